// SPDX-License-Identifier: Apache-2.0
#include "wushkv/quantize/feedback.hpp"

#include <vector>

#include "allocation_counter.hpp"
#include "support.hpp"
#include "wushkv/codec/codec.hpp"
#include "wushkv/io/safetensors.hpp"
#include "wushkv/quantize/quantize.hpp"
#include "wushkv/quantize/step_search.hpp"
#include "wushkv/transform/identity.hpp"

using namespace wushkv;

namespace {

// What a rounding makes of a batch of transformed tokens.
template <class Q>
struct Result {
  Batch<code_t<Q>> codes;
  Batch<double> values, errors;

  Vector<double> losses(const SquareMatrix<double>& a) const {
    return (errors * a).cwiseProduct(errors).rowwise().sum();
  }
};

// `together` tokens a call.
template <class Q, class R>
Result<Q> round_all(const Q& quantizer, const R& rounding, const Batch<typename Q::Scalar>& y,
                    Index group_size, Index together) {
  const Codec codec(Identity<typename Q::Scalar>(y.cols()), quantizer, group_size, rounding);
  Result<Q> result{Batch<code_t<Q>>(y.rows(), y.cols()), Batch<double>(y.rows(), y.cols()), {}};
  for (Index at = 0; at < y.rows(); at += together) {
    const Index count = std::min(together, y.rows() - at);
    const auto encoded = codec.encode(y.middleRows(at, count));
    result.codes.middleRows(at, count) = encoded.codes;
    result.values.middleRows(at, count) = codec.decode_transformed(encoded).template cast<double>();
  }
  result.errors = y.template cast<double>() - result.values;
  return result;
}

// The formula, token by token and group by group, as design.md has it: the measure of the lanes.
template <class Q>
Batch<double> by_definition(const Q& quantizer, const SquareMatrix<double>& a, const Batch<double>& y,
                            Index group_size, bool feedback, const std::vector<double>& factors) {
  const Sensitivity<double> sensitivity(a);
  const Index dim = y.cols();
  Batch<double> values(y.rows(), dim);
  for (Index t = 0; t < y.rows(); ++t) {
    Vector<double> kept = Vector<double>::Zero(dim), kept_errors = kept;
    double loss = 0;
    for (Index group = 0; group < dim; group += group_size) {
      const Vector<double> of_group = y.row(t).segment(group, group_size).transpose();
      Vector<double> best_value, best_error;
      double best = test::infinity;
      for (const double factor : factors) {
        Vector<double> value = kept, error = kept_errors;
        const auto params = quantizer.fit(of_group, factor);
        double sum = loss;
        for (Index j = group; j < group + group_size; ++j) {
          double heard = 0;
          for (Index i = 0; i < j; ++i) heard += sensitivity.feedback()(j, i) * error[i];
          value[j] = quantizer.decode(quantizer.encode(y(t, j) + (feedback ? heard : 0), params), params);
          error[j] = y(t, j) - value[j];
          sum += sensitivity.weights()[j] * (error[j] + heard) * (error[j] + heard);
        }
        if (sum < best) {
          best = sum;
          best_value = value;
          best_error = error;
        }
      }
      kept = best_value;
      kept_errors = best_error;
      loss = best;
    }
    values.row(t) = kept.transpose();
  }
  return values;
}

template <class Scalar>
using HalfAffine = Affine<Scalar, Dynamic, Eigen::half>;

}  // namespace

