// SPDX-License-Identifier: Apache-2.0
#include "wushkv/recipe/recipes.hpp"

#include <set>

#include "support.hpp"
#include "wushkv/calibrate/build.hpp"
#include "wushkv/quantize/quest.hpp"
#include "wushkv/recipe/tune.hpp"
#include "wushkv/transform/group_hadamard.hpp"

using namespace wushkv;

namespace {

constexpr AttentionHeads shape{.query_heads = 4, .kv_heads = 2, .key_dim = 16, .value_dim = 8};

// Keys and values around means far from zero, of unlike scales.
LayerStatistics any_statistics(test::Random& random, Index tokens = 96) {
  LayerStatistics statistics(shape);
  statistics.set_output_projection(random.batch(4 * 8, 24));
  statistics.gather_attention();
  statistics.keep_sample(tokens);
  const Vector<double> scales = random.vector(2 * 16).array().exp();
  Batch<double> k = random.batch(tokens, 2 * 16) * scales.asDiagonal();
  k.rowwise() += 3 * random.vector(2 * 16).transpose();
  statistics.add(random.batch(tokens, 4 * 16), k, random.batch(tokens, 2 * 8));
  return statistics;
}

std::vector<TuningTokens> key_tokens(const LayerStatistics& statistics) {
  return {tuning_keys(statistics.sample(), 0), tuning_keys(statistics.sample(), 1)};
}

}  // namespace

TEST_CASE("the tuning loss is the weighted mean of eᵀAe, and of eᵀHe in original coordinates") {
  test::Random random(820);
  const LayerStatistics statistics = any_statistics(random);
  const LayerTransforms transforms = build_transforms(statistics, {.construction = Construction::Joint});
  for (Index h = 0; h < 2; ++h) {
    const HeadTransform& head = transforms.values[static_cast<std::size_t>(h)];
    const TuningTokens tokens = tuning_values(statistics.sample(), h);
    REQUIRE(tokens.x.rows() == 96);
    const Codec codec(head.centered(), Quest<double>(2));
    const Batch<double> error = codec.reconstruct(tokens.x) - tokens.x;
    const SquareMatrix<double> t = to_matrix(head.linear), hessian = t.transpose() * head.sensitivity * t;
    double sum = 0;
    for (Index i = 0; i < error.rows(); ++i)
      sum += tokens.weights[i] * error.row(i).dot(error.row(i) * hessian);
    CHECK(tuning_loss(codec, head.sensitivity, tokens) ==
          doctest::Approx(sum / tokens.weights.sum()).epsilon(1e-9));
  }
}

TEST_CASE("tuning finds the least of its candidates, by head and by layer") {
  test::Random random(821);
  const LayerStatistics statistics = any_statistics(random);
  const std::vector<HeadTransform> heads =
      build_transforms(statistics, {.construction = Construction::Wush}).keys;
  const std::vector<TuningTokens> tokens = key_tokens(statistics);
  const auto codec_of = [](const HeadTransform& head, double kappa) {
    return Codec(head.centered(), Affine<double>::percentile(kappa, 2));
  };
  const auto loss = [&](std::size_t h, double kappa) {
    return tuning_loss(codec_of(heads[h], kappa), heads[h].sensitivity, tokens[h]);
  };
  const Tuned both = tune(percentile_candidates, heads, tokens, codec_of);
  CHECK(both.loss == doctest::Approx(loss(0, both.parameter) + loss(1, both.parameter)).epsilon(1e-12));
  for (const double kappa : percentile_candidates) CHECK(both.loss <= loss(0, kappa) + loss(1, kappa));
  double by_head = 0;
  for (std::size_t h = 0; h < 2; ++h) {
    const Tuned one = tune(percentile_candidates, {&heads[h], 1}, {&tokens[h], 1}, codec_of);
    for (const double kappa : percentile_candidates) CHECK(one.loss <= loss(h, kappa));
    by_head += one.loss;
  }
  CHECK(by_head <= both.loss);
  CHECK(both.loss < loss(0, oscar_key_percentile) + loss(1, oscar_key_percentile));
}

TEST_CASE("other signs: the same energy and sensitivity, another mixture") {
  test::Random random(822);
  const LayerStatistics statistics = any_statistics(random);
  for (const Index group : {0, 4}) {
    const HeadTransform head = build_transforms(statistics, {.construction = Construction::Joint,
                                                             .key_group_size = group,
                                                             .exponent = feedback_exponent})
                                   .keys[0];
    Vector<double> signs(16);
    for (double& sign : signs) sign = random.pick({-1.0, 1.0});
    const HeadTransform other = with_signs(head, signs);
    const SquareMatrix<double> t = to_matrix(head.linear), u = to_matrix(other.linear);
    CHECK(other.linear.block_count() == head.linear.block_count());
    CHECK(test::identical(other.mean, head.mean));
    // U = R T with R orthogonal, so UᵀU is TᵀT; A follows.
    CHECK(test::relative_difference(u.transpose() * u, t.transpose() * t) < 1e-12);
    const SquareMatrix<double> hessian = t.transpose() * head.sensitivity * t;
    CHECK(test::relative_difference(u.transpose() * other.sensitivity * u, hessian) < 1e-10);
    CHECK(test::relative_difference(other.linear.inverse(Batch<double>(other.linear.forward(t))), t) < 1e-10);
    // Undone: Had X becomes Had S X, and that again Had X.
    CHECK(test::relative_difference(to_matrix(with_signs(other, signs).linear), t) < 1e-12);
    const SquareMatrix<double> had = to_matrix(group_hadamard<double>(16, group == 0 ? 16 : group));
    CHECK(test::relative_difference(u, had * signs.asDiagonal() * had.transpose() * t) < 1e-12);
  }
}

