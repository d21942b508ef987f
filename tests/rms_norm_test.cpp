// SPDX-License-Identifier: Apache-2.0
#include "wushkv/rope/rms_norm.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "support.hpp"

namespace {

using namespace wushkv;
using test::Random;

template <class Scalar>
Vector<Scalar> ones(Index dim) {
  return Vector<Scalar>::Ones(dim);
}

/// A random case: dimensions, weight, epsilon and values.
template <class Scalar>
struct Case {
  explicit Case(unsigned seed) : random(seed) {
    head_dim = random.integer(1, 130);
    heads = random.integer(1, 4);
    tokens = random.integer(1, 9);
    epsilon = std::pow(10.0, -static_cast<double>(random.integer(1, 9)));
    weight = random.vector<Scalar>(head_dim);
    x = random.batch<Scalar>(tokens, heads * head_dim);
  }
  RmsNorm<Scalar> norm() const { return RmsNorm<Scalar>(weight, epsilon); }

  Random random;
  Index head_dim, heads, tokens;
  double epsilon;
  Vector<Scalar> weight;
  Batch<Scalar> x;
};

template <class Scalar>
Batch<Scalar> normalized(const RmsNorm<Scalar>& norm, const Batch<Scalar>& x) {
  Batch<Scalar> y(x.rows(), x.cols());
  norm.apply_to(x, y);
  return y;
}

}  // namespace

TEST_CASE_TEMPLATE("RMS normalization follows its definition", Scalar, float, double) {
  constexpr double tolerance = 4 * static_cast<double>(std::numeric_limits<Scalar>::epsilon());
  for (unsigned seed = 0; seed < 60; ++seed) {
    const Case<Scalar> c(seed);
    const Batch<Scalar> y = normalized(c.norm(), c.x);
    for (Index t = 0; t < c.tokens; ++t)
      for (Index h = 0; h < c.heads; ++h) {
        const Vector<double> x =
            c.x.row(t).segment(h * c.head_dim, c.head_dim).transpose().template cast<double>();
        const double rms = std::sqrt(x.squaredNorm() / static_cast<double>(c.head_dim) + c.epsilon);
        for (Index i = 0; i < c.head_dim; ++i) {
          const double expected = x[i] / rms * static_cast<double>(c.weight[i]);
          CHECK(std::abs(static_cast<double>(y(t, h * c.head_dim + i)) - expected) <=
                tolerance * std::abs(expected));
        }
      }
  }
}

TEST_CASE_TEMPLATE("every form of RMS normalization gives the same bits", Scalar, float, double) {
  for (unsigned seed = 100; seed < 140; ++seed) {
    Case<Scalar> c(seed);
    const RmsNorm<Scalar> norm = c.norm();
    const Batch<Scalar> y = normalized(norm, c.x);

    Batch<Scalar> in_place = c.x;
    norm.apply(in_place);
    CHECK(in_place == y);
    in_place = c.x;
    norm.apply_to(in_place, in_place);
    CHECK(in_place == y);

    const Index width = c.x.cols(), pitch = width + c.random.integer(1, 9),
                begin = c.random.integer(0, pitch - width);
    Batch<Scalar> wide = Batch<Scalar>::Constant(c.tokens, pitch, 7), wide_out = wide;
    wide.middleCols(begin, width) = c.x;
    norm.apply_to(wide.middleCols(begin, width), wide_out.middleCols(begin, width));
    norm.apply(wide.middleCols(begin, width));
    CHECK(wide == wide_out);
    CHECK(wide.middleCols(begin, width) == y);
    wide.middleCols(begin, width).setConstant(7);
    CHECK(wide == Batch<Scalar>::Constant(c.tokens, pitch, 7));

    for (Index t = 0; t < c.tokens; ++t) {
      Vector<Scalar> token = c.x.row(t).transpose(), out(width);
      norm.apply_to(token, out);
      norm.apply(token);
      CHECK(token == out);
      CHECK(token == y.row(t).transpose());
      Batch<Scalar> row = c.x.row(t);
      norm.apply(row.row(0).transpose());
      CHECK(row == y.row(t));
    }
    for (Index h = 0; h < c.heads; ++h) {
      const Batch<Scalar> head = c.x.middleCols(h * c.head_dim, c.head_dim);
      CHECK(normalized(norm, head) == y.middleCols(h * c.head_dim, c.head_dim));
    }
  }
}

