// SPDX-License-Identifier: Apache-2.0
#include "wushkv/measure/loss_bound.hpp"

#include <numbers>
#include <vector>

#include "support.hpp"
#include "wushkv/calibrate/attention_statistics.hpp"
#include "wushkv/calibrate/wush.hpp"
#include "wushkv/quantize/pass_through.hpp"
#include "wushkv/quantize/quantize.hpp"
#include "wushkv/transform/transform.hpp"

using namespace wushkv;

namespace {

/// Semidefinite of the given rank, with eigenvalues over some decades.
SquareMatrix<double> semidefinite(test::Random& random, Index dim, Index rank) {
  Batch<double> factor = random.batch(dim, rank);
  for (Index j = 0; j < rank; ++j) factor.col(j) *= std::pow(10.0, random.uniform(-1.5, 1.5));
  return factor * factor.transpose();
}

/// WUSH with a change of its own: what comes near to the bound without being there.
Dense<double> near_wush(test::Random& random, const SquareMatrix<double>& m, const SquareMatrix<double>& h,
                        double distance) {
  const SquareMatrix<double> t = wush_matrices(m, h, {.damping = 0}).forward;
  return Dense<double>(
      (SquareMatrix<double>::Identity(m.rows(), m.rows()) + distance * random.matrix(m.rows())) * t);
}

double relative(double actual, double expected) { return std::abs(actual / expected - 1); }

/// A transform of the library with another one's matrices, to see that predictions depend on nothing else.
Dense<double> random_transform(test::Random& random, const SquareMatrix<double>& m,
                               const SquareMatrix<double>& h) {
  const Index d = m.rows();
  switch (random.integer(0, 3)) {
    case 0:
      return Dense<double>(random.matrix(d) + 0.1 * SquareMatrix<double>::Identity(d, d));
    case 1: {  // coordinates of very different scales
      const Vector<double> scales =
          Vector<double>::NullaryExpr(d, [&](Index) { return std::pow(10.0, random.uniform(-2, 2)); });
      return Dense<double>(SquareMatrix<double>(scales.asDiagonal()));
    }
    case 2:
      return wush<double>(m, h, {.damping = random.pick({0.0, 1e-2}), .exponent = random.uniform(0, 1)});
    default:
      return near_wush(random, m, h, std::pow(10.0, random.uniform(-4, -1)));
  }
}

}  // namespace

TEST_CASE("Lambda is the spectrum of M H, ascending, of singular matrices too") {
  test::Random random(900);
  for (int round = 0; round < 60; ++round) {
    const Index d = random.integer(1, 24);
    const Index rank_m = random.integer(0, d), rank_h = random.integer(0, d);
    const SquareMatrix<double> m = semidefinite(random, d, rank_m), h = semidefinite(random, d, rank_h);
    const Vector<double> lambda = loss_spectrum(m, h);
    REQUIRE(lambda.size() == d);
    CHECK(lambda.minCoeff() >= 0);
    for (Index i = 1; i < d; ++i) CHECK(lambda[i] >= lambda[i - 1]);
    // Sums of powers determine a spectrum, and need no decomposition.
    CHECK(relative(lambda.sum() + 1e-300, (m * h).trace() + 1e-300) < 1e-9);
    CHECK(relative(lambda.squaredNorm() + 1e-300, (m * h * m * h).trace() + 1e-300) < 1e-9);
    CHECK((lambda.array() > 0).count() <= std::min(rank_m, rank_h));
  }
  const SquareMatrix<double> m = random.definite(16), h = random.definite(16);
  const SquareMatrix<double> l = h.llt().matrixL();
  const Vector<double> expected =
      Eigen::SelfAdjointEigenSolver<SquareMatrix<double>>(l.transpose() * m * l).eigenvalues();
  CHECK(test::relative_difference(loss_spectrum(m, h), expected) < 1e-11);
  CHECK(test::relative_difference(loss_spectrum(1e150 * m, 1e-250 * h), 1e-100 * expected) < 1e-11);
  CHECK(test::relative_difference(loss_spectrum(m.cast<float>(), h.cast<float>()), expected) < 1e-4);
  CHECK(loss_spectrum(SquareMatrix<double>::Zero(3, 3), SquareMatrix<double>::Identity(3, 3)).isZero(0));
}

