// SPDX-License-Identifier: Apache-2.0
#include "wushkv/calibrate/attention_statistics.hpp"

#include "attention_reference.hpp"
#include "wushkv/measure/attention.hpp"

using namespace wushkv;

namespace {

struct Layer {
  AttentionHeads heads;
  Batch<double> q, k, v, w_o;

  Layer(test::Random& random, const AttentionHeads& shape, Index tokens, Index model = 7)
      : heads(shape),
        q(random.batch(tokens, shape.query_heads * shape.key_dim)),
        k(random.batch(tokens, shape.kv_heads * shape.key_dim)),
        v(random.batch(tokens, shape.kv_heads * shape.value_dim)),
        w_o(random.batch(shape.query_heads * shape.value_dim, model)) {}
};

double difference(const WeightedSums& a, const WeightedSums& b) {
  return std::max({test::relative_difference(a.hessian, b.hessian), std::abs(a.weight - b.weight) / b.weight,
                   test::relative_difference(a.weighted_sum, b.weighted_sum),
                   test::relative_difference(a.weighted_gram, b.weighted_gram)});
}

double difference(const AttentionStatistics& a, const AttentionStatistics& b) {
  double worst = a.tokens() == b.tokens() && a.sequences() == b.sequences() ? 0 : test::infinity;
  for (Index h = 0; h < b.heads().kv_heads; ++h)
    worst = std::max({worst, difference(a.keys(h), b.keys(h)), difference(a.values(h), b.values(h))});
  return worst;
}

}  // namespace

TEST_CASE("reference: HA, MA, mu and the tokens' weights within 1e-9") {
  const test::AttentionReference reference;
  AttentionStatistics statistics(reference.heads);
  TokenWeights weights;
  statistics.add(reference.q, reference.k, reference.v, reference.w_o, 7, &weights);
  const Batch<double> key_weights = reference.file.matrix<double>("token_k"),
                      value_weights = reference.file.matrix<double>("token_v"),
                      key_means = reference.file.matrix<double>("mu_K"),
                      value_means = reference.file.matrix<double>("mu_V");
  for (Index h = 0; h < reference.heads.kv_heads; ++h) {
    const WeightedSums &keys = statistics.keys(h), &values = statistics.values(h);
    CHECK(test::relative_difference(keys.hessian, reference.of_head("HA_K", h)) < 1e-9);
    CHECK(test::relative_difference(values.hessian, reference.of_head("HA_V", h)) < 1e-9);
    CHECK(test::relative_difference(keys.centered_gram(), reference.of_head("MA_K", h)) < 1e-9);
    CHECK(test::relative_difference(values.centered_gram(), reference.of_head("MA_V", h)) < 1e-9);
    CHECK(test::relative_difference(keys.mean().transpose(), key_means.row(h)) < 1e-9);
    CHECK(test::relative_difference(values.mean().transpose(), value_means.row(h)) < 1e-9);
    CHECK(keys.weight == doctest::Approx(key_weights.row(h).sum()).epsilon(1e-9));
    CHECK(values.weight == doctest::Approx(value_weights.row(h).sum()).epsilon(1e-9));
  }
  CHECK(test::relative_difference(weights.keys.transpose(), key_weights) < 1e-9);
  CHECK(test::relative_difference(weights.values.transpose(), value_weights) < 1e-9);
  CHECK(statistics.tokens() == 40);
}

