// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_IO_STATISTICS_HPP
#define WUSHKV_IO_STATISTICS_HPP

#include <filesystem>
#include <string>
#include <vector>

#include "wushkv/calibrate/statistics.hpp"
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

/// The number of layers a file of this library says it has.
inline Index layer_count(const SafetensorsView& file, std::string_view format) {
  const auto found = file.metadata().find("format");
  if (found == file.metadata().end() || found->second != format)
    file_error("safetensors: metadata 'format' is ",
               found == file.metadata().end() ? std::string("missing") : "'" + found->second + "'",
               ", expected '", format, "'");
  const auto layers = file.metadata().find("layers");
  Index count = 0;
  if (layers != file.metadata().end()) {
    const std::string& text = layers->second;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
    if (error != std::errc() || end != text.data() + text.size()) count = 0;
  }
  if (count < 1 || count > 1000000)
    file_error("safetensors: metadata 'layers' is not a number of layers, expected 1 or more");
  return count;
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

/// Reads what `save_statistics` wrote. Throws `FileError` for a file that cannot be read, is damaged, or is
/// something else, `std::invalid_argument` for sums that no sequence gives.
inline std::vector<LayerStatistics> load_statistics(const SafetensorsView& file) {
  const Index count = detail::layer_count(file, detail::statistics_format);
  std::vector<LayerStatistics> layers;
  for (Index l = 0; l < count; ++l) {
    const std::string layer = "." + std::to_string(l);
    const TensorView keys = file.expect_shape("M_K" + layer, {Dynamic, Dynamic, Dynamic});
    const TensorView values = file.expect_shape("M_V" + layer, {Dynamic, Dynamic, Dynamic});
    const Vector<std::int64_t> counts = file.vector<std::int64_t>("counts" + layer, {4});
    const AttentionHeads heads{static_cast<Index>(counts[0]), keys.shape()[0], keys.shape()[2],
                               values.shape()[2]};
    detail::check_heads(heads);
    LayerStatistics::Sums sums;
    sums.heads.resize(static_cast<std::size_t>(heads.kv_heads));
    const auto read = [&](const char* name, SquareMatrix<double> HeadStatistics::*member, Index d) {
      detail::unstack(file.matrix<double>(name + layer, {heads.kv_heads, d, d}), sums.heads, member);
    };
    read("M_K", &HeadStatistics::key_gram, heads.key_dim);
    read("H_K", &HeadStatistics::key_hessian, heads.key_dim);
    read("M_V", &HeadStatistics::value_gram, heads.value_dim);
    read("H_V", &HeadStatistics::value_hessian, heads.value_dim);
    read("S_V", &HeadStatistics::value_sigma, heads.value_dim);
    sums.key_sigma = file.matrix<double>("Sigma_K" + layer, {heads.key_dim, heads.key_dim});
    sums.value_sigma = file.matrix<double>("Sigma_V" + layer, {heads.value_dim, heads.value_dim});
    sums.tokens = counts[1];
    sums.sequences = counts[2];
    sums.has_output_projection = counts[3] != 0;
    layers.emplace_back(heads, std::move(sums));
  }
  return layers;
}

inline std::vector<LayerStatistics> load_statistics(const std::filesystem::path& path) {
  return load_statistics(SafetensorsFile(path));
}

}  // namespace wushkv

#endif  // WUSHKV_IO_STATISTICS_HPP
