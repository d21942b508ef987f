// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TRANSFORM_CONCEPT_HPP
#define WUSHKV_TRANSFORM_CONCEPT_HPP

#include <concepts>
#include <cstddef>
#include <type_traits>

#include "wushkv/core/check.hpp"
#include "wushkv/core/types.hpp"

namespace wushkv {
namespace detail {

template <class Result, class Scalar>
concept TokenResult = std::constructible_from<Vector<Scalar>, Result>;

/// Not a column: Eigen would convert a batch to one, and a type without a batch form would pass for one that
/// has it.
template <class Result, class Scalar>
concept BatchResult =
    std::constructible_from<Batch<Scalar>, Result> && !is_token_v<std::remove_cvref_t<Result>>;

}  // namespace detail

/// An invertible map of one head's vectors (design.md, section 3). A type needs no base class, only
///
///     using Scalar = float;          // or double
///     Index dim() const;             // the length of the vectors
///     auto forward(x) const;         // T x
///     auto inverse(y) const;         // T^-1 y
///     auto adjoint_inverse(q) const; // T^-T q, for queries: (T k) . (T^-T q) = k . q
///
/// each taking a column (`Vector<Scalar>`, one token) and a `Batch<Scalar>` (`[tokens, dim]`, one token a
/// row), and returning what converts to the same. Optional members that the library uses where they exist:
///
///     void forward_to(x, y) const;   // and inverse_to, adjoint_inverse_to: rows x to rows y,
///                                    // ConstRows and Rows of any pitch, without an allocation
///     static constexpr int dim_at_compile_time;
template <class T>
concept Transform = requires(const T& t, const Vector<typename T::Scalar>& token,
                             const Batch<typename T::Scalar>& batch) {
  requires std::same_as<typename T::Scalar, float> || std::same_as<typename T::Scalar, double>;
  { t.dim() } -> std::convertible_to<Index>;
  { t.forward(token) } -> detail::TokenResult<typename T::Scalar>;
  { t.inverse(token) } -> detail::TokenResult<typename T::Scalar>;
  { t.adjoint_inverse(token) } -> detail::TokenResult<typename T::Scalar>;
  { t.forward(batch) } -> detail::BatchResult<typename T::Scalar>;
  { t.inverse(batch) } -> detail::BatchResult<typename T::Scalar>;
  { t.adjoint_inverse(batch) } -> detail::BatchResult<typename T::Scalar>;
};

/// The dimension a transform type fixes at compile time, or `Dynamic`.
template <class T>
inline constexpr int transform_dim_v = Dynamic;

template <class T>
requires requires {
  { T::dim_at_compile_time } -> std::convertible_to<int>;
}
inline constexpr int transform_dim_v<T> = T::dim_at_compile_time;

/// False for a map that shifts vectors too (`Centered`, and what contains one): it has no matrix.
template <class T>
inline constexpr bool is_linear_v = true;

namespace detail {

/// Hands the rows of a batch, or a token as a batch of one row, to `direct(rows x, rows y)` if a transform
/// writes to a given place, else to `fallback(x)`, whose result must have the shape of x: a user's transform
/// is not trusted with that.
template <class Scalar, class X, class Y, class Direct, class Fallback>
void apply_to(Index dim, const X& x, Y& y, Direct direct, Fallback fallback) {
  if constexpr (is_token_v<X>) {
    check_shape("transform: x", x, dim, 1);
    check_sizes("transform: y", y.rows(), y.cols(), dim, 1);
    const Eigen::Ref<const Vector<Scalar>> in(x);
    if constexpr (!std::is_null_pointer_v<Direct>) {
      Eigen::Ref<Vector<Scalar>> out(y);
      const Eigen::Map<const Batch<Scalar>> in_row(in.data(), 1, dim);
      Eigen::Map<Batch<Scalar>> out_row(out.data(), 1, dim);
      direct(ConstRows<Scalar>(in_row), Rows<Scalar>(out_row));
    } else {
      const Vector<Scalar> result = fallback(Vector<Scalar>(in));
      check_shape("transform: the result of a user's transform", result, dim, 1);
      y = result;
    }
  } else {
    check_shape("transform: x", x, x.rows(), dim);
    check_sizes("transform: y", y.rows(), y.cols(), x.rows(), dim);
    if constexpr (!std::is_null_pointer_v<Direct>) {
      if (repeats_a_row(y)) invalid_argument("transform: y has rows in one place, expected a place for each");
      if (repeats_a_row(x))
        direct(ConstRows<Scalar>(Batch<Scalar>(x)), Rows<Scalar>(y));
      else
        direct(ConstRows<Scalar>(x), Rows<Scalar>(y));
    } else {
      const Batch<Scalar> result = fallback(Batch<Scalar>(x));
      check_shape("transform: the result of a user's transform", result, x.rows(), dim);
      y = result;
    }
  }
}

}  // namespace detail

/// Writes `T x` to `y` (a column, or rows with unit inner stride), without an allocation where the transform
/// has a `forward_to` and the arguments lie in place. `x` and `y` must not overlap. Throws
/// `std::invalid_argument` for shapes that differ from the transform's, and what the transform throws.
template <Transform T, class X, class Y>
void forward_to(const T& transform, const X& x, Y&& y) {
  using Scalar = typename T::Scalar;
  const Index dim = static_cast<Index>(transform.dim());
  if constexpr (requires(const ConstRows<Scalar>& in, Rows<Scalar> out) { transform.forward_to(in, out); })
    detail::apply_to<Scalar>(
        dim, x, y, [&](const ConstRows<Scalar>& in, Rows<Scalar> out) { transform.forward_to(in, out); },
        nullptr);
  else
    detail::apply_to<Scalar>(dim, x, y, nullptr, [&](const auto& in) { return transform.forward(in); });
}

/// Writes `T^-1 y` to `x`, as `forward_to`.
template <Transform T, class Y, class X>
void inverse_to(const T& transform, const Y& y, X&& x) {
  using Scalar = typename T::Scalar;
  const Index dim = static_cast<Index>(transform.dim());
  if constexpr (requires(const ConstRows<Scalar>& in, Rows<Scalar> out) { transform.inverse_to(in, out); })
    detail::apply_to<Scalar>(
        dim, y, x, [&](const ConstRows<Scalar>& in, Rows<Scalar> out) { transform.inverse_to(in, out); },
        nullptr);
  else
    detail::apply_to<Scalar>(dim, y, x, nullptr, [&](const auto& in) { return transform.inverse(in); });
}

/// Writes `T^-T q` to `y`, as `forward_to`.
template <Transform T, class Q, class Y>
void adjoint_inverse_to(const T& transform, const Q& q, Y&& y) {
  using Scalar = typename T::Scalar;
  const Index dim = static_cast<Index>(transform.dim());
  if constexpr (requires(const ConstRows<Scalar>& in, Rows<Scalar> out) {
                  transform.adjoint_inverse_to(in, out);
                })
    detail::apply_to<Scalar>(
        dim, q, y,
        [&](const ConstRows<Scalar>& in, Rows<Scalar> out) { transform.adjoint_inverse_to(in, out); },
        nullptr);
  else
    detail::apply_to<Scalar>(dim, q, y, nullptr,
                             [&](const auto& in) { return transform.adjoint_inverse(in); });
}

/// The matrix of a linear transform, `[dim, dim]`.
template <Transform T>
SquareMatrix<typename T::Scalar> to_matrix(const T& transform) {
  static_assert(is_linear_v<T>, "wushkv: an affine transform has no matrix; take its linear part's");
  using Scalar = typename T::Scalar;
  const Index dim = static_cast<Index>(transform.dim());
  const Batch<Scalar> basis = Batch<Scalar>::Identity(dim, dim);
  return Batch<Scalar>(transform.forward(basis)).transpose();  // row i is T e_i
}

}  // namespace wushkv

#endif  // WUSHKV_TRANSFORM_CONCEPT_HPP
