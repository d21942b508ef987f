// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CORE_CHECK_HPP
#define WUSHKV_CORE_CHECK_HPP

#include <bit>
#include <cstdint>
#include <limits>
#include <string_view>
#include <type_traits>

#include "wushkv/core/error.hpp"
#include "wushkv/core/types.hpp"

namespace wushkv {

/// True unless `value` is an infinity or a NaN. Looks at the bits, so that an including project's
/// `-ffast-math`, under which a compiler may take every value for finite, does not switch the checks off.
template <class Scalar>
requires std::is_same_v<Scalar, float> || std::is_same_v<Scalar, double>
constexpr bool is_finite(Scalar value) {
  if constexpr (sizeof(Scalar) == 4) {
    constexpr std::uint32_t exponent = 0x7f800000U;
    return (std::bit_cast<std::uint32_t>(value) & exponent) != exponent;
  } else {
    constexpr std::uint64_t exponent = 0x7ff0000000000000U;
    return (std::bit_cast<std::uint64_t>(value) & exponent) != exponent;
  }
}

template <class Scalar>
requires std::is_same_v<Scalar, Eigen::half> || std::is_same_v<Scalar, Eigen::bfloat16>
bool is_finite(Scalar value) { return is_finite(static_cast<float>(value)); }

/// True unless some of the `count` values is an infinity or a NaN. One pass of integer operations that
/// compilers vectorize: adding one to the exponent carries into the sign bit just where the exponent is all
/// ones.
template <class Scalar>
requires std::is_same_v<Scalar, float> || std::is_same_v<Scalar, double>
bool all_finite(const Scalar* values, Index count) {
  using Bits = std::conditional_t<sizeof(Scalar) == 4, std::uint32_t, std::uint64_t>;
  constexpr Bits magnitude = ~Bits{0} >> 1;
  constexpr Bits one = Bits{1} << (std::numeric_limits<Scalar>::digits - 1);
  Bits carried = 0;
  for (Index i = 0; i < count; ++i) carried |= (std::bit_cast<Bits>(values[i]) & magnitude) + one;
  return (carried & ~magnitude) == 0;
}

template <class Scalar>
bool all_finite(const Scalar* values, Index count) {
  bool finite = true;
  for (Index i = 0; i < count; ++i) finite &= is_finite(values[i]);
  return finite;
}

/// True unless some coefficient of `x` (any shape and stride) is an infinity or a NaN.
template <class Derived>
bool all_finite(const Eigen::DenseBase<Derived>& x) {
  const auto& values = x.derived();
  if constexpr ((Derived::Flags & Eigen::DirectAccessBit) != 0) {
    if (values.innerStride() == 1) {
      for (Index i = 0; i < values.outerSize(); ++i)
        if (!all_finite(values.data() + i * values.outerStride(), values.innerSize())) return false;
      return true;
    }
  }
  const auto plain = values.eval();
  return all_finite(plain.data(), plain.size());
}

namespace detail {

template <class Derived>
void check_finite(std::string_view name, const Eigen::DenseBase<Derived>& x) {
  if (!all_finite(x)) [[unlikely]]
    invalid_argument(name, " has a value that is not finite (", x.rows(), " x ", x.cols(), ")");
}

inline void check_sizes(std::string_view name, Index rows, Index cols, Index expected_rows,
                        Index expected_cols) {
  if (rows != expected_rows || cols != expected_cols) [[unlikely]]
    invalid_argument(name, " is ", rows, " x ", cols, ", expected ", expected_rows, " x ", expected_cols);
}

template <class Derived>
void check_shape(std::string_view name, const Eigen::DenseBase<Derived>& x, Index rows, Index cols) {
  check_sizes(name, x.rows(), x.cols(), rows, cols);
}

template <class Derived>
void check_square(std::string_view name, const Eigen::DenseBase<Derived>& x) {
  if (x.rows() != x.cols() || x.rows() == 0) [[unlikely]]
    invalid_argument(name, " is ", x.rows(), " x ", x.cols(), ", expected a square matrix");
}

}  // namespace detail
}  // namespace wushkv

#endif  // WUSHKV_CORE_CHECK_HPP
