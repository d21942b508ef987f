// SPDX-License-Identifier: Apache-2.0
#include "wushkv/calibrate/fold.hpp"

#include "support.hpp"
#include "wushkv/calibrate/build.hpp"
#include "wushkv/transform/block_diagonal.hpp"
#include "wushkv/transform/dense.hpp"
#include "wushkv/transform/hadamard.hpp"

using namespace wushkv;

namespace {

constexpr Index model = 24;
const AttentionHeads heads{6, 2, 8, 12};

Dense<double> any_dense(test::Random& random) {
  return Dense<double>(SquareMatrix<double>::Identity(12, 12) + random.matrix(12) / 12);
}

// One token's module output: values of each KV head, mixed by weights that stand for attention (rows sum to
// one), then W_O.
struct Module {
  Batch<double> w_v;  // [kv_heads * value_dim, model]
  Batch<double> w_o;  // [query_heads * value_dim, model]
  Vector<double> b_v, b_o;

  explicit Module(test::Random& random)
      : w_v(random.batch(24, model)),
        w_o(random.batch(72, model)),
        b_v(random.vector(24)),
        b_o(random.vector(model)) {}

  Batch<double> output(const Batch<double>& x, const Batch<double>& weights) const {
    const Batch<double> v = (x * w_v.transpose()).rowwise() + b_v.transpose();
    Batch<double> o(x.rows(), 72);
    for (Index h = 0; h < 6; ++h) o.middleCols(12 * h, 12) = weights * v.middleCols(12 * (h / 3), 12);
    return (o * w_o).rowwise() + b_o.transpose();
  }
};

Batch<double> any_weights(test::Random& random, Index tokens) {
  Batch<double> weights = random.batch(tokens, tokens).array().exp();
  for (Index t = 0; t < tokens; ++t) weights.row(t) /= weights.row(t).sum();
  return weights;
}

}  // namespace

TEST_CASE("folding changes no output, and the projection yields transformed values") {
  test::Random random(150);
  const std::vector<Dense<double>> transforms = {any_dense(random), any_dense(random)};
  const Batch<double> x = random.batch(9, model), weights = any_weights(random, 9);
  const Module plain(random);
  Module folded = plain;
  fold_values(transforms, heads, folded.w_v, folded.w_o, folded.b_v, folded.b_o);
  CHECK(test::relative_difference(folded.output(x, weights), plain.output(x, weights)) < 1e-12);
  CHECK(test::identical(folded.b_o, plain.b_o));
  for (Index h = 0; h < 2; ++h) {
    const auto value = [&](const Module& m) {
      return Batch<double>((x * m.w_v.middleRows(12 * h, 12).transpose()).rowwise() +
                           m.b_v.segment(12 * h, 12).transpose());
    };
    CHECK(test::relative_difference(value(folded),
                                    transforms[static_cast<std::size_t>(h)].forward(value(plain))) < 1e-12);
  }
  // Without biases the weights come out the same.
  Module weights_only = plain;
  fold_values(transforms, heads, weights_only.w_v, weights_only.w_o);
  CHECK(test::identical(weights_only.w_v, folded.w_v));
  CHECK(test::identical(weights_only.w_o, folded.w_o));
}

TEST_CASE("a centered transform folds its mean into both biases") {
  test::Random random(151);
  std::vector<Centered<Dense<double>>> transforms;
  for (int h = 0; h < 2; ++h) transforms.emplace_back(any_dense(random), random.vector(12));
  const Batch<double> x = random.batch(9, model), weights = any_weights(random, 9);
  const Module plain(random);
  Module folded = plain;
  fold_values(transforms, heads, folded.w_v, folded.w_o, folded.b_v, folded.b_o);
  CHECK(test::relative_difference(folded.output(x, weights), plain.output(x, weights)) < 1e-12);
  const Batch<double> v = (x * plain.w_v.topRows(12).transpose()).rowwise() + plain.b_v.head(12).transpose();
  const Batch<double> stored =
      (x * folded.w_v.topRows(12).transpose()).rowwise() + folded.b_v.head(12).transpose();
  CHECK(test::relative_difference(stored, transforms[0].forward(v)) < 1e-12);
}

