// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_WUSH_HPP
#define WUSHKV_CALIBRATE_WUSH_HPP

#include <cmath>
#include <vector>

#include "wushkv/calibrate/build_options.hpp"
#include "wushkv/calibrate/linear_algebra.hpp"
#include "wushkv/transform/block_diagonal.hpp"
#include "wushkv/transform/dense.hpp"
#include "wushkv/transform/hadamard.hpp"

namespace wushkv {

namespace detail {

inline void check_wush_options(const WushOptions& options) {
  if (!(options.damping >= 0 && options.damping <= 1e6))
    invalid_argument("wush: damping is ", options.damping, ", expected 0 to 1e6");
  if (!(options.exponent >= 0 && options.exponent <= 2))
    invalid_argument("wush: exponent is ", options.exponent, ", expected 0 to 2");
  if (!(options.tokens >= 0 && is_finite(options.tokens)))
    invalid_argument("wush: tokens is ", options.tokens, ", expected 0 or a positive number");
}

/// `a + damping tr(a)/d I` after division by `tr(a)/d`, and that divisor. A zero matrix, a head that nothing
/// has been seen of, stands for no preference: the identity.
struct Damped {
  SquareMatrix<double> matrix;
  double scale;
};

inline Damped damped(const SquareMatrix<double>& a, double damping) {
  const SquareMatrix<double> identity = SquareMatrix<double>::Identity(a.rows(), a.rows());
  // Via the largest entry: the trace of huge statistics would overflow.
  const double largest = a.cwiseAbs().maxCoeff();
  if (!(largest > 0)) return {identity, 1};
  const double scale = (a / largest).trace() / static_cast<double>(a.rows()) * largest;
  return {a / scale + damping * identity, scale};
}

}  // namespace detail

/// WUSH's `T = c Had Lambda^{-p/2} Uᵀ Lᵀ` and its closed-form inverse, in double, from the Gram `M` of what
/// is stored and the Hessian `H` of the loss, both `[d, d]`: `L Lᵀ = H + gamma tr(H)/d I`, `U Lambda Uᵀ = Lᵀ
/// (M + gamma tr(M)/d I) L`, Lambda ascending, each eigenvector's entry of largest magnitude positive, Had in
/// natural order (arXiv 2609.38121; design.md, *WUSH*). Scaling `M` or `H` scales `T` only.
///
/// Throws `std::invalid_argument` unless both are finite, symmetric, positive semidefinite and of one size at
/// which a Hadamard transform exists; and with no damping, unless they are definite.
template <class Gram, class Hessian>
MatrixPair wush_matrices(const Eigen::MatrixBase<Gram>& gram, const Eigen::MatrixBase<Hessian>& hessian,
                         const WushOptions& options = {}) {
  detail::check_wush_options(options);
  const SquareMatrix<double> m = detail::checked_semidefinite("wush: gram M", gram);
  const SquareMatrix<double> h = detail::checked_semidefinite("wush: hessian H", hessian);
  const Index d = m.rows();
  detail::check_shape("wush: hessian H", h, d, d);
  const SquareMatrix<double> had = to_matrix(Hadamard<double>(d));

  // M and H are normalized first; the factors that this leaves out of T go back in below.
  const detail::Damped dm = detail::damped(m, options.damping), dh = detail::damped(h, options.damping);
  const Eigen::LLT<SquareMatrix<double>> cholesky(dh.matrix);
  if (cholesky.info() != Eigen::Success)
    detail::invalid_argument("wush: hessian H is singular, expected damping or a definite matrix");
  const SquareMatrix<double> l = cholesky.matrixL();
  SquareMatrix<double> balanced = l.transpose() * dm.matrix * l;
  balanced = (balanced + balanced.transpose().eval()) / 2;
  const detail::Spectrum s = detail::spectrum("wush: Lᵀ M L", balanced);
  if (!(s.values[0] > 1e-14 * s.values[d - 1]))
    detail::invalid_argument("wush: gram M is singular, expected damping or a definite matrix");

  const Vector<double> power = s.values.array().pow(-options.exponent / 2);
  MatrixPair t;
  t.forward = had * power.asDiagonal() * s.vectors.transpose() * l.transpose();
  // T^-1 = L^-T U Lambda^{p/2} Hadᵀ
  t.inverse = l.transpose().triangularView<Eigen::Upper>().solve(
      s.vectors * power.cwiseInverse().asDiagonal() * had.transpose());

  double c = std::pow(dm.scale, -options.exponent / 2) * std::pow(dh.scale, (1 - options.exponent) / 2);
  if (options.tokens > 0 && m.cwiseAbs().maxCoeff() > 0) {
    const double energy = (t.forward * (m / dm.scale) * t.forward.transpose()).trace();
    c = std::sqrt(static_cast<double>(d) * options.tokens / dm.scale / energy);
  }
  t.forward *= c;
  t.inverse /= c;
  return t;
}

/// WUSH as a transform of the whole head.
template <class Scalar, int Dim = Dynamic, class Gram, class Hessian>
Dense<Scalar, Dim> wush(const Eigen::MatrixBase<Gram>& gram, const Eigen::MatrixBase<Hessian>& hessian,
                        const WushOptions& options = {}) {
  return Dense<Scalar, Dim>(wush_matrices(gram, hessian, options));
}

/// WUSH, block diagonal by groups of `group_size` coordinates, from the diagonal blocks of `M` and `H`.
/// Throws `std::invalid_argument` also if `group_size` does not divide the head dimension.
template <class Scalar, int Dim = Dynamic, class Gram, class Hessian>
BlockDiagonal<Dense<Scalar>, Dim> wush_blocks(const Eigen::MatrixBase<Gram>& gram,
                                              const Eigen::MatrixBase<Hessian>& hessian, Index group_size,
                                              const WushOptions& options = {}) {
  detail::check_square("wush: gram M", gram);
  detail::check_shape("wush: hessian H", hessian, gram.rows(), gram.rows());
  if (group_size < 1 || gram.rows() % group_size != 0)
    detail::invalid_argument("wush: group_size is ", group_size,
                             ", expected a divisor of the head dimension ", gram.rows());
  std::vector<Dense<Scalar>> blocks;
  for (Index at = 0; at < gram.rows(); at += group_size)
    blocks.push_back(wush<Scalar>(gram.block(at, at, group_size, group_size),
                                  hessian.block(at, at, group_size, group_size), options));
  return BlockDiagonal<Dense<Scalar>, Dim>(std::move(blocks));
}

}  // namespace wushkv

#endif  // WUSHKV_CALIBRATE_WUSH_HPP
