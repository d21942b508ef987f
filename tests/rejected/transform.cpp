// SPDX-License-Identifier: Apache-2.0
// Compiled by one_error.cmake: a transform that lacks adjoint_inverse must be refused with one error.
#include "wushkv/codec/codec.hpp"
#include "wushkv/quantize/quest.hpp"

struct Doubling {
  using Scalar = float;
  wushkv::Index dim() const { return 8; }
  template <class X>
  auto forward(const Eigen::MatrixBase<X>& x) const {
    return (2 * x).eval();
  }
  template <class X>
  auto inverse(const Eigen::MatrixBase<X>& y) const {
    return (y / 2).eval();
  }
#ifdef WUSHKV_RIGHT_TYPE
  template <class X>
  auto adjoint_inverse(const Eigen::MatrixBase<X>& q) const {
    return (q / 2).eval();
  }
#endif
};

int main() { const wushkv::Codec codec(Doubling{}, wushkv::Quest<float, 2>()); }
