// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_LINEAR_ALGEBRA_HPP
#define WUSHKV_CALIBRATE_LINEAR_ALGEBRA_HPP

#include <Eigen/Cholesky>
#include <Eigen/Eigenvalues>

#include "wushkv/core/check.hpp"

namespace wushkv::detail {

/// A copy of `matrix` in double, made exactly symmetric. Throws `std::invalid_argument` unless it is square,
/// finite, symmetric within 1e-8 of its largest entry (1e-5 for a float's) and, to rounding, positive
/// semidefinite.
template <class Matrix>
SquareMatrix<double> checked_semidefinite(std::string_view name, const Eigen::MatrixBase<Matrix>& matrix) {
  check_square(name, matrix);
  const SquareMatrix<double> a = matrix.template cast<double>();
  check_finite(name, a);
  const bool is_double = std::is_same_v<typename Matrix::Scalar, double>;
  const double largest = a.cwiseAbs().maxCoeff(), skew = (a - a.transpose()).cwiseAbs().maxCoeff();
  if (!(skew <= (is_double ? 1e-8 : 1e-5) * largest))
    invalid_argument(name, " is not symmetric: entries differ from their mirror images by up to ", skew,
                     " of ", largest);
  SquareMatrix<double> symmetric = a / 2;
  symmetric += symmetric.transpose().eval();
  const Index d = a.rows();
  const double slack = (is_double ? 1e-9 : 1e-5) * largest;
  // Scaled by the largest entry, so that neither tiny nor huge statistics leave the range of a double.
  if (largest > 0) {
    const SquareMatrix<double> shifted =
        symmetric / largest + slack / largest * SquareMatrix<double>::Identity(d, d);
    if (Eigen::LLT<SquareMatrix<double>>(shifted).info() != Eigen::Success)
      invalid_argument(name, " is indefinite, expected a positive semidefinite matrix");
  }
  return symmetric;
}

/// Eigenvalues ascending, eigenvectors in columns with the entry of largest magnitude (the first of equals)
/// positive: the convention that makes results repeat (design.md, section 2).
struct Spectrum {
  Vector<double> values;
  SquareMatrix<double> vectors;
};

inline Spectrum spectrum(std::string_view name, const SquareMatrix<double>& symmetric) {
  const Eigen::SelfAdjointEigenSolver<SquareMatrix<double>> solver(symmetric);
  if (solver.info() != Eigen::Success)
    invalid_argument(name, " has an eigendecomposition that does not converge");
  Spectrum result{solver.eigenvalues(), solver.eigenvectors()};
  for (Index j = 0; j < result.vectors.cols(); ++j) {
    Index largest = 0;
    result.vectors.col(j).cwiseAbs().maxCoeff(&largest);
    if (result.vectors(largest, j) < 0) result.vectors.col(j) *= -1;
  }
  return result;
}

}  // namespace wushkv::detail

#endif  // WUSHKV_CALIBRATE_LINEAR_ALGEBRA_HPP
