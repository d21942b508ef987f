// SPDX-License-Identifier: Apache-2.0
#include "wushkv/transform/hadamard.hpp"
#include "transform_properties.hpp"

using namespace wushkv;

TEST_CASE_TEMPLATE("Hadamard has a transform's properties", Scalar, float, double) {
  test::Random random(2);
  for (const Index dim : {1, 2, 8, 12, 64, 80, 96, 112, 192, 256})
    test::check_transform(Hadamard<Scalar>(dim), random);
  test::check_transform(Hadamard<Scalar>(128, HadamardOrder::Walsh), random);
  test::check_transform(Hadamard<Scalar, 64>(), random);
}

TEST_CASE("every supported order is orthogonal with entries ±1/sqrt(d)") {
  int supported = 0;
  for (Index d = 1; d <= 512; ++d) {
    if (!hadamard_supported(d)) continue;
    ++supported;
    const SquareMatrix<double> h = to_matrix(Hadamard<double>(d));
    CAPTURE(d);
    CHECK((h * h.transpose() - SquareMatrix<double>::Identity(d, d)).cwiseAbs().maxCoeff() < 1e-13);
    CHECK((h.cwiseAbs().array() * std::sqrt(static_cast<double>(d)) - 1).abs().maxCoeff() < 1e-13);
  }
  CHECK(supported == 80);
  for (const Index base : {12, 20, 28, 36, 44})
    for (Index d = base; d <= 16 * base; d *= 2) CHECK(hadamard_supported(d));
}

TEST_CASE("large orders keep norms and come back; each order is either supported or refused") {
  test::Random random(4);
  for (const Index base : {1, 12, 20, 28, 36, 44, 60, 76, 108, 252})
    for (Index d = base; d <= 65536; d *= 2) {
      if (d == 2 || d == 1) continue;
      REQUIRE(hadamard_supported(d));
      const Hadamard<double> h(d);
      const Vector<double> x = random.vector(d), y = h.forward(x);
      CAPTURE(d);
      CHECK(y.norm() == doctest::Approx(x.norm()).epsilon(1e-12));
      CHECK(test::relative_difference(h.inverse(y), x) < 1e-12);
    }
  for (Index d = 513; d <= 2000; ++d)
    if (!hadamard_supported(d)) CHECK_FALSE(test::message_of([&] { Hadamard<double>{d}; }).empty());
  CHECK_FALSE(hadamard_supported(1000004));
}

TEST_CASE("natural order is Sylvester's") {
  SquareMatrix<double> h = SquareMatrix<double>::Ones(1, 1);
  for (Index d = 1; d <= 256; d *= 2) {
    CHECK(test::relative_difference(to_matrix(Hadamard<double>(d)), h / std::sqrt(static_cast<double>(d))) <
          1e-14);
    SquareMatrix<double> next(2 * d, 2 * d);
    next << h, h, h, -h;
    h = next;
  }
}

TEST_CASE("Walsh order sorts natural rows by sign changes") {
  for (Index d = 2; d <= 256; d *= 2) {
    const SquareMatrix<double> walsh = to_matrix(Hadamard<double>(d, HadamardOrder::Walsh));
    for (Index i = 0; i < d; ++i) {
      Index changes = 0;
      for (Index j = 1; j < d; ++j) changes += walsh(i, j) * walsh(i, j - 1) < 0 ? 1 : 0;
      CHECK(changes == i);
      CHECK(walsh(i, 0) > 0);
    }
  }
}

TEST_CASE("the fast apply agrees with a product by the matrix in long double") {
  test::Random random(3);
  for (const Index d : {64, 112, 256}) {
    const Vector<float> x = random.vector<float>(d);
    const auto h = to_matrix(Hadamard<double>(d)).cast<long double>().eval();
    CHECK(test::relative_difference(Hadamard<float>(d).forward(x), (h * x.cast<long double>()).eval()) <
          1e-6);
  }
}

TEST_CASE("an order without a construction is refused, with the nearest that have one") {
  CHECK_REFUSED(Hadamard<float>(52), "order 52 is not supported, the nearest are 48 and 56");
  CHECK_REFUSED(Hadamard<float>(0), "order 0 is not supported, the nearest are 1 ");
  CHECK_REFUSED(Hadamard<float>(-8), "nearest are 1 ");
  CHECK_REFUSED(Hadamard<float>(3), "nearest are 2 and 4");
  CHECK_REFUSED(Hadamard<float>(Index{1} << 40), "nearest are 65536 ");
  CHECK_REFUSED(Hadamard<float>(std::numeric_limits<Index>::max()), "nearest are 65536 ");
  CHECK_REFUSED(Hadamard<float>(96, HadamardOrder::Walsh), "expected a power of two");
  CHECK_REFUSED((Hadamard<float, 64>(32)), "expected the fixed dimension 64");
}