TEST_CASE("chosen signs lose least of those tried, and repeat") {
  test::Random random(823);
  const LayerStatistics statistics = any_statistics(random);
  const HeadTransform head = build_transforms(statistics, {.construction = Construction::Joint}).keys[1];
  const TuningTokens tokens = tuning_keys(statistics.sample(), 1);
  const auto codec_of = [](const HeadTransform& h) { return Codec(h.centered(), Quest<double>(2)); };
  double previous = tuning_loss(codec_of(head), head.sensitivity, tokens);
  CHECK(test::identical(to_matrix(choose_signs(head, tokens, codec_of, 0).linear), to_matrix(head.linear)));
  std::set<double> seen{previous};
  for (const int trials : {1, 4, 16}) {
    const HeadTransform chosen = choose_signs(head, tokens, codec_of, trials, 5);
    CHECK(test::identical(to_matrix(choose_signs(head, tokens, codec_of, trials, 5).linear),
                          to_matrix(chosen.linear)));
    const double loss = tuning_loss(codec_of(chosen), chosen.sensitivity, tokens);
    CHECK(loss <= previous);
    previous = loss;
    seen.insert(loss);
  }
  CHECK(seen.size() > 1);
}

TEST_CASE("recipes are made of the parts they name") {
  test::Random random(824);
  const LayerStatistics statistics = any_statistics(random);
  const Batch<double> x = random.batch(20, 16);
  using Paper = PaperRecipe<double, double>;
  const HeadTransform wush = build_transforms(statistics, Paper::build_options()).keys[0];
  const Codec paper(wush.centered(), Affine<double>::percentile(.96, 3));
  CHECK(test::relative_difference(Paper::key_codec(wush, 3).reconstruct(x), paper.reconstruct(x)) < 1e-12);
  const Codec values(wush.centered(), Affine<double>::percentile(.92, 3));
  CHECK(test::relative_difference(Paper::value_codec(wush, 3).reconstruct(x), values.reconstruct(x)) < 1e-12);

  using Best = BestRecipe<double, double>;
  CHECK(Best::build_options().construction == Construction::Joint);
  CHECK(Best::build_options().exponent == 0.75);
  const HeadTransform joint = build_transforms(statistics, Best::build_options()).keys[0];
  const Codec best(
      joint.centered(), Affine<double>::min_max(2), 0,
      StepSearch(Feedback<double>(Sensitivity<double>(joint.sensitivity)), affine_range_factors));
  CHECK(test::relative_difference(Best::key_codec(joint, 2).reconstruct(x), best.reconstruct(x)) < 1e-12);
  // The default at its storage: what the README calls 2.5 bits at 64 elements is 4 at 16.
  CHECK(BestRecipe<float>::value_codec(joint, 2).bits_per_element() == 4);
  CHECK(BestRecipe<float>::name == "best");

  // On the tokens that both were made from, best loses less.
  const TuningTokens tokens = tuning_keys(statistics.sample(), 0);
  CHECK(tuning_loss(BestRecipe<float>::key_codec(joint, 2), joint.sensitivity, tokens) <
        0.7 * tuning_loss(PaperRecipe<float>::key_codec(wush, 2),
                          SquareMatrix<double>(to_matrix(wush.linear).inverse().transpose() *
                                               to_matrix(joint.linear).transpose() * joint.sensitivity *
                                               to_matrix(joint.linear) * to_matrix(wush.linear).inverse()),
                          tokens));
}

TEST_CASE("what tuning refuses") {
  test::Random random(825);
  const LayerStatistics statistics = any_statistics(random);
  const std::vector<HeadTransform> heads =
      build_transforms(statistics, {.construction = Construction::Wush}).keys;
  std::vector<TuningTokens> tokens = key_tokens(statistics);
  const auto codec_of = [](const HeadTransform& head, double kappa) {
    return Codec(head.centered(), Affine<double>::percentile(kappa, 2));
  };
  CHECK_REFUSED(tuning_keys(statistics.sample(), 2), "KV head");
  CHECK_REFUSED(tune(std::span<const double>(), heads, tokens, codec_of), "0 candidates");
  CHECK_REFUSED(tune(percentile_candidates, {heads.data(), 1}, tokens, codec_of), "1 heads and tokens of 2");
  const HeadTransform blind(heads[0].linear);
  CHECK_REFUSED(tune(percentile_candidates, {&blind, 1}, {tokens.data(), 1}, codec_of), "sensitivity");
  CHECK_REFUSED(sensitivity_of<float>(blind), "no sensitivity");
  const Codec codec = codec_of(heads[0], .9);
  tokens[0].weights.setZero();
  CHECK_REFUSED(tuning_loss(codec, heads[0].sensitivity, tokens[0]), "not all 0");
  tokens[0].weights[0] = test::nan;
  CHECK_REFUSED(tuning_loss(codec, heads[0].sensitivity, tokens[0]), "weights");
  CHECK_REFUSED(tuning_loss(codec, heads[0].sensitivity, {Batch<double>(0, 16), Vector<double>(0)}),
                "0 tokens came");
  CHECK_REFUSED(tuning_loss(codec, heads[0].sensitivity, {random.batch(3, 15), random.vector(3)}), "x");
  CHECK_REFUSED(with_signs(heads[0], Vector<double>::Ones(15)), "signs");
  CHECK_REFUSED(with_signs(heads[0], Vector<double>::Zero(16)), "neither 1 nor -1");
}