TEST_CASE("reference: F, D, values and losses within 1e-9") {
  const SafetensorsFile file(test::data("feedback.safetensors"));
  for (const Index d : {16, 64}) {
    const std::string name = "d" + std::to_string(d);
    const SquareMatrix<double> a = file.matrix<double>(name + ".A", {d, d}),
                               f = file.matrix<double>(name + ".F", {d, d});
    const Batch<double> y = file.matrix<double>(name + ".y");
    const Sensitivity<double> sensitivity(a);
    const SquareMatrix<double> ours =
        SquareMatrix<double>(sensitivity.feedback().transpose()) + SquareMatrix<double>::Identity(d, d);
    CHECK(test::relative_difference(ours, f) < 1e-9);
    CHECK(test::relative_difference(
              sensitivity.scale() * ours * sensitivity.weights().asDiagonal() * ours.transpose(), a) < 1e-9);
    for (const int bits : {2, 3}) {
      const std::string of_bits = name + ".b" + std::to_string(bits);
      const Quest<double> quest(bits, 1.15);
      const auto with = round_all(quest, Feedback<double>(sensitivity), y, d, 7);
      const auto without = round_all(quest, Nearest(), y, d, 7);
      CHECK(test::relative_difference(with.values, file.matrix<double>(of_bits + ".value")) < 1e-9);
      CHECK(test::relative_difference(with.losses(a), file.vector<double>(of_bits + ".loss")) < 1e-9);
      CHECK(test::relative_difference(without.losses(a), file.vector<double>(of_bits + ".loss_nearest")) <
            1e-9);
      CHECK(sensitivity.loss(with.errors.row(3).transpose()) ==
            doctest::Approx(with.losses(a)[3]).epsilon(1e-9));
    }
  }
}

TEST_CASE("the lanes do what the formula says, for every group, with and without feedback and search") {
  test::Random random(800);
  for (int round = 0; round < 12; ++round) {
    const Index dim = random.pick({1, 2, 6, 16, 24, 64}),
                group = random.pick({Index{1}, dim % 2 == 0 ? dim / 2 : dim, dim});
    const int bits = static_cast<int>(random.integer(1, 4));
    const SquareMatrix<double> a = random.definite(dim);
    const Batch<double> y = random.batch(random.integer(1, 40), dim);
    const Sensitivity<double> sensitivity(a);
    const std::vector<double> factors = {.6, .8, 1, 1.2};
    const auto check = [&](const auto& quantizer) {
      const auto same = [&](const auto& rounding, bool feedback, const std::vector<double>& tried) {
        const auto ours = round_all(quantizer, rounding, y, group, y.rows());
        CHECK(test::relative_difference(ours.values, by_definition(quantizer, a, y, group, feedback, tried)) <
              1e-12);
      };
      same(Feedback<double>(sensitivity), true, {1});
      same(SensitiveNearest<double>(sensitivity), false, {1});
      same(StepSearch(Feedback<double>(sensitivity), factors), true, factors);
      same(StepSearch(SensitiveNearest<double>(sensitivity), factors), false, factors);
    };
    check(Quest<double>(bits));
    check(HalfAffine<double>::percentile(.9, bits));
    check(LloydMax<double>(bits));
  }
}

TEST_CASE_TEMPLATE("a token's codes are the same alone and among others, for every quantizer", Scalar, float,
                   double) {
  test::Random random(801);
  for (int round = 0; round < 8; ++round) {
    const Index dim = random.pick({3, 8, 48, 64, 128}), group = random.pick({Index{1}, dim});
    const Sensitivity<Scalar> sensitivity(random.definite(dim));
    const Batch<Scalar> y = random.batch<Scalar>(random.integer(2, 70), dim);
    const auto check = [&](const auto& quantizer, const auto& rounding) {
      const auto alone = round_all(quantizer, rounding, y, group, 1);
      for (const Index together : {Index{2}, Index{7}, Index{8}, Index{33}, y.rows()})
        CHECK(test::identical(round_all(quantizer, rounding, y, group, together).codes, alone.codes));
    };
    const Feedback<Scalar> feedback(sensitivity);
    check(Quest<Scalar, 2>(), feedback);
    check(HalfAffine<Scalar>::percentile(.92, 3), feedback);
    check(LloydMax<Scalar>(3), feedback);
    check(PassThrough<Scalar>(), feedback);
    check(HalfAffine<Scalar>::min_max(2), StepSearch(feedback, affine_range_factors));
    check(Quest<Scalar, 2>(), StepSearch(BestOf<Scalar>(sensitivity), quest_step_factors));
    check(LloydMax<Scalar>(2), BestOf<Scalar>(sensitivity));
  }
}

