// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_EVALUATION_HPP
#define WUSHKV_EXAMPLES_ENGINE_EVALUATION_HPP

#include <functional>
#include <span>
#include <vector>

#include "engine/transformer.hpp"

namespace engine {

/// Negative log-likelihoods of predicted tokens, in nats, summed; sums of several texts add up.
struct Likelihood {
  double all = 0, late = 0;  ///< of every prediction, and of those from the second half of each text
  Index predictions = 0, late_predictions = 0;

  double perplexity() const;
  double late_perplexity() const;
  Likelihood& operator+=(const Likelihood& other);
};

/// How well the model predicts a text from its own beginning, through a cache whose sequence 0 is emptied
/// first. `batch` tokens a step, 0 for all at once.
Likelihood likelihood(Transformer& transformer, std::span<const Token> text, const CachePath& path,
                      Index batch, const std::function<void(Index tokens)>& progress = {});

/// Adds the errors of every layer's attention module on a text, all layers with exact inputs. `exact` is an
/// unquantized cache. Sequence 0 of all caches is emptied first; `batch` as above.
void module_errors(Transformer& transformer, std::span<const Token> text, KvCache& exact,
                   std::span<Probe> probes, Index batch);

/// Relative errors, one a layer.
std::vector<double> relative_errors(const Probe& probe);

/// The first `count` texts of `length` tokens each, `prefix` included, with which every one begins; all there
/// are for a count of 0. Throws `std::invalid_argument` if there are fewer.
std::vector<std::vector<Token>> cut_texts(std::span<const Token> tokens, std::span<const Token> prefix,
                                          Index length, Index count);

/// Samples texts from the model itself, all at the same time, at temperature 1 and min-p 0.02: calibration
/// data where there is none. Sequences begin with `first`.
std::vector<std::vector<Token>> own_samples(Transformer& transformer, Token first, Index sequences,
                                            Index length, std::uint64_t seed,
                                            const std::function<void(Index step)>& progress);

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_EVALUATION_HPP
