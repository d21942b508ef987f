// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_PREDICT_HPP
#define WUSHKV_CALIBRATE_PREDICT_HPP

#include <cmath>

#include "wushkv/core/check.hpp"
#include "wushkv/core/upper_factors.hpp"
#include "wushkv/transform/hadamard.hpp"

namespace wushkv {

/// How the cache is rounded, as far as the exponent of WUSH depends on it.
enum class ErrorFeedback { Off, On };

namespace detail {

inline void check_prediction(const Vector<double>& lambda, double exponent, double kappa) {
  if (lambda.size() == 0) invalid_argument("predict: lambda has 0 eigenvalues, expected at least one");
  check_finite("predict: lambda", lambda);
  if (lambda.minCoeff() < 0)
    invalid_argument("predict: lambda has an eigenvalue ", lambda.minCoeff(), ", expected none below 0");
  if (!(exponent >= 0 && exponent <= 1))
    invalid_argument("predict: exponent is ", exponent, ", expected 0 to 1");
  if (!(kappa >= 0 && is_finite(kappa)))
    invalid_argument("predict: kappa is ", kappa, ", expected a finite number of at least 0");
}

}  // namespace detail

/// What undamped WUSH with exponent p loses to nearest rounding, from Lambda alone (`loss_spectrum`, `[d]`,
/// any order): `kappa (sum lambda^{1-p}) (sum lambda^p) / d`, the additive-noise model's `kappa tr(T M Tᵀ)
/// tr(T^-T H T^-1) / d` (design.md, *Bound*). Least at p = 1/2, where it is the bound. Throws
/// `std::invalid_argument` for no eigenvalue, one that is negative or not finite, an exponent outside 0 to 1
/// and a kappa that is negative or not finite.
inline double predicted_wush_loss(const Vector<double>& lambda, double exponent, double kappa) {
  detail::check_prediction(lambda, exponent, kappa);
  // In units of the largest eigenvalue, since powers of huge ones overflow; the loss is linear in Lambda.
  const double largest = lambda.maxCoeff();
  if (!(largest > 0)) return 0;
  const Eigen::ArrayXd unit = lambda.array() / largest;
  return kappa * unit.pow(1 - exponent).mean() * unit.pow(exponent).sum() * largest;
}

/// The same under feedback rounding. A step's error has variance `kappa` times that of what it rounds, which
/// is its coordinate and the errors fed back to it: with `Had Lambda^p Hadᵀ = F D Fᵀ` and `G = F^-T`,
/// `var_j = kappa (sigma_j² + sum_{i<j} G_ji² var_i)`, `sigma_j²` on the diagonal of `Had Lambda^{1-p} Hadᵀ`,
/// and the loss is `sum D_j var_j` (after design.md, *Feedback rounding*; without the fed-back term, the loss
/// of a 2-bit cache is predicted a fifth to a quarter too low). Throws `std::invalid_argument` also where no
/// Hadamard transform of Lambda's size exists.
inline double predicted_wush_feedback_loss(const Vector<double>& lambda, double exponent, double kappa) {
  detail::check_prediction(lambda, exponent, kappa);
  const Index d = lambda.size();
  const SquareMatrix<double> had = to_matrix(Hadamard<double>(d));
  const double largest = lambda.maxCoeff();
  if (!(largest > 0)) return 0;
  const Vector<double> unit = lambda / largest;
  const auto mixed = [&](double power) -> SquareMatrix<double> {
    return had * unit.array().pow(power).matrix().asDiagonal() * had.transpose();
  };
  const detail::UpperFactors factors = detail::upper_factors(mixed(exponent));
  const SquareMatrix<double> inverse =
      factors.unit.triangularView<Eigen::UnitUpper>().solve(SquareMatrix<double>::Identity(d, d));  // Gᵀ
  Vector<double> variance = kappa * mixed(1 - exponent).diagonal();
  for (Index j = 1; j < d; ++j)
    variance[j] += kappa * inverse.col(j).head(j).cwiseAbs2().dot(variance.head(j));
  return factors.diagonal.dot(variance) * largest;
}

/// The exponent p of WUSH, of 0.5, 0.55 … 1, with the least predicted loss: 0.5 without feedback, around 0.7
/// to 0.8 with it. `lambda` `[d]` from `loss_spectrum`, of the matrices that WUSH is built from, `kappa` from
/// `noise_factor`. Near the optimum the loss is flat: on real activations the choice loses 0.2 to 3 %
/// against the best p of each head by measurement, and p = 0.75 throughout 0.5 to 4 %. Errors as for the
/// predictions.
inline double choose_exponent(const Vector<double>& lambda, double kappa, ErrorFeedback feedback) {
  double best = 0.5, least = 0;
  for (int step = 10; step <= 20; ++step) {
    const double exponent = step / 20.0;
    const double loss = feedback == ErrorFeedback::On ? predicted_wush_feedback_loss(lambda, exponent, kappa)
                                                      : predicted_wush_loss(lambda, exponent, kappa);
    if (step == 10 || loss < least) {
      least = loss;
      best = exponent;
    }
  }
  return best;
}

}  // namespace wushkv

#endif  // WUSHKV_CALIBRATE_PREDICT_HPP
