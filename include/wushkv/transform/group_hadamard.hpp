// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TRANSFORM_GROUP_HADAMARD_HPP
#define WUSHKV_TRANSFORM_GROUP_HADAMARD_HPP

#include "wushkv/transform/block_diagonal.hpp"
#include "wushkv/transform/hadamard.hpp"

namespace wushkv {

/// The Hadamard transform of each group of `group_size` coordinates.
template <class Scalar>
using GroupHadamard = BlockDiagonal<Hadamard<Scalar>>;

/// Throws `std::invalid_argument` for a group that does not divide `dim` or has no Hadamard transform.
template <class Scalar>
GroupHadamard<Scalar> group_hadamard(Index dim, Index group_size) {
  if (group_size < 1 || dim < 1 || dim % group_size != 0)
    detail::invalid_argument("group_hadamard: group_size is ", group_size,
                             ", expected a divisor of the head dimension ", dim);
  return GroupHadamard<Scalar>(Hadamard<Scalar>(group_size), dim / group_size);
}

}  // namespace wushkv

#endif  // WUSHKV_TRANSFORM_GROUP_HADAMARD_HPP