TEST_CASE_TEMPLATE("the scale of the input cancels, up to the limits of the scalar", Scalar, float, double) {
  using Limits = std::numeric_limits<Scalar>;
  const RmsNorm<Scalar> norm(ones<Scalar>(7), 1e-30);
  Vector<Scalar> x(7);
  x << 1, -2, 0, Scalar(0.5), Scalar(0.25), -1, 2;
  Vector<Scalar> expected = x;
  norm.apply(expected);
  for (const Scalar scale : {Scalar(1e-6), Scalar(1e6), Limits::max() / 2}) {
    Vector<Scalar> y = x * scale;
    norm.apply(y);
    CHECK((y - expected).cwiseAbs().maxCoeff() <= 8 * Limits::epsilon());
  }

  // Degenerate rows (design.md, section 4): zeros, denormals, one huge outlier.
  Vector<Scalar> zero = Vector<Scalar>::Zero(7);
  norm.apply(zero);
  CHECK(zero == Vector<Scalar>::Zero(7));
  Vector<Scalar> denormal = Vector<Scalar>::Constant(7, Limits::denorm_min());
  norm.apply(denormal);
  CHECK(all_finite(denormal));
  Vector<Scalar> outlier = Vector<Scalar>::Ones(7);
  outlier[3] = -Limits::max();
  norm.apply(outlier);
  CHECK(outlier[3] == doctest::Approx(-std::sqrt(7.0)));
  CHECK(all_finite(outlier));
  CHECK(std::abs(outlier[0]) < Scalar(1e-37));
}

TEST_CASE_TEMPLATE("RMS normalization refuses bad input and writes nothing", Scalar, float, double) {
  CHECK_REFUSED(RmsNorm<Scalar>{Vector<Scalar>()}, "weight is empty");
  for (const double bad : {test::nan, test::infinity, -test::infinity})
    CHECK_REFUSED(RmsNorm<Scalar>{Vector<Scalar>::Constant(4, static_cast<Scalar>(bad))},
                  "weight has a value");
  for (const double bad : {test::nan, test::infinity, 0.0, -1e-6})
    CHECK_REFUSED(RmsNorm<Scalar>(ones<Scalar>(4), bad), "epsilon is");

  const RmsNorm<Scalar> norm(ones<Scalar>(4));
  CHECK(norm.head_dim() == 4);
  CHECK(norm.epsilon() == 1e-6);
  CHECK(norm.weight() == ones<Scalar>(4));
  Batch<Scalar> x = Batch<Scalar>::Ones(3, 8), out = Batch<Scalar>::Constant(3, 8, 5), narrow(3, 7),
                nothing(3, 0);
  CHECK_REFUSED(norm.apply(narrow),
                "7 coordinates a token, expected a positive multiple of the head dimension 4");
  CHECK_REFUSED(norm.apply(nothing), "0 coordinates a token");
  CHECK_REFUSED(norm.apply_to(x, out.leftCols(4)), "out is 3 x 4, expected 3 x 8");
  CHECK_REFUSED(norm.apply_to(x, out.topRows(2)), "out is 2 x 8, expected 3 x 8");
  Vector<Scalar> token = ones<Scalar>(4), odd = ones<Scalar>(5), token_out = Vector<Scalar>::Constant(4, 5);
  CHECK_REFUSED(norm.apply(odd), "5 coordinates a token");
  CHECK_REFUSED(norm.apply_to(token, odd), "out is 5 x 1, expected 4 x 1");
  for (const double bad : {test::nan, test::infinity, -test::infinity}) {
    x(2, 7) = static_cast<Scalar>(bad);
    const Batch<Scalar> before = x;
    CHECK_REFUSED(norm.apply(x), "not finite");
    CHECK_REFUSED(norm.apply_to(x, out), "not finite");
    CHECK(std::memcmp(before.data(), x.data(), sizeof(Scalar) * static_cast<std::size_t>(x.size())) == 0);
    token[3] = static_cast<Scalar>(bad);
    CHECK_REFUSED(norm.apply(token), "not finite");
    CHECK_REFUSED(norm.apply_to(token, token_out), "not finite");
    CHECK(token.head(3) == ones<Scalar>(3));
  }
  CHECK(out == Batch<Scalar>::Constant(3, 8, 5));
  CHECK(token_out == Vector<Scalar>::Constant(4, 5));
}