TEST_CASE("nearest rounding by lanes is nearest rounding, to the last code") {
  test::Random random(802);
  const Sensitivity<float> sensitivity(random.definite(64));
  const Batch<float> y = random.batch<float>(50, 64);
  for (const int bits : {1, 2, 3, 4, 8}) {
    const auto check = [&](const auto& quantizer) {
      CHECK(test::identical(round_all(quantizer, SensitiveNearest<float>(sensitivity), y, 16, 50).codes,
                            round_all(quantizer, Nearest(), y, 16, 50).codes));
    };
    check(Quest<float>(bits));
    check(HalfAffine<float>::min_max(bits));
    check(HalfAffine<float>::percentile(.92, bits));
    check(LloydMax<float>(bits));
  }
}

TEST_CASE("without correlation there is nothing to feed back") {
  test::Random random(803);
  const Vector<double> diagonal = random.vector(24).cwiseAbs().array() + 0.1;
  const Batch<double> y = random.batch(20, 24);
  const Quest<double> quest(2);
  CHECK(test::identical(
      round_all(quest, Feedback<double>(Sensitivity<double>(SquareMatrix<double>(diagonal.asDiagonal()))), y,
                24, 20)
          .codes,
      round_all(quest, Nearest(), y, 24, 20).codes));
}

TEST_CASE(
    "feedback lowers the loss, a search lowers it further, and the better of two is no worse than either") {
  test::Random random(804);
  double nearest_sum = 0, feedback_sum = 0, search_sum = 0;
  for (int round = 0; round < 20; ++round) {
    const Index dim = random.pick({16, 64});
    const SquareMatrix<double> a = random.definite(dim);
    const Sensitivity<double> sensitivity(a);
    const Batch<double> y = random.batch(30, dim);
    const Affine<double> affine = Affine<double>::min_max(2);
    for (const Index group : {dim, dim / 2}) {
      const Vector<double> nearest = round_all(affine, Nearest(), y, group, 30).losses(a),
                           feedback =
                               round_all(affine, Feedback<double>(sensitivity), y, group, 30).losses(a),
                           best = round_all(affine, BestOf<double>(sensitivity), y, group, 30).losses(a);
      const Vector<double> search =
          round_all(affine, StepSearch(Feedback<double>(sensitivity), affine_range_factors), y, group, 30)
              .losses(a);
      CHECK((best - nearest.cwiseMin(feedback)).cwiseAbs().maxCoeff() <= 1e-9 * nearest.maxCoeff());
      nearest_sum += (nearest / nearest.mean()).mean();
      feedback_sum += feedback.mean() / nearest.mean();
      search_sum += search.mean() / nearest.mean();
      if (group < dim) continue;
      // One group: of each token's candidates the least.
      Vector<double> least = Vector<double>::Constant(30, test::infinity);
      for (const double factor : affine_range_factors)
        least = least.cwiseMin(
            round_all(Affine<double>::shrunk(factor, 2), Feedback<double>(sensitivity), y, group, 30)
                .losses(a));
      CHECK((search - least).cwiseAbs().maxCoeff() <= 1e-9 * least.maxCoeff());
    }
  }
  CHECK(feedback_sum < 0.8 * nearest_sum);
  CHECK(search_sum < 0.8 * feedback_sum);
}

TEST_CASE_TEMPLATE("the units of values and of A do not matter", Scalar, float, double) {
  test::Random random(805);
  const SquareMatrix<double> a = random.definite(32);
  const Batch<Scalar> y = random.batch<Scalar>(17, 32);
  const auto quantizer = Affine<Scalar>::min_max(2);
  const auto codes = [&](double of_a, double of_y) {
    const StepSearch rounding(BestOf<Scalar>(Sensitivity<Scalar>(SquareMatrix<double>(of_a * a))),
                              affine_range_factors);
    return round_all(quantizer, rounding, Batch<Scalar>(static_cast<Scalar>(of_y) * y), 8, 17).codes;
  };
  const auto expected = codes(1, 1);
  for (const double of_a : {0x1p-400, 0x1p-20, 0x1p300}) CHECK(test::identical(codes(of_a, 1), expected));
  for (const double of_y : {0x1p-60, 0x1p-20, 0x1p20, 0x1p100})
    CHECK(test::identical(codes(1, of_y), expected));
}

