// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_ROPE_KEY_TRANSFORM_HPP
#define WUSHKV_ROPE_KEY_TRANSFORM_HPP

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <ranges>
#include <span>
#include <type_traits>

#include "wushkv/core/check.hpp"
#include "wushkv/core/error.hpp"
#include "wushkv/core/scratch.hpp"
#include "wushkv/core/types.hpp"
#include "wushkv/rope/rms_norm.hpp"
#include "wushkv/rope/rope.hpp"
#include "wushkv/transform/concept.hpp"

namespace wushkv {

/// Which side of `KᵀQ = (T_K K)ᵀ(T_K^{-T} Q)` (design.md, section 2) a row is on.
enum class RopeSide {
  Key,   ///< yields `T_K · RoPE(k)`
  Query  ///< yields `T_K^{-T} · RoPE(q)`
};

/// One key transform for each KV head: a `std::vector`, `std::array` or `std::span` of them.
template <class Range>
concept RopeTransformRange = std::ranges::contiguous_range<const Range> &&
    std::ranges::sized_range<const Range> && Transform<std::ranges::range_value_t<const Range>>;

namespace detail {

template <RopeSide Side, class T, class X, class Out>
void transform_roped(const T& transform, const X& x, Out& out) {
  if constexpr (Side == RopeSide::Key)
    wushkv::forward_to(transform, x, out);
  else
    wushkv::adjoint_inverse_to(transform, x, out);
}

/// Head normalization (if any) and rotation of one head, from `x` to `y`.
template <class Scalar>
void normalize_and_rotate(const Rope<Scalar>& rope, const RmsNorm<Scalar>* norm, const Scalar* x,
                          Index position, Scalar* y) {
  if (norm != nullptr) {
    norm->normalize_head(x, y);
    x = y;
  }
  rope.rotate_head(x, position, y);
}

template <class Scalar, class T>
void check_roped_dimensions(const Rope<Scalar>& rope, const RmsNorm<Scalar>* norm,
                            std::span<const T> transforms) {
  const Index dim = rope.head_dim();
  if (norm != nullptr && norm->head_dim() != dim) [[unlikely]]
    invalid_argument("rope_and_transform: norm has head dimension ", norm->head_dim(), ", expected ", dim,
                     " as in rope");
  for (const T& transform : transforms)
    if (static_cast<Index>(transform.dim()) != dim) [[unlikely]]
      invalid_argument("rope_and_transform: a transform has dimension ", static_cast<Index>(transform.dim()),
                       ", expected ", dim, " as in rope");
}

/// The number of heads in a row of `width`, checked against the number of KV heads' transforms.
template <RopeSide Side>
Index count_transformed_heads(Index width, Index head_dim, Index transforms) {
  const Index heads = count_heads("rope_and_transform: x", width, head_dim);
  const bool fits = transforms > 0 && (Side == RopeSide::Key ? heads == transforms : heads % transforms == 0);
  if (!fits) [[unlikely]]
    invalid_argument("rope_and_transform: transforms has ", transforms, " entries, expected ",
                     Side == RopeSide::Key ? "one for each of " : "a divisor of the query head count ", heads,
                     Side == RopeSide::Key ? " key heads" : "");
  return heads;
}

/// One token. `group` heads side by side share a transform.
template <RopeSide Side, class Scalar, class T>
void rope_and_transform_token(const Rope<Scalar>& rope, const RmsNorm<Scalar>* norm, const T* transforms,
                              Index group, const Eigen::Ref<const Vector<Scalar>>& x, Index position,
                              Eigen::Ref<Vector<Scalar>>& out) {
  check_shape("rope_and_transform: out", out, x.rows(), 1);
  rope.check_position(position);
  check_finite("rope_and_transform: x", x);
  const Index dim = rope.head_dim();
  Scratch<Scalar> scratch(dim);
  const Eigen::Map<const Vector<Scalar>> roped(scratch.data(), dim);
  const Eigen::Ref<const Vector<Scalar>> in(roped);
  for (Index head = 0; head < x.size() / dim; ++head) {
    normalize_and_rotate(rope, norm, x.data() + head * dim, position, scratch.data());
    Eigen::Ref<Vector<Scalar>> to(out.segment(head * dim, dim));
    transform_roped<Side>(transforms[head / group], in, to);
  }
}

/// A batch, in tiles of rows: a dense transform then runs as matrix products, and rotated values stay in
/// cache.
template <RopeSide Side, class Scalar, class T, class Positions>
void rope_and_transform_batch(const Rope<Scalar>& rope, const RmsNorm<Scalar>* norm, const T* transforms,
                              Index group, const ConstRows<Scalar>& x, const Positions& positions,
                              Rows<Scalar>& out) {
  constexpr std::size_t tile_scalars = 4096;  // 16 or 32 KB of stack
  check_shape("rope_and_transform: out", out, x.rows(), x.cols());
  rope.check_positions(positions, x.rows());
  check_finite("rope_and_transform: x", x);
  const Index dim = rope.head_dim();
  const Index tile = std::max<Index>(static_cast<Index>(tile_scalars) / dim, 1);
  Scratch<Scalar, tile_scalars> scratch(tile * dim);
  const auto* position = std::ranges::data(positions);
  for (Index begin = 0; begin < x.rows(); begin += tile) {
    const Index rows = std::min(tile, x.rows() - begin);
    for (Index head = 0; head < x.cols() / dim; ++head) {
      for (Index row = 0; row < rows; ++row) {
        const Index token = begin + row;
        normalize_and_rotate(rope, norm, x.data() + token * x.outerStride() + head * dim,
                             static_cast<Index>(position[token]), scratch.data() + row * dim);
      }
      const Eigen::Map<const Batch<Scalar>> roped(scratch.data(), rows, dim);
      const ConstRows<Scalar> in(roped);
      Rows<Scalar> to(out.block(begin, head * dim, rows, dim));
      transform_roped<Side>(transforms[head / group], in, to);
    }
  }
}

}  // namespace detail

/// The one-call form of head normalization, RoPE and key transform (design.md, section 2, *keys*): from
/// pre-RoPE rows `x`, `out = T_K · RoPE(norm(k))` (`RopeSide::Key`) or `out = T_K^{-T} · RoPE(norm(q))`
/// (`RopeSide::Query`). Engines that rotate themselves call the transform on rotated rows instead (two steps,
/// the same result up to rounding).
///
/// `x` and `out` are `[tokens, heads · head_dim]`, one token a row, heads side by side, any distance between
/// rows, or one token's column; `out` may be `x` itself but must not overlap it otherwise. `norm` may be
/// null. `transforms` holds one transform for each KV head; of `h` query heads, `h / size` neighbours (the
/// group that shares a KV head, GQA) use the same one. Rotated rows go through a buffer on the stack: one
/// head for a token (nothing is allocated for head dimensions up to 512), 4096 scalars for a batch; a
/// transform may allocate for a batch (Eigen's matrix product does). Errors (`std::invalid_argument`, nothing
/// written): those of `Rope`, dimensions of rope, norm and transforms that differ, a number of transforms
/// that does not go with the heads.
template <RopeSide Side, class Scalar, RopeTransformRange Transforms, PositionRange Positions>
void rope_and_transform(const Rope<Scalar>& rope, const RmsNorm<std::type_identity_t<Scalar>>* norm,
                        const Transforms& transforms, const ConstRows<std::type_identity_t<Scalar>>& x,
                        const Positions& positions, Rows<std::type_identity_t<Scalar>> out) {
  using T = std::ranges::range_value_t<const Transforms>;
  const std::span<const T> each(std::ranges::data(transforms), std::ranges::size(transforms));
  const auto count = static_cast<Index>(each.size());
  detail::check_roped_dimensions(rope, norm, each);
  const Index heads = detail::count_transformed_heads<Side>(x.cols(), rope.head_dim(), count);
  detail::rope_and_transform_batch<Side>(rope, norm, each.data(), heads / count, x, positions, out);
}

/// The same for one token.
template <RopeSide Side, class Scalar, RopeTransformRange Transforms>
void rope_and_transform(const Rope<Scalar>& rope, const RmsNorm<std::type_identity_t<Scalar>>* norm,
                        const Transforms& transforms,
                        const Eigen::Ref<const Vector<std::type_identity_t<Scalar>>>& x, Index position,
                        Eigen::Ref<Vector<std::type_identity_t<Scalar>>> out) {
  using T = std::ranges::range_value_t<const Transforms>;
  const std::span<const T> each(std::ranges::data(transforms), std::ranges::size(transforms));
  const auto count = static_cast<Index>(each.size());
  detail::check_roped_dimensions(rope, norm, each);
  const Index heads = detail::count_transformed_heads<Side>(x.size(), rope.head_dim(), count);
  detail::rope_and_transform_token<Side>(rope, norm, each.data(), heads / count, x, position, out);
}

/// The same with one transform for every head in the row (a row of one head, or a transform shared by a
/// layer).
template <RopeSide Side, class Scalar, Transform T, PositionRange Positions>
void rope_and_transform(const Rope<Scalar>& rope, const RmsNorm<std::type_identity_t<Scalar>>* norm,
                        const T& transform, const ConstRows<std::type_identity_t<Scalar>>& x,
                        const Positions& positions, Rows<std::type_identity_t<Scalar>> out) {
  detail::check_roped_dimensions(rope, norm, std::span<const T>(&transform, 1));
  const Index heads = detail::count_heads("rope_and_transform: x", x.cols(), rope.head_dim());
  detail::rope_and_transform_batch<Side>(rope, norm, &transform, heads, x, positions, out);
}

/// The same for one token and one transform.
template <RopeSide Side, class Scalar, Transform T>
void rope_and_transform(const Rope<Scalar>& rope, const RmsNorm<std::type_identity_t<Scalar>>* norm,
                        const T& transform, const Eigen::Ref<const Vector<std::type_identity_t<Scalar>>>& x,
                        Index position, Eigen::Ref<Vector<std::type_identity_t<Scalar>>> out) {
  detail::check_roped_dimensions(rope, norm, std::span<const T>(&transform, 1));
  const Index heads = detail::count_heads("rope_and_transform: x", x.size(), rope.head_dim());
  detail::rope_and_transform_token<Side>(rope, norm, &transform, heads, x, position, out);
}

}  // namespace wushkv

#endif  // WUSHKV_ROPE_KEY_TRANSFORM_HPP
