// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_LAYER_TRANSFORMS_HPP
#define WUSHKV_CALIBRATE_LAYER_TRANSFORMS_HPP

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "wushkv/transform/block_diagonal.hpp"
#include "wushkv/transform/centered.hpp"
#include "wushkv/transform/dense.hpp"

namespace wushkv {

/// Any linear transform of a head as matrices by group, in double: what files hold. `cast` its blocks to a
/// float, or give a fast transform its own type instead.
using BlockTransform = BlockDiagonal<Dense<double>>;

/// What a codec of one KV head's keys, or values, is made from: it stores `T (x - mu)`.
struct HeadTransform {
  BlockTransform linear;  ///< `T`
  Vector<double> mean;    ///< `mu`, `[dim]`; zeros for a linear transform
  /// `A = T^-T (H + gamma tr(H)/d I) T^-1`, `[dim, dim]`: `eᵀ A e` is the loss of an error e in stored
  /// coordinates (design.md, *Feedback rounding*). 0 x 0 where no Hessian is known.
  SquareMatrix<double> sensitivity;
  /// What tuning found for quantizers, by name and width as `quest:2` (`recipe/tune.hpp`).
  std::map<std::string, double> tuned{};

  /// A linear transform is one whose mean is zero.
  HeadTransform(BlockTransform transform)
      : linear(std::move(transform)), mean(Vector<double>::Zero(linear.dim())) {}
  HeadTransform(BlockTransform transform, Vector<double> shift, SquareMatrix<double> loss = {})
      : linear(std::move(transform)), mean(std::move(shift)), sensitivity(std::move(loss)) {}

  bool is_linear() const { return mean.isZero(0); }
  bool has_sensitivity() const { return sensitivity.size() > 0; }
  /// `x -> T (x - mu)`. Throws `std::invalid_argument` for a mean of another dimension or one that is not
  /// finite.
  Centered<BlockTransform> centered() const { return {linear, mean}; }
};

/// The transforms of one layer, one a KV head.
struct LayerTransforms {
  std::vector<HeadTransform> keys, values;
};

/// `x -> T (x - mu)` of every head, as `fold_values` takes them, with biases. Throws as
/// `HeadTransform::centered`.
inline std::vector<Centered<BlockTransform>> centered(const std::vector<HeadTransform>& heads) {
  std::vector<Centered<BlockTransform>> transforms;
  for (const HeadTransform& head : heads) transforms.push_back(head.centered());
  return transforms;
}

}  // namespace wushkv

#endif  // WUSHKV_CALIBRATE_LAYER_TRANSFORMS_HPP
