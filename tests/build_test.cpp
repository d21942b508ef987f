// SPDX-License-Identifier: Apache-2.0
#include "wushkv/calibrate/build.hpp"

#include "support.hpp"

using namespace wushkv;

namespace {

const AttentionHeads heads{4, 2, 16, 8};

LayerStatistics any_statistics(test::Random& random) {
  LayerStatistics statistics(heads);
  statistics.set_output_projection(random.batch(32, 20));
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
        for (const BlockTransform& t : transforms) {
          const SquareMatrix<double> matrix = to_matrix(t);
          CHECK(test::relative_difference(
                    to_matrix(t) *
                        Batch<double>(t.inverse(Batch<double>::Identity(t.dim(), t.dim()))).transpose(),
                    SquareMatrix<double>::Identity(t.dim(), t.dim())) < 1e-9);
          if (construction != Construction::Wush)
            CHECK(test::relative_difference(matrix * matrix.transpose(),
                                            SquareMatrix<double>::Identity(t.dim(), t.dim())) < 1e-9);
        }
      CHECK(built.keys[0].dim() == 16);
      CHECK(built.values[0].dim() == 8);
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
    return to_matrix(build_transforms(s, options).keys[head]);
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
            to_matrix(build_transforms(s, plain).values[1]),
            wush_matrices(head.value_gram, head.value_hessian, {.damping = 0.1, .exponent = 0.75}).forward) ==
        0);
  CHECK(test::relative_difference(
            to_matrix(build_transforms(s, {.construction = Construction::Oscar}).values[0]),
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
    CHECK(test::identical(to_matrix(part.keys[0]), to_matrix(whole.keys[1])));
    CHECK(test::identical(to_matrix(part.values[0]), to_matrix(whole.values[1])));
  }
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
  CHECK_REFUSED(construction_from_string("wusch"), "'wusch' is unknown, expected one of none, hadamard");
  CHECK_REFUSED(to_string(static_cast<Construction>(99)), "99");
}
