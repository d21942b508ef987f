// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_IO_STATISTICS_HPP
#define WUSHKV_IO_STATISTICS_HPP

#include <filesystem>
#include <string>
#include <vector>

#include "wushkv/calibrate/statistics.hpp"
#include "wushkv/io/layer_count.hpp"
#include "wushkv/io/safetensors.hpp"

namespace wushkv {

// A statistics file is a safetensors file of, per layer L and in F64: `M_K.L`, `H_K.L`, `M_V.L`, `H_V.L`,
// `S_V.L`
// (`[kv_heads, d, d]`, S for OSCAR's sigma by head), `Sigma_K.L`, `Sigma_V.L` (`[d, d]`), and in I64
// `counts.L`: query heads, tokens, sequences, whether an output projection was set. Its metadata say `format:
// wushkv-statistics-1` and `layers`.

namespace detail {

inline constexpr std::string_view statistics_format = "wushkv-statistics-1";

inline Batch<double> stacked(const std::vector<HeadStatistics>& heads,
                             SquareMatrix<double> HeadStatistics::*member) {
  const Index d = (heads.front().*member).rows();
  Batch<double> rows(static_cast<Index>(heads.size()) * d, d);
  for (std::size_t h = 0; h < heads.size(); ++h)
    rows.middleRows(static_cast<Index>(h) * d, d) = heads[h].*member;
  return rows;
}

inline void unstack(const Batch<double>& rows, std::vector<HeadStatistics>& heads,
                    SquareMatrix<double> HeadStatistics::*member) {
  const Index d = rows.cols();
  for (std::size_t h = 0; h < heads.size(); ++h)
    heads[h].*member = rows.middleRows(static_cast<Index>(h) * d, d);
}

}  // namespace detail

/// Writes the statistics of all layers of a model. Throws `std::invalid_argument` for none, `FileError` if
/// the file cannot be written.
inline void save_statistics(const std::filesystem::path& path, const std::vector<LayerStatistics>& layers) {
  if (layers.empty()) detail::invalid_argument("save_statistics: 0 layers, expected at least one");
  SafetensorsWriter writer;
  writer.set_metadata("format", detail::statistics_format);
  writer.set_metadata("layers", std::to_string(layers.size()));
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const std::string layer = "." + std::to_string(l);
    const AttentionHeads& shape = layers[l].heads();
    const LayerStatistics::Sums sums = layers[l].sums();
    const auto add = [&](const char* name, SquareMatrix<double> HeadStatistics::*member, Index d) {
      writer.add(name + layer, TensorShape{shape.kv_heads, d, d}, detail::stacked(sums.heads, member));
    };
    add("M_K", &HeadStatistics::key_gram, shape.key_dim);
    add("H_K", &HeadStatistics::key_hessian, shape.key_dim);
    add("M_V", &HeadStatistics::value_gram, shape.value_dim);
    add("H_V", &HeadStatistics::value_hessian, shape.value_dim);
    add("S_V", &HeadStatistics::value_sigma, shape.value_dim);
    writer.add("Sigma_K" + layer, sums.key_sigma);
    writer.add("Sigma_V" + layer, sums.value_sigma);
    const std::vector<std::int64_t> counts = {shape.query_heads, sums.tokens, sums.sequences,
                                              sums.has_output_projection ? 1 : 0};
    writer.add("counts" + layer, TensorShape{4}, counts);
  }
  writer.save(path);
}

namespace detail {

inline LayerStatistics read_layer(const SafetensorsView& file, const std::string& layer) {
  const TensorShape keys = file.expect_shape("M_K" + layer, {Dynamic, Dynamic, Dynamic}).shape();
  const TensorShape values = file.expect_shape("M_V" + layer, {Dynamic, Dynamic, Dynamic}).shape();
  const Vector<std::int64_t> counts = file.vector<std::int64_t>("counts" + layer, {4});
  const AttentionHeads heads{static_cast<Index>(counts[0]), keys[0], keys[2], values[2]};
  if (keys.size() < 1 || values.size() < 1 || keys[1] != keys[2] || values[1] != values[2] ||
      heads.query_heads < 1 || heads.query_heads % heads.kv_heads != 0 || counts[2] < 0 ||
      counts[1] < counts[2])
    file_error("safetensors: statistics of layer ", layer.substr(1), ": M_K is ", keys.to_string(), ", M_V ",
               values.to_string(), ", counts are ", counts[0], " query heads, ", counts[1], " tokens, ",
               counts[2], " sequences, which no layer has");
  LayerStatistics::Sums sums;
  sums.heads.resize(static_cast<std::size_t>(heads.kv_heads));
  const auto matrix = [&](const std::string& name, const TensorShape& shape) {
    Batch<double> rows = file.matrix<double>(name, shape);
    if (!all_finite(rows)) file_error("safetensors: tensor \"", name, "\" has a value that is not finite");
    return rows;
  };
  const auto read = [&](const char* name, SquareMatrix<double> HeadStatistics::*member, Index d) {
    unstack(matrix(name + layer, {heads.kv_heads, d, d}), sums.heads, member);
  };
  read("M_K", &HeadStatistics::key_gram, heads.key_dim);
  read("H_K", &HeadStatistics::key_hessian, heads.key_dim);
  read("M_V", &HeadStatistics::value_gram, heads.value_dim);
  read("H_V", &HeadStatistics::value_hessian, heads.value_dim);
  read("S_V", &HeadStatistics::value_sigma, heads.value_dim);
  sums.key_sigma = matrix("Sigma_K" + layer, {heads.key_dim, heads.key_dim});
  sums.value_sigma = matrix("Sigma_V" + layer, {heads.value_dim, heads.value_dim});
  sums.tokens = counts[1];
  sums.sequences = counts[2];
  sums.has_output_projection = counts[3] != 0;
  return LayerStatistics(heads, std::move(sums));
}

}  // namespace detail

/// Reads what `save_statistics` wrote. Throws `FileError` for a file that cannot be read, is damaged, or is
/// something else.
inline std::vector<LayerStatistics> load_statistics(const SafetensorsView& file) {
  const Index count = detail::layer_count(file, detail::statistics_format);
  std::vector<LayerStatistics> layers;
  for (Index l = 0; l < count; ++l) layers.push_back(detail::read_layer(file, "." + std::to_string(l)));
  return layers;
}

inline std::vector<LayerStatistics> load_statistics(const std::filesystem::path& path) {
  return load_statistics(SafetensorsFile(path));
}

}  // namespace wushkv

#endif  // WUSHKV_IO_STATISTICS_HPP
