// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_FOLD_HPP
#define WUSHKV_CALIBRATE_FOLD_HPP

#include <string_view>
#include <type_traits>
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

/// The first output row of a KV head's values within a fused QKV projection. Throws `std::invalid_argument`
/// for heads that make no layer, or a KV head that is not there.
inline Index fused_value_row(const AttentionHeads& heads, QkvOrder order, Index kv_head) {
  detail::check_heads(heads);
  if (kv_head < 0 || kv_head >= heads.kv_heads)
    detail::invalid_argument("fused_value_row: KV head ", kv_head, " asked for, expected 0 to ",
                             heads.kv_heads - 1);
  const Index q = heads.query_heads * heads.key_dim, k = heads.kv_heads * heads.key_dim;
  if (order == QkvOrder::Concatenated) return q + k + kv_head * heads.value_dim;
  const Index before_value = (heads.queries_per_kv_head() + 1) * heads.key_dim;
  return kv_head * (before_value + heads.value_dim) + before_value;
}

namespace detail {

/// A value transform that folds: linear, or `Centered` around a linear one. Any other affine map has no
/// weights to go into.
template <class T>
constexpr bool can_fold() {
  if constexpr (is_centered_v<T>)
    return is_linear_v<std::remove_cvref_t<decltype(linear_part(std::declval<const T&>()))>>;
  else
    return is_linear_v<T>;
}

/// Every column of `weight` (`[dim, model]`) through `apply`, in the weight's own scalar; the weight itself
/// is left alone.
template <class T, class W, class Apply>
auto folded_rows(std::string_view name, const T& transform, const W& weight, Apply apply) {
  static_assert(can_fold<T>(), "wushkv: only a linear transform, or Centered around one, can be folded");
  using Scalar = typename T::Scalar;
  using WeightScalar = typename W::Scalar;
  check_shape(name, weight, static_cast<Index>(transform.dim()), weight.cols());
  check_finite(name, weight);
  const Batch<Scalar> columns = weight.transpose().template cast<Scalar>();  // a column a row
  Batch<WeightScalar> result = Batch<Scalar>(apply(columns)).transpose().template cast<WeightScalar>();
  if (!all_finite(result)) [[unlikely]]
    invalid_argument(name, " overflows when folded");
  return result;
}

template <class T, class W>
auto folded_value_weight(const T& transform, const W& w_v) {
  return folded_rows("fold: w_v", transform, w_v,
                     [&](const auto& columns) { return linear_part(transform).forward(columns); });
}
template <class T, class W>
auto folded_output_weight(const T& transform, const W& w_o) {
  return folded_rows("fold: w_o", transform, w_o,
                     [&](const auto& columns) { return linear_part(transform).adjoint_inverse(columns); });
}

}  // namespace detail

/// `W_V <- T_V W_V`: afterwards the projection yields transformed values. `w_v` is the block of one KV head's
/// rows,
/// `[value_dim, model]` (a block of a larger weight, `.transpose()` of a `[model, value_dim]` one, either
/// storage order). A centered transform folds its linear part here and its mean into the biases. Throws
/// `std::invalid_argument` for a wrong shape, a value that is not finite or one that overflows when folded;
/// the weight is unchanged then.
template <Transform T, class W>
void fold_value_weight(const T& transform, W&& w_v) {
  w_v = detail::folded_value_weight(transform, w_v);
}

/// `b_V <- T_V b_V`, for a centered transform `T_V (b_V - mu)`. `b_v` is one KV head's, a column of
/// `value_dim`. Errors as for `fold_value_weight`.
template <Transform T, class B>
void fold_value_bias(const T& transform, B&& b_v) {
  using Scalar = typename T::Scalar;
  using BiasScalar = typename std::remove_cvref_t<B>::Scalar;
  static_assert(detail::can_fold<T>(),
                "wushkv: only a linear transform, or Centered around one, can be folded");
  detail::check_shape("fold: b_v", b_v, static_cast<Index>(transform.dim()), 1);
  detail::check_finite("fold: b_v", b_v);
  const Vector<Scalar> bias = b_v.template cast<Scalar>();
  b_v = Vector<Scalar>(transform.forward(bias)).template cast<BiasScalar>();
}

/// `W_O,g <- T_V^-T W_O,g`: afterwards the output projection takes attention's output over transformed
/// values. `w_o` is the block of one query head's rows, `[value_dim, model]`. Errors as for
/// `fold_value_weight`.
template <Transform T, class W>
void fold_output_weight(const T& transform, W&& w_o) {
  w_o = detail::folded_output_weight(transform, w_o);
}