TEST_CASE("joint transforms fold: outputs within 1e-9, and the projection yields what the codec stores") {
  test::Random random(155);
  for (const double exponent : {0.5, 0.75})
    for (const Index group : {0, 4}) {
      const Batch<double> x = random.batch(60, model), weights = any_weights(random, 60);
      const Module plain(random);
      const Batch<double> v = (x * plain.w_v.transpose()).rowwise() + plain.b_v.transpose();
      LayerStatistics statistics(heads);
      statistics.set_output_projection(plain.w_o);
      statistics.gather_attention();
      statistics.add(random.batch(60, 48), random.batch(60, 16), v);
      const LayerTransforms built = build_transforms(
          statistics, {.construction = Construction::Joint, .value_group_size = group, .exponent = exponent});
      Module folded = plain;
      fold_values(centered(built.values), heads, folded.w_v, folded.w_o, folded.b_v, folded.b_o);
      CHECK(test::relative_difference(folded.output(x, weights), plain.output(x, weights)) < 1e-9);
      CHECK(test::relative_difference(folded.b_o, plain.b_o) > 1e-3);
      const Batch<double> stored = (x * folded.w_v.transpose()).rowwise() + folded.b_v.transpose();
      for (Index h = 0; h < 2; ++h)
        CHECK(test::relative_difference(stored.middleCols(12 * h, 12),
                                        built.values[static_cast<std::size_t>(h)].centered().forward(
                                            v.middleCols(12 * h, 12))) < 1e-9);
    }
}

TEST_CASE("row- and column-major, transposed, float weights, fast transforms") {
  test::Random random(152);
  const BlockDiagonal<Hadamard<double>> hadamard(Hadamard<double>(4), 3);
  const std::vector<BlockDiagonal<Hadamard<double>>> transforms(2, hadamard);
  const Module plain(random);
  Module expected = plain;
  fold_values(transforms, heads, expected.w_v, expected.w_o);
  Eigen::MatrixXd w_v = plain.w_v, w_o = plain.w_o;
  fold_values(transforms, heads, w_v, w_o);
  CHECK(test::identical(w_v, expected.w_v));
  CHECK(test::identical(w_o, expected.w_o));
  Batch<double> w_v_t = plain.w_v.transpose(), w_o_t = plain.w_o.transpose();
  fold_values(transforms, heads, w_v_t.transpose(), w_o_t.transpose());
  CHECK(test::identical(w_v_t.transpose(), expected.w_v));
  CHECK(test::identical(w_o_t.transpose(), expected.w_o));
  Batch<float> w_v_f = plain.w_v.cast<float>(), w_o_f = plain.w_o.cast<float>();
  fold_values(transforms, heads, w_v_f, w_o_f);
  CHECK(test::relative_difference(w_v_f, expected.w_v) < 1e-6);
  CHECK(test::relative_difference(w_o_f, expected.w_o) < 1e-6);
}

