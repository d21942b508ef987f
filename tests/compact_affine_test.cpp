// SPDX-License-Identifier: Apache-2.0
#include "wushkv/quantize/compact_affine.hpp"

#include "quantizer_properties.hpp"
#include "wushkv/quantize/affine.hpp"
#include "wushkv/quantize/lloyd_max.hpp"
#include "wushkv/quantize/quest.hpp"

using namespace wushkv;

namespace {

template <class Q, class Scalar = typename Q::Scalar>
double relative_error(const Q& quantizer, const Batch<Scalar>& x) {
  double error = 0;
  for (Index t = 0; t < x.rows(); ++t) {
    const Vector<Scalar> group = x.row(t).transpose();
    error += static_cast<double>((test::decoded(quantizer, group) - group).squaredNorm());
  }
  return error / static_cast<double>(x.squaredNorm());
}

}  // namespace

TEST_CASE("an 8-bit scale is the nearest by ratio") {
  for (int bits = 0; bits < 256; ++bits) {
    const Log8 scale = Log8::from_bits(static_cast<std::uint8_t>(bits));
    const double value = static_cast<double>(scale);
    CHECK(Log8(value) == scale);
    if (bits > 0) CHECK(value == doctest::Approx(std::exp2((bits - 1) / 8.0 - 16)).epsilon(1e-6));
  }
  test::Random random(810);
  for (int round = 0; round < 1000; ++round) {
    const double value = std::exp2(random.uniform(-15.9, 15.7));
    CHECK(std::abs(std::log2(static_cast<double>(Log8(value)) / value)) <= 1 / 16.0 + 1e-6);
    const double above = static_cast<double>(Log8::above(value));
    CHECK(above >= value * (1 - 2e-6));
    CHECK(Log8::above(above) == Log8::above(value));
    CHECK(above <= value * std::exp2(1 / 8.0) * (1 + 1e-6));
  }
  CHECK(static_cast<double>(Log8(0.0)) == 0);
  CHECK(Log8(1e300) == std::numeric_limits<Log8>::max());
  CHECK(Log8(1e-300).bits() == 0);
  CHECK(Log8(0x1p-16).bits() == 1);
  CHECK(Log8::above(1e-9).bits() == 1);
  CHECK(Log8::above(0).bits() == 0);
  for (const int bits : {2, 8}) {
    const Vector<double> small = 1e-4 * Vector<double>::LinSpaced(16, -1, 1);
    CHECK(!test::decoded(CompactAffine<double>(bits), small).isZero(0));
    CHECK(test::decoded(CompactAffine<double>(bits), Vector<double>(1e-9 * small)).isZero(1e-5));
  }
}

TEST_CASE_TEMPLATE("compact affine levels have a quantizer's properties", Scalar, float, double) {
  test::Random random(811);
  for (int bits = 1; bits <= 8; ++bits) test::check_quantizer(CompactAffine<Scalar>(bits), random, 2);
}

TEST_CASE("8-bit parameters cost little beside 16-bit ones") {
  test::Random random(812);
  const Batch<float> x = random.batch<float>(2000, 64);
  for (const int bits : {2, 3, 4}) {
    CAPTURE(bits);
    const double affine = relative_error(Affine<float, Dynamic, Eigen::half>::min_max(bits), x),
                 compact = relative_error(CompactAffine<float>(bits), x);
    CHECK(compact < 1.02 * affine);
    const double quest = relative_error(Quest<float, Dynamic, Eigen::half>(bits), x),
                 quest8 = relative_error(Quest<float, Dynamic, Log8>(bits), x);
    CHECK(quest8 < 1.02 * quest);
    CHECK(relative_error(LloydMax<float, Dynamic, Log8>(bits), x) <
          1.02 * relative_error(LloydMax<float>(bits), x));
  }
  static_assert(param_bits_v<CompactAffine<float>> == 16 && param_bits_v<Quest<float, 2, Log8>> == 8);
}

TEST_CASE("groups on one side of zero, and constant ones, keep their far end") {
  for (const int bits : {1, 2, 3, 4, 8})
    for (const double sign : {1.0, -1.0})
      for (const double size : {1e-3, 0.02, 0.37, 1.0, 1000.0}) {
        const Vector<double> constant = Vector<double>::Constant(16, sign * size);
        const Vector<double> values = test::decoded(CompactAffine<double>(bits), constant);
        // At 8 bits the least step is coarse beside the smallest.
        CHECK((values - constant).cwiseAbs().maxCoeff() <= std::max(0.003 * size, 0x1p-17));
        Vector<double> shifted = constant;
        shifted[3] *= 0.5;
        CHECK(std::abs(test::decoded(CompactAffine<double>(bits), shifted)[0] - sign * size) <=
              std::max(0.003 * size, 0x1p-17));
      }
  CHECK_REFUSED(CompactAffine<float>(2, 0), "range is 0");
  CHECK_REFUSED(CompactAffine<float>(9), "bits is 9");
}
