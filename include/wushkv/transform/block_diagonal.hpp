// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TRANSFORM_BLOCK_DIAGONAL_HPP
#define WUSHKV_TRANSFORM_BLOCK_DIAGONAL_HPP

#include <utility>
#include <vector>

#include "wushkv/transform/base.hpp"

namespace wushkv {

/// `T = diag(T_0, T_1, …)`, blocks of one size: the form a transform takes when a group is smaller than the
/// head.
template <Transform Block, int Dim = Dynamic>
class BlockDiagonal : public TransformBase<BlockDiagonal<Block, Dim>, typename Block::Scalar, Dim> {
  using Base = TransformBase<BlockDiagonal, typename Block::Scalar, Dim>;

 public:
  /// One transform a block. Throws `std::invalid_argument` if there is none or their dimensions differ.
  explicit BlockDiagonal(std::vector<Block> blocks) : blocks_(std::move(blocks)) {
    if (blocks_.empty()) detail::invalid_argument("BlockDiagonal: blocks is empty, expected at least one");
    for (const Block& block : blocks_)
      if (block.dim() != blocks_.front().dim())
        detail::invalid_argument("BlockDiagonal: a block has dimension ", block.dim(), ", expected ",
                                 blocks_.front().dim(), " as the first");
    if (Dim != Dynamic && dim() != Dim)
      detail::invalid_argument("BlockDiagonal: blocks span ", dim(), " coordinates, expected ", Dim);
  }
  /// `count` copies of one block.
  BlockDiagonal(const Block& block, Index count)
      : BlockDiagonal(std::vector<Block>(count > 0 ? static_cast<std::size_t>(count) : 0, block)) {}

  Index dim() const { return block_dim() * block_count(); }
  Index block_dim() const { return static_cast<Index>(blocks_.front().dim()); }
  Index block_count() const { return static_cast<Index>(blocks_.size()); }
  const std::vector<Block>& blocks() const { return blocks_; }

  void forward_rows(const typename Base::In& x, typename Base::Out y) const {
    each(x, y, [](const Block& t, const auto& in, auto&& out) { wushkv::forward_to(t, in, out); });
  }
  void inverse_rows(const typename Base::In& y, typename Base::Out x) const {
    each(y, x, [](const Block& t, const auto& in, auto&& out) { wushkv::inverse_to(t, in, out); });
  }
  void adjoint_inverse_rows(const typename Base::In& q, typename Base::Out y) const {
    each(q, y, [](const Block& t, const auto& in, auto&& out) { wushkv::adjoint_inverse_to(t, in, out); });
  }

 private:
  template <class Apply>
  void each(const typename Base::In& x, typename Base::Out& y, Apply apply) const {
    const Index width = block_dim();
    for (Index b = 0; b < block_count(); ++b)
      apply(blocks_[static_cast<std::size_t>(b)], x.middleCols(b * width, width),
            y.middleCols(b * width, width));
  }

  std::vector<Block> blocks_;
};

template <class Block, int Dim>
inline constexpr bool is_linear_v<BlockDiagonal<Block, Dim>> = is_linear_v<Block>;

}  // namespace wushkv

#endif  // WUSHKV_TRANSFORM_BLOCK_DIAGONAL_HPP