TEST_CASE_TEMPLATE("degenerate data and a near-singular A decode to finite values", Scalar, float, double) {
  test::Random random(806);
  const Index dim = 32;
  constexpr Scalar largest = std::numeric_limits<Scalar>::max(),
                   least = std::numeric_limits<Scalar>::denorm_min();
  std::vector<Vector<Scalar>> tokens = {Vector<Scalar>::Zero(dim),
                                        Vector<Scalar>::Constant(dim, 3.5),
                                        Vector<Scalar>::Constant(dim, -7),
                                        Vector<Scalar>::Unit(dim, 5) * 1000,
                                        Vector<Scalar>::Unit(dim, 0) * largest,
                                        Vector<Scalar>::Constant(dim, largest),
                                        Vector<Scalar>::Constant(dim, least),
                                        Vector<Scalar>::Unit(dim, dim - 1) * least};
  tokens.push_back(random.vector<Scalar>(dim) * (largest / 8));
  tokens.push_back(random.vector<Scalar>(dim) * (1000 * std::numeric_limits<Scalar>::min()));
  Batch<Scalar> y(static_cast<Index>(tokens.size()), dim);
  for (Index t = 0; t < y.rows(); ++t) y.row(t) = tokens[static_cast<std::size_t>(t)].transpose();
  const SquareMatrix<double> b = random.batch(dim, 3);
  const SquareMatrix<double> low_rank = b * b.transpose();
  for (const double rest : {1.0, 1e-4, 1e-12}) {
    const Sensitivity<Scalar> sensitivity(
        SquareMatrix<double>(low_rank + rest * SquareMatrix<double>::Identity(dim, dim)));
    const auto check = [&](const auto& quantizer, const auto& rounding) {
      for (const Index group : {Index{8}, dim}) {
        const auto result = round_all(quantizer, rounding, y, group, y.rows());
        CHECK(all_finite(result.values));
        CHECK(result.values.row(0).isZero(0));
        CHECK(result.codes.template cast<int>().maxCoeff() < (1 << quantizer.bits()));
      }
    };
    const Feedback<Scalar> feedback(sensitivity);
    check(Quest<Scalar>(2), feedback);
    check(HalfAffine<Scalar>::min_max(2), feedback);
    check(LloydMax<Scalar>(3), feedback);
    check(HalfAffine<Scalar>::min_max(2), StepSearch(feedback, affine_range_factors));
    check(Quest<Scalar, Dynamic, Eigen::bfloat16>(4),
          StepSearch(BestOf<Scalar>(sensitivity), quest_step_factors));
  }
}

TEST_CASE("encoding allocates nothing, alone and in batches") {
  test::Random random(807);
  for (const Index dim : {64, 80, 96, 112, 128, 192, 256, 512})
    for (const Index group : {dim, Index{16}}) {
      const StepSearch rounding(Feedback<float>(Sensitivity<float>(random.definite(dim))),
                                affine_range_factors);
      const Codec codec(Identity<float>(dim), HalfAffine<float>::min_max(2), group, rounding);
      for (const Index tokens : {1, 8, 32}) {
        CAPTURE(dim);
        CAPTURE(group);
        CAPTURE(tokens);
        const Batch<float> y = random.batch<float>(tokens, dim);
        std::vector<std::uint8_t> codes(static_cast<std::size_t>(y.size()));
        std::vector<HalfAffine<float>::Params> params(static_cast<std::size_t>(tokens * dim / group));
        CHECK(test::allocations_of([&] {
                codec.encode_transformed({y.data(), codes.size()}, tokens, codes, params);
              }) == 0);
      }
    }
}

