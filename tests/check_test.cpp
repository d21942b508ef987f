// SPDX-License-Identifier: Apache-2.0
#include "wushkv/core/check.hpp"

#include "support.hpp"

using namespace wushkv;

TEST_CASE_TEMPLATE("is_finite tells finite values from infinities and NaNs", Scalar, float, double) {
  using Limits = std::numeric_limits<Scalar>;
  for (const Scalar value : {Scalar(0), Scalar(-0.0), Scalar(1), Limits::max(), Limits::lowest(),
                             Limits::denorm_min(), Limits::min()})
    CHECK(is_finite(value));
  for (const Scalar value : {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN(),
                             -Limits::quiet_NaN(), Limits::signaling_NaN()})
    CHECK_FALSE(is_finite(value));
}

TEST_CASE("is_finite of 16-bit types") {
  CHECK(is_finite(Eigen::half(65504.0F)));
  CHECK_FALSE(is_finite(Eigen::half(std::numeric_limits<float>::infinity())));
  CHECK(is_finite(Eigen::bfloat16(1.0F)));
  CHECK_FALSE(is_finite(Eigen::bfloat16(std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("all_finite finds one bad value anywhere, in any storage") {
  test::Random random(1);
  for (int round = 0; round < 200; ++round) {
    const Index rows = random.integer(1, 9), cols = random.integer(1, 40);
    Batch<float> x = random.batch<float>(rows, cols + 3);
    CHECK(all_finite(x));
    const Index i = random.integer(0, rows - 1), j = random.integer(0, cols - 1);
    x(i, j) = static_cast<float>(random.pick({test::nan, test::infinity, -test::infinity}));
    CHECK_FALSE(all_finite(x));
    CHECK_FALSE(all_finite(x.leftCols(cols)));
    CHECK_FALSE(all_finite(x.transpose()));
    CHECK_FALSE(all_finite(x.col(j)));
    CHECK_FALSE(all_finite(x + Batch<float>::Ones(rows, cols + 3)));
    CHECK(all_finite(x.rightCols(3)));
    CHECK_FALSE(all_finite(Eigen::MatrixXf(x)));
  }
  CHECK(all_finite(Batch<double>(0, 4)));
}

TEST_CASE("messages put numbers and text together") {
  CHECK(detail::concat("a ", 3, " b ", 2.5, " c ", std::string("d"), '!') == "a 3 b 2.5 c d!");
  CHECK(detail::concat(~0ULL, ' ', std::int8_t{-5}, ' ', true) == "18446744073709551615 -5 1");
  CHECK_REFUSED(detail::invalid_argument("x is ", -7, ", expected 1"), "x is -7, expected 1");
  CHECK(test::message_of<FileError>([] { detail::file_error("file ", 1); }) == "file 1");
}
