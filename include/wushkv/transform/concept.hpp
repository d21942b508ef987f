// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TRANSFORM_CONCEPT_HPP
#define WUSHKV_TRANSFORM_CONCEPT_HPP

#include <concepts>
#include <type_traits>

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
///     using Scalar = float;                  // or double
///     Index dim() const;                     // the length of the vectors
///     auto forward(x) const;                 // T x
///     auto inverse(y) const;                 // T^-1 y
///     auto adjoint_inverse(q) const;         // T^-T q, what queries need: (T k) . (T^-T q) = k . q
///
/// each taking a column (`Vector<Scalar>`, one token) and a `Batch<Scalar>` (`[tokens, dim]`, one token a
/// row), and returning what converts to the same. Optional members that the library uses when they exist:
/// `forward_to(x, y)`, `inverse_to(y, x)`, `adjoint_inverse_to(q, y)`, which write to a given place and
/// allocate nothing, and `static constexpr int dim_at_compile_time`.
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

namespace detail {

/// The argument as the concept promises it to a user's transform, which may overload on just these two types.
template <class Scalar, class X>
auto plain(const X& x) {
  if constexpr (is_token_v<X>)
    return Vector<Scalar>(x);
  else
    return Batch<Scalar>(x);
}

}  // namespace detail

/// Writes `T x` to `y`, without an allocation where the transform has a `forward_to`. `x` and `y` must not
/// overlap.
template <Transform T, class X, class Y>
void forward_to(const T& transform, const X& x, Y&& y) {
  if constexpr (requires { transform.forward_to(x, y); })
    transform.forward_to(x, y);
  else
    y = transform.forward(detail::plain<typename T::Scalar>(x));
}

/// Writes `T^-1 y` to `x`, as `forward_to`.
template <Transform T, class Y, class X>
void inverse_to(const T& transform, const Y& y, X&& x) {
  if constexpr (requires { transform.inverse_to(y, x); })
    transform.inverse_to(y, x);
  else
    x = transform.inverse(detail::plain<typename T::Scalar>(y));
}

/// Writes `T^-T q` to `y`, as `forward_to`.
template <Transform T, class Q, class Y>
void adjoint_inverse_to(const T& transform, const Q& q, Y&& y) {
  if constexpr (requires { transform.adjoint_inverse_to(q, y); })
    transform.adjoint_inverse_to(q, y);
  else
    y = transform.adjoint_inverse(detail::plain<typename T::Scalar>(q));
}

/// The matrix of a linear transform, `[dim, dim]`.
template <Transform T>
SquareMatrix<typename T::Scalar> to_matrix(const T& transform) {
  using Scalar = typename T::Scalar;
  const Index dim = transform.dim();
  const Batch<Scalar> basis = Batch<Scalar>::Identity(dim, dim);
  return Batch<Scalar>(transform.forward(basis)).transpose();  // row i is T e_i
}

}  // namespace wushkv

#endif  // WUSHKV_TRANSFORM_CONCEPT_HPP