TEST_CASE("fused QKV rows: only the values' change") {
  test::Random random(153);
  const std::vector<Dense<double>> transforms = {any_dense(random), any_dense(random)};
  const Module plain(random);
  Module expected = plain;
  fold_values(transforms, heads, expected.w_v, expected.w_o);
  // Query heads of 8, key heads of 8, value heads of 12.
  const Batch<double> rest = random.batch(48 + 16, model);
  Batch<double> concatenated(88, model), grouped(88, model);
  concatenated << rest, plain.w_v;
  for (Index h = 0; h < 2; ++h)
    grouped.middleRows(44 * h, 44) << rest.middleRows(24 * h, 24), rest.middleRows(48 + 8 * h, 8),
        plain.w_v.middleRows(12 * h, 12);
  for (Index h = 0; h < 2; ++h) {
    const auto& transform = transforms[static_cast<std::size_t>(h)];
    fold_value_weight(transform,
                      concatenated.middleRows(fused_value_row(heads, QkvOrder::Concatenated, h), 12));
    fold_value_weight(transform, grouped.middleRows(fused_value_row(heads, QkvOrder::Grouped, h), 12));
  }
  CHECK(test::identical(concatenated.topRows(64), rest));
  CHECK(test::identical(concatenated.bottomRows(24), expected.w_v));
  for (Index h = 0; h < 2; ++h) {
    CHECK(test::identical(grouped.middleRows(44 * h, 24), rest.middleRows(24 * h, 24)));
    CHECK(test::identical(grouped.middleRows(44 * h + 24, 8), rest.middleRows(48 + 8 * h, 8)));
    CHECK(test::identical(grouped.middleRows(44 * h + 32, 12), expected.w_v.middleRows(12 * h, 12)));
  }
  // Biases of a fused projection, head by head, and of a centered transform's output.
  Vector<double> b_qkv(88);
  b_qkv << Vector<double>::Zero(64), plain.b_v;
  for (Index h = 0; h < 2; ++h)
    fold_value_bias(transforms[static_cast<std::size_t>(h)],
                    b_qkv.segment(fused_value_row(heads, QkvOrder::Concatenated, h), 12));
  Module with_bias = plain;
  fold_values(transforms, heads, with_bias.w_v, with_bias.w_o, with_bias.b_v, with_bias.b_o);
  CHECK(test::identical(b_qkv.tail(24), with_bias.b_v));
  CHECK(b_qkv.head(64).isZero(0));
  CHECK_REFUSED(fused_value_row(heads, QkvOrder::Grouped, 2), "KV head 2");
}

TEST_CASE("bad input is refused and changes nothing") {
  test::Random random(154);
  const std::vector<Dense<double>> transforms = {any_dense(random), any_dense(random)},
                                   one = {any_dense(random)};
  const std::vector<Dense<double>> wrong_size(2, Dense<double>(SquareMatrix<double>::Identity(8, 8)));
  const Module plain(random);
  Module m = plain;
  CHECK_REFUSED(fold_values(one, heads, m.w_v, m.w_o), "1 transforms, expected one a KV head, 2");
  CHECK_REFUSED(fold_values(wrong_size, heads, m.w_v, m.w_o), "dimension 8, expected 12");
  CHECK_REFUSED(fold_values(transforms, heads, m.w_o, m.w_v), "w_v is 72 x 24, expected 24 x 24");
  CHECK_REFUSED(fold_values(transforms, heads, m.w_v, m.w_v), "w_o is 24 x 24, expected 72 x 24");
  CHECK_REFUSED(fold_values(transforms, heads, m.w_v, m.w_o, m.b_o.head(5), m.b_o), "b_v is 5 x 1");
  CHECK_REFUSED(fold_values(transforms, heads, m.w_v, m.w_o, m.b_v, m.b_v.head(5)), "b_o is 5 x 1");
  CHECK(test::identical(m.w_v, plain.w_v));
  CHECK(test::identical(m.w_o, plain.w_o));
  // A fold that overflows at the last head leaves the first alone.
  const std::vector<Dense<float>> narrow(2, Dense<float>(SquareMatrix<double>::Identity(12, 12)));
  Module huge = plain;
  huge.w_v(23, 0) = 1e300;
  const Batch<double> before = huge.w_v;
  CHECK_REFUSED(fold_values(narrow, heads, huge.w_v, huge.w_o), "not finite");
  CHECK(test::identical(huge.w_v, before));
  Batch<Eigen::half> half_v = plain.w_v.cast<Eigen::half>(), half_o = plain.w_o.cast<Eigen::half>();
  const Batch<Eigen::half> half_before = half_v;
  const std::vector<Dense<float>> large(2, Dense<float>(1e5 * SquareMatrix<double>::Identity(12, 12)));
  CHECK_REFUSED(fold_values(large, heads, half_v, half_o), "overflows when folded");
  CHECK(test::identical(half_v, half_before));
  m.w_o(71, 23) = test::nan;
  CHECK_REFUSED(fold_values(transforms, heads, m.w_v, m.w_o), "w_o has a value that is not finite");
  CHECK(test::identical(m.w_v, plain.w_v));
}
