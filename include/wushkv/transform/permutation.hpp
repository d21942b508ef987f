// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TRANSFORM_PERMUTATION_HPP
#define WUSHKV_TRANSFORM_PERMUTATION_HPP

#include <utility>
#include <vector>

#include "wushkv/transform/base.hpp"

namespace wushkv {

/// Reorders channels: `(T x)[i] = x[source[i]]`.
template <class Scalar, int Dim = Dynamic>
class Permutation : public OrthogonalBase<Permutation<Scalar, Dim>, Scalar, Dim> {
  using Base = TransformBase<Permutation, Scalar, Dim>;

 public:
  /// `source` holds each of 0 … dim-1 once; anything else throws `std::invalid_argument`.
  explicit Permutation(std::vector<Index> source) : source_(std::move(source)) {
    const Index n = dim();
    if (n == 0 || (Dim != Dynamic && n != Dim))
      detail::invalid_argument("Permutation: source has ", n, " entries, expected one a coordinate");
    std::vector<bool> seen(source_.size(), false);
    for (const Index i : source_) {
      if (i < 0 || i >= n)
        detail::invalid_argument("Permutation: source names channel ", i, ", expected 0 to ", n - 1);
      if (seen[static_cast<std::size_t>(i)])
        detail::invalid_argument("Permutation: source names channel ", i, " twice, expected each once");
      seen[static_cast<std::size_t>(i)] = true;
    }
  }

  Index dim() const { return static_cast<Index>(source_.size()); }
  const std::vector<Index>& source() const { return source_; }

  void forward_rows(const typename Base::In& x, typename Base::Out y) const {
    for (Index t = 0; t < x.rows(); ++t)
      for (Index i = 0; i < dim(); ++i) y(t, i) = x(t, source_[static_cast<std::size_t>(i)]);
  }
  void inverse_rows(const typename Base::In& y, typename Base::Out x) const {
    for (Index t = 0; t < y.rows(); ++t)
      for (Index i = 0; i < dim(); ++i) x(t, source_[static_cast<std::size_t>(i)]) = y(t, i);
  }

 private:
  std::vector<Index> source_;
};

}  // namespace wushkv

#endif  // WUSHKV_TRANSFORM_PERMUTATION_HPP
