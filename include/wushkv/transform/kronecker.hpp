// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TRANSFORM_KRONECKER_HPP
#define WUSHKV_TRANSFORM_KRONECKER_HPP

#include <utility>

#include "wushkv/core/scratch.hpp"
#include "wushkv/transform/base.hpp"
#include "wushkv/transform/dense.hpp"

namespace wushkv {

/// `T = A ⊗ B` of two small invertible factors (FlatQuant's form): with `x` read as an `a x b` matrix `X`,
/// row-major, `T x` is `A X Bᵀ`. `a b (a + b)` multiply-adds a vector instead of `(a b)²`.
template <class ScalarType, int Dim = Dynamic>
class Kronecker : public TransformBase<Kronecker<ScalarType, Dim>, ScalarType, Dim> {
  using Base = TransformBase<Kronecker, ScalarType, Dim>;

 public:
  using Scalar = ScalarType;

  /// The dimension is the product of the factors'. Throws `std::invalid_argument` if it is not the fixed one.
  Kronecker(Dense<Scalar> a, Dense<Scalar> b) : a_(std::move(a)), b_(std::move(b)) {
    if (Dim != Dynamic && dim() != Dim)
      detail::invalid_argument("Kronecker: factors span ", dim(), " coordinates, expected ", Dim);
  }

  Index dim() const { return a_.dim() * b_.dim(); }
  const Dense<Scalar>& a() const { return a_; }
  const Dense<Scalar>& b() const { return b_; }

  void forward_rows(const typename Base::In& x, typename Base::Out y) const {
    each(x, y, a_.matrix(), b_.matrix().transpose());
  }
  void inverse_rows(const typename Base::In& y, typename Base::Out x) const {
    each(y, x, a_.inverse_matrix(), b_.inverse_matrix().transpose());
  }
  void adjoint_inverse_rows(const typename Base::In& q, typename Base::Out y) const {
    each(q, y, a_.inverse_matrix().transpose(), b_.inverse_matrix());
  }

 private:
  template <class Left, class Right>
  void each(const typename Base::In& x, typename Base::Out& y, const Left& left, const Right& right) const {
    const Index rows = a_.dim(), cols = b_.dim();
    detail::Scratch<Scalar> scratch(dim());
    Eigen::Map<Batch<Scalar>> half(scratch.data(), rows, cols);
    for (Index t = 0; t < x.rows(); ++t) {
      const Eigen::Map<const Batch<Scalar>> in(x.row(t).data(), rows, cols);
      Eigen::Map<Batch<Scalar>> out(y.row(t).data(), rows, cols);
      // Coefficient-wise products: the factors are small, and Eigen's blocked product would allocate.
      half.noalias() = left.lazyProduct(in);
      out.noalias() = half.lazyProduct(right);
    }
  }

  Dense<Scalar> a_, b_;
};

}  // namespace wushkv

#endif  // WUSHKV_TRANSFORM_KRONECKER_HPP
