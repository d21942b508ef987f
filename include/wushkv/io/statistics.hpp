// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_IO_STATISTICS_HPP
#define WUSHKV_IO_STATISTICS_HPP

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
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
//
// Where attention was gathered, for keys and alike for values (`_V`): `HA_K.L`, `MA_K.L` (`[kv_heads, d, d]`,
// the second uncentered), `SA_K.L` (`[kv_heads, d]`) and `WA_K.L` (`[kv_heads]`), the sums of `WeightedSums`;
// of the options in F64 `attention.L`: scale and soft cap, and in I64 `attention_mask.L`: causal or not, and
// window.
//
// Where a sample was kept, in F32 `sample_K.L`, `sample_V.L` (`[n, kv_heads, d]`), `sample_w_K.L`,
// `sample_w_V.L` (`[n, kv_heads]`), and in I64 `sample_priority.L` (`[n]`, the bits of an unsigned number)
// and `sample_counts.L`: capacity, first sequence.

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

inline void add_attention(SafetensorsWriter& writer, const std::string& layer,
                          const AttentionStatistics& attention) {
  const AttentionStatistics::Sums sums = attention.sums();
  const auto kv_heads = static_cast<Index>(sums.keys.size());
  const auto add = [&](const std::string& side, const std::vector<WeightedSums>& heads) {
    const Index d = heads.front().weighted_sum.size();
    Batch<double> hessians(kv_heads * d, d), grams(kv_heads * d, d), totals(kv_heads, d);
    Vector<double> weights(kv_heads);
    for (Index h = 0; h < kv_heads; ++h) {
      const WeightedSums& head = heads[static_cast<std::size_t>(h)];
      hessians.middleRows(h * d, d) = head.hessian;
      grams.middleRows(h * d, d) = head.weighted_gram;
      totals.row(h) = head.weighted_sum.transpose();
      weights[h] = head.weight;
    }
    writer.add("HA_" + side + layer, TensorShape{kv_heads, d, d}, hessians);
    writer.add("MA_" + side + layer, TensorShape{kv_heads, d, d}, grams);
    writer.add("SA_" + side + layer, TensorShape{kv_heads, d}, totals);
    writer.add("WA_" + side + layer, TensorShape{kv_heads}, weights);
  };
  add("K", sums.keys);
  add("V", sums.values);
  const AttentionOptions& options = attention.options();
  const std::vector<double> factors = {options.scale, options.soft_cap};
  const std::vector<std::int64_t> mask = {options.causal ? 1 : 0, options.window};
  writer.add("attention" + layer, TensorShape{2}, factors);
  writer.add("attention_mask" + layer, TensorShape{2}, mask);
}

inline void add_sample(SafetensorsWriter& writer, const std::string& layer, const TokenSample& sample) {
  const AttentionHeads& heads = sample.heads();
  const Index n = sample.size();
  writer.add("sample_K" + layer, TensorShape{n, heads.kv_heads, heads.key_dim}, sample.keys());
  writer.add("sample_V" + layer, TensorShape{n, heads.kv_heads, heads.value_dim}, sample.values());
  writer.add("sample_w_K" + layer, TensorShape{n, heads.kv_heads}, sample.key_weights());
  writer.add("sample_w_V" + layer, TensorShape{n, heads.kv_heads}, sample.value_weights());
  std::vector<std::int64_t> priorities;
  for (const std::uint64_t priority : sample.priorities())
    priorities.push_back(static_cast<std::int64_t>(priority));
  const std::vector<std::int64_t> counts = {sample.capacity(), sample.first_sequence()};
  writer.add("sample_priority" + layer, TensorShape{n}, priorities);
  writer.add("sample_counts" + layer, TensorShape{2}, counts);
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
    if (sums.attention) detail::add_attention(writer, layer, *sums.attention);
    if (layers[l].sample().capacity() > 0) detail::add_sample(writer, layer, layers[l].sample());
  }
  writer.save(path);
}