TEST_CASE("bounds of known spectra") {
  CHECK(loss_bound(Vector<double>::Constant(5, 4), 0.1) == doctest::Approx(2));  // 0.1 (5 * 2)² / 5
  CHECK(feedback_loss_bound(Vector<double>::Constant(5, 4), 0.1) == doctest::Approx(2));
  CHECK(loss_bound(Eigen::Vector2d(1, 9), 1) == doctest::Approx(8));
  CHECK(feedback_loss_bound(Eigen::Vector2d(1, 9), 1) == doctest::Approx(6));
  CHECK(feedback_loss_bound(Eigen::Vector2d(0, 9), 1) == 0);
  CHECK(loss_bound(Eigen::Vector2d(0, 0), 1) == 0);
  // Neither a product of 256 eigenvalues nor a square leaves the range of a double.
  for (const double scale : {1e-290, 1e290}) {
    const Vector<double> lambda = Vector<double>::Constant(256, scale);
    CHECK(loss_bound(lambda, 0.5) == doctest::Approx(128 * scale));
    CHECK(feedback_loss_bound(lambda, 0.5) == doctest::Approx(128 * scale));
  }
}

TEST_CASE("no transform is predicted to lose less than the bound, in groups of any size") {
  test::Random random(901);
  for (int round = 0; round < 300; ++round) {
    const Index d = random.pick({2, 4, 8, 12, 20, 24});
    const SquareMatrix<double> m = random.definite(d), h = random.definite(d);
    const Dense<double> t = random_transform(random, m, h);
    const double kappa = random.uniform(0.001, 0.5);
    const Vector<double> lambda = loss_spectrum(m, h);
    const double bound = loss_bound(lambda, kappa), feedback_bound = feedback_loss_bound(lambda, kappa);
    CHECK(feedback_bound <= bound * (1 + 1e-12));
    const Index group = random.pick<Index>({0, 1, 2, d / 2, d});
    CAPTURE(d);
    CAPTURE(group);
    CHECK(predicted_loss(t, m, h, kappa, group) >= bound * (1 - 1e-9));
    CHECK(predicted_feedback_loss(t, m, h, kappa, group) >= feedback_bound * (1 - 1e-9));
    CHECK(predicted_feedback_loss(t, m, h, kappa, group) <=
          predicted_loss(t, m, h, kappa, group) * (1 + 1e-9));
  }
}

TEST_CASE("undamped WUSH reaches the bound, and leaves it as it is damped") {
  test::Random random(902);
  for (int round = 0; round < 40; ++round) {
    const Index d = random.pick({2, 8, 12, 20, 32, 64});
    const SquareMatrix<double> m = random.definite(d), h = random.definite(d);
    const double bound = loss_bound(loss_spectrum(m, h), 0.1);
    CHECK(relative(predicted_loss(wush<double>(m, h, {.damping = 0}), m, h, 0.1), bound) < 1e-9);
    double last = bound;
    for (const double damping : {1e-3, 1e-2, 1e-1, 1.0}) {
      const double loss = predicted_loss(wush<double>(m, h, {.damping = damping}), m, h, 0.1);
      CHECK(loss > last);
      last = loss;
    }
  }
}

