// SPDX-License-Identifier: Apache-2.0
#include "wushkv/calibrate/wush.hpp"

#include "symmetric.hpp"

using namespace wushkv;

namespace {

SquareMatrix<double> damped(const SquareMatrix<double>& a, double damping) {
  return a + damping * a.trace() / static_cast<double>(a.rows()) *
                 SquareMatrix<double>::Identity(a.rows(), a.rows());
}

void check_reference(const std::string& path, Index d) {
  const SafetensorsFile file(path);
  const std::string name = "wush" + std::to_string(d);
  const SquareMatrix<double> m = test::symmetric(file, name + ".M", d),
                             h = test::symmetric(file, name + ".H", d);
  const MatrixPair t = wush_matrices(m, h);
  CAPTURE(d);
  CHECK(test::relative_difference(t.forward.transpose() * t.forward,
                                  test::symmetric(file, name + ".TtT", d)) < 1e-9);
  CHECK(test::relative_difference(t.forward * m * t.forward.transpose(),
                                  test::symmetric(file, name + ".TMTt", d)) < 1e-9);
  CHECK(test::relative_difference(t.forward * t.inverse, SquareMatrix<double>::Identity(d, d)) < 1e-9);
}

}  // namespace

TEST_CASE("reference: TᵀT and T M Tᵀ within 1e-9") {
  for (const Index d : {8, 16, 64, 128}) check_reference(test::data("transforms.safetensors"), d);
}

TEST_CASE("reference at 256") { check_reference(test::data("transforms256.safetensors"), 256); }

TEST_CASE("reference: blocks of 32") {
  const SafetensorsFile file(test::data("transforms.safetensors"));
  const SquareMatrix<double> m = file.matrix<double>("block32.M"), h = file.matrix<double>("block32.H");
  const SquareMatrix<double> t = to_matrix(wush_blocks<double>(m, h, 32));
  CHECK(test::relative_difference(t.transpose() * t, file.matrix<double>("block32.TtT")) < 1e-9);
}

TEST_CASE("cache energy and sensitivity are equal on every coordinate, for damped M and H and c = 1") {
  test::Random random(80);
  for (int round = 0; round < 25; ++round) {
    const Index d = random.pick({2, 8, 12, 20, 32, 80});
    const double damping = random.pick({0.0, 1e-3, 1e-2, 1.0});
    const SquareMatrix<double> m = random.definite(d), h = random.definite(d);
    const MatrixPair t = wush_matrices(m, h, {.damping = damping});
    const SquareMatrix<double> energy = t.forward * damped(m, damping) * t.forward.transpose();
    const SquareMatrix<double> sensitivity = t.inverse.transpose() * damped(h, damping) * t.inverse;
    CHECK(test::relative_difference(energy, sensitivity) < 1e-9);
    const Vector<double> diagonal = energy.diagonal();
    CHECK(diagonal.maxCoeff() / diagonal.minCoeff() - 1 < 1e-9);
    CHECK(test::relative_difference(t.forward * t.inverse, SquareMatrix<double>::Identity(d, d)) < 1e-9);
  }
}

TEST_CASE("exponent p: T M Tᵀ has Lambda^(1-p), T^-T H T^-1 Lambda^p") {
  test::Random random(81);
  for (const double p : {0.0, 0.3, 0.5, 0.75, 1.0}) {
    const SquareMatrix<double> m = random.definite(16), h = random.definite(16);
    const MatrixPair t = wush_matrices(m, h, {.damping = 0, .exponent = p});
    const auto eigenvalues = [](const SquareMatrix<double>& a) {
      return Vector<double>(Eigen::SelfAdjointEigenSolver<SquareMatrix<double>>(a).eigenvalues());
    };
    const Vector<double> lambda = Eigen::EigenSolver<SquareMatrix<double>>(m * h).eigenvalues().real();
    Vector<double> sorted = lambda;
    std::sort(sorted.begin(), sorted.end());
    CHECK(test::relative_difference(eigenvalues(t.forward * m * t.forward.transpose()),
                                    sorted.array().pow(1 - p)) < 1e-9);
    CHECK(test::relative_difference(eigenvalues(t.inverse.transpose() * h * t.inverse),
                                    sorted.array().pow(p)) < 1e-9);
  }
}

TEST_CASE("scaling M or H scales T only") {
  test::Random random(82);
  for (int round = 0; round < 25; ++round) {
    const Index d = random.pick({8, 20, 64});
    const double p = random.pick({0.5, 0.75});
    const SquareMatrix<double> m = random.definite(d), h = random.definite(d);
    const double a = std::pow(10, random.uniform(-120, 120)), b = std::pow(10, random.uniform(-120, 120));
    const MatrixPair t = wush_matrices(m, h, {.exponent = p}),
                     u = wush_matrices(a * m, b * h, {.exponent = p});
    // c = 1: by the definition T ~ Lambda^{-p/2} L^T, Lambda ~ a b, L ~ sqrt(b).
    CHECK(test::relative_difference(u.forward, t.forward * std::pow(a, -p / 2) * std::pow(b, (1 - p) / 2)) <
          1e-9);
    // Unit mean square: H's scale drops out altogether.
    const MatrixPair v = wush_matrices(m, h, {.exponent = p, .tokens = 100}),
                     w = wush_matrices(m, b * h, {.exponent = p, .tokens = 100});
    CHECK(test::relative_difference(w.forward, v.forward) < 1e-9);
    CHECK(test::relative_difference(w.inverse, v.inverse) < 1e-9);
  }
}