TEST_CASE("the second derivative of the module's squared error, by finite differences") {
  test::Random random(700);
  const AttentionHeads heads{2, 2, 4, 3};  // a query head a KV head: no cross terms are left out
  for (const AttentionOptions options :
       {AttentionOptions{}, AttentionOptions{.scale = 0.9}, AttentionOptions{.soft_cap = 1.5},
        AttentionOptions{.window = 4}, AttentionOptions{.causal = false, .soft_cap = 2}}) {
    const Layer l(random, heads, 9);
    AttentionStatistics statistics(heads, options);
    statistics.add(l.q, l.k, l.v, l.w_o, 4);
    const Batch<double> exact = attention(heads, l.q, l.k, l.v, options) * l.w_o;
    // |Y(x + e) - Y(x)|² = eᵀ H e / 2 + …, for each coordinate of each token by itself.
    constexpr double step = 1e-4;
    const auto curvature = [&](bool of_keys, Index token, Index column) {
      Batch<double> k = l.k, v = l.v;
      (of_keys ? k : v)(token, column) += step;
      return 2 * (attention(heads, l.q, k, v, options) * l.w_o - exact).squaredNorm() / (step * step);
    };
    for (const bool of_keys : {true, false})
      for (Index h = 0; h < 2; ++h) {
        const WeightedSums& sums = of_keys ? statistics.keys(h) : statistics.values(h);
        const Batch<double>& x = of_keys ? l.k : l.v;
        const Index d = sums.hessian.rows();
        Vector<double> diagonal = Vector<double>::Zero(d), weighted = Vector<double>::Zero(d);
        for (Index t = 0; t < 9; ++t)
          for (Index i = 0; i < d; ++i) {
            const double c = curvature(of_keys, t, h * d + i);
            diagonal[i] += c;
            weighted += c * x.row(t).segment(h * d, d).transpose();
          }
        CHECK(test::relative_difference(diagonal, sums.hessian.diagonal()) < 1e-3);
        CHECK(test::relative_difference(weighted, sums.weighted_sum) < 1e-3);
        CHECK(sums.weight == doctest::Approx(diagonal.sum()).epsilon(1e-3));
      }
  }
}

TEST_CASE("blocks of any size give the same, and so does merging") {
  test::Random random(701);
  for (int round = 0; round < 30; ++round) {
    const Index kv_heads = random.integer(1, 3);
    const AttentionHeads heads{kv_heads * random.integer(1, 4), kv_heads, random.integer(1, 9),
                               random.integer(1, 9)};
    const AttentionOptions options{.causal = random.pick({true, false}),
                                   .soft_cap = random.pick({0.0, 0.0, 3.0}),
                                   .window = random.pick<Index>({0, 0, 2, 5})};
    const Layer first(random, heads, random.integer(2, 40)), second(random, heads, random.integer(2, 40));
    AttentionStatistics whole(heads, options);
    whole.add(first.q, first.k, first.v, first.w_o, 1000);
    AttentionStatistics other(heads, options);
    other.add(second.q, second.k, second.v, second.w_o, 1000);
    AttentionStatistics both(heads, options);
    for (const Layer* l : {&first, &second}) both.add(l->q, l->k, l->v, l->w_o, random.integer(1, 45));
    AttentionStatistics merged = whole;
    merged.merge(other);
    CHECK(difference(both, merged) < 1e-11);
    AttentionStatistics floats(heads, options);
    floats.add(first.q.cast<float>(), first.k.cast<float>(), first.v.cast<float>(), first.w_o.cast<float>());
    CHECK(difference(floats, whole) < 1e-4);
    const Index from = random.integer(0, kv_heads - 1), count = random.integer(1, kv_heads - from),
                group = heads.queries_per_kv_head();
    AttentionStatistics rank({count * group, count, heads.key_dim, heads.value_dim}, options);
    for (const Layer* l : {&first, &second})
      rank.add(l->q.middleCols(from * group * heads.key_dim, count * group * heads.key_dim),
               l->k.middleCols(from * heads.key_dim, count * heads.key_dim),
               l->v.middleCols(from * heads.value_dim, count * heads.value_dim),
               l->w_o.middleRows(from * group * heads.value_dim, count * group * heads.value_dim));
    CHECK(difference(both.slice(from, count), rank) < 1e-11);
    CHECK(both.slice(from, count).heads() == rank.heads());
    CHECK(difference(AttentionStatistics(heads, options, both.sums()), both) == 0);
  }
}

