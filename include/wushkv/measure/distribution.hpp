// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_MEASURE_DISTRIBUTION_HPP
#define WUSHKV_MEASURE_DISTRIBUTION_HPP

#include <cmath>

#include "wushkv/core/check.hpp"

namespace wushkv {

namespace detail {

template <class Y>
Batch<double> checked_batch(std::string_view name, const Eigen::MatrixBase<Y>& y) {
  if (y.size() == 0)
    invalid_argument(name, ": y is ", y.rows(), " x ", y.cols(), ", expected at least one value");
  check_finite(name, y);
  return y.template cast<double>();
}

}  // namespace detail

/// How far the largest coordinate of a vector stands out: `sqrt(d) max|y| / |y|`, from 1 (all alike) to
/// `sqrt(d)` (one spike), averaged over the tokens of `y` (`[tokens, d]`); an all-zero token counts as 1.
/// What a transform should lower. Throws `std::invalid_argument` for an empty batch or values that are not
/// finite.
template <class Y>
double incoherence(const Eigen::MatrixBase<Y>& y) {
  const Batch<double> rows = detail::checked_batch("incoherence", y);
  double sum = 0;
  for (Index t = 0; t < rows.rows(); ++t) {
    const double norm = rows.row(t).stableNorm();
    sum +=
        norm > 0 ? rows.row(t).cwiseAbs().maxCoeff() / norm * std::sqrt(static_cast<double>(rows.cols())) : 1;
  }
  return sum / static_cast<double>(rows.rows());
}

/// `E y⁴ / (E y²)²` over all values of `y` (no mean taken off): 3 for a normal, more for heavy tails. An
/// all-zero batch gives 0. Errors as for `incoherence`.
template <class Y>
double kurtosis(const Eigen::MatrixBase<Y>& y) {
  const Batch<double> rows = detail::checked_batch("kurtosis", y);
  const double largest = rows.cwiseAbs().maxCoeff();
  if (!(largest > 0)) return 0;
  const auto squares = (rows.array() / largest).square();
  const double second = squares.mean();
  return squares.square().mean() / (second * second);
}

}  // namespace wushkv

#endif  // WUSHKV_MEASURE_DISTRIBUTION_HPP
