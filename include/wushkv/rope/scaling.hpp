// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_ROPE_SCALING_HPP
#define WUSHKV_ROPE_SCALING_HPP

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <optional>
#include <string_view>
#include <variant>
#include <vector>

#include "wushkv/core/check.hpp"
#include "wushkv/core/error.hpp"
#include "wushkv/core/types.hpp"

namespace wushkv {

/// No scaling: `f_i = base^(-2i/rotary_dim)` (RoFormer, arXiv 2104.09864, section 3.2.2).
struct RopeDefault {};

/// Position interpolation (arXiv 2306.15595): every frequency over `factor`. A setting of 0 stands for "not
/// given" and is refused, here and below.
struct RopeLinear {
  double factor = 0;  ///< new context length over the trained one
};

/// NTK-aware interpolation with a fixed factor (YaRN, arXiv 2309.00071, section 3.1):
/// `base' = base · factor^(d/(d-2))`, d the rotary dimension, which therefore has to be at least 4.
struct RopeNtkAware {
  double factor = 0;
};

/// YaRN (arXiv 2309.00071, sections 3.2 to 3.4). A pair that turns more than `beta_fast` times within the
/// trained length keeps its frequency, one that turns less than `beta_slow` times is interpolated, a linear
/// ramp over the pairs' indices lies between.
struct RopeYarn {
  double factor = 0;
  double original_max_position = 0;  ///< trained context length, tokens
  double beta_fast = 32;
  double beta_slow = 1;
  /// What rotated keys and queries are both multiplied with; by default `0.1 ln(factor) + 1`, and 1 if the
  /// factor is not above 1. A checkpoint with `mscale` and `mscale_all_dim` sets the quotient of the two
  /// here.
  std::optional<double> attention_factor = std::nullopt;
  /// Whether the ramp's ends are rounded outwards to whole indices. True in the paper's code; some
  /// checkpoints set it to false.
  bool truncate = true;
};

/// Llama 3.1 and later (the model's published configuration and code): wavelengths above
/// `original_max_position / low_freq_factor` are interpolated, those below
/// `original_max_position / high_freq_factor` kept, the rest blended.
struct RopeLlama3 {
  double factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  double original_max_position = 8192;
};

using RopeScaling = std::variant<RopeDefault, RopeLinear, RopeNtkAware, RopeYarn, RopeLlama3>;

/// What a `Rope` is built from: the pairs' angles per position in radians, `[rotary_dim/2]`, and the factor
/// on rotated values. Fill it by hand for a kind that `rope_frequencies` does not know.
struct RopeFrequencies {
  std::vector<double> inv_freq;
  double attention_factor = 1;
};

namespace detail {

inline void check_rope_setting(std::string_view name, double value) {
  if (!is_finite(value) || value <= 0) [[unlikely]]
    invalid_argument(name, " is ", value, ", expected a positive finite number");
}

inline std::vector<double> rope_powers(Index rotary_dim, double base) {
  std::vector<double> frequencies(static_cast<std::size_t>(rotary_dim / 2));
  for (std::size_t i = 0; i < frequencies.size(); ++i)
    frequencies[i] = std::pow(base, -static_cast<double>(2 * i) / static_cast<double>(rotary_dim));
  return frequencies;
}

inline RopeFrequencies scaled_rope(Index rotary_dim, double base, const RopeDefault&) {
  return {rope_powers(rotary_dim, base), 1};
}

inline RopeFrequencies scaled_rope(Index rotary_dim, double base, const RopeLinear& scaling) {
  check_rope_setting("rope: factor", scaling.factor);
  RopeFrequencies result{rope_powers(rotary_dim, base), 1};
  for (double& f : result.inv_freq) f /= scaling.factor;
  return result;
}

inline RopeFrequencies scaled_rope(Index rotary_dim, double base, const RopeNtkAware& scaling) {
  check_rope_setting("rope: factor", scaling.factor);
  if (rotary_dim < 4) [[unlikely]]
    invalid_argument("rope: rotary_dim is ", rotary_dim, ", expected at least 4 with NTK-aware scaling");
  const double d = static_cast<double>(rotary_dim);
  return {rope_powers(rotary_dim, base * std::pow(scaling.factor, d / (d - 2))), 1};
}

inline double yarn_attention_factor(const RopeYarn& scaling) {
  if (scaling.attention_factor) return *scaling.attention_factor;
  return scaling.factor > 1 ? 0.1 * std::log(scaling.factor) + 1 : 1.0;
}

inline void check_yarn(double base, const RopeYarn& scaling) {
  check_rope_setting("rope: factor", scaling.factor);
  check_rope_setting("rope: original_max_position", scaling.original_max_position);
  check_rope_setting("rope: beta_fast", scaling.beta_fast);
  check_rope_setting("rope: beta_slow", scaling.beta_slow);
  check_rope_setting("rope: attention_factor", yarn_attention_factor(scaling));
  if (scaling.beta_fast < scaling.beta_slow) [[unlikely]]
    invalid_argument("rope: beta_fast is ", scaling.beta_fast, ", expected at least beta_slow (",
                     scaling.beta_slow, ")");
  if (base <= 1) [[unlikely]]
    invalid_argument("rope: base is ", base, ", expected more than 1 with YaRN scaling");
}

/// The (fractional) index of the pair that turns `rotations` times within the trained length.
inline double yarn_index(double rotations, double d, double base, double original_max_position) {
  const double trained_angle = original_max_position / (rotations * 2 * std::numbers::pi);
  return d * std::log(trained_angle) / (2 * std::log(base));
}

inline RopeFrequencies scaled_rope(Index rotary_dim, double base, const RopeYarn& scaling) {
  check_yarn(base, scaling);
  const double d = static_cast<double>(rotary_dim);
  double low = yarn_index(scaling.beta_fast, d, base, scaling.original_max_position);
  double high = yarn_index(scaling.beta_slow, d, base, scaling.original_max_position);
  if (scaling.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, d - 1);
  const double width = std::max(high - low, 0.001);  // both ends can be clipped to the same index

  RopeFrequencies result{rope_powers(rotary_dim, base), yarn_attention_factor(scaling)};
  for (std::size_t i = 0; i < result.inv_freq.size(); ++i) {
    const double interpolated = std::clamp((static_cast<double>(i) - low) / width, 0.0, 1.0);
    const double f = result.inv_freq[i];
    result.inv_freq[i] = f / scaling.factor * interpolated + f * (1 - interpolated);
  }
  return result;
}

inline RopeFrequencies scaled_rope(Index rotary_dim, double base, const RopeLlama3& scaling) {
  check_rope_setting("rope: factor", scaling.factor);
  check_rope_setting("rope: low_freq_factor", scaling.low_freq_factor);
  check_rope_setting("rope: high_freq_factor", scaling.high_freq_factor);
  check_rope_setting("rope: original_max_position", scaling.original_max_position);
  if (scaling.high_freq_factor <= scaling.low_freq_factor) [[unlikely]]
    invalid_argument("rope: high_freq_factor is ", scaling.high_freq_factor,
                     ", expected more than low_freq_factor (", scaling.low_freq_factor, ")");

  RopeFrequencies result{rope_powers(rotary_dim, base), 1};
  for (double& f : result.inv_freq) {
    const double turns = scaling.original_max_position * f / (2 * std::numbers::pi);
    const double kept = std::clamp(
        (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0);
    f = (1 - kept) * f / scaling.factor + kept * f;
  }
  return result;
}

}  // namespace detail

/// The angles per position `[rotary_dim/2]` in double, and the attention factor, of rotary embeddings over
/// `rotary_dim` coordinates with the given base (`rope_theta` in model configurations) and scaling.
/// Errors: `std::invalid_argument` for a rotary dimension that is odd or not positive, a base or a setting
/// that is not positive and finite, `high_freq_factor` not above `low_freq_factor`, `beta_fast` below
/// `beta_slow`, or a combination whose frequencies leave the range of a double.
inline RopeFrequencies rope_frequencies(Index rotary_dim, double base,
                                        const RopeScaling& scaling = RopeDefault{}) {
  if (rotary_dim <= 0 || rotary_dim % 2 != 0) [[unlikely]]
    detail::invalid_argument("rope: rotary_dim is ", rotary_dim, ", expected a positive even number");
  detail::check_rope_setting("rope: base", base);
  RopeFrequencies result =
      std::visit([&](const auto& kind) { return detail::scaled_rope(rotary_dim, base, kind); }, scaling);
  for (const double f : result.inv_freq)
    if (!is_finite(f) || f <= 0) [[unlikely]]
      detail::invalid_argument("rope: base ", base, " and the scaling give a frequency of ", f,
                               ", expected positive finite ones");
  return result;
}

}  // namespace wushkv

#endif  // WUSHKV_ROPE_SCALING_HPP
