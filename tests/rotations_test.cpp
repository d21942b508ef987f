// SPDX-License-Identifier: Apache-2.0
#include "wushkv/calibrate/rotations.hpp"

#include "symmetric.hpp"

using namespace wushkv;

namespace {

void check_reference(const std::string& path, Index d) {
  const SafetensorsFile file(path);
  const SquareMatrix<double> sigma = test::symmetric(file, "oscar" + std::to_string(d) + ".Sigma", d);
  const SquareMatrix<double> t = oscar_matrix(sigma);
  CAPTURE(d);
  CHECK(test::relative_difference(t * sigma * t.transpose(),
                                  test::symmetric(file, "oscar" + std::to_string(d) + ".TSigmaTt", d)) <
        1e-9);
  CHECK(test::relative_difference(t * t.transpose(), SquareMatrix<double>::Identity(d, d)) < 1e-12);
}

}  // namespace

TEST_CASE("reference: OSCAR's T Sigma Tᵀ within 1e-9") {
  for (const Index d : {8, 16, 64, 128}) check_reference(test::data("transforms.safetensors"), d);
}

TEST_CASE("reference at 256") { check_reference(test::data("transforms256.safetensors"), 256); }

TEST_CASE("OSCAR equalizes sigma's diagonal, at powers of two and other sizes") {
  test::Random random(90);
  for (const Index d : {8, 12, 64, 80}) {
    const SquareMatrix<double> sigma = random.definite(d);
    const SquareMatrix<double> t = oscar_matrix(sigma);
    CHECK(test::relative_difference((t * sigma * t.transpose()).diagonal(),
                                    Vector<double>::Constant(d, sigma.trace() / static_cast<double>(d))) <
          1e-10);
  }
}

TEST_CASE("random rotations are orthogonal, seeded, and uniform in mean") {
  for (const Index d : {1, 2, 64, 80}) {
    const SquareMatrix<double> r = random_rotation_matrix(d, 7);
    CHECK(test::relative_difference(r * r.transpose(), SquareMatrix<double>::Identity(d, d)) < 1e-12);
    CHECK(test::identical(r, random_rotation_matrix(d, 7)));
    if (d > 1) CHECK(test::relative_difference(r, random_rotation_matrix(d, 8)) > 0.1);
  }
  // With the signs fixed, no entry has a mean; without, the first column's would.
  SquareMatrix<double> mean = SquareMatrix<double>::Zero(4, 4);
  for (std::uint64_t seed = 0; seed < 4000; ++seed) mean += random_rotation_matrix(4, seed) / 4000;
  CHECK(mean.cwiseAbs().maxCoeff() < 5 * 0.5 / std::sqrt(4000.0));
  CHECK_REFUSED(random_rotation_matrix(0, 1), "dim is 0");
}

TEST_CASE("PCA diagonalizes the Gram, largest first") {
  test::Random random(91);
  const SquareMatrix<double> m = random.definite(20), t = pca_matrix(m);
  const SquareMatrix<double> diagonal = t * m * t.transpose();
  CHECK(test::relative_difference(SquareMatrix<double>(diagonal.diagonal().asDiagonal()), diagonal) < 1e-12);
  for (Index i = 1; i < 20; ++i) CHECK(diagonal(i, i) <= diagonal(i - 1, i - 1));
  CHECK(pca<float>(m).dim() == 20);
}

TEST_CASE("RotateKV: channels by size, then Hadamard by group") {
  test::Random random(92);
  Vector<double> size(8);
  size << 3, 100, 1, 2, 50, 0.5, 4, 60;
  const SquareMatrix<double> m = size.array().square().matrix().asDiagonal();
  const auto transform = rotate_kv<double>(m, 4);
  CHECK(transform.inner().source() == std::vector<Index>{1, 7, 4, 6, 0, 3, 2, 5});
  const SquareMatrix<double> t = to_matrix(transform);
  CHECK(test::relative_difference(t * t.transpose(), SquareMatrix<double>::Identity(8, 8)) < 1e-14);
  // Each group holds its own channels only.
  for (Index row = 0; row < 4; ++row)
    for (const Index small : {0, 3, 2, 5}) CHECK(t(row, small) == 0);
  const Vector<double> x = random.vector(8);
  CHECK(test::relative_difference(transform.inverse(transform.forward(x)), x) < 1e-14);
}

TEST_CASE("bad input is refused") {
  test::Random random(93);
  const SquareMatrix<double> m = random.definite(8);
  SquareMatrix<double> bad = m;
  bad(2, 1) = bad(1, 2) = test::nan;
  SquareMatrix<double> skew = m;
  skew(0, 1) += 1;
  for (const SquareMatrix<double>& wrong : {bad, skew, SquareMatrix<double>(-m)}) {
    CHECK_REFUSED(oscar_matrix(wrong), "oscar: sigma");
    CHECK_REFUSED(pca_matrix(wrong), "pca: gram M");
    CHECK_REFUSED(rotate_kv<float>(wrong, 4), "rotate_kv: gram M");
  }
  CHECK_REFUSED(oscar_matrix(random.definite(52)), "nearest are 48 and 56");
  CHECK_REFUSED(rotate_kv<float>(m, 3), "divisor");
  CHECK_REFUSED(group_hadamard<float>(64, 0), "divisor");
  CHECK_REFUSED(group_hadamard<float>(0, 4), "divisor");
}
