// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_LAYER_TRANSFORMS_HPP
#define WUSHKV_CALIBRATE_LAYER_TRANSFORMS_HPP

#include <vector>

#include "wushkv/transform/block_diagonal.hpp"
#include "wushkv/transform/dense.hpp"

namespace wushkv {

/// Any linear transform of a head as matrices by group, in double: what files hold. `cast` its blocks to a
/// float, or give a fast transform its own type instead.
using BlockTransform = BlockDiagonal<Dense<double>>;

/// The transforms of one layer, one a KV head.
struct LayerTransforms {
  std::vector<BlockTransform> keys, values;
};

}  // namespace wushkv

#endif  // WUSHKV_CALIBRATE_LAYER_TRANSFORMS_HPP