TEST_CASE("given the number of tokens, what is stored has unit mean square on them") {
  test::Random random(83);
  const Batch<double> k = random.batch(500, 32) * random.definite(32) * 1e-3;
  const auto t = wush<double>(k.transpose() * k, random.definite(32), {.tokens = 500});
  CHECK(t.forward(k).squaredNorm() / (500 * 32) == doctest::Approx(1).epsilon(1e-10));
}

TEST_CASE("the eigenvectors' convention: largest entry positive, ascending") {
  test::Random random(84);
  const detail::Spectrum s = detail::spectrum("a", random.definite(24));
  for (Index j = 0; j < 24; ++j) {
    Index at = 0;
    s.vectors.col(j).cwiseAbs().maxCoeff(&at);
    CHECK(s.vectors(at, j) > 0);
    if (j > 0) CHECK(s.values[j] >= s.values[j - 1]);
  }
}

TEST_CASE("a head that nothing is known of") {
  test::Random random(85);
  const SquareMatrix<double> zero = SquareMatrix<double>::Zero(16, 16), m = random.definite(16);
  for (const auto& [gram, hessian] : {std::pair{zero, zero}, std::pair{m, zero}, std::pair{zero, m}}) {
    const MatrixPair t = wush_matrices(gram, hessian, {.tokens = 10});
    CHECK(t.forward.allFinite());
    CHECK(test::relative_difference(t.forward * t.inverse, SquareMatrix<double>::Identity(16, 16)) < 1e-10);
  }
  // Few tokens: M has rank 2, which the damping makes up for.
  const Batch<double> k = random.batch(2, 16);
  CHECK(wush_matrices(k.transpose() * k, m).forward.allFinite());
}

TEST_CASE("bad input is refused") {
  test::Random random(86);
  const SquareMatrix<double> m = random.definite(8), h = random.definite(8);
  for (Index i = 0; i < m.size(); ++i)
    for (const double bad : {test::nan, test::infinity}) {
      SquareMatrix<double> broken = m;
      broken.data()[i] = bad;
      CHECK_REFUSED(wush_matrices(broken, h), "gram M has a value that is not finite");
      CHECK_REFUSED(wush_matrices(m, broken), "hessian H has a value that is not finite");
    }
  SquareMatrix<double> skew = m;
  skew(1, 2) += 0.01 * m.cwiseAbs().maxCoeff();
  CHECK_REFUSED(wush_matrices(skew, h), "gram M is not symmetric");
  CHECK_REFUSED(wush_matrices(m, skew), "hessian H is not symmetric");
  SquareMatrix<double> indefinite = m;
  indefinite -= 1.05 * Eigen::SelfAdjointEigenSolver<SquareMatrix<double>>(m).eigenvalues()[0] *
                SquareMatrix<double>::Identity(8, 8);
  CHECK_REFUSED(wush_matrices(indefinite, h), "gram M is indefinite");
  CHECK_REFUSED(wush_matrices(m, indefinite), "hessian H is indefinite");
  CHECK_REFUSED(wush_matrices(-m, h), "gram M is indefinite");
  CHECK_REFUSED(wush_matrices(random.batch(8, 7), h), "square");
  CHECK_REFUSED(wush_matrices(m, random.definite(4)), "expected 8 x 8");
  CHECK_REFUSED(wush_matrices(random.definite(52), random.definite(52)), "nearest are 48 and 56");
  CHECK_REFUSED(wush_blocks<double>(m, h, 3), "divisor");
  CHECK_REFUSED(wush_blocks<double>(m, h, 0), "divisor");
  CHECK_REFUSED(wush_matrices(m, h, {.damping = -1}), "damping is -1");
  CHECK_REFUSED(wush_matrices(m, h, {.damping = test::nan}), "damping");
  CHECK_REFUSED(wush_matrices(m, h, {.exponent = -0.1}), "exponent");
  CHECK_REFUSED(wush_matrices(m, h, {.tokens = test::infinity}), "tokens");
  const Vector<double> v = random.vector(8);
  CHECK_REFUSED(wush_matrices(v * v.transpose(), h, {.damping = 0}), "gram M is singular");
  CHECK_REFUSED(wush_matrices(m, v * v.transpose(), {.damping = 0}), "hessian H is singular");
}
