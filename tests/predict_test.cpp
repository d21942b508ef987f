// SPDX-License-Identifier: Apache-2.0
#include "wushkv/calibrate/predict.hpp"

#include "support.hpp"
#include "wushkv/calibrate/wush.hpp"
#include "wushkv/measure/loss_bound.hpp"

using namespace wushkv;

namespace {

/// Eigenvalues over some decades, in no order.
Vector<double> spectrum(test::Random& random, Index d) {
  return Vector<double>::NullaryExpr(d, [&](Index) { return std::pow(10.0, random.uniform(-4, 2)); });
}

/// Noise of `kappa` times the expected square of what each step rounds, fed back: the model by its
/// definition.
double simulated(test::Random& random, const Vector<double>& lambda, double exponent, double kappa,
                 Index draws) {
  const Index d = lambda.size();
  const SquareMatrix<double> had = to_matrix(Hadamard<double>(d));
  const SquareMatrix<double> root = had * lambda.array().pow((1 - exponent) / 2).matrix().asDiagonal(),
                             a = had * lambda.array().pow(exponent).matrix().asDiagonal() * had.transpose();
  const SquareMatrix<double> f = detail::upper_factors(a).unit;
  Batch<double> y = random.batch(draws, d) * root.transpose(), e = Batch<double>::Zero(draws, d);
  for (Index j = 0; j < d; ++j) {
    const Vector<double> fed_back = e.leftCols(j) * f.col(j).head(j);
    const double square = (y.col(j) + fed_back).squaredNorm() / static_cast<double>(draws);
    e.col(j) = std::sqrt(kappa * square) * random.vector(draws) - fed_back;
  }
  return (e * a).cwiseProduct(e).sum() / static_cast<double>(draws);
}

}  // namespace

TEST_CASE("without feedback: what undamped WUSH is predicted to lose, and the bound at p = 1/2") {
  test::Random random(920);
  for (int round = 0; round < 40; ++round) {
    const Index d = random.pick({2, 8, 12, 20, 32});
    const SquareMatrix<double> m = random.definite(d), h = random.definite(d);
    const Vector<double> lambda = loss_spectrum(m, h);
    const double p = random.uniform(0, 1), kappa = random.uniform(0.001, 0.5);
    const MatrixPair t = wush_matrices(m, h, {.damping = 0, .exponent = p});
    CHECK(predicted_wush_loss(lambda, p, kappa) ==
          doctest::Approx(predicted_loss(Dense<double>(t), m, h, kappa)).epsilon(1e-8));
    CHECK(predicted_wush_loss(lambda, 0.5, kappa) ==
          doctest::Approx(loss_bound(lambda, kappa)).epsilon(1e-12));
    CHECK(predicted_wush_loss(lambda, p, kappa) >= loss_bound(lambda, kappa) * (1 - 1e-12));
    CHECK(predicted_wush_loss(lambda, p, kappa) ==
          doctest::Approx(predicted_wush_loss(lambda, 1 - p, kappa)).epsilon(1e-12));
  }
}

TEST_CASE("with feedback: the additive model for small kappa, more than it for a large one") {
  test::Random random(921);
  for (int round = 0; round < 40; ++round) {
    const Index d = random.pick({2, 8, 12, 20, 32});
    const SquareMatrix<double> m = random.definite(d), h = random.definite(d);
    const Vector<double> lambda = loss_spectrum(m, h);
    const double p = random.uniform(0, 1);
    const Dense<double> t = wush<double>(m, h, {.damping = 0, .exponent = p});
    const double additive = predicted_feedback_loss(t, m, h, 1);
    CHECK(predicted_wush_feedback_loss(lambda, p, 1e-9) == doctest::Approx(1e-9 * additive).epsilon(1e-6));
    CHECK(predicted_wush_feedback_loss(lambda, p, 0.1) >= 0.1 * additive * (1 - 1e-9));
    CHECK(predicted_wush_feedback_loss(lambda, p, 0.1) >= feedback_loss_bound(lambda, 0.1) * (1 - 1e-9));
  }
  // Equal eigenvalues leave nothing to feed back.
  const Vector<double> equal = Vector<double>::Constant(16, 3);
  CHECK(predicted_wush_feedback_loss(equal, 0.7, 0.1) == doctest::Approx(0.1 * 16 * 3));
}

