// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TRANSFORM_CENTERED_HPP
#define WUSHKV_TRANSFORM_CENTERED_HPP

#include <utility>

#include "wushkv/core/scratch.hpp"
#include "wushkv/transform/base.hpp"

namespace wushkv {

/// `x -> T (x - mean)`, an affine map (design.md, *Joint statistics*). A key shift adds one constant to all
/// of a query's logits, which softmax ignores; a value shift is undone by `inverse`, or by the output bias.
/// `adjoint_inverse`, which queries go through, is that of the linear part.
template <Transform T>
class Centered : public TransformBase<Centered<T>, typename T::Scalar, transform_dim_v<T>> {
  using Base = TransformBase<Centered, typename T::Scalar, transform_dim_v<T>>;

 public:
  using typename Base::Scalar;

  /// `mean` is one column of `dim` entries. Throws `std::invalid_argument` for a wrong shape or a value that
  /// is not finite.
  Centered(T linear, Vector<Scalar> mean) : linear_(std::move(linear)), mean_(std::move(mean)) {
    detail::check_shape("Centered: mean", mean_, static_cast<Index>(linear_.dim()), 1);
    detail::check_finite("Centered: mean", mean_);
  }

  Index dim() const { return mean_.size(); }
  const T& linear() const { return linear_; }
  const Vector<Scalar>& mean() const { return mean_; }

  void forward_rows(const typename Base::In& x, typename Base::Out y) const {
    detail::Scratch<Scalar> scratch(x.size());
    Eigen::Map<Batch<Scalar>> shifted(scratch.data(), x.rows(), dim());
    shifted = x.rowwise() - mean_.transpose();
    wushkv::forward_to(linear_, shifted, y);
  }
  void inverse_rows(const typename Base::In& y, typename Base::Out x) const {
    wushkv::inverse_to(linear_, y, x);
    x.rowwise() += mean_.transpose();
  }
  void adjoint_inverse_rows(const typename Base::In& q, typename Base::Out y) const {
    wushkv::adjoint_inverse_to(linear_, q, y);
  }

 private:
  T linear_;
  Vector<Scalar> mean_;
};

namespace detail {

template <class T>
inline constexpr bool is_centered_v = false;
template <class T>
inline constexpr bool is_centered_v<Centered<T>> = true;

template <class T>
const auto& linear_part(const T& transform) {
  if constexpr (is_centered_v<T>)
    return transform.linear();
  else
    return transform;
}

}  // namespace detail

template <class T>
inline constexpr bool is_linear_v<Centered<T>> = false;

}  // namespace wushkv

#endif  // WUSHKV_TRANSFORM_CENTERED_HPP
