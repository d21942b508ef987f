// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TRANSFORM_COMPOSED_HPP
#define WUSHKV_TRANSFORM_COMPOSED_HPP

#include <utility>

#include "wushkv/core/scratch.hpp"
#include "wushkv/transform/base.hpp"

namespace wushkv {

/// `T = A B`: `B` is applied first. Any two transforms of one dimension and scalar.
template <Transform A, Transform B>
class Composed
    : public TransformBase<Composed<A, B>, typename A::Scalar,
                           transform_dim_v<A> != Dynamic ? transform_dim_v<A> : transform_dim_v<B>> {
  static_assert(std::is_same_v<typename A::Scalar, typename B::Scalar>,
                "wushkv: Composed takes transforms of one scalar");
  using Base = TransformBase<Composed, typename A::Scalar,
                             transform_dim_v<A> != Dynamic ? transform_dim_v<A> : transform_dim_v<B>>;

 public:
  using typename Base::Scalar;

  /// Throws `std::invalid_argument` if the dimensions differ.
  Composed(A outer, B inner) : outer_(std::move(outer)), inner_(std::move(inner)) {
    if (outer_.dim() != inner_.dim())
      detail::invalid_argument("Composed: inner has dimension ", inner_.dim(), ", expected ", outer_.dim(),
                               " as outer");
  }

  Index dim() const { return static_cast<Index>(outer_.dim()); }
  const A& outer() const { return outer_; }
  const B& inner() const { return inner_; }

  void forward_rows(const typename Base::In& x, typename Base::Out y) const {
    through(x, [&](auto& middle) {
      wushkv::forward_to(inner_, x, middle);
      wushkv::forward_to(outer_, middle, y);
    });
  }
  void inverse_rows(const typename Base::In& y, typename Base::Out x) const {
    through(y, [&](auto& middle) {
      wushkv::inverse_to(outer_, y, middle);
      wushkv::inverse_to(inner_, middle, x);
    });
  }
  /// `(A B)^-T = A^-T B^-T`.
  void adjoint_inverse_rows(const typename Base::In& q, typename Base::Out y) const {
    through(q, [&](auto& middle) {
      wushkv::adjoint_inverse_to(inner_, q, middle);
      wushkv::adjoint_inverse_to(outer_, middle, y);
    });
  }

 private:
  template <class Steps>
  void through(const typename Base::In& x, Steps steps) const {
    detail::Scratch<Scalar> scratch(x.size());
    Eigen::Map<Batch<Scalar>> middle(scratch.data(), x.rows(), dim());
    steps(middle);
  }

  A outer_;
  B inner_;
};

template <class A, class B>
inline constexpr bool is_linear_v<Composed<A, B>> = is_linear_v<A>&& is_linear_v<B>;

}  // namespace wushkv

#endif  // WUSHKV_TRANSFORM_COMPOSED_HPP
