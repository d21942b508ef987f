// SPDX-License-Identifier: Apache-2.0
#include "wushkv/quantize/affine.hpp"

#include "quantizer_properties.hpp"
#include "wushkv/quantize/lloyd_max.hpp"
#include "wushkv/quantize/quest.hpp"

using namespace wushkv;

TEST_CASE_TEMPLATE("affine quantizers have a quantizer's properties", Scalar, float, double) {
  test::Random random(30);
  for (int bits = 1; bits <= 8; ++bits) {
    test::check_quantizer(Affine<Scalar>::min_max(bits), random);
    test::check_quantizer(Affine<Scalar>::percentile(.92, bits), random);
    test::check_quantizer(Affine<Scalar>::shrunk(.65, bits), random);
    test::check_quantizer(Affine<Scalar, Dynamic, float>::percentile(.96, bits), random);
    test::check_quantizer(Affine<Scalar, Dynamic, Eigen::half>::min_max(bits), random, 2);
    test::check_quantizer(Affine<Scalar, Dynamic, Eigen::bfloat16>::min_max(bits), random);
  }
}

TEST_CASE("min-max: the least value is code 0, the greatest the last, the rest to the nearest") {
  const Affine<double, 2> affine = Affine<double, 2>::min_max();
  const Vector<double> group = Eigen::Vector4d(-1, 5, 1.9, 2.1);
  const auto params = affine.fit(group);
  CHECK(params.scale == 2);
  CHECK(params.zero == 0.5);
  CHECK(test::identical(test::decoded(affine, group), Eigen::Vector4d(-1, 5, 1, 3)));
  CHECK(affine.encode(2.0, params) == 2);  // halfway rounds up
  CHECK(affine.encode(1e300, params) == 3);
  CHECK(affine.encode(-1e300, params) == 0);
}

TEST_CASE("percentile: the range is clamped to the magnitude of rank floor(kappa n)") {
  Vector<double> group(10);
  group << 1, -2, 3, -4, 5, -6, 7, -8, 9, 100;
  const auto params = Affine<double, 2>::percentile(.8).fit(group);  // rank 8: tau = 9
  CHECK(params.scale == doctest::Approx(17.0 / 3));                  // from -8 to 9
  CHECK(params.zero == doctest::Approx(8 / (17.0 / 3)));
  const auto all = Affine<double, 2>::percentile(1).fit(group);  // rank n - 1: nothing is clamped
  CHECK(all.scale == doctest::Approx(36));
  const auto narrow = Affine<double, 2>::percentile(.05).fit(group);  // rank 0: tau = 1
  CHECK(narrow.scale == doctest::Approx(2.0 / 3));
  const Vector<double> one = Vector<double>::Constant(1, -3);
  CHECK(test::identical(test::decoded(Affine<double, 2>::percentile(.96), one), one));
}

TEST_CASE("percentile of a group too large for the stack") {
  test::Random random(31);
  const Vector<double> group = random.vector(5000);
  Vector<double> sorted = group.cwiseAbs();
  std::sort(sorted.begin(), sorted.end());
  const double tau = sorted[4800];
  const auto params = Affine<double, 4>::percentile(.96).fit(group);
  CHECK(params.scale == doctest::Approx(2 * tau / 15).epsilon(1e-12));
}

TEST_CASE("shrunk: both extremes times the factor") {
  const Vector<double> group = Eigen::Vector3d(-4, 0.5, 8);
  const auto params = Affine<double, 2>::shrunk(.5).fit(group);
  CHECK(params.scale == 2);
  CHECK(params.zero == 1);
}

TEST_CASE_TEMPLATE("a constant group decodes to its value, as the storage rounds it", Storage, double, float,
                   Eigen::half, Eigen::bfloat16) {
  test::Random random(32);
  for (int round = 0; round < 300; ++round) {
    const double value = random.normal() * std::pow(10.0, random.uniform(-3, 4));
    const Vector<double> group = Vector<double>::Constant(random.integer(1, 64), value);
    const double rounded = static_cast<double>(saturate_cast<Storage>(value));
    for (const auto& affine :
         {Affine<double, Dynamic, Storage>::min_max(static_cast<int>(random.integer(1, 8))),
          Affine<double, Dynamic, Storage>::percentile(.96, static_cast<int>(random.integer(1, 8)))}) {
      const Vector<double> back = test::decoded(affine, group);
      CHECK(std::abs(back[0] - value) <= std::abs(rounded - value) * (1 + 1e-12));
      CHECK((back.array() == back[0]).all());
    }
  }
}

