// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_SENSITIVITY_HPP
#define WUSHKV_QUANTIZE_SENSITIVITY_HPP

#include "wushkv/core/check.hpp"
#include "wushkv/core/upper_factors.hpp"

namespace wushkv {

/// The loss `eᵀ A e` of an error `e` in stored coordinates (`A = T^-T H T^-1`), factored as `A = F D Fᵀ` with
/// `F` unit upper triangular, so that it is a sum over coordinates, `sum_j D_j (e_j + sum_{i<j} F_ij e_i)²`,
/// of which each term knows the errors before it only (design.md, *Feedback rounding*).
template <class ScalarType>
class Sensitivity {
 public:
  using Scalar = ScalarType;

  /// `a` is `[dim, dim]`; only its proportions decide what is rounded how. Throws `std::invalid_argument`
  /// unless it is finite, symmetric (within 1e-8 of its largest entry, 1e-5 for a float's) and positive
  /// definite.
  template <class A>
  explicit Sensitivity(const Eigen::MatrixBase<A>& a) {
    detail::check_square("Sensitivity: A", a);
    detail::check_finite("Sensitivity: A", a);
    const SquareMatrix<double> full = a.template cast<double>();
    const double largest = full.cwiseAbs().maxCoeff(), skew = (full - full.transpose()).cwiseAbs().maxCoeff();
    if (!(skew <= (std::is_same_v<typename A::Scalar, double> ? 1e-8 : 1e-5) * largest))
      detail::invalid_argument(
          "Sensitivity: A is not symmetric: entries differ from their mirror images by up to ", skew, " of ",
          largest);
    const detail::UpperFactors factors = detail::upper_factors(full / (largest > 0 ? largest : 1));
    if (!(factors.diagonal.minCoeff() > 0))
      detail::invalid_argument(
          "Sensitivity: A is singular or indefinite, expected a positive definite matrix (damp the Hessian)");
    feedback_ = factors.unit.transpose().template cast<Scalar>();
    feedback_.diagonal().setZero();
    weights_ = factors.diagonal.template cast<Scalar>();
    scale_ = largest;
  }

  Index dim() const { return weights_.size(); }
  /// `[dim, dim]`, strictly lower triangular, rows contiguous: entry (j, i) is `F_ij`, what coordinate j
  /// hears of the error of coordinate i.
  const Batch<Scalar>& feedback() const { return feedback_; }
  /// `D`, `[dim]`, divided by `scale`.
  const Vector<Scalar>& weights() const { return weights_; }
  /// The largest entry of A.
  double scale() const { return scale_; }

  /// `eᵀ A e` of an error, a column of `dim` values, in double. Throws `std::invalid_argument` for a wrong
  /// shape.
  template <class E>
  double loss(const Eigen::MatrixBase<E>& e) const {
    detail::check_shape("Sensitivity: e", e, dim(), 1);
    double sum = 0;
    for (Index j = 0; j < dim(); ++j) {
      double r = static_cast<double>(e[j]);
      for (Index i = 0; i < j; ++i) r += static_cast<double>(feedback_(j, i)) * static_cast<double>(e[i]);
      sum += static_cast<double>(weights_[j]) * r * r;
    }
    return scale_ * sum;
  }

 private:
  Batch<Scalar> feedback_;
  Vector<Scalar> weights_;
  double scale_ = 0;
};

}  // namespace wushkv

#endif  // WUSHKV_QUANTIZE_SENSITIVITY_HPP
