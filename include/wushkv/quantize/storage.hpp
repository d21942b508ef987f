// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_STORAGE_HPP
#define WUSHKV_QUANTIZE_STORAGE_HPP

#include <algorithm>
#include <concepts>
#include <limits>
#include <string_view>

#include "wushkv/core/types.hpp"
#include "wushkv/quantize/log8.hpp"

namespace wushkv {

/// What a scale or a zero point may be stored as.
template <class T>
concept ParameterStorage = std::same_as<T, double> || std::same_as<T, float> ||
    std::same_as<T, Eigen::half> || std::same_as<T, Eigen::bfloat16>;

/// What a scale, which has no sign, may be stored as.
template <class T>
concept ScaleStorage = ParameterStorage<T> || std::same_as<T, Log8>;

namespace detail {

template <ScaleStorage Storage>
inline constexpr std::string_view storage_name = std::same_as<Storage, double>        ? "double"
                                                 : std::same_as<Storage, float>       ? "float"
                                                 : std::same_as<Storage, Eigen::half> ? "half"
                                                 : std::same_as<Storage, Log8>        ? "log8"
                                                                                      : "bfloat16";

/// The largest finite value of a storage type.
template <ScaleStorage Storage>
double storage_max() {
  if constexpr (std::same_as<Storage, Log8>)
    return static_cast<double>(std::numeric_limits<Log8>::max());
  else
    return static_cast<double>(Eigen::NumTraits<Storage>::highest());
}

/// Bits of a storage type's significand, the hidden one included.
template <ParameterStorage Storage>
inline constexpr int storage_digits = std::same_as<Storage, double>        ? 53
                                      : std::same_as<Storage, float>       ? 24
                                      : std::same_as<Storage, Eigen::half> ? 11
                                                                           : 8;

}  // namespace detail

/// Rounds to the storage type; what would overflow becomes its largest value, so that decoding stays finite.
template <ScaleStorage Storage, class Scalar>
Storage saturate_cast(Scalar value) {
  if constexpr (std::same_as<Storage, Scalar>) {
    return std::clamp(value, -std::numeric_limits<Scalar>::max(), std::numeric_limits<Scalar>::max());
  } else {
    const double limit = detail::storage_max<Storage>();
    const double clamped = std::clamp(static_cast<double>(value), -limit, limit);
    if constexpr (std::same_as<Storage, double> || std::same_as<Storage, float> ||
                  std::same_as<Storage, Log8>)
      return static_cast<Storage>(clamped);
    else
      return static_cast<Storage>(static_cast<float>(clamped));
  }
}

}  // namespace wushkv

#endif  // WUSHKV_QUANTIZE_STORAGE_HPP
