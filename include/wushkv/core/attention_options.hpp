// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CORE_ATTENTION_OPTIONS_HPP
#define WUSHKV_CORE_ATTENTION_OPTIONS_HPP

#include <algorithm>
#include <cmath>

#include "wushkv/core/check.hpp"
#include "wushkv/core/error.hpp"
#include "wushkv/core/heads.hpp"

namespace wushkv {

/// How logits become attention weights.
struct AttentionOptions {
  double scale = 0;     ///< factor of `q . k`; 0 for `1 / sqrt(key_dim)`
  bool causal = true;   ///< a token sees itself and what is before it
  double soft_cap = 0;  ///< logits z become `cap tanh(z / cap)`; 0 for none
  Index window = 0;     ///< a token sees at most this many of the latest tokens, itself included; 0 for all

  friend bool operator==(const AttentionOptions&, const AttentionOptions&) = default;
};

namespace detail {

inline double attention_scale(const AttentionHeads& heads, const AttentionOptions& options) {
  if (!is_finite(options.scale))
    invalid_argument("attention: scale is ", options.scale, ", expected a finite number");
  if (!(options.soft_cap >= 0 && is_finite(options.soft_cap)))
    invalid_argument("attention: soft_cap is ", options.soft_cap, ", expected 0 or a positive number");
  if (options.window < 0)
    invalid_argument("attention: window is ", options.window, ", expected 0 or a number of tokens");
  return options.scale != 0 ? options.scale : 1 / std::sqrt(static_cast<double>(heads.key_dim));
}

/// Turns a block of logits `[queries, tokens]`, scaled and capped, into attention weights in place: query row
/// r is token `first_query + r`, what it does not see becomes 0, the rest sums to 1.
template <class Logits>
void softmax_rows(Logits& logits, Index first_query, const AttentionOptions& options) {
  const Index tokens = logits.cols();
  for (Index row = 0; row < logits.rows(); ++row) {
    const Index query = first_query + row, last = options.causal ? query : tokens - 1,
                first = options.window > 0 ? std::max<Index>(0, query - options.window + 1) : 0;
    auto seen = logits.row(row).segment(first, last - first + 1).array();
    seen = (seen - seen.maxCoeff()).exp();
    seen /= seen.sum();
    logits.row(row).head(first).setZero();
    logits.row(row).tail(tokens - 1 - last).setZero();
  }
}

}  // namespace detail
}  // namespace wushkv

#endif  // WUSHKV_CORE_ATTENTION_OPTIONS_HPP
