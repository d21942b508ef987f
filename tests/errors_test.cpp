// SPDX-License-Identifier: Apache-2.0
#include "wushkv/measure/errors.hpp"

#include <vector>

#include "support.hpp"

using namespace wushkv;

TEST_CASE("squared errors, their ratio and decibels") {
  Batch<float> x(1, 2), y(1, 2);
  x << 3, 4;
  y << 3, 4.5F;
  const SquaredError error = squared_error(x, y);
  CHECK(error.error == doctest::Approx(0.25));
  CHECK(error.signal == 25);
  CHECK(error.relative() == doctest::Approx(0.01));
  CHECK(error.sqnr_db() == doctest::Approx(20));
  SquaredError sum = error;
  sum += error;
  CHECK(sum.error == 2 * error.error);
  CHECK(sum.relative() == error.relative());
  CHECK(squared_error(Batch<float>::Zero(2, 2), Batch<float>::Zero(2, 2)).relative() == 0);
  CHECK(squared_error(Batch<float>::Zero(2, 2), Batch<float>::Ones(2, 2)).relative() == test::infinity);
  CHECK_REFUSED(squared_error(x, Batch<float>::Ones(2, 2)), "expected 1 x 2");
  y(0, 1) = static_cast<float>(test::nan);
  CHECK_REFUSED(squared_error(x, y), "not finite");
}

TEST_CASE("module error by its definition") {
  test::Random random(120);
  const AttentionHeads heads{4, 2, 6, 5};
  const Batch<double> q = random.batch(12, 24), k = random.batch(12, 12), v = random.batch(12, 10),
                      w = random.batch(20, 7);
  const Batch<double> k2 = k + 0.1 * random.batch(12, 12), v2 = v + 0.1 * random.batch(12, 10);
  // Coefficient by coefficient, with nothing of the library's.
  const auto outputs = [&](const Batch<double>& keys, const Batch<double>& values) {
    Batch<double> y = Batch<double>::Zero(12, 7);
    for (Index i = 0; i < 12; ++i)
      for (Index h = 0; h < 4; ++h) {
        std::vector<double> weights;
        double sum = 0;
        for (Index t = 0; t <= i; ++t) {
          double logit = 0;
          for (Index c = 0; c < 6; ++c) logit += q(i, 6 * h + c) * keys(t, 6 * (h / 2) + c);
          weights.push_back(std::exp(logit / std::sqrt(6.0)));
          sum += weights.back();
        }
        for (Index t = 0; t <= i; ++t)
          for (Index c = 0; c < 5; ++c)
            for (Index m = 0; m < 7; ++m)
              y(i, m) +=
                  weights[static_cast<std::size_t>(t)] / sum * values(t, 5 * (h / 2) + c) * w(5 * h + c, m);
      }
    return y;
  };
  const Batch<double> exact = outputs(k, v), cached = outputs(k2, v2);
  CHECK(module_error(heads, q, k, v, k2, v2, w).relative() ==
        doctest::Approx((cached - exact).squaredNorm() / exact.squaredNorm()).epsilon(1e-10));
  CHECK(module_error(heads, q, k, v, k, v, w).relative() < 1e-30);
  CHECK_REFUSED(module_error(heads, q, k, v, k2, v2, random.batch(19, 7)), "w_o is 19 x 7, expected 20 x 7");
}

TEST_CASE("a key shift that all share changes no output") {
  test::Random random(121);
  const AttentionHeads heads{2, 1, 6, 6};
  const Batch<double> q = random.batch(9, 12), k = random.batch(9, 6), v = random.batch(9, 6),
                      w = random.batch(12, 4);
  const Batch<double> shifted = k.rowwise() + random.batch(1, 6).row(0);
  CHECK(module_error(heads, q, k, v, shifted, v, w).relative() < 1e-25);
  CHECK(module_error(heads, q, k, v, shifted, v, w, {.soft_cap = 2}).relative() > 1e-4);
}

TEST_CASE("attention KL: zero for the same keys, small for near ones, known for a uniform row") {
  test::Random random(122);
  const AttentionHeads heads{2, 1, 6, 6};
  const Batch<double> q = random.batch(9, 12), k = random.batch(9, 6);
  CHECK(attention_kl(heads, q, k, k) == 0);
  // Second order in the perturbation.
  const Batch<double> noise = random.batch(9, 6);
  const double small = attention_kl(heads, q, k, k + 1e-3 * noise),
               twice = attention_kl(heads, q, k, k + 2e-3 * noise);
  CHECK(small > 0);
  CHECK(twice / small == doctest::Approx(4).epsilon(0.02));
  // Token 1 of two: weights (1/2, 1/2) against (1 - s, s), s = sigmoid(1).
  Batch<double> one_q(2, 1), zero_k = Batch<double>::Zero(2, 1), other_k(2, 1);
  one_q << 1, 1;
  other_k << 0, 1;
  const double s = 1 / (1 + std::exp(-1.0));
  const double kl = 0.5 * std::log(0.5 / s) + 0.5 * std::log(0.5 / (1 - s));
  CHECK(attention_kl({1, 1, 1, 1}, one_q, zero_k, other_k) ==
        doctest::Approx(kl / 2).epsilon(1e-12));  // token 0 adds none
  CHECK_REFUSED(attention_kl({0, 1, 6, 6}, q, k, k), "0 query heads");
  // Finite where a weight is lost altogether.
  CHECK(std::isfinite(attention_kl(heads, q, k, 1e4 * k)));
}

TEST_CASE("geometric mean") {
  const std::vector<double> values = {1, 10, 100}, with_zero = {0, 4}, negative = {-1, 2},
                            broken = {test::nan};
  CHECK(geometric_mean(values) == doctest::Approx(10).epsilon(1e-14));
  CHECK(geometric_mean(with_zero) == 0);
  CHECK_REFUSED(geometric_mean({}), "0 values");
  CHECK_REFUSED(geometric_mean(negative), "-1");
  CHECK_REFUSED(geometric_mean(broken), "nan");
}
