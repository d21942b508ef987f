// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_MEASURE_LOSS_BOUND_HPP
#define WUSHKV_MEASURE_LOSS_BOUND_HPP

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <random>
#include <span>
#include <string_view>

#include "wushkv/calibrate/loss_spectrum.hpp"
#include "wushkv/codec/codec.hpp"
#include "wushkv/core/upper_factors.hpp"
#include "wushkv/transform/centered.hpp"

namespace wushkv {

namespace detail {

inline void check_kappa(std::string_view who, double kappa) {
  if (!(kappa >= 0 && is_finite(kappa)))
    invalid_argument(who, ": kappa is ", kappa, ", expected a finite number of at least 0");
}

inline void check_spectrum(std::string_view who, const Vector<double>& lambda, double kappa) {
  if (lambda.size() == 0) invalid_argument(who, ": lambda has 0 eigenvalues, expected at least one");
  check_finite(concat(who, ": lambda"), lambda);
  if (lambda.minCoeff() < 0)
    invalid_argument(who, ": lambda has an eigenvalue ", lambda.minCoeff(), ", expected none below 0");
  check_kappa(who, kappa);
}

/// What the noise model sees of a transform: `T M Tᵀ` and `A = T^-T H T^-1`, both `[d, d]`, for normalized M
/// and H, and the product of what these were divided by.
struct StoredSums {
  SquareMatrix<double> energy, sensitivity;
  double scale;
};

template <Transform T, class Gram, class Hessian>
StoredSums stored_sums(const T& transform, const Eigen::MatrixBase<Gram>& gram,
                       const Eigen::MatrixBase<Hessian>& hessian, double kappa) {
  check_kappa("predicted_loss", kappa);
  const Normalized m = normalized("predicted_loss: gram M", gram),
                   h = normalized("predicted_loss: hessian H", hessian);
  const Index d = static_cast<Index>(transform.dim());
  check_shape("predicted_loss: gram M", m.matrix, d, d);
  check_shape("predicted_loss: hessian H", h.matrix, d, d);
  using Scalar = typename T::Scalar;
  const SquareMatrix<double> t = to_matrix(linear_part(transform)).template cast<double>();
  Batch<Scalar> adjoint(d, d);  // row i is T^-T e_i, column i of T^-T
  wushkv::adjoint_inverse_to(transform, Batch<Scalar>(Batch<Scalar>::Identity(d, d)), adjoint);
  const SquareMatrix<double> s = adjoint.transpose().template cast<double>();
  return {t * m.matrix * t.transpose(), s * h.matrix * s.transpose(), m.scale * h.scale};
}

inline Index prediction_group(Index group_size, Index dim) {
  if (group_size == 0) return dim;
  if (group_size < 1 || dim % group_size != 0)
    invalid_argument("predicted_loss: group_size is ", group_size,
                     ", expected 0 or a divisor of the head dimension ", dim);
  return group_size;
}

/// `kappa sum_groups (mean of the group's energies) (sum of its weights)`.
inline double noise_loss(const Vector<double>& energies, const Vector<double>& weights, Index group_size,
                         double kappa) {
  const Index group = prediction_group(group_size, energies.size());
  double sum = 0;
  for (Index at = 0; at < energies.size(); at += group)
    sum +=
        std::max(energies.segment(at, group).mean(), 0.0) * std::max(weights.segment(at, group).sum(), 0.0);
  return kappa * sum;
}

}  // namespace detail

/// `kappa (tr Lambda^{1/2})² / d`: under the additive-noise model (error variance of a stored coordinate
/// `kappa |Tx|² / d`, that of its own group where groups are smaller than the head) no invertible `T` loses
/// less, and undamped WUSH loses just that (design.md, *Bound*). `lambda` `[d]` from `loss_spectrum`, `kappa`
/// from `noise_factor`. Throws `std::invalid_argument` for no eigenvalue, one that is negative or not finite,
/// and for such a kappa.
inline double loss_bound(const Vector<double>& lambda, double kappa) {
  detail::check_spectrum("loss_bound", lambda, kappa);
  const double roots = lambda.cwiseSqrt().sum();
  return kappa * roots * (roots / static_cast<double>(lambda.size()));
}

/// `kappa d (det Lambda)^{1/d}`, the same for feedback rounding (design.md, *Bound*), whose fed-back errors
/// the model takes for free: 0 for a singular Lambda. Errors as for `loss_bound`.
inline double feedback_loss_bound(const Vector<double>& lambda, double kappa) {
  detail::check_spectrum("feedback_loss_bound", lambda, kappa);
  if (!(lambda.minCoeff() > 0)) return 0;
  return kappa * static_cast<double>(lambda.size()) * std::exp(lambda.array().log().mean());
}

/// `kappa tr(T M Tᵀ) tr(T^-T H T^-1) / d`: what the additive-noise model expects any transform to lose,
/// summed over the tokens of `M` (design.md, *Bound*); with groups smaller than the head, the same by group.
/// `M` and `H` are `[d, d]`, undamped; for `Centered` the linear part counts, and `M` is the Gram of what is
/// left of the mean. Throws `std::invalid_argument` unless both are finite, symmetric, positive semidefinite
/// and of the transform's size, `kappa` is finite and not negative, and `group_size` is 0 (the whole head) or
/// divides it.
template <Transform T, class Gram, class Hessian>
double predicted_loss(const T& transform, const Eigen::MatrixBase<Gram>& gram,
                      const Eigen::MatrixBase<Hessian>& hessian, double kappa, Index group_size = 0) {
  const detail::StoredSums sums = detail::stored_sums(transform, gram, hessian, kappa);
  return sums.scale *
         detail::noise_loss(sums.energy.diagonal(), sums.sensitivity.diagonal(), group_size, kappa);
}

/// The same with feedback rounding: `kappa tr(T M Tᵀ) / d sum_j D_j`, `F D Fᵀ = T^-T H T^-1`, `F` unit upper
/// triangular (design.md, *Feedback rounding* and *Bound*). Errors as for `predicted_loss`; a singular `H` is
/// none.
template <Transform T, class Gram, class Hessian>
double predicted_feedback_loss(const T& transform, const Eigen::MatrixBase<Gram>& gram,
                               const Eigen::MatrixBase<Hessian>& hessian, double kappa,
                               Index group_size = 0) {
  const detail::StoredSums sums = detail::stored_sums(transform, gram, hessian, kappa);
  return sums.scale * detail::noise_loss(sums.energy.diagonal(),
                                         detail::upper_factors(sums.sensitivity).diagonal, group_size, kappa);
}

/// The same for a rounding that feeds errors back by another matrix `F`, unit upper triangular, `[d, d]`, for
/// instance that of a damped `H`: step j then counts with `(F^-1 T^-T H T^-1 F^-T)_jj`, which is `D_j` for
/// `H`'s own F. Throws `std::invalid_argument` also for an F that is no such matrix.
template <Transform T, class Gram, class Hessian, class Feedback>
double predicted_feedback_loss(const T& transform, const Eigen::MatrixBase<Gram>& gram,
                               const Eigen::MatrixBase<Hessian>& hessian, double kappa,
                               const Eigen::MatrixBase<Feedback>& feedback, Index group_size = 0) {
  const detail::StoredSums sums = detail::stored_sums(transform, gram, hessian, kappa);
  const Index d = sums.energy.rows();
  detail::check_shape("predicted_loss: feedback F", feedback, d, d);
  detail::check_finite("predicted_loss: feedback F", feedback);
  const SquareMatrix<double> f = feedback.template cast<double>();
  const SquareMatrix<double> upper = f.triangularView<Eigen::UnitUpper>();
  if (f != upper)
    detail::invalid_argument(
        "predicted_loss: feedback F is not unit upper triangular, expected 1 on its diagonal and 0 below");
  const auto solver = f.triangularView<Eigen::UnitUpper>();
  const SquareMatrix<double> half = solver.solve(sums.sensitivity);            // F^-1 A
  const SquareMatrix<double> weights = solver.solve(half.transpose().eval());  // F^-1 A F^-T
  return sums.scale * detail::noise_loss(sums.energy.diagonal(), weights.diagonal(), group_size, kappa);
}

/// `sum_x eᵀ H e`, `e` what the codec makes of a token's error, in original coordinates, over the tokens of
/// `x` (`[tokens, d]`, any scalar), in double: what the bound and the predictions speak of. `weights`, if
/// given, has a number of at least 0 a token, of which only the proportions count (they are scaled to a mean
/// of 1): with joint statistics the tokens' `w_t` (design.md, *Bound*). Throws `std::invalid_argument` for
/// shapes other than the codec's, values that are not finite, an `H` that is not symmetric and positive
/// semidefinite, and weights that are negative, all zero or not one a token.
template <HeadCodec C, class X, class Hessian>
double measured_loss(const C& codec, const Eigen::MatrixBase<X>& x, const Eigen::MatrixBase<Hessian>& hessian,
                     std::span<const double> weights = {}) {
  const SquareMatrix<double> h = detail::checked_semidefinite("measured_loss: hessian H", hessian);
  const Index d = static_cast<Index>(codec.head_dim());
  detail::check_shape("measured_loss: hessian H", h, d, d);
  detail::check_shape("measured_loss: x", x, x.rows(), d);
  const Batch<double> exact = x.template cast<double>();
  detail::check_finite("measured_loss: x", exact);
  Vector<double> w = Vector<double>::Ones(exact.rows());
  if (!weights.empty()) {
    if (static_cast<Index>(weights.size()) != exact.rows())
      detail::invalid_argument("measured_loss: weights has ", weights.size(),
                               " entries, expected one a token, ", exact.rows());
    w = Eigen::Map<const Vector<double>>(weights.data(), exact.rows());
    detail::check_finite("measured_loss: weights", w);
    const double largest = w.maxCoeff();
    if (w.minCoeff() < 0 || !(largest > 0))
      detail::invalid_argument("measured_loss: weights run from ", w.minCoeff(), " to ", largest,
                               ", expected none below 0 and one above");
    w /= largest;  // by the largest first, since the sum might overflow
    w /= w.mean();
  }
  if (exact.rows() == 0) return 0;
  using Scalar = typename C::Scalar;
  const Batch<Scalar> returned = codec.reconstruct(Batch<Scalar>(exact.template cast<Scalar>()));
  const Batch<double> error = exact - returned.template cast<double>();
  return ((error * h).cwiseProduct(error).rowwise().sum()).dot(w);
}

/// kappa: a quantizer's mean squared error on unit-normal vectors of one group, over their mean square
/// (design.md, *Bound*), each value rounded to its own level. Estimated from about `samples` values drawn by
/// `seed`, to rounding the same with every compiler and library. By default, for the library's quantizers and
/// groups of 2 to 256, its relative standard error is at most 0.15 % up to 4 bits (0.25 % if clipped at a
/// percentile), and up to 1 % at 8 bits, where kappa hangs on rare values past the clip. Throws
/// `std::invalid_argument` for a `group_size` or `samples` below 1.
template <Quantizer Q>
double noise_factor(const Q& quantizer, Index group_size, Index samples = Index{1} << 22,
                    std::uint64_t seed = 0) {
  if (group_size < 1)
    detail::invalid_argument("noise_factor: group_size is ", group_size, ", expected at least 1");
  if (samples < 1) detail::invalid_argument("noise_factor: samples is ", samples, ", expected at least 1");
  using Scalar = typename Q::Scalar;
  std::mt19937_64 generator(seed);
  const auto uniform = [&] { return (static_cast<double>(generator() >> 11) + 0.5) * 0x1p-53; };
  Vector<Scalar> group(group_size);
  double error = 0, signal = 0;
  for (Index done = 0; done < samples; done += group_size) {
    // Box-Muller, since std::normal_distribution differs between libraries.
    for (Index i = 0; i < group_size; i += 2) {
      const double radius = std::sqrt(-2 * std::log(uniform())), angle = 2 * std::numbers::pi * uniform();
      group[i] = static_cast<Scalar>(radius * std::cos(angle));
      if (i + 1 < group_size) group[i + 1] = static_cast<Scalar>(radius * std::sin(angle));
    }
    const auto params = quantizer.fit(GroupView<Scalar>(group));
    for (Index i = 0; i < group_size; ++i) {
      const double value = static_cast<double>(group[i]);
      const double off =
          value - static_cast<double>(quantizer.decode(quantizer.encode(group[i], params), params));
      error += off * off;
      signal += value * value;
    }
  }
  return error / signal;
}

}  // namespace wushkv

#endif  // WUSHKV_MEASURE_LOSS_BOUND_HPP
