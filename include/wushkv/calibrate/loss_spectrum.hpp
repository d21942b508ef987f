// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_LOSS_SPECTRUM_HPP
#define WUSHKV_CALIBRATE_LOSS_SPECTRUM_HPP

#include <limits>
#include <string_view>

#include "wushkv/calibrate/linear_algebra.hpp"

namespace wushkv {

namespace detail {

/// `a` divided by its largest entry, so that no product leaves the range of a double, and that entry (1 for
/// a zero matrix).
struct Normalized {
  SquareMatrix<double> matrix;
  double scale;
};

template <class A>
Normalized normalized(std::string_view name, const Eigen::MatrixBase<A>& a) {
  const SquareMatrix<double> checked = checked_semidefinite(name, a);
  const double largest = checked.cwiseAbs().maxCoeff();
  if (!(largest > 0)) return {checked, 1};
  return {checked / largest, largest};
}

}  // namespace detail

/// Lambda, the eigenvalues of `Lᵀ M L`, `L Lᵀ = H`, ascending, `[d]`: all that the bounds depend on
/// (design.md, *Bound*). Undamped; `M` (Gram of what is stored, summed over the tokens; joint: divided by the
/// sum of the weights, times the number of tokens) and `H` (Hessian) may be singular, and what of Lambda is
/// no more than rounding, `d` times the machine epsilon of the largest, is then 0.
///
/// Throws `std::invalid_argument` unless both are finite, symmetric, positive semidefinite and of one size,
/// and Lambda within the range of a double.
template <class Gram, class Hessian>
Vector<double> loss_spectrum(const Eigen::MatrixBase<Gram>& gram, const Eigen::MatrixBase<Hessian>& hessian) {
  const detail::Normalized m = detail::normalized("loss_spectrum: gram M", gram),
                           h = detail::normalized("loss_spectrum: hessian H", hessian);
  const Index d = m.matrix.rows();
  detail::check_shape("loss_spectrum: hessian H", h.matrix, d, d);
  // The symmetric root has the same products as Cholesky's L, and exists for a singular H too.
  const detail::Spectrum s = detail::spectrum("loss_spectrum: hessian H", h.matrix);
  const SquareMatrix<double> root =
      s.vectors * s.values.cwiseMax(0.0).cwiseSqrt().asDiagonal() * s.vectors.transpose();
  SquareMatrix<double> product = root * m.matrix * root;
  product = (product + product.transpose().eval()) / 2;
  Vector<double> lambda = detail::spectrum("loss_spectrum: Lᵀ M L", product).values;
  const double rounding =
      static_cast<double>(d) * std::numeric_limits<double>::epsilon() * std::max(lambda[d - 1], 0.0);
  lambda = (lambda.array() > rounding).select(lambda, 0.0);
  lambda = m.scale * (h.scale * lambda);
  if (!all_finite(lambda))
    detail::invalid_argument("loss_spectrum: M times H overflows, expected smaller matrices");
  return lambda;
}

}  // namespace wushkv

#endif  // WUSHKV_CALIBRATE_LOSS_SPECTRUM_HPP
