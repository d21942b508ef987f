// SPDX-License-Identifier: Apache-2.0
#include "engine/sampler.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "wushkv/core/types.hpp"

namespace engine {

Token likeliest(std::span<const float> logits) {
  return static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

double log_probability(std::span<const float> logits, Token token) {
  const Eigen::Map<const Eigen::ArrayXf> z(logits.data(), static_cast<Eigen::Index>(logits.size()));
  const float top = z.maxCoeff();
  const double sum = (z - top).exp().cast<double>().sum();
  return static_cast<double>(z[token] - top) - std::log(sum);
}

Token Sampler::sample(std::span<const float> logits) {
  if (options_.temperature <= 0) return likeliest(logits);
  struct Candidate {
    double probability;
    Token token;
  };
  const float top = logits[static_cast<std::size_t>(likeliest(logits))];
  std::vector<Candidate> candidates;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    // Relative to the likeliest, as min-p wants it.
    const double p = std::exp(static_cast<double>(logits[i] - top) / options_.temperature);
    if (p >= options_.min_p) candidates.push_back({p, static_cast<Token>(i)});
  }
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.probability > b.probability; });
  if (options_.top_k > 0 && candidates.size() > static_cast<std::size_t>(options_.top_k))
    candidates.resize(static_cast<std::size_t>(options_.top_k));
  double total = 0;
  for (const Candidate& c : candidates) total += c.probability;
  double kept = 0;
  std::size_t count = 0;
  while (count < candidates.size() && (count == 0 || kept < options_.top_p * total))
    kept += candidates[count++].probability;
  // A draw by hand: the standard's distributions differ between libraries.
  double left = kept * static_cast<double>(random_() >> 11) * 0x1p-53;
  for (std::size_t i = 0; i < count; ++i) {
    left -= candidates[i].probability;
    if (left < 0) return candidates[i].token;
  }
  return candidates[count - 1].token;
}

}  // namespace engine
