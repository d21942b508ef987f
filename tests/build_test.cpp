// SPDX-License-Identifier: Apache-2.0
#include "wushkv/calibrate/build.hpp"

#include "support.hpp"

using namespace wushkv;

namespace {

const AttentionHeads heads{4, 2, 16, 8};

LayerStatistics any_statistics(test::Random& random) {
  LayerStatistics statistics(heads);
  statistics.set_output_projection(random.batch(32, 20));
  statistics.gather_attention();
  statistics.add(random.batch(50, 64), random.batch(50, 32), random.batch(50, 16));
  return statistics;
}

}  // namespace

TEST_CASE("every construction, from the same statistics") {
  test::Random random(160);
  const LayerStatistics statistics = any_statistics(random);
  for (const auto& [construction, name] : detail::construction_names) {
    CHECK(to_string(construction) == name);
    CHECK(construction_from_string(name) == construction);
    for (const Index group : {0, 4}) {
      BuildOptions options;
      options.construction = construction;
      options.key_group_size = options.value_group_size = group;
      const LayerTransforms built = build_transforms(statistics, options);
      REQUIRE(built.keys.size() == 2);
      REQUIRE(built.values.size() == 2);
      for (const auto& transforms : {built.keys, built.values})
        for (const HeadTransform& head : transforms) {
          const BlockTransform& t = head.linear;
          const SquareMatrix<double> matrix = to_matrix(t);
          CHECK(test::relative_difference(
                    to_matrix(t) *
                        Batch<double>(t.inverse(Batch<double>::Identity(t.dim(), t.dim()))).transpose(),
                    SquareMatrix<double>::Identity(t.dim(), t.dim())) < 1e-9);
          if (!detail::is_wush(construction))
            CHECK(test::relative_difference(matrix * matrix.transpose(),
                                            SquareMatrix<double>::Identity(t.dim(), t.dim())) < 1e-9);
        }
      CHECK(built.keys[0].linear.dim() == 16);
      CHECK(built.values[0].linear.dim() == 8);
      CHECK(built.keys[1].is_linear() == (construction != Construction::Joint));
      CHECK(built.values[1].is_linear() == (construction != Construction::Joint));
    }
  }
}

TEST_CASE("each construction is the one that its own function makes") {
  test::Random random(161);
  const LayerStatistics s = any_statistics(random);
  const auto key = [&](Construction construction, std::size_t head, Index group = 0) {
    BuildOptions options;
    options.construction = construction;
    options.key_group_size = group;
    options.seed = 9;
    return to_matrix(build_transforms(s, options).keys[head].linear);
  };
  const HeadStatistics& head = s.head(1);
  CHECK(test::relative_difference(key(Construction::None, 1), SquareMatrix<double>::Identity(16, 16)) == 0);
  CHECK(test::relative_difference(key(Construction::Hadamard, 1), to_matrix(Hadamard<double>(16))) == 0);
  CHECK(test::relative_difference(key(Construction::Hadamard, 1, 4),
                                  to_matrix(group_hadamard<double>(16, 4))) == 0);
  CHECK(test::relative_difference(key(Construction::Random, 1), random_rotation_matrix(16, 9)) == 0);
  CHECK(test::relative_difference(key(Construction::Random, 0), key(Construction::Random, 1)) == 0);
  CHECK(test::relative_difference(key(Construction::Pca, 1), pca_matrix(head.key_gram)) == 0);
  CHECK(test::relative_difference(key(Construction::RotateKv, 1, 4),
                                  to_matrix(rotate_kv<double>(head.key_gram, 4))) == 0);
  CHECK(test::relative_difference(key(Construction::Oscar, 1), oscar_matrix(s.key_sigma())) == 0);
  CHECK(test::relative_difference(key(Construction::Oscar, 0), key(Construction::Oscar, 1)) == 0);
  CHECK(test::relative_difference(key(Construction::OscarPerHead, 1), oscar_matrix(head.key_hessian)) <
        1e-12);
  CHECK(test::relative_difference(key(Construction::Wush, 1),
                                  wush_matrices(head.key_gram, head.key_hessian, {.tokens = 50}).forward) ==
        0);
  CHECK(test::relative_difference(
            key(Construction::Wush, 1, 8),
            to_matrix(wush_blocks<double>(head.key_gram, head.key_hessian, 8, {.tokens = 50}))) == 0);
  BuildOptions plain;
  plain.unit_mean_square = false;
  plain.damping = 0.1;
  plain.exponent = 0.75;
  CHECK(test::relative_difference(
            to_matrix(build_transforms(s, plain).values[1].linear),
            wush_matrices(head.value_gram, head.value_hessian, {.damping = 0.1, .exponent = 0.75}).forward) ==
        0);
  CHECK(test::relative_difference(
            to_matrix(build_transforms(s, {.construction = Construction::Oscar}).values[0].linear),
            oscar_matrix(s.value_sigma())) == 0);
}

