// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TRANSFORM_DENSE_HPP
#define WUSHKV_TRANSFORM_DENSE_HPP

#include <Eigen/LU>
#include <limits>
#include <utility>

#include "wushkv/transform/base.hpp"

namespace wushkv {

/// A matrix and its inverse, both in double: what the constructions return and `Dense` is built from.
struct MatrixPair {
  SquareMatrix<double> forward;  ///< `T`, `[dim, dim]`
  SquareMatrix<double> inverse;  ///< `T^-1`, `[dim, dim]`
};

/// The inverse of `matrix` (`[dim, dim]`) in double beside the matrix itself. Throws `std::invalid_argument`
/// if it is not square, not finite, or so near singular that fewer than four digits of the inverse would be
/// right.
template <class Matrix>
MatrixPair inverted(const Eigen::MatrixBase<Matrix>& matrix) {
  detail::check_square("Dense: matrix", matrix);
  const SquareMatrix<double> t = matrix.template cast<double>();
  detail::check_finite("Dense: matrix", t);
  const Eigen::PartialPivLU<SquareMatrix<double>> lu(t);
  const double rcond = lu.rcond();
  if (!(rcond > 1e-12)) [[unlikely]]
    detail::invalid_argument("Dense: matrix is singular (its reciprocal condition number is ", rcond,
                             ", expected more than 1e-12)");
  return {t, lu.inverse()};
}

/// `T` any invertible matrix, with `T^-1` computed once, in double; `T^-T` is its transposed view. One
/// product of `dim²` multiply-adds a vector each way.
template <class Scalar, int Dim = Dynamic>
class Dense : public TransformBase<Dense<Scalar, Dim>, Scalar, Dim> {
  using Base = TransformBase<Dense, Scalar, Dim>;

 public:
  /// `matrix` is `T`, `[dim, dim]`, of any scalar. Throws `std::invalid_argument` for a wrong shape, a value
  /// that is not finite and a singular matrix.
  template <class Matrix>
  explicit Dense(const Eigen::MatrixBase<Matrix>& matrix) : Dense(inverted(matrix)) {}

  /// `T` with an inverse known in closed form, which is more exact than one computed. Throws
  /// `std::invalid_argument` unless every entry of their product is within `tolerance` of the identity's; the
  /// default suits doubles, matrices that were stored in single precision want about 1e-3.
  explicit Dense(const MatrixPair& pair, double tolerance = 1e-6) {
    const auto& [t, inverse] = pair;
    detail::check_square("Dense: matrix", t);
    if (Dim != Dynamic) detail::check_shape("Dense: matrix", t, Dim, Dim);
    detail::check_shape("Dense: inverse", inverse, t.rows(), t.rows());
    detail::check_finite("Dense: matrix", t);
    detail::check_finite("Dense: inverse", inverse);
    const double off =
        (t * inverse - SquareMatrix<double>::Identity(t.rows(), t.rows())).cwiseAbs().maxCoeff();
    if (!(off <= tolerance))
      detail::invalid_argument("Dense: matrix times inverse is off by ", off,
                               " from the identity, expected at most ", tolerance);
    matrix_ = t.cast<Scalar>();
    inverse_ = inverse.cast<Scalar>();
    detail::check_finite("Dense: matrix (in the transform's scalar)", matrix_);
    detail::check_finite("Dense: inverse (in the transform's scalar)", inverse_);
  }

  Index dim() const { return matrix_.rows(); }
  const SquareMatrix<Scalar>& matrix() const { return matrix_; }
  const SquareMatrix<Scalar>& inverse_matrix() const { return inverse_; }
  /// The same transform in another scalar, or with the dimension fixed or left to run time.
  template <class Other, int OtherDim = Dim>
  Dense<Other, OtherDim> cast() const {
    return Dense<Other, OtherDim>(
        MatrixPair{matrix_.template cast<double>(), inverse_.template cast<double>()},
        std::numeric_limits<double>::infinity());
  }

  void forward_rows(const typename Base::In& x, typename Base::Out y) const {
    y.noalias() = x * matrix_.transpose();
  }
  void inverse_rows(const typename Base::In& y, typename Base::Out x) const {
    x.noalias() = y * inverse_.transpose();
  }
  void adjoint_inverse_rows(const typename Base::In& q, typename Base::Out y) const {
    y.noalias() = q * inverse_;
  }

 private:
  SquareMatrix<Scalar> matrix_, inverse_;  // on the heap even where Dim is fixed: 256 x 256 is no member
};

}  // namespace wushkv

#endif  // WUSHKV_TRANSFORM_DENSE_HPP
