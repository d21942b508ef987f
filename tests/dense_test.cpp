// SPDX-License-Identifier: Apache-2.0
#include <Eigen/QR>

#include "transform_properties.hpp"
#include "wushkv/transform/dense.hpp"
#include "wushkv/transform/orthogonal.hpp"

using namespace wushkv;

namespace {

SquareMatrix<double> rotation(test::Random& random, Index dim) {
  return Eigen::HouseholderQR<SquareMatrix<double>>(random.matrix(dim)).householderQ();
}

// Condition number about 10, so that floats keep most of their digits.
SquareMatrix<double> invertible(test::Random& random, Index dim) {
  const Vector<double> scales =
      Vector<double>::NullaryExpr(dim, [&](Index) { return random.uniform(0.3, 3); });
  return rotation(random, dim) * scales.asDiagonal() * rotation(random, dim);
}

}  // namespace

TEST_CASE_TEMPLATE("Dense has a transform's properties", Scalar, float, double) {
  test::Random random(4);
  for (const Index dim : {1, 2, 7, 64, 80, 192})
    test::check_transform(Dense<Scalar>(invertible(random, dim)), random);
  test::check_transform(Dense<Scalar, 64>(invertible(random, 64)), random);
}

TEST_CASE_TEMPLATE("Orthogonal has a transform's properties", Scalar, float, double) {
  test::Random random(5);
  for (const Index dim : {1, 3, 64, 112})
    test::check_transform(Orthogonal<Scalar>(rotation(random, dim)), random);
  test::check_transform(Orthogonal<Scalar, 96>(rotation(random, 96)), random);
}

TEST_CASE("large dimensions can be fixed too") {
  test::Random random(9);
  const SquareMatrix<double> t = invertible(random, 192), r = rotation(random, 256);
  const Vector<float> x = random.vector<float>(192), y = random.vector<float>(256);
  CHECK(test::relative_difference(Dense<float, 192>(t).forward(x), t * x.cast<double>()) < 1e-5);
  CHECK(test::relative_difference(
            Dense<double, 192>(t).inverse(Dense<double, 192>(t).forward(x.cast<double>())), x) < 1e-10);
  CHECK(test::relative_difference(Orthogonal<float, 256>(r).forward(y), r * y.cast<double>()) < 1e-5);
}

TEST_CASE("Dense keeps T and its inverse as computed in double") {
  test::Random random(6);
  const SquareMatrix<double> t = invertible(random, 48);
  const Dense<float> dense(t);
  CHECK(test::identical(dense.matrix(), t.cast<float>()));
  CHECK(test::relative_difference(dense.inverse_matrix(), t.inverse()) < 1e-7);
  const Dense<double> wide = dense.cast<double>();
  CHECK(test::identical(wide.matrix(), dense.matrix().cast<double>()));
  CHECK(test::identical(wide.cast<float>().inverse_matrix(), dense.inverse_matrix()));
}

TEST_CASE("Dense refuses what has no inverse") {
  test::Random random(7);
  SquareMatrix<double> t = invertible(random, 16);
  CHECK_REFUSED(Dense<double>(SquareMatrix<double>::Zero(4, 4)), "singular");
  SquareMatrix<double> rank_one = t.col(0) * t.row(0);
  CHECK_REFUSED(Dense<double>(rank_one), "singular");
  CHECK_REFUSED(Dense<double>(Batch<double>::Ones(3, 4)), "square");
  CHECK_REFUSED(Dense<double>(SquareMatrix<double>(0, 0)), "square");
  CHECK_REFUSED((Dense<double, 8>(t)), "expected 8 x 8");
  CHECK_REFUSED(Dense<double>(MatrixPair{t, t}), "off by");
  CHECK_REFUSED(Dense<double>(MatrixPair{t, t.topLeftCorner(8, 8)}), "expected 16 x 16");
  t(3, 5) = test::nan;
  CHECK_REFUSED(Dense<double>(t), "not finite");
  // Fits a double, not a float.
  CHECK_REFUSED(Dense<float>(1e60 * SquareMatrix<double>::Identity(2, 2)), "not finite");
  CHECK(Dense<double>(1e60 * SquareMatrix<double>::Identity(2, 2)).dim() == 2);
}

TEST_CASE("Orthogonal refuses what is not orthogonal") {
  test::Random random(8);
  SquareMatrix<double> r = rotation(random, 16);
  CHECK_REFUSED(Orthogonal<float>(1.01 * r), "expected at most");
  CHECK_REFUSED(Orthogonal<float>(Batch<double>::Ones(16, 15)), "square");
  CHECK_REFUSED((Orthogonal<float, 8>(r)), "expected 8 x 8");
  CHECK(Orthogonal<float>(r.cast<float>()).dim() == 16);
  r(0, 0) = test::infinity;
  CHECK_REFUSED(Orthogonal<float>(r), "not finite");
}