TEST_CASE("a rank's slice builds what the whole layer builds for its heads") {
  test::Random random(162);
  const LayerStatistics statistics = any_statistics(random);
  for (const auto& [construction, name] : detail::construction_names) {
    BuildOptions options;
    options.construction = construction;
    const LayerTransforms whole = build_transforms(statistics, options),
                          part = build_transforms(statistics.slice(1, 1), options);
    for (const auto& [actual, expected] :
         {std::pair{part.keys[0], whole.keys[1]}, {part.values[0], whole.values[1]}}) {
      CHECK(test::identical(to_matrix(actual.linear), to_matrix(expected.linear)));
      CHECK(test::identical(actual.mean, expected.mean));
      CHECK(test::identical(actual.sensitivity, expected.sensitivity));
    }
  }
}

TEST_CASE("wush-a and joint against their definitions") {
  test::Random random(164);
  for (int round = 0; round < 30; ++round) {
    const Index kv_heads = random.integer(1, 2);
    const AttentionHeads shape{kv_heads * random.integer(1, 3), kv_heads, random.pick<Index>({4, 8, 12, 16}),
                               random.pick<Index>({4, 8, 20})};
    const Index n = random.integer(30, 60);
    const Batch<double> q = random.batch(n, shape.query_heads * shape.key_dim),
                        k = random.batch(n, shape.kv_heads * shape.key_dim).array() + 0.7,
                        v = random.batch(n, shape.kv_heads * shape.value_dim).array() - 0.4,
                        w_o = random.batch(shape.query_heads * shape.value_dim, 9);
    LayerStatistics statistics(shape);
    statistics.set_output_projection(w_o);
    statistics.gather_attention();
    statistics.add(q, k, v);
    AttentionStatistics attention(shape);
    TokenWeights weights;
    attention.add(q, k, v, w_o, 64, &weights);

    BuildOptions options;
    options.construction = random.pick({Construction::WushA, Construction::Joint});
    const bool joint = options.construction == Construction::Joint;
    options.exponent = random.pick({0.5, 0.75});
    options.damping = random.pick({0.01, 0.1});
    options.unit_mean_square = random.pick({true, false});
    options.key_group_size = random.pick<Index>({0, 4});
    const LayerTransforms built = build_transforms(statistics, options);
    for (const bool of_keys : {true, false})
      for (Index h = 0; h < kv_heads; ++h) {
        const HeadTransform& head = (of_keys ? built.keys : built.values)[static_cast<std::size_t>(h)];
        const WeightedSums& sums = of_keys ? attention.keys(h) : attention.values(h);
        const Index d = sums.hessian.rows(), group = of_keys && options.key_group_size > 0 ? 4 : d;
        const Batch<double> x = (of_keys ? k : v).middleCols(h * d, d);
        const Vector<double> w = (of_keys ? weights.keys : weights.values).col(h);
        const Vector<double> mean =
            joint ? Vector<double>(x.transpose() * w / w.sum()) : Vector<double>(Vector<double>::Zero(d));
        const Batch<double> y = x.rowwise() - mean.transpose();
        const SquareMatrix<double> gram = joint ? SquareMatrix<double>(y.transpose() * w.asDiagonal() * y)
                                                : SquareMatrix<double>(x.transpose() * x);
        const double tokens = joint ? w.sum() : static_cast<double>(n);
        const SquareMatrix<double> t = to_matrix(head.linear);
        CHECK(test::relative_difference(head.mean, mean) < 1e-10);
        CHECK(test::relative_difference(
                  t, to_matrix(wush_blocks<double>(gram, sums.hessian, group,
                                                   {options.damping, options.exponent,
                                                    options.unit_mean_square ? tokens : 0}))) < 1e-8);
        const SquareMatrix<double> identity = SquareMatrix<double>::Identity(d, d);
        const auto damped = [&](const SquareMatrix<double>& a) -> SquareMatrix<double> {
          return a + options.damping * a.trace() / static_cast<double>(d) * identity;
        };
        const SquareMatrix<double> inverse = t.inverse();
        CHECK(test::relative_difference(head.sensitivity,
                                        inverse.transpose() * damped(sums.hessian) * inverse) < 1e-9);
        if (options.exponent == 0.5 && !options.unit_mean_square && group == d)
          CHECK(test::relative_difference(t * damped(gram) * t.transpose(), head.sensitivity) < 1e-9);
        if (options.unit_mean_square && group == d) {
          const Vector<double> energies = (y * t.transpose()).rowwise().squaredNorm();
          CHECK((joint ? energies.dot(w) : energies.sum()) / tokens / static_cast<double>(d) ==
                doctest::Approx(1).epsilon(1e-9));
        }
      }
  }
}

