// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TRANSFORM_DIAGONAL_HPP
#define WUSHKV_TRANSFORM_DIAGONAL_HPP

#include "wushkv/transform/base.hpp"

namespace wushkv {

/// `T = diag(d)`: one factor a channel (smoothing, FlatQuant's per-channel scale).
template <class Scalar, int Dim = Dynamic>
class Diagonal : public TransformBase<Diagonal<Scalar, Dim>, Scalar, Dim> {
  using Base = TransformBase<Diagonal, Scalar, Dim>;

 public:
  /// `diagonal` has `dim` entries. Throws `std::invalid_argument` if one is zero or not finite, or its
  /// inverse overflows.
  template <class Entries>
  explicit Diagonal(const Eigen::MatrixBase<Entries>& diagonal) {
    static_assert(is_token_v<Entries>, "wushkv: Diagonal takes a column");
    if (diagonal.rows() == 0)
      detail::invalid_argument("Diagonal: diagonal has 0 entries, expected one a coordinate");
    if (Dim != Dynamic) detail::check_shape("Diagonal: diagonal", diagonal, Dim, 1);
    const Vector<double> d = diagonal.template cast<double>();
    detail::check_finite("Diagonal: diagonal", d);
    factors_ = d.cast<Scalar>();
    inverse_ = d.cwiseInverse().cast<Scalar>();
    for (Index i = 0; i < d.size(); ++i)
      if (factors_[i] == Scalar(0) || !is_finite(factors_[i]) || !is_finite(inverse_[i]))
        detail::invalid_argument("Diagonal: entry ", i, " is ", d[i],
                                 ", expected a number with a finite inverse");
  }

  Index dim() const { return factors_.size(); }
  const Vector<Scalar, Dim>& diagonal() const { return factors_; }

  void forward_rows(const typename Base::In& x, typename Base::Out y) const {
    y = x.array().rowwise() * factors_.transpose().array();
  }
  void inverse_rows(const typename Base::In& y, typename Base::Out x) const {
    x = y.array().rowwise() * inverse_.transpose().array();
  }
  void adjoint_inverse_rows(const typename Base::In& q, typename Base::Out y) const { inverse_rows(q, y); }

 private:
  Vector<Scalar, Dim> factors_, inverse_;
};

}  // namespace wushkv

#endif  // WUSHKV_TRANSFORM_DIAGONAL_HPP