namespace detail {

/// Whether one of the tensors of an optional part is there: all of them have to be, then.
inline bool has_any(const SafetensorsView& file, const std::string& layer,
                    std::initializer_list<const char*> names) {
  return std::any_of(names.begin(), names.end(),
                     [&](const char* name) { return file.contains(name + layer); });
}

/// A tensor whose values are finite.
template <class Scalar>
Batch<Scalar> finite_matrix(const SafetensorsView& file, const std::string& name, const TensorShape& shape) {
  Batch<Scalar> rows = file.matrix<Scalar>(name, shape);
  if (!all_finite(rows)) file_error("safetensors: tensor \"", name, "\" has a value that is not finite");
  return rows;
}

/// One whose values are not negative either.
template <class Scalar>
Batch<Scalar> weight_matrix(const SafetensorsView& file, const std::string& name, const TensorShape& shape) {
  Batch<Scalar> rows = finite_matrix<Scalar>(file, name, shape);
  if ((rows.array() < 0).any())
    file_error("safetensors: tensor \"", name, "\" has a negative weight, expected 0 or more");
  return rows;
}

inline std::vector<WeightedSums> read_weighted_sums(const SafetensorsView& file, const std::string& side,
                                                    const std::string& layer, Index kv_heads, Index d) {
  const Batch<double> hessians = finite_matrix<double>(file, "HA_" + side + layer, {kv_heads, d, d}),
                      grams = finite_matrix<double>(file, "MA_" + side + layer, {kv_heads, d, d}),
                      totals = finite_matrix<double>(file, "SA_" + side + layer, {kv_heads, d}),
                      weights = weight_matrix<double>(file, "WA_" + side + layer, {kv_heads});
  std::vector<WeightedSums> heads;
  for (Index h = 0; h < kv_heads; ++h)
    heads.push_back({hessians.middleRows(h * d, d), weights(0, h), totals.row(h).transpose(),
                     grams.middleRows(h * d, d)});
  return heads;
}

inline AttentionStatistics read_attention(const SafetensorsView& file, const std::string& layer,
                                          const AttentionHeads& heads, std::int64_t tokens,
                                          std::int64_t sequences) {
  const Batch<double> factors = finite_matrix<double>(file, "attention" + layer, {2});
  const Vector<std::int64_t> mask = file.vector<std::int64_t>("attention_mask" + layer, {2});
  if (factors(0, 1) < 0 || mask[0] < 0 || mask[0] > 1 || mask[1] < 0)
    file_error("safetensors: attention options of layer ", layer.substr(1), ": soft cap is ", factors(0, 1),
               ", causal ", mask[0], ", window ", mask[1], ", which no layer has");
  const AttentionOptions options{factors(0, 0), mask[0] != 0, factors(0, 1), static_cast<Index>(mask[1])};
  return AttentionStatistics(
      heads, options,
      {read_weighted_sums(file, "K", layer, heads.kv_heads, heads.key_dim),
       read_weighted_sums(file, "V", layer, heads.kv_heads, heads.value_dim), tokens, sequences});
}

/// `[n, kv_heads, d]` with heads side by side.
inline Batch<float> sample_matrix(const SafetensorsView& file, const std::string& name,
                                  const TensorShape& shape) {
  finite_matrix<float>(file, name, shape);
  return file.token_matrix<float>(name);
}

inline TokenSample read_sample(const SafetensorsView& file, const std::string& layer,
                               const AttentionHeads& heads, std::int64_t tokens) {
  const Vector<std::int64_t> counts = file.vector<std::int64_t>("sample_counts" + layer, {2});
  const Vector<std::int64_t> priorities = file.vector<std::int64_t>("sample_priority" + layer, {Dynamic});
  const Index n = priorities.size();
  TokenSample::Parts parts;
  for (const std::int64_t priority : priorities)
    parts.priorities.push_back(static_cast<std::uint64_t>(priority));
  if (n > counts[0] || n > tokens || counts[1] < 0 ||
      !std::is_sorted(parts.priorities.begin(), parts.priorities.end()))
    file_error("safetensors: sample of layer ", layer.substr(1), ": ", n, " tokens of ", tokens,
               " with a capacity of ", counts[0], " from sequence ", counts[1],
               ", expected no more than that, in ascending order of priority");
  parts.keys = sample_matrix(file, "sample_K" + layer, {n, heads.kv_heads, heads.key_dim});
  parts.values = sample_matrix(file, "sample_V" + layer, {n, heads.kv_heads, heads.value_dim});
  parts.key_weights = weight_matrix<float>(file, "sample_w_K" + layer, {n, heads.kv_heads});
  parts.value_weights = weight_matrix<float>(file, "sample_w_V" + layer, {n, heads.kv_heads});
  return TokenSample(heads, counts[0], counts[1], parts);
}

inline LayerStatistics read_layer(const SafetensorsView& file, const std::string& layer) {
  const TensorShape keys = file.expect_shape("M_K" + layer, {Dynamic, Dynamic, Dynamic}).shape();
  const TensorShape values = file.expect_shape("M_V" + layer, {Dynamic, Dynamic, Dynamic}).shape();
  const Vector<std::int64_t> counts = file.vector<std::int64_t>("counts" + layer, {4});
  const AttentionHeads heads{static_cast<Index>(counts[0]), keys[0], keys[2], values[2]};
  if (keys.size() < 1 || values.size() < 1 || keys[1] != keys[2] || values[1] != values[2] ||
      heads.query_heads < 1 || heads.query_heads > (Index{1} << 24) ||
      heads.query_heads % heads.kv_heads != 0 || counts[2] < 0 || counts[1] < counts[2])
    file_error("safetensors: statistics of layer ", layer.substr(1), ": M_K is ", keys.to_string(), ", M_V ",
               values.to_string(), ", counts are ", counts[0], " query heads, ", counts[1], " tokens, ",
               counts[2], " sequences, which no layer has");
  LayerStatistics::Sums sums;
  sums.heads.resize(static_cast<std::size_t>(heads.kv_heads));
  const auto matrix = [&](const std::string& name, const TensorShape& shape) {
    return finite_matrix<double>(file, name, shape);
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
  if (has_any(
          file, layer,
          {"HA_K", "HA_V", "MA_K", "MA_V", "SA_K", "SA_V", "WA_K", "WA_V", "attention", "attention_mask"}))
    sums.attention = read_attention(file, layer, heads, sums.tokens, sums.sequences);
  if (has_any(file, layer,
              {"sample_K", "sample_V", "sample_w_K", "sample_w_V", "sample_priority", "sample_counts"}))
    sums.sample = read_sample(file, layer, heads, sums.tokens);
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