TEST_CASE("a large common offset of keys and values is no obstacle to joint") {
  test::Random random(861);
  for (const double offset : {1e3, 1e4, 1e6}) {
    LayerStatistics statistics(heads);
    statistics.set_output_projection(random.batch(32, 20));
    statistics.gather_attention();
    statistics.add(random.batch(50, 64), (random.batch(50, 32).array() + offset).matrix(),
                   (random.batch(50, 16).array() - offset).matrix());
    const LayerTransforms transforms = build_transforms(statistics, {.construction = Construction::Joint});
    for (const HeadTransform& head : transforms.values) {
      CHECK(all_finite(to_matrix(head.linear)));
      CHECK(head.mean.mean() == doctest::Approx(-offset).epsilon(0.01));
    }
  }
}

TEST_CASE("each head's exponent by prediction") {
  test::Random random(860);
  const LayerStatistics statistics = any_statistics(random);
  BuildOptions chosen{.construction = Construction::Joint};
  chosen.choose_exponent_for = 0.12;
  const LayerTransforms transforms = build_transforms(statistics, chosen);
  for (Index h = 0; h < statistics.heads().kv_heads; ++h) {
    const WeightedSums& sums = statistics.attention()->keys(h);
    const auto damped = [](const SquareMatrix<double>& a) -> SquareMatrix<double> {
      const Index d = a.rows();
      return a + 1e-2 * a.trace() / static_cast<double>(d) * SquareMatrix<double>::Identity(d, d);
    };
    BuildOptions fixed{.construction = Construction::Joint};
    fixed.exponent = choose_exponent(loss_spectrum(damped(sums.centered_gram()), damped(sums.hessian)), 0.12,
                                     ErrorFeedback::On);
    CHECK(fixed.exponent > 0.5);
    const auto at = static_cast<std::size_t>(h);
    CHECK(test::relative_difference(to_matrix(build_transforms(statistics, fixed).keys[at].linear),
                                    to_matrix(transforms.keys[at].linear)) < 1e-12);
  }
  chosen.choose_exponent_for = -1;
  CHECK_REFUSED(build_transforms(statistics, chosen), "choose_exponent_for is -1");
  chosen.choose_exponent_for = test::nan;
  CHECK_REFUSED(build_transforms(statistics, chosen), "choose_exponent_for");
  chosen.choose_exponent_for = 0.12;
  chosen.key_group_size = 4;
  CHECK_REFUSED(build_transforms(statistics, chosen), "groups of 4 and 8");
}

TEST_CASE("sensitivity of the other constructions: from the plain Hessian, where one is known") {
  test::Random random(165);
  const LayerStatistics statistics = any_statistics(random);
  LayerStatistics no_projection(heads);
  no_projection.add(random.batch(50, 64), random.batch(50, 32), random.batch(50, 16));
  for (const auto& [construction, name] : detail::construction_names) {
    if (detail::is_attention_aware(construction)) continue;
    BuildOptions options;
    options.construction = construction;
    options.value_group_size = 4;
    options.damping = 0.05;
    const LayerTransforms built = build_transforms(statistics, options);
    for (std::size_t h = 0; h < 2; ++h)
      for (const bool of_keys : {true, false}) {
        const HeadTransform& head = of_keys ? built.keys[h] : built.values[h];
        const HeadStatistics& sums = statistics.head(static_cast<Index>(h));
        const SquareMatrix<double>& hessian = of_keys ? sums.key_hessian : sums.value_hessian;
        const Index d = hessian.rows();
        const SquareMatrix<double> inverse = to_matrix(head.linear).inverse();
        CHECK(test::relative_difference(head.sensitivity,
                                        inverse.transpose() *
                                            (hessian + 0.05 * hessian.trace() / static_cast<double>(d) *
                                                           SquareMatrix<double>::Identity(d, d)) *
                                            inverse) < 1e-9);
      }
    if (construction == Construction::Wush) continue;
    const LayerTransforms keys_only = build_transforms(no_projection, options);
    CHECK(keys_only.keys[1].has_sensitivity());
    CHECK_FALSE(keys_only.values[1].has_sensitivity());
  }
  const LayerTransforms nothing =
      build_transforms(LayerStatistics(heads), {.construction = Construction::Hadamard});
  CHECK_FALSE(nothing.keys[0].has_sensitivity());
  CHECK_FALSE(nothing.values[0].has_sensitivity());
}

