// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_LOG8_HPP
#define WUSHKV_QUANTIZE_LOG8_HPP

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace wushkv {

/// A scale in 8 bits: zero, or one of 255 powers of two an eighth of an octave apart, 2^-16 to 2^15.75; the
/// nearest by ratio, within 4.4 %. Transforms that leave unit mean square use the middle of that.
class Log8 {
 public:
  Log8() = default;
  /// Rounds a number that is not negative; what is too large becomes the largest, what is below half the
  /// least becomes zero.
  explicit Log8(double value) : Log8(value, 0.5) {}
  /// The least value that is not below `value` (to a float's rounding), the largest if there is none.
  static Log8 above(double value) {
    // A float's rounding of a power of two must not count as above it.
    return value > 0 ? Log8(std::max(value, 0x1p-16), 1 - 1e-5) : Log8();
  }
  static Log8 from_bits(std::uint8_t bits) {
    Log8 result;
    result.bits_ = bits;
    return result;
  }

  std::uint8_t bits() const { return bits_; }
  explicit operator double() const { return static_cast<double>(static_cast<float>(*this)); }
  explicit operator float() const {
    if (bits_ == 0) return 0;
    // A float's exponent is an integer shift away: 2^(n/8) times an octave.
    static constexpr std::array<float, 8> eighths = {1,          1.0905077F, 1.1892071F, 1.2968396F,
                                                     1.4142135F, 1.5422108F, 1.6817929F, 1.8340081F};
    const int code = bits_ - 1;
    return eighths[static_cast<std::size_t>(code % 8)] *
           std::bit_cast<float>(static_cast<std::uint32_t>(127 + code / 8 - 16) << 23);
  }

  friend bool operator==(Log8, Log8) = default;

 private:
  Log8(double value, double round_up) {
    if (!(value >= 0x1p-17)) return;
    const double code = std::floor(8 * (std::log2(std::min(value, 0x1p20)) + 16) + round_up);
    bits_ = static_cast<std::uint8_t>(1 + std::clamp(code, 0.0, 254.0));
  }

  std::uint8_t bits_ = 0;
};

}  // namespace wushkv

template <>
class std::numeric_limits<wushkv::Log8> {
 public:
  static constexpr bool is_specialized = true, is_signed = false, is_integer = false;
  static wushkv::Log8 min() { return wushkv::Log8::from_bits(1); }
  static wushkv::Log8 denorm_min() { return min(); }
  static wushkv::Log8 max() { return wushkv::Log8::from_bits(255); }
};

#endif  // WUSHKV_QUANTIZE_LOG8_HPP
