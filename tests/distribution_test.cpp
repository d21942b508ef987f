// SPDX-License-Identifier: Apache-2.0
#include "wushkv/measure/distribution.hpp"

#include "support.hpp"

using namespace wushkv;

TEST_CASE("incoherence runs from 1 to sqrt(d)") {
  Batch<float> alike = Batch<float>::Constant(3, 16, -2), spike = Batch<float>::Zero(1, 16);
  spike(0, 3) = 7;
  CHECK(incoherence(alike) == doctest::Approx(1));
  CHECK(incoherence(spike) == doctest::Approx(4));
  Batch<float> both(2, 16);
  both << spike, alike.topRows(1);
  CHECK(incoherence(both) == doctest::Approx(2.5));
  CHECK(incoherence(Batch<float>::Zero(2, 4)) == 1);
}

TEST_CASE("kurtosis of known distributions") {
  test::Random random(130);
  CHECK(kurtosis(random.batch(2000, 64)) == doctest::Approx(3).epsilon(0.03));
  CHECK(kurtosis(Batch<double>::NullaryExpr(2000, 64, [&](Index, Index) { return random.uniform(-1, 1); })) ==
        doctest::Approx(1.8).epsilon(0.02));
  CHECK(kurtosis(Batch<float>::Constant(4, 4, 3)) == doctest::Approx(1));
  CHECK(kurtosis(Batch<float>::Zero(4, 4)) == 0);
  CHECK(kurtosis(Batch<double>::Constant(2, 2, 1e200)) == doctest::Approx(1));
}

TEST_CASE("empty and broken batches are refused") {
  CHECK_REFUSED(incoherence(Batch<float>(0, 4)), "expected at least one value");
  CHECK_REFUSED(kurtosis(Batch<float>(3, 0)), "expected at least one value");
  CHECK_REFUSED(kurtosis(Batch<double>::Constant(2, 2, test::nan)), "not finite");
}
