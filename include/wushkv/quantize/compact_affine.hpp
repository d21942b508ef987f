// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_COMPACT_AFFINE_HPP
#define WUSHKV_QUANTIZE_COMPACT_AFFINE_HPP

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "wushkv/quantize/bits.hpp"
#include "wushkv/quantize/log8.hpp"
#include "wushkv/quantize/root_mean_square.hpp"
#include "wushkv/quantize/uniform.hpp"

namespace wushkv {

/// `Affine` with a scale and a zero point of 8 bits each, half of its parameters' storage: a logarithmic
/// scale and a zero point in 255 parts of the levels' span, so that the levels reach from zero or below to
/// zero or above. `zero = position (2^b - 1) / 255`, `code = clamp(floor(x / scale + zero + 1/2), 0, 2^b -
/// 1)`, `value = (code - zero) scale`. For values of about unit mean square (`Log8`'s range), as transforms
/// leave them; steps above 2^15 are cut short.
template <class ScalarType, int Bits = Dynamic>
class CompactAffine : public BitWidth<Bits> {
 public:
  using Scalar = ScalarType;
  struct Params {
    Log8 scale;
    std::uint8_t position = 0;
  };

  /// Levels over `range` times the group's extremes. Throws `std::invalid_argument` for a width outside 1 to
  /// 8 or a factor outside (0, 1].
  explicit CompactAffine(int bits = Bits, double range = 1) : BitWidth<Bits>(bits), range_(range) {
    if (!(range > 0 && range <= 1))
      detail::invalid_argument("CompactAffine: range is ", range, ", expected more than 0 and at most 1");
  }

  /// What `decode` depends on besides the bits (`codec/identity.hpp`).
  static std::string identity() { return "compact-affine"; }

  /// Scale and zero for a group of any length, for `factor` times the range they would cover, as stored.
  Params fit(const GroupView<Scalar>& group, double factor = 1) const {
    detail::check_group<Scalar>(group);
    constexpr double most = 1e300;  // no sum or difference of these overflows
    const double low = std::clamp(factor * range_ * static_cast<double>(group.minCoeff()), -most, most),
                 high = std::clamp(factor * range_ * static_cast<double>(group.maxCoeff()), -most, most);
    const double top = static_cast<double>((1 << this->bits()) - 1);
    Params params;
    if (low > 0 || high < 0) {
      // Zero stays within the levels; the far end, which a constant group is all at, is hit exactly.
      params.scale = Log8::above(std::max(high, -low) / top);
      const double reach = std::max(high, -low) / static_cast<double>(params.scale);
      params.position = position(low > 0 ? top - reach : reach);
    } else {
      params.scale = Log8((high - low) / top);
      // A step that rounds to nothing: the least one there is, if the group reaches its first level at all.
      const Log8 least = std::numeric_limits<Log8>::min();
      if (params.scale == Log8() && 2 * std::max(high, -low) > static_cast<double>(least))
        params.scale = least;
      const double scale = static_cast<double>(params.scale);
      if (scale > 0) params.position = position((top * scale - high - low) / (2 * scale));
    }
    return params;
  }

  UniformLevels<Scalar> levels(const Params& params) const {
    return detail::affine_levels(static_cast<Scalar>(params.scale), zero_of(params), this->bits());
  }

  std::uint8_t encode(Scalar x, const Params& params) const {
    return static_cast<std::uint8_t>(levels(params).code(x));
  }
  Scalar decode(std::uint8_t code, const Params& params) const {
    return levels(params).value(static_cast<Scalar>(code));
  }

 private:
  std::uint8_t position(double zero) const {
    const double top = static_cast<double>((1 << this->bits()) - 1);
    return static_cast<std::uint8_t>(std::clamp(std::round(zero * 255 / top), 0.0, 255.0));
  }
  Scalar zero_of(const Params& params) const {
    return static_cast<Scalar>(params.position) * static_cast<Scalar>((1 << this->bits()) - 1) / Scalar(255);
  }

  double range_;
};

}  // namespace wushkv

#endif  // WUSHKV_QUANTIZE_COMPACT_AFFINE_HPP
