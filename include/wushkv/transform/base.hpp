// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TRANSFORM_BASE_HPP
#define WUSHKV_TRANSFORM_BASE_HPP

#include <cstdint>
#include <type_traits>

#include "wushkv/core/check.hpp"
#include "wushkv/core/types.hpp"
#include "wushkv/transform/concept.hpp"

namespace wushkv {

/// What the library's own transforms share: argument checks, and the token and batch forms from one kernel on
/// rows. `Derived` has `dim()` and, for `x` and `y` of shape `[tokens, dim]` that do not overlap,
/// `forward_rows(x, y)`, `inverse_rows(x, y)` and `adjoint_inverse_rows(x, y)`. A user's transform does not
/// need it.
///
/// Every public call refuses a wrong shape and a value that is not finite with `std::invalid_argument`. Any
/// expression is taken; one with unit inner stride, rows any distance apart, is read in place. The `_to`
/// forms on such arguments allocate nothing for one token (Eigen's matrix product may, for a batch).
template <class Derived, class ScalarType, int Dim = Dynamic>
class TransformBase {
  static_assert(std::is_same_v<ScalarType, float> || std::is_same_v<ScalarType, double>,
                "wushkv: a transform's scalar is float or double");
  static_assert(Dim == Dynamic || Dim > 1, "wushkv: a fixed dimension is at least 2 (use Dynamic for 1)");

 public:
  using Scalar = ScalarType;
  static constexpr int dim_at_compile_time = Dim;

  /// `T x`; `x` one column of `dim()` or a batch `[tokens, dim]`; the result has the same shape.
  template <class X>
  auto forward(const Eigen::MatrixBase<X>& x) const {
    return returned(x, [this](const X& in, auto& out) { this->forward_to(in, out); });
  }
  /// `T^-1 y`, shapes as for `forward`.
  template <class Y>
  auto inverse(const Eigen::MatrixBase<Y>& y) const {
    return returned(y, [this](const Y& in, auto& out) { this->inverse_to(in, out); });
  }
  /// `T^-T q`, shapes as for `forward`.
  template <class Q>
  auto adjoint_inverse(const Eigen::MatrixBase<Q>& q) const {
    return returned(q, [this](const Q& in, auto& out) { this->adjoint_inverse_to(in, out); });
  }

  /// The same, written to `y` of the same shape (a column, or rows with unit inner stride), which must not
  /// overlap `x`.
  template <class X, class Y>
  void forward_to(const Eigen::MatrixBase<X>& x, Y&& y) const {
    on_rows(x.derived(), y, [this](const auto& in, auto out) { derived().forward_rows(in, out); });
  }
  template <class Y, class X>
  void inverse_to(const Eigen::MatrixBase<Y>& y, X&& x) const {
    on_rows(y.derived(), x, [this](const auto& in, auto out) { derived().inverse_rows(in, out); });
  }
  template <class Q, class Y>
  void adjoint_inverse_to(const Eigen::MatrixBase<Q>& q, Y&& y) const {
    on_rows(q.derived(), y, [this](const auto& in, auto out) { derived().adjoint_inverse_rows(in, out); });
  }

 protected:
  using In = ConstRows<Scalar, Dim>;
  using Out = Rows<Scalar, Dim>;

 private:
  const Derived& derived() const { return static_cast<const Derived&>(*this); }

  template <class X, class Apply>
  auto returned(const Eigen::MatrixBase<X>& x, Apply apply) const {
    if constexpr (is_token_v<X>) {
      Vector<Scalar, Dim> y(derived().dim());
      apply(x.derived(), y);
      return y;
    } else {
      Batch<Scalar, Dim> y(x.rows(), derived().dim());
      apply(x.derived(), y);
      return y;
    }
  }

  template <class X, class Y, class Kernel>
  void on_rows(const X& x, Y& y, Kernel kernel) const {
    static_assert(std::is_same_v<typename X::Scalar, Scalar>,
                  "wushkv: the argument's scalar differs from the transform's; use .cast<Scalar>()");
    const Index dim = derived().dim();
    if constexpr (is_token_v<X>) {
      detail::check_shape("transform: x", x, dim, 1);
      detail::check_sizes("transform: y", y.rows(), y.cols(), dim, 1);  // y holds nothing yet
      const Eigen::Ref<const Vector<Scalar, Dim>> in(x);
      Eigen::Ref<Vector<Scalar, Dim>> out(y);
      const Eigen::Map<const Batch<Scalar, Dim>> in_row(in.data(), 1, dim);
      Eigen::Map<Batch<Scalar, Dim>> out_row(out.data(), 1, dim);
      run(In(in_row), Out(out_row), kernel);
    } else {
      detail::check_shape("transform: x", x, x.rows(), dim);
      detail::check_sizes("transform: y", y.rows(), y.cols(), x.rows(), dim);
      if (x.rows() == 0) return;
      if (detail::repeats_a_row(y))
        detail::invalid_argument("transform: y has rows in one place, expected a place for each");
      if (detail::repeats_a_row(x))
        run(In(Batch<Scalar, Dim>(x)), Out(y), kernel);
      else
        run(In(x), Out(y), kernel);
    }
  }

  template <class Kernel>
  static void run(const In& x, Out y, Kernel kernel) {
    check_apart(x, y);
    detail::check_finite("transform: x", x);
    kernel(x, y);
  }

  // The kernels read x after they begin to write y. Slices of one wide buffer side by side are fine.
  static void check_apart(const In& x, const Out& y) {
    const auto from = reinterpret_cast<std::uintptr_t>(x.data()),
               to = reinterpret_cast<std::uintptr_t>(y.data());
    const auto apart = static_cast<Index>((from > to ? from - to : to - from) / sizeof(Scalar));
    const Index pitch = x.outerStride(), rows = x.rows(), dim = x.cols();
    const bool same_pitch = rows == 1 || pitch == y.outerStride();
    if (!same_pitch || apart >= (rows - 1) * pitch + dim) return;
    const Index shift = rows == 1 ? apart : apart % pitch;
    if (shift < dim || (rows > 1 && pitch - shift < dim)) [[unlikely]]
      detail::invalid_argument("transform: y overlaps x, expected a place of its own");
  }
};

/// `TransformBase` for the orthogonal ones, where `T^-T = T`: `Derived` has `forward_rows` and
/// `inverse_rows`.
template <class Derived, class ScalarType, int Dim = Dynamic>
class OrthogonalBase : public TransformBase<Derived, ScalarType, Dim> {
  using Base = TransformBase<Derived, ScalarType, Dim>;

 public:
  void adjoint_inverse_rows(const typename Base::In& x, typename Base::Out y) const {
    static_cast<const Derived*>(this)->forward_rows(x, y);
  }
};

}  // namespace wushkv

#endif  // WUSHKV_TRANSFORM_BASE_HPP
