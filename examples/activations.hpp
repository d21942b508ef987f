// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ACTIVATIONS_HPP
#define WUSHKV_EXAMPLES_ACTIVATIONS_HPP

// Real queries, keys, values and output projections of some layers, as the programs beside this header read
// them.
#include <charconv>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "wushkv/calibrate/statistics.hpp"
#include "wushkv/io/safetensors.hpp"
#include "wushkv/measure/errors.hpp"

#ifndef WUSHKV_EXAMPLE_DATA  // set by the build
#define WUSHKV_EXAMPLE_DATA "examples/data"
#endif

namespace examples {

using wushkv::AttentionHeads;
using wushkv::Batch;
using wushkv::Index;

inline constexpr const char* default_activations = WUSHKV_EXAMPLE_DATA "/smollm2-activations.safetensors";

struct Sequence {
  Batch<double> q, k, v;  // [tokens, heads * dim]
};

struct Layer {
  int number;
  AttentionHeads heads;
  Sequence calibration, evaluation;
  Batch<double> w_o;                   // [query_heads * value_dim, model]
  wushkv::LayerStatistics statistics;  // of the calibration tokens, which are its sample, too
};

// Tensors are [tokens, heads, dim]; the library takes heads side by side. A file that does not fit says so
// with its layer.
inline Sequence load_sequence(const wushkv::SafetensorsView& file, const std::string& prefix,
                              const AttentionHeads& heads) {
  file.expect_shape(prefix + ".q", {wushkv::Dynamic, heads.query_heads, heads.key_dim});
  file.expect_shape(prefix + ".k", {wushkv::Dynamic, heads.kv_heads, heads.key_dim});
  file.expect_shape(prefix + ".v", {wushkv::Dynamic, heads.kv_heads, heads.value_dim});
  return {file.token_matrix<double>(prefix + ".q"), file.token_matrix<double>(prefix + ".k"),
          file.token_matrix<double>(prefix + ".v")};
}

inline Layer load_layer(const wushkv::SafetensorsView& file, int number) {
  using wushkv::Dynamic;
  const std::string l = std::to_string(number);
  const wushkv::TensorShape w_o = file.expect_shape(l + ".w_o", {Dynamic, Dynamic, Dynamic}).shape();
  const wushkv::TensorShape k = file.expect_shape(l + ".calibration.k", {Dynamic, Dynamic, Dynamic}).shape();
  const AttentionHeads heads{w_o[0], k[1], k[2], w_o[1]};
  Layer layer{number,
              heads,
              load_sequence(file, l + ".calibration", heads),
              load_sequence(file, l + ".evaluation", heads),
              file.matrix<double>(l + ".w_o"),
              wushkv::LayerStatistics(heads)};
  try {
    layer.statistics.set_output_projection(layer.w_o);
    layer.statistics.gather_attention();
    layer.statistics.keep_sample(layer.calibration.k.rows());
    layer.statistics.add(layer.calibration.q, layer.calibration.k, layer.calibration.v);
  } catch (const std::invalid_argument& error) {
    throw wushkv::FileError("activations: layer " + l + ": " + error.what());
  }
  return layer;
}

inline std::vector<Layer> load_layers(const std::string& path) {
  const wushkv::SafetensorsFile file(path);
  std::set<int> numbers;
  for (const std::string& name : file.names()) {
    int number = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
    if (error == std::errc() && std::string_view(end) == ".w_o") numbers.insert(number);
  }
  if (numbers.empty())
    throw wushkv::FileError("activations: " + path + " has no tensors L.w_o, expected one a layer");
  std::vector<Layer> layers;
  for (const int number : numbers) layers.push_back(load_layer(file, number));
  return layers;
}

// Every head's vectors through its codec, codec_of(head number), and back.
template <class CodecOf>
Batch<double> through_cache(Index kv_heads, const Batch<double>& x, CodecOf codec_of) {
  Batch<double> cached(x.rows(), x.cols());
  const Index d = x.cols() / kv_heads;
  for (Index h = 0; h < kv_heads; ++h)
    cached.middleCols(h * d, d) = codec_of(h).reconstruct(x.middleCols(h * d, d));
  return cached;
}

}  // namespace examples

#endif  // WUSHKV_EXAMPLES_ACTIVATIONS_HPP