TEST_CASE("with feedback the bound is reached where all energies and all D_j are equal") {
  test::Random random(903);
  for (int round = 0; round < 20; ++round) {
    // A transform that whitens the cache, followed by the one that makes T^-T H T^-1 a multiple of the
    // identity, is possible only for M = H^-1; then any rotation of it is at the bound.
    const Index d = random.integer(2, 24);
    const SquareMatrix<double> h = random.definite(d), m = h.inverse();
    const SquareMatrix<double> l = h.llt().matrixL();
    const Dense<double> t(
        SquareMatrix<double>(Eigen::HouseholderQR<SquareMatrix<double>>(random.matrix(d)).householderQ()) *
        l.transpose());
    const double bound = feedback_loss_bound(loss_spectrum(m, h), 0.3);
    CHECK(relative(predicted_feedback_loss(t, m, h, 0.3), bound) < 1e-9);
    CHECK(relative(predicted_loss(t, m, h, 0.3), bound) < 1e-9);
  }
  // Whitened by M^{-1/2}, energies are equal. In two dimensions a rotation by which A's Schur complement is
  // equal to its last entry exists: D_1 = D_2 = det^{1/2}.
  for (int round = 0; round < 20; ++round) {
    const SquareMatrix<double> m = random.definite(2), h = random.definite(2);
    const SquareMatrix<double> whiten = SquareMatrix<double>(m.llt().matrixL())
                                            .triangularView<Eigen::Lower>()
                                            .solve(SquareMatrix<double>::Identity(2, 2));
    const double bound = feedback_loss_bound(loss_spectrum(m, h), 1);
    double least = test::infinity;
    for (int step = 0; step < 4000; ++step) {
      const SquareMatrix<double> rotation =
          Eigen::Rotation2Dd(step * std::numbers::pi / 4000).toRotationMatrix();
      least = std::min(least, predicted_feedback_loss(Dense<double>(rotation * whiten), m, h, 1));
    }
    CHECK(least >= bound * (1 - 1e-9));
    CHECK(least < bound * (1 + 1e-4));
  }
}

TEST_CASE("the prediction does not depend on the scale of T, and is linear in M, H and kappa") {
  test::Random random(904);
  for (int round = 0; round < 50; ++round) {
    const Index d = random.integer(1, 20);
    const SquareMatrix<double> m = random.definite(d), h = random.definite(d);
    const SquareMatrix<double> t = random.matrix(d) + 3 * SquareMatrix<double>::Identity(d, d);
    const double c = std::pow(10.0, random.uniform(-3, 3)), a = std::pow(10.0, random.uniform(-100, 100)),
                 b = std::pow(10.0, random.uniform(-100, 100));
    const double loss = predicted_loss(Dense<double>(t), m, h, 0.2),
                 feedback_loss = predicted_feedback_loss(Dense<double>(t), m, h, 0.2);
    CHECK(relative(predicted_loss(Dense<double>(c * t), m, h, 0.2), loss) < 1e-9);
    CHECK(relative(predicted_feedback_loss(Dense<double>(c * t), m, h, 0.2), feedback_loss) < 1e-9);
    CHECK(relative(predicted_loss(Dense<double>(t), a * m, b * h, 0.1), loss * a * b / 2) < 1e-9);
    CHECK(relative(predicted_feedback_loss(Dense<double>(t), a * m, b * h, 0.1), feedback_loss * a * b / 2) <
          1e-9);
  }
}

TEST_CASE("predictions by their definition, for any transform") {
  test::Random random(905);
  const Index d = 16;
  const SquareMatrix<double> m = random.definite(d), h = random.definite(d);
  const auto expected = [&](const SquareMatrix<double>& t) {
    const SquareMatrix<double> inverse = t.inverse();
    return 0.1 * (t * m * t.transpose()).trace() * (inverse.transpose() * h * inverse).trace() / d;
  };
  const Dense<double> dense(random.matrix(d));
  const Hadamard<double> hadamard(d);
  CHECK(relative(predicted_loss(dense, m, h, 0.1), expected(to_matrix(dense))) < 1e-8);
  CHECK(relative(predicted_loss(hadamard, m, h, 0.1), expected(to_matrix(hadamard))) < 1e-9);
  const Composed<Dense<double>, Hadamard<double>> both(dense, hadamard);
  CHECK(relative(predicted_loss(both, m, h, 0.1), expected(to_matrix(both))) < 1e-8);
  // The linear part of a centered one: its mean is in M.
  const Centered<Dense<double>> centered(dense, 100 * random.vector(d));
  CHECK(predicted_loss(centered, m, h, 0.1) == predicted_loss(dense, m, h, 0.1));
  CHECK(predicted_feedback_loss(centered, m, h, 0.1) == predicted_feedback_loss(dense, m, h, 0.1));
  CHECK(relative(predicted_loss(dense.cast<float>(), m, h, 0.1), expected(to_matrix(dense))) < 1e-3);
  // H's own F is the best there is: any other one costs more.
  const SquareMatrix<double> a = dense.inverse_matrix().transpose() * h * dense.inverse_matrix();
  const detail::UpperFactors factors = detail::upper_factors(a);
  CHECK(test::relative_difference(factors.unit * factors.diagonal.asDiagonal() * factors.unit.transpose(),
                                  a) < 1e-12);
  const double own = predicted_feedback_loss(dense, m, h, 0.1);
  CHECK(relative(predicted_feedback_loss(dense, m, h, 0.1, factors.unit), own) < 1e-9);
  CHECK(relative(predicted_feedback_loss(dense, m, h, 0.1, SquareMatrix<double>::Identity(d, d)),
                 predicted_loss(dense, m, h, 0.1)) < 1e-9);
  for (int round = 0; round < 20; ++round) {
    SquareMatrix<double> other = factors.unit;
    for (Index j = 0; j < d; ++j)
      for (Index i = 0; i < j; ++i) other(i, j) += 0.1 * random.normal();
    CHECK(predicted_feedback_loss(dense, m, h, 0.1, other) > own);
  }
  // A singular H is no obstacle.
  const Vector<double> v = random.vector(d);
  const double rank_one = predicted_feedback_loss(hadamard, m, v * v.transpose(), 0.1);
  CHECK(rank_one > 0);
  CHECK(rank_one < predicted_loss(hadamard, m, v * v.transpose(), 0.1));
}

