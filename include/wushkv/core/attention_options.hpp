// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CORE_ATTENTION_OPTIONS_HPP
#define WUSHKV_CORE_ATTENTION_OPTIONS_HPP

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

}  // namespace detail
}  // namespace wushkv

#endif  // WUSHKV_CORE_ATTENTION_OPTIONS_HPP
