// SPDX-License-Identifier: Apache-2.0
#include "wushkv/quantize/pass_through.hpp"

#include "quantizer_properties.hpp"

using namespace wushkv;

TEST_CASE_TEMPLATE("pass-through has a quantizer's properties", Scalar, float, double) {
  test::Random random(50);
  test::check_quantizer(PassThrough<Scalar>(), random);
  test::check_quantizer(PassThrough<Scalar, Eigen::half>(), random, 2);
  test::check_quantizer(PassThrough<Scalar, float>(), random);
}

TEST_CASE("values come back rounded to the stored type, or exactly") {
  test::Random random(51);
  for (int round = 0; round < 1000; ++round) {
    const float x = static_cast<float>(random.normal() * std::pow(10.0, random.uniform(-30, 30)));
    const PassThrough<float> bf16;
    CHECK(bf16.decode(bf16.encode(x, {}), {}) == static_cast<float>(Eigen::bfloat16(x)));
    const PassThrough<float, float> exact;
    CHECK(exact.decode(exact.encode(x, {}), {}) == x);
  }
  static_assert(PassThrough<float>::bits() == 16 && param_bits_v<PassThrough<float>> == 0);
  static_assert(PassThrough<double, double>::bits() == 64);
}

TEST_CASE("what would overflow becomes the largest value") {
  const PassThrough<double, Eigen::half> half;
  CHECK(half.decode(half.encode(1e9, {}), {}) == 65504);
  CHECK(half.decode(half.encode(-1e300, {}), {}) == -65504);
}