TEST_CASE_TEMPLATE("a narrow group far from zero keeps the digits that the storage has", Storage, float,
                   Eigen::half, Eigen::bfloat16) {
  test::Random random(33);
  const double unit = std::ldexp(1.0, -detail::storage_digits<Storage>);
  for (int round = 0; round < 300; ++round) {
    const double offset = random.uniform(50, 5000) * random.pick({-1, 1}),
                 width = std::pow(10.0, random.uniform(-4, 1));
    const int bits = static_cast<int>(random.integer(1, 8));
    const Vector<double> group = (random.vector(64) * width).array() + offset;
    const auto affine = Affine<double, Dynamic, Storage>::min_max(bits);
    const double range = group.maxCoeff() - group.minCoeff(), largest = group.cwiseAbs().maxCoeff();
    // Half a step of the ideal levels, or of those a rounded zero point allows.
    const double allowed = std::max(range / ((1 << bits) - 1), 2 * unit * largest);
    CAPTURE(offset);
    CAPTURE(width);
    CAPTURE(bits);
    CHECK((test::decoded(affine, group) - group).norm() <= std::sqrt(64.0) * allowed);
  }
}

TEST_CASE("16-bit parameters keep narrow and tiny groups nearly as well as any pair of them could") {
  test::Random random(34);
  const auto error = [&](const auto& affine, const Vector<double>& group) {
    return (test::decoded(affine, group) - group).norm() / std::sqrt(static_cast<double>(group.size()));
  };
  const Vector<double> normal = random.vector(64);
  const auto half = Affine<double, Dynamic, Eigen::half>::min_max(8);
  const auto brain = Affine<double, Dynamic, Eigen::bfloat16>::min_max(8);
  // In units of the spread; an ideal 8-bit step leaves about 0.006.
  CHECK(error(half, normal.array() + 100) < 0.02);
  CHECK(error(half, normal.array() + 1000) < 0.03);
  CHECK(error(brain, normal.array() + 100) < 0.08);
  CHECK(error(half, 1e-4 * normal) / 1e-4 < 0.01);
  CHECK(error(half, 1e-6 * normal) / 1e-6 < 0.1);
  const Vector<double> constant = Vector<double>::Constant(8, 1e-7);
  CHECK(error(Affine<double, 2, Eigen::half>::min_max(), constant) < 0.2e-7);
  CHECK(error(Quest<double, 8, Eigen::half>(), 7e-7 * normal) / 7e-7 < 0.1);
  CHECK(error(LloydMax<double, 8, Eigen::half>(), 2e-8 * normal) / 2e-8 < 0.2);
}

TEST_CASE("a float's zero point past its digits is not used") {
  Vector<float> group(3);
  group << 10000.0F, 10000.001F, 10000.0039F;
  const auto affine = Affine<float, 2>::min_max();
  const auto params = affine.fit(group);
  for (std::uint8_t code = 0; code < 4; ++code) {
    const std::uint8_t again = affine.encode(affine.decode(code, params), params);
    CHECK(affine.decode(again, params) == affine.decode(code, params));
  }
}

TEST_CASE("affine refuses bad settings") {
  CHECK_REFUSED(Affine<float>::min_max(0), "bits is 0");
  CHECK_REFUSED(Affine<float>::min_max(9), "bits is 9");
  CHECK_REFUSED(Affine<float>::percentile(-.1, 2), "kappa is -0.1");
  CHECK_REFUSED(Affine<float>::percentile(1.1, 2), "kappa");
  CHECK_REFUSED(Affine<float>::percentile(test::nan, 2), "kappa");
  CHECK_REFUSED(Affine<float>::shrunk(0, 2), "range is 0");
  CHECK_REFUSED(Affine<float>::shrunk(1.5, 2), "range");
  CHECK_REFUSED(Affine<float>::min_max(2).fit(Vector<float>(0)), "0 values");
}
