// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_MEASURE_RELATIVE_ERROR_HPP
#define WUSHKV_MEASURE_RELATIVE_ERROR_HPP

#include <cmath>
#include <limits>
#include <span>

#include "wushkv/core/error.hpp"

namespace wushkv {

/// Squared error and squared signal, summed; sums of several sequences add up.
struct SquaredError {
  double error = 0, signal = 0;

  /// `error / signal`; 0 where both are zero, infinity where only the signal is.
  double relative() const {
    if (error == 0) return 0;
    return signal > 0 ? error / signal : std::numeric_limits<double>::infinity();
  }
  /// Signal-to-quantization-noise ratio in decibels, `-10 log10(relative())`.
  double sqnr_db() const { return -10 * std::log10(relative()); }

  SquaredError& operator+=(const SquaredError& other) {
    error += other.error;
    signal += other.signal;
    return *this;
  }
};

/// The geometric mean of positive numbers. Throws `std::invalid_argument` if there is none or one is negative
/// or no number; a zero makes it zero.
inline double geometric_mean(std::span<const double> values) {
  if (values.empty()) detail::invalid_argument("geometric_mean: 0 values, expected at least one");
  double sum = 0;
  for (const double value : values) {
    if (!(value >= 0))
      detail::invalid_argument("geometric_mean: a value is ", value, ", expected none below 0");
    sum += std::log(value);
  }
  return std::exp(sum / static_cast<double>(values.size()));
}

}  // namespace wushkv

#endif  // WUSHKV_MEASURE_RELATIVE_ERROR_HPP
