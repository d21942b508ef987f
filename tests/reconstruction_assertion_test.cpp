// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include "support.hpp"
#include "wushkv/codec/codec.hpp"
#include "wushkv/measure/doctest.hpp"
#include "wushkv/quantize/quest.hpp"
#include "wushkv/transform/hadamard.hpp"

using namespace wushkv;

namespace {

const Batch<float>& normal_data() {
  static const Batch<float> data = test::Random(140).batch<float>(100, 64);
  return data;
}
const Codec<Hadamard<float>, Quest<float, 4>>& codec() {
  static const Codec<Hadamard<float>, Quest<float, 4>> instance{Hadamard<float>(64), Quest<float, 4>()};
  return instance;
}

}  // namespace

TEST_CASE("a codec within its bound passes") {
  // A 4-bit uniform quantizer of a unit normal has a mean squared error of 0.0115.
  CHECK_RECONSTRUCTION(codec(), normal_data(), 0.013);
  REQUIRE_RECONSTRUCTION(codec(), normal_data(), 0.013);
  WARN_RECONSTRUCTION(codec(), normal_data(), 0.013);
}

TEST_CASE("a codec outside its bound fails" * doctest::should_fail()) {
  CHECK_RECONSTRUCTION(codec(), normal_data(), 0.010);
}

namespace {
bool went_on = false;
}

TEST_CASE("REQUIRE fails" * doctest::should_fail()) {
  REQUIRE_RECONSTRUCTION(codec(), normal_data(), 0);
  went_on = true;
}

TEST_CASE("and ended its test case") { CHECK_FALSE(went_on); }