TEST_CASE("degenerate layers build finite transforms") {
  test::Random random(166);
  const auto check = [&](const Batch<double>& q, const Batch<double>& k, const Batch<double>& v,
                         const Batch<double>& w_o) {
    LayerStatistics statistics(heads);
    statistics.set_output_projection(w_o);
    statistics.gather_attention();
    statistics.add(q, k, v);
    for (const Construction construction : {Construction::WushA, Construction::Joint})
      for (const double exponent : {0.5, 0.75, 1.0}) {
        const LayerTransforms built =
            build_transforms(statistics, {.construction = construction, .exponent = exponent});
        for (const auto& side : {built.keys, built.values})
          for (const HeadTransform& head : side) {
            CHECK(all_finite(to_matrix(head.linear)));
            CHECK(all_finite(head.mean));
            CHECK(all_finite(head.sensitivity));
            CHECK(head.sensitivity.trace() > 0);
          }
      }
  };
  const Batch<double> q = random.batch(40, 64), k = random.batch(40, 32), v = random.batch(40, 16),
                      w_o = random.batch(32, 20);
  check(q, k, v, Batch<double>::Zero(32, 20));
  check(Batch<double>::Zero(40, 64), k, v, w_o);
  check(q, Batch<double>::Constant(40, 32, 1.7), v, w_o);
  check(q, k, Batch<double>::Constant(40, 16, -2.3), w_o);
  check(q, k.array() * 1e-7 + 1000, v.array() * 1e-9 - 300, w_o);
  check(q.topRows(1), k.topRows(1), v.topRows(1), w_o);
}

TEST_CASE("bad input is refused") {
  test::Random random(163);
  LayerStatistics statistics = any_statistics(random);
  CHECK_REFUSED(build_transforms(statistics, {.key_group_size = 3}), "key_group_size is 3");
  CHECK_REFUSED(build_transforms(statistics, {.value_group_size = 16}), "value_group_size is 16");
  CHECK_REFUSED(build_transforms(statistics, {.key_group_size = -4}), "key_group_size is -4");
  CHECK_REFUSED(build_transforms(LayerStatistics(heads), {.construction = Construction::Oscar}),
                "0 tokens, expected at least one for oscar");
  CHECK(build_transforms(LayerStatistics(heads), {.construction = Construction::Hadamard}).keys.size() == 2);
  LayerStatistics no_projection(heads);
  no_projection.add(random.batch(5, 64), random.batch(5, 32), random.batch(5, 16));
  CHECK_REFUSED(build_transforms(no_projection), "set_output_projection before WUSH");
  for (const Construction construction : {Construction::WushA, Construction::Joint})
    CHECK_REFUSED(
        build_transforms(no_projection, {.construction = construction}),
        "expected gather_attention before the sequences for " + std::string(to_string(construction)));
  CHECK_REFUSED(build_transforms(statistics, {.construction = Construction::None, .damping = -1}),
                "damping is -1");
  LayerStatistics capped(heads);
  capped.set_output_projection(random.batch(32, 20));
  capped.gather_attention({.soft_cap = 30});
  CHECK_REFUSED(build_transforms(capped, {.construction = Construction::Joint}), "0 tokens");
  capped.add(random.batch(5, 64), random.batch(5, 32), random.batch(5, 16));
  CHECK_REFUSED(build_transforms(capped, {.construction = Construction::Joint}),
                "soft cap of 30, in which a key shift does not cancel");
  CHECK(build_transforms(capped, {.construction = Construction::WushA}).keys.size() == 2);
  CHECK_REFUSED(construction_from_string("wusch"), "'wusch' is unknown, expected one of none, hadamard");
  CHECK_REFUSED(to_string(static_cast<Construction>(99)), "99");
}
