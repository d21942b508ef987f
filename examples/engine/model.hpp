// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_MODEL_HPP
#define WUSHKV_EXAMPLES_ENGINE_MODEL_HPP

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "engine/gguf.hpp"
#include "engine/tokenizer.hpp"
#include "wushkv/core/heads.hpp"
#include "wushkv/core/types.hpp"
#include "wushkv/rope/rms_norm.hpp"
#include "wushkv/rope/rope.hpp"

namespace engine {

using wushkv::Batch;
using wushkv::Index;
using wushkv::Vector;

/// What a GGUF file says of its model.
struct ModelConfig {
  std::string architecture;  ///< "llama" or "qwen3"
  Index layers = 0;
  Index width = 0;       ///< of the residual stream
  Index ffn_width = 0;   ///< of the feed-forward network's hidden layer
  Index vocabulary = 0;  ///< tokens
  Index context = 0;     ///< trained length, tokens
  wushkv::AttentionHeads heads;
  double norm_epsilon = 0;
  Index rotary_dim = 0;
  double rope_base = 0;
  wushkv::RopeScaling rope_scaling;
  wushkv::RopePairs rope_pairs = wushkv::RopePairs::Half;
};

/// Weights of a layer, in float, `[outputs, inputs]` as files have them.
struct LayerWeights {
  Vector<float> attention_norm, ffn_norm;
  Batch<float> q, k, v, o;
  Batch<float> gate, up, down;
  std::optional<wushkv::RmsNorm<float>> q_norm, k_norm;  ///< per head, before RoPE (Qwen3)
};

struct Model {
  ModelConfig config;
  Vocabulary vocabulary;
  wushkv::RopeFrequencies rope;
  Batch<float> embedding;  ///< `[vocabulary, width]`
  Batch<float> output;     ///< the same shape; empty where it is the embedding (tied)
  Vector<float> output_norm;
  std::vector<LayerWeights> layers;

  const Batch<float>& output_weight() const { return output.size() > 0 ? output : embedding; }
};

/// Reads a model with its tokenizer and dequantizes every weight. Throws `wushkv::FileError` for a file that
/// is damaged, an architecture, scaling or tensor that this engine does not have (it is named), and shapes
/// that do not go together.
Model load_model(const std::filesystem::path& path);

/// The same from an open file.
Model load_model(const GgufFile& file);

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_MODEL_HPP
