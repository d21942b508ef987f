// SPDX-License-Identifier: Apache-2.0
#include "wushkv/transform/composed.hpp"
#include "transform_properties.hpp"

#include "wushkv/transform/centered.hpp"
#include "wushkv/transform/dense.hpp"
#include "wushkv/transform/diagonal.hpp"
#include "wushkv/transform/hadamard.hpp"

using namespace wushkv;

TEST_CASE_TEMPLATE("Composed applies the inner transform first", Scalar, float, double) {
  test::Random random(15);
  const Index dim = 28;
  const SquareMatrix<double> a = SquareMatrix<double>::Identity(dim, dim) + random.matrix(dim) / 20;
  const Vector<double> d = Vector<double>::NullaryExpr(dim, [&](Index) { return random.uniform(0.5, 2); });
  const Composed transform{Dense<Scalar>(a), Diagonal<Scalar>(d)};
  test::check_transform(transform, random);
  CHECK(test::relative_difference(to_matrix(transform), SquareMatrix<double>(a * d.asDiagonal())) < 1e-6);
  test::check_transform(Composed(transform, Composed(Hadamard<Scalar>(dim), Diagonal<Scalar>(d))), random);
  static_assert(Composed<Hadamard<Scalar, 28>, Diagonal<Scalar>>::dim_at_compile_time == 28);
  static_assert(Composed<Hadamard<Scalar>, Diagonal<Scalar, 28>>::dim_at_compile_time == 28);
  CHECK_REFUSED(Composed(Hadamard<Scalar>(16), Diagonal<Scalar>(d)), "expected 16");
}

TEST_CASE_TEMPLATE("Centered takes the mean off, and queries do not see it", Scalar, float, double) {
  test::Random random(16);
  const Index dim = 24;
  const Dense<Scalar> linear(SquareMatrix<double>::Identity(dim, dim) + random.matrix(dim) / 20);
  const Vector<Scalar> mean = random.vector<Scalar>(dim);
  const Centered transform(linear, mean);
  test::check_transform(transform, random);
  const Batch<Scalar> k = random.batch<Scalar>(6, dim), q = random.batch<Scalar>(4, dim);
  // All of a query's logits move by one constant: softmax is unchanged.
  const Batch<Scalar> exact = q * k.transpose();
  Batch<Scalar> shifted = transform.adjoint_inverse(q) * transform.forward(k).transpose();
  const Vector<Scalar> constant = (exact - shifted).col(0);
  shifted.colwise() += constant;
  CHECK(test::relative_difference(shifted, exact) < 1e-5);
  CHECK(test::relative_difference(constant, q * mean) < 1e-4);
  static_assert(!is_linear_v<Centered<Dense<Scalar>>> &&
                !is_linear_v<Composed<Dense<Scalar>, Centered<Dense<Scalar>>>> &&
                is_linear_v<Composed<Dense<Scalar>, Dense<Scalar>>>);
  CHECK_REFUSED(Centered(linear, Vector<Scalar>(mean.head(5))), "expected 24 x 1");
  Vector<Scalar> bad = mean;
  bad[3] = static_cast<Scalar>(test::nan);
  CHECK_REFUSED(Centered(linear, bad), "not finite");
}
