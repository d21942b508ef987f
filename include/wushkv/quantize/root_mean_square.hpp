// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_ROOT_MEAN_SQUARE_HPP
#define WUSHKV_QUANTIZE_ROOT_MEAN_SQUARE_HPP

#include <cmath>

#include "wushkv/core/check.hpp"
#include "wushkv/quantize/concept.hpp"

namespace wushkv::detail {

/// Throws `std::invalid_argument` for a group without a value or with one that is not finite.
template <class Scalar>
void check_group(const GroupView<Scalar>& group) {
  if (group.size() == 0) [[unlikely]]
    invalid_argument("quantizer: group has 0 values, expected at least one");
  if (!all_finite(group)) [[unlikely]]
    invalid_argument("quantizer: group has a value that is not finite");
}

/// The root mean square of a group, in double: neither the largest nor the smallest finite values overflow or
/// vanish.
template <class Scalar>
double root_mean_square(const GroupView<Scalar>& group) {
  check_group<Scalar>(group);
  const double count = static_cast<double>(group.size());
  const double mean = group.template cast<double>().squaredNorm() / count;
  if (mean > 1e-280 && mean < 1e280) [[likely]]
    return std::sqrt(mean);
  const double largest = static_cast<double>(group.cwiseAbs().maxCoeff());
  if (!(largest > 0)) return 0;
  // Squares leave the range of a double: scale by a power of two, which is exact, and back. Two steps, since
  // the factor for the smallest denormals is itself out of range.
  const int exponent = std::ilogb(largest);
  const int half = exponent / 2;
  double sum = 0;
  for (Index i = 0; i < group.size(); ++i) {
    const double scaled = std::ldexp(std::ldexp(static_cast<double>(group[i]), -half), -(exponent - half));
    sum += scaled * scaled;
  }
  return std::ldexp(std::sqrt(sum / count), exponent);
}

}  // namespace wushkv::detail

#endif  // WUSHKV_QUANTIZE_ROOT_MEAN_SQUARE_HPP