TEST_CASE("levels in closed form take what is no number") {
  const UniformLevels<float> levels{
      .divisor = 0.5F, .shift = 0, .first = -2, .top = 3, .origin = 1.5F, .step = 0.5F};
  const float infinite = std::numeric_limits<float>::infinity(),
              none = std::numeric_limits<float>::quiet_NaN();
  CHECK(levels.code(-infinite) == 0);
  CHECK(levels.code(infinite) == 3);
  CHECK(levels.code(none) == 0);
  // Errors that overflow on their way leave finite values in all other tokens, and in their own.
  test::Random random(809);
  SquareMatrix<double> a = random.definite(8);
  a.row(0) *= 1e5;
  a.col(0) *= 1e5;
  Batch<float> y = random.batch<float>(3, 8);
  y.row(1) *= 1e38F;
  const auto check = [&](const auto& quantizer) {
    CHECK(all_finite(round_all(quantizer, Feedback<float>(Sensitivity<float>(a)), y, 8, 3).values));
  };
  check(Quest<float>(2));
  check(LloydMax<float>(2));
  // A constant group at the end of the range: no other of its codes may leave it.
  y.row(2).setConstant(std::numeric_limits<float>::max());
  for (const int bits : {1, 2, 3, 8}) {
    check(Affine<float>::min_max(bits));
    check(Affine<float, Dynamic, Eigen::bfloat16>::percentile(.9, bits));
  }
  // One loss that overflows does not hide the other.
  Batch<float> spike = random.batch<float>(1, 8);
  spike(0, 3) = std::numeric_limits<float>::max();
  const SquareMatrix<double> weights = random.definite(8);
  const Sensitivity<float> sensitivity(weights);
  const auto loss = [&](const auto& rounding) {
    return round_all(Affine<float>::min_max(1), rounding, spike, 8, 1).losses(weights)[0];
  };
  CHECK(loss(BestOf<float>(sensitivity)) <=
        1.001 * std::min(loss(Feedback<float>(sensitivity)), loss(SensitiveNearest<float>(sensitivity))));
}

TEST_CASE("what is refused") {
  test::Random random(808);
  const SquareMatrix<double> a = random.definite(4);
  CHECK_REFUSED(Sensitivity<float>(random.batch(4, 3)), "Sensitivity: A");
  SquareMatrix<double> bad = a;
  bad(1, 2) = test::nan;
  CHECK_REFUSED(Sensitivity<float>(bad), "Sensitivity: A has a value that is not finite");
  bad = a;
  bad(1, 2) += 0.1 * a.maxCoeff();
  CHECK_REFUSED(Sensitivity<float>(bad), "not symmetric");
  CHECK_REFUSED(Sensitivity<float>(SquareMatrix<double>(-a)), "singular or indefinite");
  CHECK_REFUSED(Sensitivity<float>(SquareMatrix<double>::Zero(3, 3)), "singular or indefinite");
  const Sensitivity<float> sensitivity(a);
  CHECK_REFUSED(sensitivity.loss(random.vector(5)), "Sensitivity: e");
  const Feedback<float> feedback(sensitivity);
  const std::vector<double> none, negative = {1, -1}, many(17, 1.0);
  CHECK_REFUSED(StepSearch(feedback, none), "factors has 0 entries");
  CHECK_REFUSED(StepSearch(feedback, negative), "a factor is -1");
  CHECK_REFUSED(StepSearch(feedback, many), "factors has 17 entries");
  CHECK_REFUSED(Codec(Identity<float>(8), Quest<float>(2), 0, feedback), "rounding is for dimension 4");
  // Another scalar, or a step that cannot be scaled: no rounding for that quantizer.
  static_assert(Rounding<Feedback<float>, PassThrough<float>>);
  static_assert(!Rounding<Feedback<float>, Quest<double>>);
  static_assert(!Rounding<StepSearch<Feedback<float>>, PassThrough<float>>);
  static_assert(BatchRounding<Feedback<float>, Quest<float>> && !BatchRounding<Nearest, Quest<float>>);
}
