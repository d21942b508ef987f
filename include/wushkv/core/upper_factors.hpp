// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CORE_UPPER_FACTORS_HPP
#define WUSHKV_CORE_UPPER_FACTORS_HPP

#include <limits>

#include "wushkv/core/types.hpp"

namespace wushkv::detail {

/// `A = F D Fᵀ`, `F` unit upper triangular: under feedback rounding the loss `eᵀ A e` is `sum D_j r_j²`,
/// `r_j` the error of step j alone, and `e = F^-T r` (design.md, *Feedback rounding*).
struct UpperFactors {
  SquareMatrix<double> unit;  ///< `F`, `[d, d]`
  Vector<double> diagonal;    ///< `D`, `[d]`, none below 0
};

/// The factors of a symmetric `[d, d]` matrix that is positive semidefinite to rounding. A pivot of no more
/// than rounding counts as zero, and so does its column of `F`: predictions must not stop at a singular
/// matrix, while a rounding, which has to steer by F, refuses one.
inline UpperFactors upper_factors(SquareMatrix<double> a) {
  const Index d = a.rows();
  const double rounding =
      static_cast<double>(d) * std::numeric_limits<double>::epsilon() * a.diagonal().cwiseAbs().maxCoeff();
  UpperFactors factors{SquareMatrix<double>::Identity(d, d), Vector<double>::Zero(d)};
  for (Index j = d - 1; j >= 0; --j) {
    if (!(a(j, j) > rounding)) continue;
    factors.diagonal[j] = a(j, j);
    factors.unit.col(j).head(j) = a.col(j).head(j) / a(j, j);
    a.topLeftCorner(j, j).noalias() -=
        a(j, j) * factors.unit.col(j).head(j) * factors.unit.col(j).head(j).transpose();
  }
  return factors;
}

}  // namespace wushkv::detail

#endif  // WUSHKV_CORE_UPPER_FACTORS_HPP
