// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TRANSFORM_IDENTITY_HPP
#define WUSHKV_TRANSFORM_IDENTITY_HPP

#include "wushkv/transform/base.hpp"

namespace wushkv {

/// `T = I`: the baseline that stores vectors as they are.
template <class Scalar, int Dim = Dynamic>
class Identity : public OrthogonalBase<Identity<Scalar, Dim>, Scalar, Dim> {
  using Base = TransformBase<Identity, Scalar, Dim>;

 public:
  explicit Identity(Index dim = Dim) : dim_(dim) {
    if (dim <= 0 || (Dim != Dynamic && dim != Dim))
      detail::invalid_argument("Identity: dim is ", dim, ", expected ",
                               Dim == Dynamic ? "a positive number" : "the fixed dimension");
  }

  Index dim() const { return dim_; }

  void forward_rows(const typename Base::In& x, typename Base::Out y) const { y = x; }
  void inverse_rows(const typename Base::In& y, typename Base::Out x) const { x = y; }

 private:
  Index dim_;
};

}  // namespace wushkv

#endif  // WUSHKV_TRANSFORM_IDENTITY_HPP