TEST_CASE("a token that nobody attends to has no weight, and no mean") {
  const AttentionHeads heads{1, 1, 2, 2};
  AttentionStatistics statistics(heads);
  CHECK(statistics.keys(0).mean().isZero(0));
  // One token: its own value is the output whatever its key.
  statistics.add(Batch<double>::Ones(1, 2), Batch<double>::Ones(1, 2), Batch<double>::Ones(1, 2),
                 Batch<double>::Ones(2, 3));
  CHECK(statistics.keys(0).hessian.isZero(1e-15));
  CHECK(statistics.values(0).weight == doctest::Approx(2 * 6));
  CHECK(statistics.values(0).mean().isApproxToConstant(1));
  CHECK(statistics.values(0).centered_gram().isZero(1e-12));
}

TEST_CASE("bad input is refused and changes nothing") {
  test::Random random(702);
  const AttentionHeads heads{4, 2, 4, 3};
  const Layer l(random, heads, 6);
  AttentionStatistics statistics(heads);
  statistics.add(l.q, l.k, l.v, l.w_o);
  const AttentionStatistics before = statistics;
  Batch<double> bad = l.v;
  bad(3, 1) = test::nan;
  CHECK_REFUSED(statistics.add(l.q, l.k, bad, l.w_o), "v");
  CHECK_REFUSED(statistics.add(l.q.topRows(0), l.k.topRows(0), l.v.topRows(0), l.w_o), "0 tokens");
  CHECK_REFUSED(statistics.add(l.q, l.k.topRows(5), l.v, l.w_o), "k is 5 x 8, expected 6 x 8");
  CHECK_REFUSED(statistics.add(l.q, l.k, l.v, l.w_o.topRows(5)), "w_o is 5 x 7, expected 12 x 7");
  CHECK_REFUSED(statistics.add(l.q, l.k, l.v, l.w_o, 0), "block is 0");
  CHECK_REFUSED(statistics.add(l.q, l.k, 1e300 * l.v, l.w_o), "overflow");
  CHECK_REFUSED(statistics.merge(AttentionStatistics(heads, {.window = 3})), "merge: other has other heads");
  CHECK_REFUSED(statistics.merge(AttentionStatistics({4, 1, 4, 3})), "merge: other has other heads");
  CHECK_REFUSED(AttentionStatistics({3, 2, 4, 4}), "3 query heads");
  CHECK_REFUSED(AttentionStatistics(heads, {.soft_cap = -1}), "soft_cap is -1");
  CHECK_REFUSED(statistics.keys(2), "KV head 2 asked for, expected 0 to 1");
  CHECK_REFUSED(statistics.values(-1), "KV head -1");
  CHECK_REFUSED(statistics.add_from_grams(l.q, l.k, l.v, {}), "0 grams, expected one a query head, 4");
  CHECK_REFUSED(
      statistics.add_from_grams(l.q, l.k, l.v, std::vector<SquareMatrix<double>>(4, random.matrix(2))),
      "grams is 2 x 2, expected 3 x 3");
  CHECK_REFUSED(statistics.slice(1, 2), "slice: 2 KV heads from 1 asked for, expected a range within 0 to 1");
  const auto restored = [&](auto&& change) {
    AttentionStatistics::Sums sums = statistics.sums();
    change(sums);
    return test::message_of([&] { AttentionStatistics(heads, {}, sums); });
  };
  CHECK(restored([](auto&) {}).empty());
  CHECK(restored([](auto& s) { s.values.pop_back(); }).find("1 KV heads' values, expected 2") !=
        std::string::npos);
  CHECK(restored([](auto& s) { s.keys[1].weighted_sum.resize(3); }).find("weighted_sum of keys is 3 x 1") !=
        std::string::npos);
  CHECK(restored([](auto& s) { s.keys[1].hessian(0, 1) = test::nan; }).find("hessian of keys") !=
        std::string::npos);
  CHECK(restored([](auto& s) { s.values[0].weight = -1; }).find("weight of values is -1") !=
        std::string::npos);
  CHECK(restored([](auto& s) { s.tokens = 0; }).find("0 tokens in 1 sequences") != std::string::npos);
  CHECK(difference(statistics, before) == 0);
}
