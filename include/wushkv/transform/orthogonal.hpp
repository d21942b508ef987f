// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TRANSFORM_ORTHOGONAL_HPP
#define WUSHKV_TRANSFORM_ORTHOGONAL_HPP

#include <cmath>
#include <limits>

#include "wushkv/transform/base.hpp"

namespace wushkv {

/// `T = R` with `R Rᵀ = I`: a rotation or reflection given as a matrix (OSCAR, PCA, SpinQuant).
template <class Scalar, int Dim = Dynamic>
class Orthogonal : public OrthogonalBase<Orthogonal<Scalar, Dim>, Scalar, Dim> {
  using Base = TransformBase<Orthogonal, Scalar, Dim>;

 public:
  /// `matrix` is `[dim, dim]`, of any scalar. Throws `std::invalid_argument` unless every entry of `R Rᵀ - I`
  /// is within `tolerance`; the default suits matrices that were stored in single precision.
  template <class Matrix>
  explicit Orthogonal(const Eigen::MatrixBase<Matrix>& matrix, double tolerance = 1e-5) {
    detail::check_square("Orthogonal: matrix", matrix);
    if (Dim != Dynamic) detail::check_shape("Orthogonal: matrix", matrix, Dim, Dim);
    const SquareMatrix<double> r = matrix.template cast<double>();
    detail::check_finite("Orthogonal: matrix", r);
    const double off =
        (r * r.transpose() - SquareMatrix<double>::Identity(r.rows(), r.rows())).cwiseAbs().maxCoeff();
    if (!(off <= tolerance))
      detail::invalid_argument("Orthogonal: matrix is off by ", off, " from R Rᵀ = I, expected at most ",
                               tolerance);
    matrix_ = r.cast<Scalar>();
  }

  Index dim() const { return matrix_.rows(); }
  const SquareMatrix<Scalar>& matrix() const { return matrix_; }

  void forward_rows(const typename Base::In& x, typename Base::Out y) const {
    y.noalias() = x * matrix_.transpose();
  }
  void inverse_rows(const typename Base::In& y, typename Base::Out x) const { x.noalias() = y * matrix_; }

 private:
  SquareMatrix<Scalar> matrix_;  // on the heap even where Dim is fixed: 256 x 256 is no member
};

}  // namespace wushkv

#endif  // WUSHKV_TRANSFORM_ORTHOGONAL_HPP