TEST_CASE("additive noise loses what is predicted, with and without feedback, within sampling error") {
  test::Random random(906);
  for (int round = 0; round < 6; ++round) {
    const Index d = random.pick({4, 12, 16}), tokens = 40, draws = 500;
    const Batch<double> x = random.batch(tokens, d) * random.matrix(d);
    const SquareMatrix<double> m = x.transpose() * x, h = random.definite(d);
    const Dense<double> t = random_transform(random, m, h);
    const double kappa = 0.1;
    const SquareMatrix<double> a = t.inverse_matrix().transpose() * h * t.inverse_matrix();
    const SquareMatrix<double> f = detail::upper_factors(a).unit;
    const Batch<double> y = t.forward(x);
    double plain = 0, fed_back = 0, squares = 0, fed_back_squares = 0;
    for (Index draw = 0; draw < draws; ++draw) {
      double sum = 0, fed_back_sum = 0;
      for (Index i = 0; i < tokens; ++i) {
        const Vector<double> r =
            std::sqrt(kappa * y.row(i).squaredNorm() / static_cast<double>(d)) * random.vector(d);
        sum += r.dot(a * r);
        Vector<double> e(d);  // e_j = r_j - sum_{i<j} F_ij e_i
        for (Index j = 0; j < d; ++j) e[j] = r[j] - f.col(j).head(j).dot(e.head(j));
        fed_back_sum += e.dot(a * e);
      }
      plain += sum / draws;
      fed_back += fed_back_sum / draws;
      squares += sum * sum / draws;
      fed_back_squares += fed_back_sum * fed_back_sum / draws;
    }
    const double error = std::sqrt((squares - plain * plain) / draws),
                 fed_back_error = std::sqrt((fed_back_squares - fed_back * fed_back) / draws);
    CHECK(std::abs(plain - predicted_loss(t, m, h, kappa)) < 5 * error);
    CHECK(std::abs(fed_back - predicted_feedback_loss(t, m, h, kappa)) < 5 * fed_back_error);
  }
}

