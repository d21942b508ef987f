// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_ROPE_RMS_NORM_HPP
#define WUSHKV_ROPE_RMS_NORM_HPP

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "wushkv/core/check.hpp"
#include "wushkv/core/error.hpp"
#include "wushkv/core/types.hpp"
#include "wushkv/rope/rope.hpp"

namespace wushkv {

namespace detail {

/// The sum of `(x_i · scale)²` over `count` values, in double.
template <class Scalar>
double sum_of_squares(const Scalar* x, Index count, double scale = 1) {
  double partial[4] = {};  // a single chain of additions would not vectorize
  Index i = 0;
  for (; i + 4 <= count; i += 4)
    for (Index lane = 0; lane < 4; ++lane) {
      const double value = static_cast<double>(x[i + lane]) * scale;
      partial[lane] += value * value;
    }
  for (; i < count; ++i) {
    const double value = static_cast<double>(x[i]) * scale;
    partial[0] += value * value;
  }
  return (partial[0] + partial[1]) + (partial[2] + partial[3]);
}

/// `sqrt(mean(x²) + epsilon)`, finite for every finite x.
template <class Scalar>
double guarded_rms(const Scalar* x, Index count, double epsilon) {
  const double sum = sum_of_squares(x, count);
  if (is_finite(sum)) [[likely]]
    return std::sqrt(sum / static_cast<double>(count) + epsilon);
  double largest = 0;  // squares of doubles overflow from 1e154 on; epsilon is nothing beside them
  for (Index i = 0; i < count; ++i) largest = std::max(largest, std::abs(static_cast<double>(x[i])));
  return largest * std::sqrt(sum_of_squares(x, count, 1 / largest) / static_cast<double>(count));
}

}  // namespace detail

/// Head-wise root mean square normalization, `y = x / sqrt(mean(x²) + epsilon) · weight` for each head on its
/// own (arXiv 1910.07467; on queries and keys before RoPE: QK-norm, Qwen3, arXiv 2505.09388). Computed in
/// double and rounded once.
///
/// A batch is `[tokens, heads · head_dim]`, one token a row, heads side by side, any distance between rows; a
/// single token is a column `[heads · head_dim]`. `out` may be `x` itself but must not overlap it otherwise.
/// Allocates nothing after construction. Errors (`std::invalid_argument`, nothing written): a width that is
/// no multiple of `head_dim()`, `out` of another shape than `x`, a value that is not finite.
template <class Scalar>
class RmsNorm {
  static_assert(std::is_same_v<Scalar, float> || std::is_same_v<Scalar, double>,
                "wushkv::RmsNorm computes in float or double");

 public:
  using Column = Eigen::Ref<Vector<Scalar>>;
  using ConstColumn = Eigen::Ref<const Vector<Scalar>>;

  /// `weight` is `[head_dim]`, the same for every head (models that store `weight - 1` add the one first).
  /// Errors: `std::invalid_argument` if it is empty or not finite, or if `epsilon` is not positive and
  /// finite.
  explicit RmsNorm(Vector<Scalar> weight, double epsilon = 1e-6)
      : weight_(std::move(weight)), epsilon_(epsilon) {
    if (weight_.size() == 0) [[unlikely]]
      detail::invalid_argument("RMS norm: weight is empty, expected one value for each coordinate of a head");
    detail::check_finite("RMS norm: weight", weight_);
    detail::check_rope_setting("RMS norm: epsilon", epsilon_);
  }

  Index head_dim() const { return weight_.size(); }
  double epsilon() const { return epsilon_; }
  const Vector<Scalar>& weight() const { return weight_; }

  /// Normalizes every head of a batch in place.
  void apply(Rows<Scalar> x) const { run(x, x); }
  /// `out` = the normalized batch `x`.
  void apply_to(const ConstRows<Scalar>& x, Rows<Scalar> out) const { run(x, out); }
  /// Normalizes every head of one token in place.
  template <class X>
  requires is_token_v<std::remove_cvref_t<X>>
  void apply(X&& x) const {
    Column column(x);
    run(column, column);
  }
  /// `out` = the normalized token `x`.
  template <class X>
  requires is_token_v<X>
  void apply_to(const X& x, Column out) const { run(ConstColumn(x), out); }

  /// The kernel under `apply`: `y` = the head `x` (`head_dim()` scalars each) normalized. Checks nothing.
  void normalize_head(const Scalar* x, Scalar* y) const {
    const double gain = 1 / detail::guarded_rms(x, head_dim(), epsilon_);
    const Scalar* weight = weight_.data();
    for (Index i = 0; i < head_dim(); ++i)
      y[i] = static_cast<Scalar>(static_cast<double>(x[i]) * gain * static_cast<double>(weight[i]));
  }

 private:
  template <class X, class Out>
  void run(const X& x, Out& out) const {
    // A column is one run of memory as a batch's row is, only turned.
    const Index tokens = is_token_v<X> ? 1 : x.rows();
    const Index heads = detail::count_heads("RMS norm: x", is_token_v<X> ? x.rows() : x.cols(), head_dim());
    detail::check_shape("RMS norm: out", out, x.rows(), x.cols());
    detail::check_finite("RMS norm: x", x);
    for (Index token = 0; token < tokens; ++token)
      for (Index head = 0; head < heads; ++head)
        normalize_head(x.data() + token * x.outerStride() + head * head_dim(),
                       out.data() + token * out.outerStride() + head * head_dim());
  }

  Vector<Scalar> weight_;
  double epsilon_;
};

}  // namespace wushkv

#endif  // WUSHKV_ROPE_RMS_NORM_HPP
