// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CORE_TYPES_HPP
#define WUSHKV_CORE_TYPES_HPP

#include <Eigen/Core>

namespace wushkv {

using Eigen::Index;

/// Marks a size that is known only at run time, as in Eigen.
inline constexpr int Dynamic = Eigen::Dynamic;

/// One token's vector for one head: a column.
template <class Scalar, int Dim = Dynamic>
using Vector = Eigen::Matrix<Scalar, Dim, 1>;

/// A batch of tokens, `[tokens, dim]`, one token a row, row-major: the layout engines have.
template <class Scalar, int Dim = Dynamic>
using Batch = Eigen::Matrix<Scalar, Eigen::Dynamic, Dim, Eigen::RowMajor>;

/// A square matrix that acts on one head's vectors (column-major, Eigen's default).
template <class Scalar, int Dim = Dynamic>
using SquareMatrix = Eigen::Matrix<Scalar, Dim, Dim>;

/// Read-only and writable views of a batch: any distance between rows, so a slice of a wide QKV buffer needs
/// no copy.
template <class Scalar, int Dim = Dynamic>
using ConstRows = Eigen::Ref<const Batch<Scalar, Dim>, 0, Eigen::OuterStride<>>;
template <class Scalar, int Dim = Dynamic>
using Rows = Eigen::Ref<Batch<Scalar, Dim>, 0, Eigen::OuterStride<>>;

/// True for an expression that is a column at compile time: one token. Everything else is a batch.
template <class Expression>
inline constexpr bool is_token_v = Expression::ColsAtCompileTime == 1;

}  // namespace wushkv

#endif  // WUSHKV_CORE_TYPES_HPP
