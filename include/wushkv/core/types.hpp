// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CORE_TYPES_HPP
#define WUSHKV_CORE_TYPES_HPP

#include <Eigen/Core>

#if defined(_MSVC_LANG) ? _MSVC_LANG < 202002L : __cplusplus < 202002L
#error "wushkv needs C++20"
#endif
#if !EIGEN_VERSION_AT_LEAST(3, 4, 0)
#error "wushkv needs Eigen 3.4 or later"
#endif

namespace wushkv {

using Eigen::Dynamic;
using Eigen::Index;

/// One token's vector for one head: a column.
template <class Scalar, int Dim = Dynamic>
using Vector = Eigen::Matrix<Scalar, Dim, 1>;

/// A batch of tokens, `[tokens, dim]`, one token a row, row-major: the layout engines have.
template <class Scalar, int Dim = Dynamic>
using Batch = Eigen::Matrix<Scalar, Eigen::Dynamic, Dim, Eigen::RowMajor>;

/// A square matrix that acts on one head's vectors. Column-major whatever an including project's default is.
template <class Scalar, int Dim = Dynamic>
using SquareMatrix = Eigen::Matrix<Scalar, Dim, Dim, Eigen::ColMajor>;

/// Read-only and writable views of a batch: any distance between rows, so a slice of a wide QKV buffer needs
/// no copy.
template <class Scalar, int Dim = Dynamic>
using ConstRows = Eigen::Ref<const Batch<Scalar, Dim>, 0, Eigen::OuterStride<>>;
template <class Scalar, int Dim = Dynamic>
using Rows = Eigen::Ref<Batch<Scalar, Dim>, 0, Eigen::OuterStride<>>;

/// True for an expression that is a column at compile time: one token. Everything else is a batch.
template <class Expression>
inline constexpr bool is_token_v = Expression::ColsAtCompileTime == 1;

namespace detail {

/// One row read again and again (outer stride 0), which `Eigen::Ref` takes for rows one after the other.
template <class Derived>
bool repeats_a_row(const Eigen::DenseBase<Derived>& x) {
  if constexpr ((Derived::Flags & Eigen::DirectAccessBit) != 0)
    return x.rows() > 1 && x.derived().outerStride() == 0;
  else
    return false;
}

}  // namespace detail
}  // namespace wushkv

#endif  // WUSHKV_CORE_TYPES_HPP