TEST_CASE("with feedback: noise that grows with its input, simulated") {
  test::Random random(922);
  for (int round = 0; round < 12; ++round) {
    const Vector<double> lambda = spectrum(random, random.pick({4, 8, 12, 16}));
    const double p = random.uniform(0.4, 1), kappa = random.uniform(0.02, 0.3);
    CHECK(simulated(random, lambda, p, kappa, 40000) ==
          doctest::Approx(predicted_wush_feedback_loss(lambda, p, kappa)).epsilon(0.03));
  }
}

TEST_CASE("predictions are linear in Lambda, and so the exponent does not depend on its scale") {
  test::Random random(923);
  for (int round = 0; round < 20; ++round) {
    const Vector<double> lambda = spectrum(random, random.pick({4, 12, 32}));
    const double p = random.uniform(0, 1), scale = std::pow(10.0, random.uniform(-250, 250));
    CHECK(predicted_wush_loss(scale * lambda, p, 0.1) / scale ==
          doctest::Approx(predicted_wush_loss(lambda, p, 0.1)).epsilon(1e-11));
    CHECK(predicted_wush_feedback_loss(scale * lambda, p, 0.1) / scale ==
          doctest::Approx(predicted_wush_feedback_loss(lambda, p, 0.1)).epsilon(1e-9));
    CHECK(choose_exponent(scale * lambda, 0.1, ErrorFeedback::On) ==
          choose_exponent(lambda, 0.1, ErrorFeedback::On));
  }
}

TEST_CASE("the chosen exponent is the best of the grid") {
  test::Random random(924);
  for (int round = 0; round < 20; ++round) {
    const Vector<double> lambda = spectrum(random, random.pick({8, 20, 32}));
    const double kappa = random.uniform(0.005, 0.2);
    CHECK(choose_exponent(lambda, kappa, ErrorFeedback::Off) == 0.5);
    const double chosen = choose_exponent(lambda, kappa, ErrorFeedback::On);
    CHECK(chosen >= 0.5);
    CHECK(chosen <= 1);
    for (int step = 10; step <= 20; ++step)
      CHECK(predicted_wush_feedback_loss(lambda, chosen, kappa) <=
            predicted_wush_feedback_loss(lambda, step / 20.0, kappa));
    // Feedback pays where the spectrum is wide, and the more the finer the rounding.
    CHECK(predicted_wush_feedback_loss(lambda, chosen, kappa) < loss_bound(lambda, kappa));
  }
}

TEST_CASE("singular spectra are predicted, not refused") {
  test::Random random(925);
  Vector<double> lambda = spectrum(random, 16);
  lambda.head(5).setZero();
  for (const double p : {0.0, 0.5, 0.75, 1.0}) {
    CHECK(is_finite(predicted_wush_loss(lambda, p, 0.1)));
    CHECK(is_finite(predicted_wush_feedback_loss(lambda, p, 0.1)));
    CHECK(predicted_wush_feedback_loss(lambda, p, 0.1) >= 0);
  }
  const Vector<double> zero = Vector<double>::Zero(16);
  CHECK(predicted_wush_loss(zero, 0.5, 0.1) == 0);
  CHECK(predicted_wush_feedback_loss(zero, 0.75, 0.1) == 0);
  CHECK(choose_exponent(zero, 0.1, ErrorFeedback::On) == 0.5);
}

TEST_CASE("bad input is refused") {
  const Vector<double> none, lambda = Vector<double>::Ones(8), negative = -lambda,
                             broken = test::nan * lambda;
  for (const auto& predict : {&predicted_wush_loss, &predicted_wush_feedback_loss}) {
    CHECK_REFUSED(predict(none, 0.5, 0.1), "0 eigenvalues");
    CHECK_REFUSED(predict(negative, 0.5, 0.1), "eigenvalue -1, expected none below 0");
    CHECK_REFUSED(predict(broken, 0.5, 0.1), "lambda has a value that is not finite");
    CHECK_REFUSED(predict(lambda, -0.1, 0.1), "exponent is -0.1, expected 0 to 1");
    CHECK_REFUSED(predict(lambda, 1.1, 0.1), "exponent is 1.1");
    CHECK_REFUSED(predict(lambda, test::nan, 0.1), "exponent");
    CHECK_REFUSED(predict(lambda, 0.5, -1), "kappa is -1");
    CHECK_REFUSED(predict(lambda, 0.5, test::infinity), "kappa");
  }
  CHECK_REFUSED(predicted_wush_feedback_loss(Vector<double>::Ones(52), 0.5, 0.1), "nearest are 48 and 56");
  CHECK_REFUSED(choose_exponent(none, 0.1, ErrorFeedback::On), "0 eigenvalues");
  CHECK_REFUSED(choose_exponent(lambda, test::nan, ErrorFeedback::Off), "kappa");
}