TEST_CASE("measured loss by its definition, with weights by their proportions") {
  test::Random random(907);
  const Index d = 12;
  const SquareMatrix<double> h = random.definite(d);
  const Batch<double> x = random.batch(30, d);
  const Codec codec(Dense<double>(random.matrix(d)), Quest<double>(3), 4);
  const Batch<double> error = codec.reconstruct(x) - x;
  std::vector<double> weights(30);
  double plain = 0, weighted = 0, sum = 0;
  for (Index t = 0; t < 30; ++t) {
    const double loss = error.row(t) * h * error.row(t).transpose();
    weights[static_cast<std::size_t>(t)] = t == 7 ? 0 : random.uniform(0, 5);
    plain += loss;
    weighted += weights[static_cast<std::size_t>(t)] * loss;
    sum += weights[static_cast<std::size_t>(t)];
  }
  CHECK(measured_loss(codec, x, h) == doctest::Approx(plain).epsilon(1e-12));
  CHECK(measured_loss(codec, x, h, weights) == doctest::Approx(weighted * 30 / sum).epsilon(1e-12));
  for (double& weight : weights) weight *= 1e306;
  CHECK(measured_loss(codec, x, h, weights) == doctest::Approx(weighted * 30 / sum).epsilon(1e-12));
  CHECK(measured_loss(codec, Batch<double>(0, d), h) == 0);
  CHECK(measured_loss(codec, 2 * x, h) == doctest::Approx(4 * plain).epsilon(1e-12));
  const Codec exact{Identity<float>(d), PassThrough<float, float>()};
  CHECK(measured_loss(exact, x.cast<float>(), h) == 0);
  CHECK(measured_loss(exact, x, h) > 0);  // what a float cannot hold
}

TEST_CASE("joint statistics: noise on centered, weighted tokens loses what their Gram predicts") {
  test::Random random(908);
  const AttentionHeads heads{2, 1, 8, 8};
  const Index tokens = 300;
  const Batch<double> q = random.batch(tokens, 16), k = random.batch(tokens, 8) * random.matrix(8),
                      v = random.batch(tokens, 8), w_o = random.batch(16, 5);
  AttentionStatistics statistics(heads);
  statistics.add(q, k, v, w_o);
  const WeightedSums& sums = statistics.values(0);
  // w_t of values: the squared attention weights that a token gets, times a constant.
  std::vector<double> weights(static_cast<std::size_t>(tokens), 0.0);
  for (Index g = 0; g < 2; ++g) {
    const Batch<double> w = w_o.middleRows(8 * g, 8);
    for (Index i = 0; i < tokens; ++i) {
      Vector<double> a = (k.topRows(i + 1) * q.row(i).segment(8 * g, 8).transpose()) / std::sqrt(8.0);
      a = (a.array() - a.maxCoeff()).exp();
      a /= a.sum();
      for (Index t = 0; t <= i; ++t)
        weights[static_cast<std::size_t>(t)] += 2 * a[t] * a[t] * w.squaredNorm();
    }
  }
  const SquareMatrix<double> m = static_cast<double>(tokens) / sums.weight * sums.centered_gram();
  const Centered<Dense<double>> t(wush<double>(m, sums.hessian), sums.mean());
  // Fine levels of a range that holds every value make independent noise of a size that kappa tells.
  const Affine<double> quantizer = Affine<double>::min_max(8);
  const double measured = measured_loss(Codec(t, quantizer), v, sums.hessian, weights);
  const double predicted = predicted_loss(t, m, sums.hessian, noise_factor(quantizer, 8));
  CHECK(relative(measured, predicted) < 0.15);
}

TEST_CASE("kappa of known quantizers") {
  // Lloyd-Max of a unit normal at 1 bit: 1 - 2/pi; the root mean square of 4,096 values is that of the
  // normal.
  CHECK(noise_factor(LloydMax<double>(1), 4096) == doctest::Approx(1 - 2 / std::numbers::pi).epsilon(0.005));
  CHECK(noise_factor(LloydMax<double>(2), 4096) == doctest::Approx(0.11748).epsilon(0.005));
  CHECK(noise_factor(LloydMax<float>(2), 4096) == doctest::Approx(0.11748).epsilon(0.005));
  CHECK(noise_factor(PassThrough<double, double>(), 64) == 0);
  CHECK(noise_factor(Affine<double>::min_max(4), 2) < 1e-25);  // both values are levels
  // Three digits, by other seeds; and fewer samples are less exact, not different.
  const double kappa = noise_factor(Quest<double>(3), 64);
  CHECK(noise_factor(Quest<double>(3), 64, Index{1} << 22, 1) == doctest::Approx(kappa).epsilon(0.005));
  CHECK(noise_factor(Quest<double>(3), 64, 100000, 2) == doctest::Approx(kappa).epsilon(0.03));
  CHECK(noise_factor(Quest<double>(3), 64) == kappa);
  CHECK(noise_factor(Quest<double>(3), 5, 7) > 0);  // an odd size, and part of a group
}

