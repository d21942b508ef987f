// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_ROTATIONS_HPP
#define WUSHKV_CALIBRATE_ROTATIONS_HPP

#include <Eigen/QR>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <numeric>
#include <random>
#include <vector>

#include "wushkv/calibrate/linear_algebra.hpp"
#include "wushkv/transform/composed.hpp"
#include "wushkv/transform/group_hadamard.hpp"
#include "wushkv/transform/orthogonal.hpp"
#include "wushkv/transform/permutation.hpp"

namespace wushkv {

/// OSCAR's rotation `T = (R Had P)ᵀ`, `[d, d]`: `R` the eigenvectors of `sigma` (`[d, d]`, what queries weigh
/// keys by, or scores weigh values by), ascending; `P` puts column `d-1-i` of `R Had` at the bit-reversed
/// place of `i`, so that a group smaller than the head gets a share of every scale (design.md, *OSCAR*).
/// Throws `std::invalid_argument` unless `sigma` is finite, symmetric, positive semidefinite and of a size at
/// which a Hadamard transform exists.
template <class Sigma>
SquareMatrix<double> oscar_matrix(const Eigen::MatrixBase<Sigma>& sigma) {
  const SquareMatrix<double> s = detail::checked_semidefinite("oscar: sigma", sigma);
  const Index d = s.rows();
  const SquareMatrix<double> mixed =
      detail::spectrum("oscar: sigma", s).vectors * to_matrix(Hadamard<double>(d));
  if (!std::has_single_bit(static_cast<std::uint64_t>(d))) return mixed.transpose();
  const int bits = std::countr_zero(static_cast<std::uint64_t>(d));
  SquareMatrix<double> t(d, d);
  for (Index i = 0; i < d; ++i) {
    t.row(detail::reversed_bits(i, bits)) = mixed.col(d - 1 - i).transpose();
  }
  return t;
}

/// The same as a transform; errors as for `oscar_matrix`.
template <class Scalar, int Dim = Dynamic, class Sigma>
Orthogonal<Scalar, Dim> oscar(const Eigen::MatrixBase<Sigma>& sigma) {
  return Orthogonal<Scalar, Dim>(oscar_matrix(sigma));
}

/// A rotation drawn uniformly: `Q` of the QR decomposition of a Gaussian matrix, its columns' signs fixed by
/// `R`'s diagonal (design.md, *TurboQuant-style*). The same seed gives the same matrix, to
/// rounding, with every compiler and library.
inline SquareMatrix<double> random_rotation_matrix(Index dim, std::uint64_t seed) {
  if (dim < 1) detail::invalid_argument("random_rotation: dim is ", dim, ", expected at least 1");
  std::mt19937_64 generator(seed);
  const auto uniform = [&] { return (static_cast<double>(generator() >> 11) + 0.5) * 0x1p-53; };
  SquareMatrix<double> gaussian(dim, dim);
  // Box-Muller, since std::normal_distribution differs between libraries.
  for (Index i = 0; i < gaussian.size(); ++i) {
    const double radius = std::sqrt(-2 * std::log(uniform())), angle = 2 * std::numbers::pi * uniform();
    gaussian.data()[i] = radius * std::cos(angle);
  }
  const Eigen::HouseholderQR<SquareMatrix<double>> qr(gaussian);
  SquareMatrix<double> q = qr.householderQ();
  for (Index j = 0; j < dim; ++j)
    if (qr.matrixQR()(j, j) < 0) q.col(j) *= -1;
  return q;
}

/// The same as a transform; throws `std::invalid_argument` for a `dim` below 1.
template <class Scalar, int Dim = Dynamic>
Orthogonal<Scalar, Dim> random_rotation(Index dim, std::uint64_t seed) {
  return Orthogonal<Scalar, Dim>(random_rotation_matrix(dim, seed));
}

/// The principal axes of the Gram `M`, `[d, d]`: row i of `T` is the eigenvector of the i-th largest
/// eigenvalue. Throws `std::invalid_argument` unless `M` is finite, symmetric and positive semidefinite.
template <class Gram>
SquareMatrix<double> pca_matrix(const Eigen::MatrixBase<Gram>& gram) {
  const SquareMatrix<double> m = detail::checked_semidefinite("pca: gram M", gram);
  return detail::spectrum("pca: gram M", m).vectors.rowwise().reverse().transpose();
}

/// The same as a transform; errors as for `pca_matrix`.
template <class Scalar, int Dim = Dynamic, class Gram>
Orthogonal<Scalar, Dim> pca(const Eigen::MatrixBase<Gram>& gram) {
  return Orthogonal<Scalar, Dim>(pca_matrix(gram));
}

/// RotateKV-style: channels sorted by root mean square (from `M`'s diagonal, descending, equals in order), so
/// that a group holds channels of like size, then a Hadamard transform by group (arXiv 2501.16383). Throws
/// `std::invalid_argument` for an `M` that is not a Gram or a group that does not divide the head.
template <class Scalar, class Gram>
Composed<GroupHadamard<Scalar>, Permutation<Scalar>> rotate_kv(const Eigen::MatrixBase<Gram>& gram,
                                                               Index group_size) {
  const SquareMatrix<double> m = detail::checked_semidefinite("rotate_kv: gram M", gram);
  std::vector<Index> order(static_cast<std::size_t>(m.rows()));
  std::iota(order.begin(), order.end(), Index{0});
  std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) { return m(a, a) > m(b, b); });
  return {group_hadamard<Scalar>(m.rows(), group_size), Permutation<Scalar>(std::move(order))};
}

}  // namespace wushkv

#endif  // WUSHKV_CALIBRATE_ROTATIONS_HPP
