// SPDX-License-Identifier: Apache-2.0
#include "wushkv/quantize/quest.hpp"

#include "quantizer_properties.hpp"

using namespace wushkv;

TEST_CASE_TEMPLATE("QuEST has a quantizer's properties", Scalar, float, double) {
  test::Random random(20);
  for (int bits = 1; bits <= 8; ++bits) {
    test::check_quantizer(Quest<Scalar>(bits), random);
    test::check_quantizer(Quest<Scalar, Dynamic, float>(bits, 1.15), random);
    test::check_quantizer(Quest<Scalar, Dynamic, Eigen::half>(bits), random, 2);
    test::check_quantizer(Quest<Scalar, Dynamic, Eigen::bfloat16>(bits), random);
  }
}

TEST_CASE("levels are mid-rise: symmetric, half a step from zero, never zero") {
  const Quest<double, 2> quest;
  const Quest<double, 2>::Params params{2.0};
  const double expected[] = {-3, -1, 1, 3};
  for (std::uint8_t code = 0; code < 4; ++code) CHECK(quest.decode(code, params) == expected[code]);
  CHECK(quest.encode(-100, params) == 0);
  CHECK(quest.encode(-2.0, params) == 1);
  CHECK(quest.encode(-1e-300, params) == 1);
  CHECK(quest.encode(0, params) == 2);
  CHECK(quest.encode(1.999, params) == 2);
  CHECK(quest.encode(2, params) == 3);
  CHECK(quest.encode(1e300, params) == 3);
}

TEST_CASE("the step is 2 alpha rms / (2^b - 1), times the widening") {
  const Vector<double> group = Eigen::Vector4d(3, -1, 1, -3);  // rms sqrt(5)
  for (int bits = 1; bits <= 8; ++bits) {
    const double step =
        2 * quest_alpha[static_cast<std::size_t>(bits - 1)] * std::sqrt(5.0) / ((1 << bits) - 1);
    CHECK(Quest<double>(bits).fit(group).step == doctest::Approx(step).epsilon(1e-14));
    CHECK(Quest<double>(bits, 1.15).fit(group).step == doctest::Approx(1.15 * step).epsilon(1e-14));
  }
}

namespace {

double normal_cdf(double x) { return std::erfc(-x / std::sqrt(2.0)) / 2; }
double normal_pdf(double x) { return std::exp(-x * x / 2) / std::sqrt(2 * 3.14159265358979323846); }

// The expected squared error of a unit normal under clipping constant alpha: closed form, cell by cell.
double expected_error(int bits, double alpha) {
  const int half = 1 << (bits - 1);
  const double step = 2 * alpha / ((1 << bits) - 1);
  double sum = 0;
  for (int i = 0; i < half; ++i) {
    const double a = i * step, b = i + 1 < half ? (i + 1) * step : 40.0, level = (i + 0.5) * step;
    const double mass = normal_cdf(b) - normal_cdf(a), first = normal_pdf(a) - normal_pdf(b);
    const double second = mass + a * normal_pdf(a) - b * normal_pdf(b);
    sum += second - 2 * level * first + level * level * mass;
  }
  return 2 * sum;
}

}  // namespace

TEST_CASE("alpha minimizes the expected squared error of a unit normal, as design.md says") {
  for (int bits = 1; bits <= 8; ++bits) {
    double low = 0.1, high = 8;  // golden-section search; the error is unimodal here
    const double ratio = (std::sqrt(5.0) - 1) / 2;
    for (int k = 0; k < 200; ++k) {
      const double a = high - ratio * (high - low), b = low + ratio * (high - low);
      (expected_error(bits, a) < expected_error(bits, b) ? high : low) =
          expected_error(bits, a) < expected_error(bits, b) ? b : a;
    }
    const double best = (low + high) / 2, alpha = quest_alpha[static_cast<std::size_t>(bits - 1)];
    CAPTURE(bits);
    CAPTURE(best);
    if (bits <= 5) CHECK(std::abs(alpha - best) < 1e-4);
    CHECK(expected_error(bits, alpha) <= 1.002 * expected_error(bits, best));
  }
}

TEST_CASE("QuEST refuses bad settings") {
  CHECK_REFUSED(Quest<float>(0), "bits is 0, expected 1 to 8");
  CHECK_REFUSED(Quest<float>(9), "bits is 9");
  CHECK_REFUSED(Quest<float>(-1), "bits is -1");
  CHECK_REFUSED((Quest<float, 3>(2)), "expected the fixed width 3");
  CHECK_REFUSED(Quest<float>(2, 0), "widen is 0");
  CHECK_REFUSED(Quest<float>(2, test::nan), "widen");
  CHECK_REFUSED(Quest<float>(2).fit(Vector<float>(0)), "0 values");
}
