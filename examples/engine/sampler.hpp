// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_SAMPLER_HPP
#define WUSHKV_EXAMPLES_ENGINE_SAMPLER_HPP

#include <cstdint>
#include <random>
#include <span>

#include "engine/tokenizer.hpp"

namespace engine {

struct SamplerOptions {
  double temperature = 0;  ///< 0: the likeliest token
  int top_k = 0;           ///< only the k likeliest; 0: all
  double top_p = 1;        ///< only the likeliest that have this much of the probability together
  double min_p = 0;        ///< only those at least so likely, relative to the likeliest
  std::uint64_t seed = 0;
};

/// Draws tokens from logits. The same seed and logits give the same tokens.
class Sampler {
 public:
  explicit Sampler(const SamplerOptions& options) : options_(options), random_(options.seed) {}
  Token sample(std::span<const float> logits);

 private:
  SamplerOptions options_;
  std::mt19937_64 random_;
};

/// The likeliest token.
Token likeliest(std::span<const float> logits);

/// log softmax(logits)[token]; the sum over the vocabulary is in double.
double log_probability(std::span<const float> logits, Token token);

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_SAMPLER_HPP
