// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_UNIFORM_HPP
#define WUSHKV_QUANTIZE_UNIFORM_HPP

#include <cmath>
#include <concepts>
#include <limits>

#include "wushkv/quantize/concept.hpp"

namespace wushkv {

/// Levels one step apart, the closed form that quantizers with such levels may give
/// (`levels(params)`) and that loops over many values use: `code = floor(clamp(x / divisor + shift, first,
/// first + top)) - first`, `value = (code - origin) step`. `divisor` is the step, or infinite where that is
/// zero, so that every value gets the code of zero; `first` and `top` are the quantizer's, the same for all
/// parameters.
template <class Scalar>
struct UniformLevels {
  Scalar divisor, shift, first, top, origin, step;

  Scalar code(Scalar x) const {
    const Scalar u = x / divisor + shift, last = first + top;
    return u >= first ? std::floor(u < last ? u : last) - first : Scalar(0);  // 0 for no number, too
  }
  /// The same for an array of values with divisors and shifts of their own; for no number, any value.
  template <class Values, class Divisors, class Shifts>
  auto codes(const Values& x, const Divisors& divisors, const Shifts& shifts) const {
    return ((x / divisors + shifts).max(first).min(first + top).floor() - first).eval();
  }
  Scalar value(Scalar code) const { return (code - origin) * step; }
};

namespace detail {

/// Levels `(code - zero) scale`, codes 0 to `2^bits - 1`, to the nearest.
template <class Scalar>
UniformLevels<Scalar> affine_levels(Scalar scale, Scalar zero, int bits) {
  const bool flat = scale == Scalar(0);
  return {.divisor = flat ? std::numeric_limits<Scalar>::infinity() : scale,
          .shift = flat ? Scalar(0) : zero + Scalar(0.5),
          .first = 0,
          .top = static_cast<Scalar>((1 << bits) - 1),
          .origin = zero,
          .step = scale};
}

}  // namespace detail

/// A quantizer whose levels are one step apart, and says so.
template <class Q>
concept UniformQuantizer = Quantizer<Q> && requires(const Q& q, const typename Q::Params& params) {
  { q.levels(params) } -> std::same_as<UniformLevels<typename Q::Scalar>>;
};

/// A quantizer that can fit its levels to `factor` times the range it would choose by itself.
template <class Q>
concept ScalableQuantizer = Quantizer<Q> &&
    requires(const Q& q, const GroupView<typename Q::Scalar>& group, double factor) {
  { q.fit(group, factor) } -> std::same_as<typename Q::Params>;
};

}  // namespace wushkv

#endif  // WUSHKV_QUANTIZE_UNIFORM_HPP
