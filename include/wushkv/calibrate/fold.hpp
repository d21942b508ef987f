// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_FOLD_HPP
#define WUSHKV_CALIBRATE_FOLD_HPP

#include <vector>

#include "wushkv/core/heads.hpp"
#include "wushkv/transform/centered.hpp"
#include "wushkv/transform/concept.hpp"

namespace wushkv {

/// How a fused QKV projection lays its output rows.
enum class QkvOrder {
  Concatenated,  ///< every query head, then every key head, then every value head
  Grouped        ///< per KV head: its query heads, its key, its value
};

/// The first output row of a KV head's values within a fused QKV projection.
inline Index fused_value_row(const AttentionHeads& heads, QkvOrder order, Index kv_head) {
  detail::check_heads(heads);
  if (kv_head < 0 || kv_head >= heads.kv_heads)
    detail::invalid_argument("fused_value_row: KV head ", kv_head, " asked for, expected 0 to ",
                             heads.kv_heads - 1);
  const Index q = heads.query_heads * heads.key_dim, k = heads.kv_heads * heads.key_dim;
  if (order == QkvOrder::Concatenated) return q + k + kv_head * heads.value_dim;
  return kv_head * (heads.group() * heads.key_dim + heads.key_dim + heads.value_dim) +
         (heads.group() + 1) * heads.key_dim;
}

/// `W_V <- T_V W_V`: afterwards the projection yields transformed values. `w_v` is the block of one KV head's
/// rows,
/// `[value_dim, model]` (a block of a larger weight, `.transpose()` of a `[model, value_dim]` one, either
/// storage order). A centered transform folds its linear part here and its mean into the bias. Throws
/// `std::invalid_argument` for a wrong shape or a value that is not finite; the weight is unchanged then.
template <Transform T, class W>
void fold_value_weight(const T& transform, W&& w_v) {
  using Scalar = typename T::Scalar;
  using WeightScalar = typename std::remove_cvref_t<W>::Scalar;
  detail::check_shape("fold_value_weight: w_v", w_v, static_cast<Index>(transform.dim()), w_v.cols());
  detail::check_finite("fold_value_weight: w_v", w_v);
  const Batch<Scalar> columns = w_v.transpose().template cast<Scalar>();  // a column of W_V a row
  w_v = Batch<Scalar>(detail::linear_part(transform).forward(columns))
            .transpose()
            .template cast<WeightScalar>();
}

/// `b_V <- T_V b_V`, for a centered transform `T_V (b_V - mu)`. `b_v` is one KV head's, a column of
/// `value_dim`.
template <Transform T, class B>
void fold_value_bias(const T& transform, B&& b_v) {
  using Scalar = typename T::Scalar;
  using BiasScalar = typename std::remove_cvref_t<B>::Scalar;
  detail::check_shape("fold_value_bias: b_v", b_v, static_cast<Index>(transform.dim()), 1);
  detail::check_finite("fold_value_bias: b_v", b_v);
  const Vector<Scalar> bias = b_v.template cast<Scalar>();
  b_v = Vector<Scalar>(transform.forward(bias)).template cast<BiasScalar>();
}

/// `W_O,g <- T_V^-T W_O,g`: afterwards the output projection takes attention's output over transformed
/// values. `w_o` is the block of one query head's rows, `[value_dim, model]`, as for `fold_value_weight`.
template <Transform T, class W>
void fold_output_weight(const T& transform, W&& w_o) {
  using Scalar = typename T::Scalar;
  using WeightScalar = typename std::remove_cvref_t<W>::Scalar;
  detail::check_shape("fold_output_weight: w_o", w_o, static_cast<Index>(transform.dim()), w_o.cols());
  detail::check_finite("fold_output_weight: w_o", w_o);
  const Batch<Scalar> columns = w_o.transpose().template cast<Scalar>();
  w_o = Batch<Scalar>(detail::linear_part(transform).adjoint_inverse(columns))
            .transpose()
            .template cast<WeightScalar>();
}

namespace detail {

template <Transform T, class WV, class WO>
void check_fold(const std::vector<T>& transforms, const AttentionHeads& heads, const WV& w_v, const WO& w_o) {
  check_heads(heads);
  if (static_cast<Index>(transforms.size()) != heads.kv_heads)
    invalid_argument("fold_values: ", transforms.size(), " transforms, expected one a KV head, ",
                     heads.kv_heads);
  for (const T& transform : transforms)
    if (static_cast<Index>(transform.dim()) != heads.value_dim)
      invalid_argument("fold_values: a transform has dimension ", transform.dim(), ", expected ",
                       heads.value_dim);
  check_shape("fold_values: w_v", w_v, heads.kv_heads * heads.value_dim, w_v.cols());
  check_shape("fold_values: w_o", w_o, heads.query_heads * heads.value_dim, w_o.cols());
  check_finite("fold_values: w_v", w_v);
  check_finite("fold_values: w_o", w_o);
}

template <Transform T, class WV, class WO>
void fold_value_weights(const std::vector<T>& transforms, const AttentionHeads& heads, WV& w_v, WO& w_o) {
  const Index d = heads.value_dim;
  for (Index h = 0; h < heads.kv_heads; ++h) {
    const T& transform = transforms[static_cast<std::size_t>(h)];
    fold_value_weight(transform, w_v.middleRows(h * d, d));
    for (Index g = h * heads.group(); g < (h + 1) * heads.group(); ++g)
      fold_output_weight(transform, w_o.middleRows(g * d, d));
  }
}

}  // namespace detail

/// Folds the value transforms of a layer, one a KV head, into its projections (design.md, *fold*): for each
/// KV head `W_V <- T_V W_V`, and `W_O,g <- T_V^-T W_O,g` for the query heads of its group; the outputs are
/// then those of before up to rounding, and the cache holds `T_V v`.
///
/// `w_v` is `[kv_heads * value_dim, model]` and `w_o` `[query_heads * value_dim, model]`, output features of
/// `W_V` and input features of `W_O` in rows (`y = sum_h W_O,hᵀ o_h`); pass `.transpose()` for the other
/// orientation. For a fused projection pass its rows of values if they are adjacent, or fold head by head
/// with `fused_value_row`. Throws `std::invalid_argument` for wrong shapes or values that are not finite;
/// nothing is changed then. Centered transforms need the form with biases.
template <Transform T, class WV, class WO>
void fold_values(const std::vector<T>& transforms, const AttentionHeads& heads, WV&& w_v, WO&& w_o) {
  static_assert(!detail::is_centered_v<T>, "wushkv: a centered value transform needs the biases b_v and b_o");
  detail::check_fold(transforms, heads, w_v, w_o);
  detail::fold_value_weights(transforms, heads, w_v, w_o);
}

/// The same with biases: `b_v`, a column of `kv_heads * value_dim`, becomes `T_V b_V`. A centered transform
/// stores `T_V (v - mu)`: then `b_V <- T_V (b_V - mu)` and `b_o`, a column of `model` entries, gains `sum_g
/// W_O,gᵀ mu` (design.md, *Joint statistics*); other transforms leave `b_o` as it is.
template <Transform T, class WV, class WO, class BV, class BO>
void fold_values(const std::vector<T>& transforms, const AttentionHeads& heads, WV&& w_v, WO&& w_o, BV&& b_v,
                 BO&& b_o) {
  detail::check_fold(transforms, heads, w_v, w_o);
  const Index d = heads.value_dim;
  detail::check_shape("fold_values: b_v", b_v, heads.kv_heads * d, 1);
  detail::check_shape("fold_values: b_o", b_o, w_o.cols(), 1);
  detail::check_finite("fold_values: b_v", b_v);
  detail::check_finite("fold_values: b_o", b_o);
  if constexpr (detail::is_centered_v<T>) {
    Vector<double> shift = Vector<double>::Zero(w_o.cols());
    for (Index g = 0; g < heads.query_heads; ++g)
      shift.noalias() +=
          w_o.middleRows(g * d, d).template cast<double>().transpose() *
          transforms[static_cast<std::size_t>(g / heads.group())].mean().template cast<double>();
    b_o += shift.template cast<typename std::remove_cvref_t<BO>::Scalar>();
  }
  detail::fold_value_weights(transforms, heads, w_v, w_o);
  for (Index h = 0; h < heads.kv_heads; ++h)
    fold_value_bias(transforms[static_cast<std::size_t>(h)], b_v.segment(h * d, d));
}

}  // namespace wushkv

#endif  // WUSHKV_CALIBRATE_FOLD_HPP