/// `b_O <- b_O + W_O,gᵀ mu` for a centered transform, nothing for a linear one (design.md, *Joint
/// statistics*). `w_o` is one query head's rows *before* `fold_output_weight`, `[value_dim, model]`, `b_o` a
/// column of `model` entries. Errors as for `fold_value_weight`.
template <Transform T, class W, class B>
void fold_output_bias(const T& transform, const W& w_o, B&& b_o) {
  using BiasScalar = typename std::remove_cvref_t<B>::Scalar;
  static_assert(detail::can_fold<T>(),
                "wushkv: only a linear transform, or Centered around one, can be folded");
  detail::check_shape("fold: w_o", w_o, static_cast<Index>(transform.dim()), w_o.cols());
  detail::check_shape("fold: b_o", b_o, w_o.cols(), 1);
  detail::check_finite("fold: w_o", w_o);
  detail::check_finite("fold: b_o", b_o);
  if constexpr (detail::is_centered_v<T>) {
    const Vector<double> shift =
        w_o.template cast<double>().transpose() * transform.mean().template cast<double>();
    b_o += shift.template cast<BiasScalar>();
  }
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
      invalid_argument("fold_values: a transform has dimension ", static_cast<Index>(transform.dim()),
                       ", expected ", heads.value_dim);
  check_shape("fold_values: w_v", w_v, heads.kv_heads * heads.value_dim, w_v.cols());
  check_shape("fold_values: w_o", w_o, heads.query_heads * heads.value_dim, w_o.cols());
}

/// Both weights folded, beside the old ones: a head that cannot be folded leaves the others alone.
template <Transform T, class WV, class WO>
struct FoldedWeights {
  FoldedWeights(const std::vector<T>& transforms, const AttentionHeads& heads, const WV& v, const WO& o)
      : w_v(v.rows(), v.cols()), w_o(o.rows(), o.cols()) {
    const Index d = heads.value_dim;
    for (Index h = 0; h < heads.kv_heads; ++h)
      w_v.middleRows(h * d, d) =
          folded_value_weight(transforms[static_cast<std::size_t>(h)], v.middleRows(h * d, d));
    for (Index g = 0; g < heads.query_heads; ++g)
      w_o.middleRows(g * d, d) = folded_output_weight(
          transforms[static_cast<std::size_t>(g / heads.queries_per_kv_head())], o.middleRows(g * d, d));
  }
  Batch<typename WV::Scalar> w_v;
  Batch<typename WO::Scalar> w_o;
};

}  // namespace detail

/// Folds the value transforms of a layer, one a KV head, into its projections (design.md, *fold*): for each
/// KV head `W_V <- T_V W_V`, and `W_O,g <- T_V^-T W_O,g` for the query heads of its group; the outputs are
/// then those of before up to rounding, and the cache holds `T_V v`.
///
/// `w_v` is `[kv_heads * value_dim, model]` and `w_o` `[query_heads * value_dim, model]`: output features of
/// `W_V` and input features of `W_O` in rows (`y = sum_h W_O,hᵀ o_h`). Pass `.transpose()` for the other
/// orientation. Of a fused projection pass the rows of values if they are adjacent, or fold head by head with
/// `fused_value_row`.
///
/// Throws `std::invalid_argument` for wrong shapes, values that are not finite and weights that overflow when
/// folded; nothing is changed then. Centered transforms need the form with biases.
template <Transform T, class WV, class WO>
void fold_values(const std::vector<T>& transforms, const AttentionHeads& heads, WV&& w_v, WO&& w_o) {
  static_assert(!detail::is_centered_v<T>, "wushkv: a centered value transform needs the biases b_v and b_o");
  detail::check_fold(transforms, heads, w_v, w_o);
  const detail::FoldedWeights<T, std::remove_cvref_t<WV>, std::remove_cvref_t<WO>> folded(transforms, heads,
                                                                                          w_v, w_o);
  w_v = folded.w_v;
  w_o = folded.w_o;
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
  const detail::FoldedWeights<T, std::remove_cvref_t<WV>, std::remove_cvref_t<WO>> folded(transforms, heads,
                                                                                          w_v, w_o);
  for (Index g = 0; g < heads.query_heads; ++g)
    fold_output_bias(transforms[static_cast<std::size_t>(g / heads.queries_per_kv_head())],
                     w_o.middleRows(g * d, d), b_o);
  for (Index h = 0; h < heads.kv_heads; ++h)
    fold_value_bias(transforms[static_cast<std::size_t>(h)], b_v.segment(h * d, d));
  w_v = folded.w_v;
  w_o = folded.w_o;
}

}  // namespace wushkv

#endif  // WUSHKV_CALIBRATE_FOLD_HPP
