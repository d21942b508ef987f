// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_BITS_HPP
#define WUSHKV_QUANTIZE_BITS_HPP

#include "wushkv/core/error.hpp"
#include "wushkv/core/types.hpp"

namespace wushkv {

/// The number of bits of a code, 1 to 8: fixed at compile time, or `Dynamic` and kept. As with Eigen's sizes,
/// the fixed form lets kernels unroll and the dynamic one lets one type serve every layer of a model.
template <int Bits>
class BitWidth {
  static_assert(Bits >= 1 && Bits <= 8, "wushkv: a code has 1 to 8 bits (or Dynamic)");

 public:
  /// Throws `std::invalid_argument` unless `bits` is the fixed width.
  explicit BitWidth(int bits = Bits) {
    if (bits != Bits)
      detail::invalid_argument("quantizer: bits is ", bits, ", expected the fixed width ", Bits);
  }
  static constexpr int bits() { return Bits; }
};

template <>
class BitWidth<Dynamic> {
 public:
  /// Throws `std::invalid_argument` unless `bits` is 1 to 8.
  explicit BitWidth(int bits) : bits_(bits) {
    if (bits < 1 || bits > 8) detail::invalid_argument("quantizer: bits is ", bits, ", expected 1 to 8");
  }
  int bits() const { return bits_; }

 private:
  int bits_;
};

}  // namespace wushkv

#endif  // WUSHKV_QUANTIZE_BITS_HPP
