// SPDX-License-Identifier: Apache-2.0
//
// Calibrate on one text, build the default recipe's transforms, keep another text's keys and values at 2
// bits, and see what the attention module loses.
#include <cstdio>

#include "wushkv/wushkv.hpp"

#ifndef WUSHKV_EXAMPLE_DATA  // set by the build
#define WUSHKV_EXAMPLE_DATA "examples/data"
#endif

using namespace wushkv;

int main() {
  // Real queries, keys and values of a layer of SmolLM2-135M: [tokens, heads, 64], 9 query and 3 KV heads.
  const SafetensorsFile file(WUSHKV_EXAMPLE_DATA "/smollm2-activations.safetensors");
  const AttentionHeads heads{.query_heads = 9, .kv_heads = 3, .key_dim = 64, .value_dim = 64};
  const auto read = [&](const char* name) { return file.token_matrix<float>(name); };  // heads side by side
  const Batch<float> w_o = file.matrix<float>("12.w_o", {9, 64, 576});

  // 1. Calibrate: one call a sequence.
  LayerStatistics statistics(heads);
  statistics.set_output_projection(w_o);
  statistics.gather_attention();
  statistics.add(read("12.calibration.q"), read("12.calibration.k"), read("12.calibration.v"));

  // 2. Build one transform a KV head for keys and for values.
  using Recipe = BestRecipe<float>;
  const LayerTransforms transforms = build_transforms(statistics, Recipe::build_options());

  // 3. Quantize: 2 bits, and a scale and a zero of 16 bits a head and token, and decode again.
  const Batch<float> q = read("12.evaluation.q"), k = read("12.evaluation.k"), v = read("12.evaluation.v");
  Batch<float> cached_k(k.rows(), k.cols()), cached_v(v.rows(), v.cols());
  double bits = 0;
  for (Index h = 0; h < heads.kv_heads; ++h) {
    const auto at = static_cast<std::size_t>(h);
    const Recipe::Codec keys = Recipe::key_codec(transforms.keys[at], 2);
    const Recipe::Codec values = Recipe::value_codec(transforms.values[at], 2);
    cached_k.middleCols(64 * h, 64) = keys.reconstruct(k.middleCols(64 * h, 64));
    cached_v.middleCols(64 * h, 64) = values.reconstruct(v.middleCols(64 * h, 64));
    bits = keys.bits_per_element();
  }

  // 4. Measure.
  const SquaredError error = module_error(heads, q, k, v, cached_k, cached_v, w_o);
  std::printf(
      "%.2f bits an element instead of 16; the attention module's output is off by %.1f %% (relative squared "
      "error)\n",
      bits, 100 * error.relative());
  return error.relative() < 0.15 ? 0 : 1;
}
