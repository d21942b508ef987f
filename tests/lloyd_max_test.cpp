// SPDX-License-Identifier: Apache-2.0
#include "wushkv/quantize/lloyd_max.hpp"

#include "quantizer_properties.hpp"

using namespace wushkv;

TEST_CASE_TEMPLATE("Lloyd-Max has a quantizer's properties", Scalar, float, double) {
  test::Random random(40);
  for (int bits = 1; bits <= 8; ++bits) {
    test::check_quantizer(LloydMax<Scalar>(bits), random);
    test::check_quantizer(LloydMax<Scalar, Dynamic, Eigen::half>(bits), random, 2);
    test::check_quantizer(LloydMax<Scalar, Dynamic, Eigen::bfloat16>(bits), random);
  }
}

TEST_CASE("levels are a fixed point of Lloyd's iteration") {
  const auto density = [](double x) { return std::exp(-x * x / 2); };
  for (int bits = 1; bits <= 8; ++bits) {
    const LloydMaxTable& table = lloyd_max_levels(bits);
    const std::size_t n = std::size_t{1} << bits;
    double worst = 0;
    for (std::size_t i = 0; i < n; ++i) {
      // The centroid of cell i by Simpson's rule, with nothing of the library's arithmetic.
      const double a = i == 0 ? -12 : table.boundary[i - 1], b = i + 1 == n ? 12 : table.boundary[i];
      const int steps = 20000;
      double mass = 0, moment = 0;
      for (int k = 0; k <= steps; ++k) {
        const double x = a + (b - a) * k / steps, weight = (k == 0 || k == steps ? 1
                                                            : k % 2 == 1         ? 4
                                                                                 : 2) *
                                                           density(x);
        mass += weight;
        moment += weight * x;
      }
      worst = std::max(worst, std::abs(table.level[i] - moment / mass));
      if (i + 1 < n)
        CHECK(table.boundary[i] == doctest::Approx((table.level[i] + table.level[i + 1]) / 2).epsilon(1e-14));
      CHECK(table.level[i] == -table.level[n - 1 - i]);
    }
    CAPTURE(bits);
    CHECK(worst < 1e-10);
  }
}

TEST_CASE("known levels and errors of the unit normal") {
  // Max, Quantizing for minimum distortion (1960), table I: outermost level and mean squared error.
  const double outermost[] = {0.7980, 1.510, 2.152, 2.733}, error[] = {0.3634, 0.1175, 0.03454, 0.009497};
  for (int bits = 1; bits <= 4; ++bits) {
    const LloydMaxTable& table = lloyd_max_levels(bits);
    const std::size_t n = std::size_t{1} << bits;
    CHECK(table.level[n - 1] == doctest::Approx(outermost[bits - 1]).epsilon(5e-4));
    double kept = 0;  // at the optimum the error is 1 - E[level²]
    for (std::size_t i = 0; i < n; ++i) {
      const double a = i == 0 ? -40 : table.boundary[i - 1], b = i + 1 == n ? 40 : table.boundary[i];
      kept +=
          table.level[i] * table.level[i] * (std::erf(b / std::sqrt(2.0)) - std::erf(a / std::sqrt(2.0))) / 2;
    }
    CHECK(1 - kept == doctest::Approx(error[bits - 1]).epsilon(2e-3));
  }
}

TEST_CASE("codes are the nearest level of the group's root mean square") {
  test::Random random(41);
  for (int bits = 1; bits <= 8; ++bits) {
    const LloydMax<double> lloyd(bits);
    const Vector<double> group = random.vector(64);
    const auto params = lloyd.fit(group);
    CHECK(params.rms == doctest::Approx(std::sqrt(group.squaredNorm() / 64)).epsilon(1e-14));
    for (const double x : group) {
      double best = test::infinity;
      for (int code = 0; code < 1 << bits; ++code)
        best = std::min(best, std::abs(x - lloyd.decode(static_cast<std::uint8_t>(code), params)));
      CHECK(std::abs(x - lloyd.decode(lloyd.encode(x, params), params)) ==
            doctest::Approx(best).epsilon(1e-12));
    }
  }
}

TEST_CASE("Lloyd-Max refuses bad settings") {
  CHECK_REFUSED(LloydMax<float>(0), "bits is 0");
  CHECK_REFUSED(LloydMax<float>(9), "bits is 9");
  CHECK_REFUSED(lloyd_max_levels(0), "bits is 0");
  CHECK_REFUSED(LloydMax<float>(2).fit(Vector<float>(0)), "0 values");
}