TEST_CASE("bad input is refused") {
  test::Random random(909);
  const SquareMatrix<double> m = random.definite(8), h = random.definite(8), four = random.definite(4);
  SquareMatrix<double> broken = m, skew = m;
  broken(2, 3) = test::nan;
  skew(1, 2) += m.cwiseAbs().maxCoeff();
  const Hadamard<double> t(8);
  CHECK_REFUSED(loss_spectrum(broken, h), "gram M has a value that is not finite");
  CHECK_REFUSED(loss_spectrum(m, skew), "hessian H is not symmetric");
  CHECK_REFUSED(loss_spectrum(-m, h), "gram M is indefinite");
  CHECK_REFUSED(loss_spectrum(m, four), "expected 8 x 8");
  CHECK_REFUSED(loss_spectrum(random.batch(8, 7), h), "square");
  CHECK_REFUSED(loss_spectrum(1e200 * m, 1e200 * h), "overflows");
  const Vector<double> none, negative = Eigen::Vector2d(-1, 2), bad = Eigen::Vector2d(1, test::infinity),
                             one = Eigen::Vector2d(1, 1);
  for (const auto& bound : {&loss_bound, &feedback_loss_bound}) {
    CHECK_REFUSED(bound(none, 1), "0 eigenvalues");
    CHECK_REFUSED(bound(negative, 1), "eigenvalue -1, expected none below 0");
    CHECK_REFUSED(bound(bad, 1), "not finite");
    CHECK_REFUSED(bound(one, -0.5), "kappa is -0.5");
    CHECK_REFUSED(bound(one, test::nan), "kappa");
  }
  CHECK_REFUSED(predicted_loss(t, broken, h, 1), "gram M has a value that is not finite");
  CHECK_REFUSED(predicted_loss(t, m, -h, 1), "hessian H is indefinite");
  CHECK_REFUSED(predicted_loss(t, four, four, 1), "expected 8 x 8");
  CHECK_REFUSED(predicted_loss(t, m, four, 1), "expected 8 x 8");
  CHECK_REFUSED(predicted_loss(t, m, h, test::infinity), "kappa");
  CHECK_REFUSED(predicted_loss(t, m, h, 1, 3), "group_size is 3, expected 0 or a divisor");
  CHECK_REFUSED(predicted_feedback_loss(t, m, h, 1, -8), "group_size is -8");
  CHECK_REFUSED(predicted_feedback_loss(t, m, h, -1), "kappa");
  CHECK_REFUSED(predicted_feedback_loss(t, m, h, 1, four), "feedback F is 4 x 4");
  CHECK_REFUSED(predicted_feedback_loss(t, m, h, 1, m), "not unit upper triangular");
  CHECK_REFUSED(predicted_feedback_loss(t, m, h, 1, broken), "not finite");
  const Codec codec(t, Quest<double>(2));
  const Batch<double> x = random.batch(3, 8);
  const std::vector<double> short_weights(2, 1.0), zeros(3, 0.0), below{1, -1, 1}, nans{1, test::nan, 1};
  CHECK_REFUSED(measured_loss(codec, random.batch(3, 7), h), "expected 3 x 8");
  CHECK_REFUSED(measured_loss(codec, x, four), "expected 8 x 8");
  CHECK_REFUSED(measured_loss(codec, x, skew), "not symmetric");
  CHECK_REFUSED(measured_loss(codec, Batch<double>::Constant(1, 8, test::nan), h), "x has a value");
  CHECK_REFUSED(measured_loss(codec, x, h, short_weights), "weights has 2 entries");
  CHECK_REFUSED(measured_loss(codec, x, h, zeros), "weights run from 0 to 0");
  CHECK_REFUSED(measured_loss(codec, x, h, below), "weights run from -1 to 1");
  CHECK_REFUSED(measured_loss(codec, x, h, nans), "weights has a value that is not finite");
  CHECK_REFUSED(noise_factor(Quest<double>(2), 0), "group_size is 0");
  CHECK_REFUSED(noise_factor(Quest<double>(2), 64, 0), "samples is 0");
}
