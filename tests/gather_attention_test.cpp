// SPDX-License-Identifier: Apache-2.0
// What LayerStatistics gathers on demand: attention-aware sums and a sample of the tokens.
#include <algorithm>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "support.hpp"
#include "wushkv/calibrate/statistics.hpp"

using namespace wushkv;

namespace {

const AttentionHeads heads{6, 3, 4, 5};

struct Sequence {
  Batch<double> q, k, v;
};

Sequence any_sequence(test::Random& random, Index tokens) {
  return {random.batch(tokens, 24), random.batch(tokens, 12), random.batch(tokens, 15)};
}

LayerStatistics gathering(const Batch<double>& w_o, const AttentionOptions& options = {}, Index sample = 0,
                          std::int64_t first_sequence = 0) {
  LayerStatistics statistics(heads);
  statistics.set_output_projection(w_o);
  statistics.gather_attention(options);
  if (sample > 0) statistics.keep_sample(sample, first_sequence);
  return statistics;
}

void add(LayerStatistics& statistics, const Sequence& s) { statistics.add(s.q, s.k, s.v); }

double difference(const WeightedSums& a, const WeightedSums& b) {
  return std::max({test::relative_difference(a.hessian, b.hessian), std::abs(a.weight - b.weight) / b.weight,
                   test::relative_difference(a.weighted_sum, b.weighted_sum),
                   test::relative_difference(a.weighted_gram, b.weighted_gram)});
}

double difference(const AttentionStatistics& a, const AttentionStatistics& b) {
  if (a.heads() != b.heads() || a.tokens() != b.tokens() || a.sequences() != b.sequences())
    return test::infinity;
  double worst = 0;
  for (Index h = 0; h < b.heads().kv_heads; ++h)
    worst = std::max({worst, difference(a.keys(h), b.keys(h)), difference(a.values(h), b.values(h))});
  return worst;
}

bool same(const TokenSample& a, const TokenSample& b, double tolerance = 0) {
  const auto near = [&](const auto& x, const auto& y) {
    return test::relative_difference(x, y) <= tolerance;
  };
  return a.capacity() == b.capacity() && a.priorities() == b.priorities() && near(a.keys(), b.keys()) &&
         near(a.values(), b.values()) && near(a.key_weights(), b.key_weights()) &&
         near(a.value_weights(), b.value_weights());
}

}  // namespace

TEST_CASE("attention-aware sums are those of AttentionStatistics, padding left out") {
  test::Random random(720);
  for (const AttentionOptions options : {AttentionOptions{}, AttentionOptions{.soft_cap = 3, .window = 4}}) {
    const Batch<double> w_o = random.batch(30, 9);
    LayerStatistics statistics = gathering(w_o, options);
    AttentionStatistics expected(heads, options);
    for (const Index n : {1, 9, 17}) {
      const Sequence s = any_sequence(random, n);
      Sequence padded{Batch<double>::Constant(n + 3, 24, test::nan),
                      Batch<double>::Constant(n + 3, 12, test::infinity), Batch<double>::Zero(n + 3, 15)};
      std::vector<std::uint8_t> mask(static_cast<std::size_t>(n + 3), 1);
      mask[0] = mask[1] = mask.back() = 0;
      padded.q.middleRows(2, n) = s.q;
      padded.k.middleRows(2, n) = s.k;
      padded.v.middleRows(2, n) = s.v;
      statistics.add(padded.q, padded.k, padded.v, mask);
      expected.add(s.q, s.k, s.v, w_o);
    }
    REQUIRE(statistics.attention().has_value());
    CHECK(statistics.attention()->options() == options);
    CHECK(difference(*statistics.attention(), expected) < 1e-12);
  }
  CHECK_FALSE(LayerStatistics(heads).attention().has_value());
  CHECK(LayerStatistics(heads).sample().capacity() == 0);
}

TEST_CASE("sequences in any split merge to the same sums and the same sample") {
  test::Random random(721);
  const Batch<double> w_o = random.batch(30, 9);
  for (const Index capacity : {5, 40, 1000}) {
    // The ranks number their sequences as one run over all of them does: left's first, then right's.
    LayerStatistics whole = gathering(w_o, {}, capacity), left = gathering(w_o, {}, capacity),
                    right = gathering(w_o, {}, capacity, 4);
    Index tokens = 0;
    for (int i = 0; i < 6; ++i) {
      const Sequence s = any_sequence(random, random.integer(1, 30));
      tokens += s.q.rows();
      add(whole, s);
      add(i < 4 ? left : right, s);
    }
    LayerStatistics merged = right;
    merged.merge(left);
    left.merge(right);
    for (const LayerStatistics* both : {&merged, &left}) {
      CHECK(difference(*both->attention(), *whole.attention()) < 1e-11);
      CHECK(same(both->sample(), whole.sample(), 1e-6));
      CHECK(both->sample().size() == std::min(capacity, tokens));
    }
    // One that has seen nothing takes over what the other gathers, and gives nothing.
    LayerStatistics empty(heads);
    empty.merge(whole);
    CHECK(difference(*empty.attention(), *whole.attention()) == 0);
    CHECK(same(empty.sample(), whole.sample()));
    empty.merge(LayerStatistics(heads));
    CHECK(difference(*empty.attention(), *whole.attention()) == 0);
    CHECK(same(empty.sample(), whole.sample()));
    const Sequence more = any_sequence(random, 3);
    add(empty, more);
    add(whole, more);
    CHECK(difference(*empty.attention(), *whole.attention()) < 1e-12);
    CHECK(same(empty.sample(), whole.sample()));
    LayerStatistics plain(heads), gathers = gathering(w_o, {}, capacity);
    add(plain, more);
    gathers.merge(plain);
    CHECK_FALSE(gathers.attention().has_value());
    CHECK(gathers.sample().capacity() == 0);
  }
}

TEST_CASE("a slice has its heads' sums and sample") {
  test::Random random(722);
  const Batch<double> w_o = random.batch(30, 9);
  LayerStatistics whole = gathering(w_o, {.window = 6}, 11), rank({4, 2, 4, 5});
  rank.set_output_projection(w_o.middleRows(10, 20));
  rank.gather_attention({.window = 6});
  rank.keep_sample(11);
  const auto add_both = [&](LayerStatistics& all, LayerStatistics& part, Index tokens) {
    const Sequence s = any_sequence(random, tokens);
    add(all, s);
    part.add(s.q.middleCols(8, 16), s.k.middleCols(4, 8), s.v.middleCols(5, 10));
  };
  for (int i = 0; i < 3; ++i) add_both(whole, rank, 10);
  LayerStatistics slice = whole.slice(1, 2);
  CHECK(difference(*slice.attention(), *rank.attention()) < 1e-12);
  CHECK(same(slice.sample(), rank.sample(), 1e-6));
  // It can go on: it has its heads' share of the projection.
  add_both(whole, slice, 8);
  CHECK(difference(*slice.attention(), *whole.slice(1, 2).attention()) < 1e-12);
  CHECK(same(slice.sample(), whole.slice(1, 2).sample(), 1e-6));
}

TEST_CASE("a sample holds tokens with their own weights, each at most once and none more likely") {
  test::Random random(723);
  const Batch<double> w_o = random.batch(30, 9);
  std::map<float, Index> row_of;  // by the first entry of the key, which differs from token to token
  Batch<double> keys(0, 12), values(0, 15);
  TokenWeights weights;
  std::vector<TokenWeights> of_sequences;
  LayerStatistics statistics = gathering(w_o, {}, 50), unweighted(heads);
  unweighted.keep_sample(50);
  AttentionStatistics attention(heads);
  Index total = 0;
  for (int i = 0; i < 20; ++i) {
    const Sequence s = any_sequence(random, 40);
    attention.add(s.q, s.k, s.v, w_o, 64, &weights);
    of_sequences.push_back(weights);
    add(statistics, s);
    add(unweighted, s);
    keys.conservativeResize(total + 40, Eigen::NoChange);
    values.conservativeResize(total + 40, Eigen::NoChange);
    keys.bottomRows(40) = s.k;
    values.bottomRows(40) = s.v;
    for (Index t = 0; t < 40; ++t) row_of[static_cast<float>(s.k(t, 0))] = total + t;
    total += 40;
  }
  const TokenSample& sample = statistics.sample();
  REQUIRE(sample.size() == 50);
  CHECK(std::is_sorted(sample.priorities().begin(), sample.priorities().end()));
  double mean_row = 0;
  for (Index i = 0; i < 50; ++i) {
    const auto found = row_of.find(sample.keys()(i, 0));
    REQUIRE(found != row_of.end());
    const Index row = found->second;
    row_of.erase(found);
    mean_row += static_cast<double>(row) / 50;
    const TokenWeights& own = of_sequences[static_cast<std::size_t>(row / 40)];
    CHECK(test::identical(sample.keys().row(i), keys.row(row).cast<float>()));
    CHECK(test::identical(sample.values().row(i), values.row(row).cast<float>()));
    CHECK(test::relative_difference(sample.key_weights().row(i), own.keys.row(row % 40)) < 1e-6);
    CHECK(test::relative_difference(sample.value_weights().row(i), own.values.row(row % 40)) < 1e-6);
  }
  CHECK(std::abs(mean_row - 400) < 3 * 800 / std::sqrt(12.0 * 50));
  CHECK(test::identical(unweighted.sample().keys(), sample.keys()));
  CHECK(unweighted.sample().key_weights().isOnes(0));
  CHECK(unweighted.sample().value_weights().isOnes(0));
}

TEST_CASE("samples of different capacities merge to the smaller, of the same numbers side by side") {
  test::Random random(724);
  const Batch<double> w_o = random.batch(30, 9);
  LayerStatistics few = gathering(w_o, {}, 3), many = gathering(w_o, {}, 10);
  const Sequence s = any_sequence(random, 20);
  add(few, s);
  add(many, s);
  CHECK(few.sample().priorities()[2] == many.sample().priorities()[2]);
  many.merge(few);
  CHECK(many.sample().capacity() == 3);
  CHECK(many.sample().size() == 3);
  CHECK(many.sample().priorities()[0] == many.sample().priorities()[1]);
}

TEST_CASE("bad input is refused and changes nothing") {
  test::Random random(725);
  const Batch<double> w_o = random.batch(30, 9);
  const Sequence s = any_sequence(random, 6);
  LayerStatistics no_projection(heads);
  no_projection.gather_attention();
  CHECK_REFUSED(add(no_projection, s), "expected set_output_projection before sequences");
  CHECK(no_projection.tokens() == 0);
  CHECK_REFUSED(no_projection.gather_attention({.soft_cap = -1}), "soft_cap is -1");
  CHECK_REFUSED(no_projection.keep_sample(-1), "capacity is -1");
  CHECK_REFUSED(no_projection.keep_sample(1, -1), "first_sequence is -1");

  LayerStatistics statistics = gathering(w_o, {}, 8);
  add(statistics, s);
  const LayerStatistics before = statistics;
  CHECK_REFUSED(statistics.gather_attention(), "gather_attention: 6 tokens were added already");
  CHECK_REFUSED(statistics.keep_sample(3), "keep_sample: 6 tokens were added already");
  CHECK_REFUSED(statistics.set_output_projection(Batch<double>(2 * w_o)), "w_o differs from before");
  LayerStatistics plain(heads);
  add(plain, s);
  CHECK_REFUSED(statistics.merge(plain), "merge: other lacks attention-aware sums");
  CHECK_REFUSED(plain.merge(statistics), "merge: only other has attention-aware sums");
  CHECK_FALSE(plain.has_output_projection());
  CHECK_REFUSED(statistics.merge(gathering(w_o, {.window = 3})), "other heads or attention options");
  CHECK_REFUSED(statistics.add(s.q, s.k, 1e200 * s.v), "overflow");
  CHECK_REFUSED(statistics.add(s.q, s.k, 1e40 * s.v), "in float");
  Sequence broken = s;
  broken.v(2, 3) = test::nan;
  CHECK_REFUSED(add(statistics, broken), "not finite");
  CHECK(difference(*statistics.attention(), *before.attention()) == 0);
  CHECK(same(statistics.sample(), before.sample()));
  CHECK(statistics.tokens() == 6);
  CHECK(test::identical(statistics.head(0).value_hessian, before.head(0).value_hessian));
  CHECK(test::identical(statistics.head(1).value_gram, before.head(1).value_gram));

  // What a file gives has sums but no projection: it can be merged, not added to.
  LayerStatistics loaded(heads, statistics.sums());
  CHECK(same(loaded.sample(), statistics.sample()));
  CHECK_REFUSED(add(loaded, s), "expected set_output_projection before sequences");
  CHECK_REFUSED(loaded.set_output_projection(random.batch(30, 9)), "w_o differs from before");
  loaded.set_output_projection(w_o);
  add(loaded, s);
  add(statistics, s);
  CHECK(difference(*loaded.attention(), *statistics.attention()) == 0);
  CHECK(same(loaded.sample(), statistics.sample()));

  const auto refused = [&](auto&& change) {
    LayerStatistics::Sums sums = statistics.sums();
    change(sums);
    return test::message_of([&] { LayerStatistics(heads, sums); });
  };
  CHECK(refused([](auto&) {}).empty());
  CHECK(refused([](auto& x) { x.tokens = 13; }).find("attention is of 12 tokens") != std::string::npos);
  CHECK(refused([](auto& x) { x.attention = x.attention->slice(0, 1); }).find("2 query and 1 KV heads") !=
        std::string::npos);
  CHECK(refused([](auto& x) { x.sample = x.sample->slice(0, 1); }).find("sample is of 8 tokens") !=
        std::string::npos);
}

TEST_CASE("a sample that is none is refused") {
  test::Random random(726);
  TokenSample sample(heads, 3);
  sample.add(0, random.batch(4, 12), random.batch(4, 15),
             {Batch<double>::Ones(4, 3), Batch<double>::Zero(4, 3)});
  CHECK_REFUSED(sample.add(0, random.batch(4, 11), random.batch(4, 15), {}),
                "keys is 4 x 11, expected 4 x 12");
  CHECK_REFUSED(sample.add(0, random.batch(4, 12), random.batch(4, 15), {}), "weights of keys is 0 x 0");
  CHECK_REFUSED(sample.merge(TokenSample({3, 3, 4, 5}, 3)), "sample of other heads");
  CHECK_REFUSED(sample.slice(2, 2), "slice: 2 KV heads from 2");
  CHECK(sample.size() == 3);
  const TokenSample::Parts good{sample.priorities(), sample.keys(), sample.values(), sample.key_weights(),
                                sample.value_weights()};
  const auto refused = [&](auto&& change, Index capacity = 3) {
    TokenSample::Parts parts = good;
    change(parts);
    return test::message_of([&] { TokenSample(heads, capacity, 0, parts); });
  };
  CHECK(refused([](auto&) {}).empty());
  CHECK(refused([](auto&) {}, 2).find("3 tokens, expected at most the capacity, 2") != std::string::npos);
  CHECK(refused([](auto& p) { p.keys.resize(2, 12); }).find("keys is 2 x 12") != std::string::npos);
  CHECK(refused([](auto& p) { std::swap(p.priorities[0], p.priorities[1]); }).find("do not ascend") !=
        std::string::npos);
  CHECK(refused([](auto& p) { p.value_weights(1, 1) = -1; }).find("weight is negative") != std::string::npos);
  CHECK(refused([](auto& p) { p.values(0, 0) = static_cast<float>(test::nan); }).find("not finite") !=
        std::string::npos);
  // An empty one is fine.
  const TokenSample empty(heads, 3);
  CHECK(
      TokenSample(heads, 3, 0, {{}, empty.keys(), empty.values(), empty.key_weights(), empty.value_weights()})
          .slice(0, 2)
          .size() == 0);
}

TEST_CASE("a sample of nothing can be sliced, saved and read") {
  const AttentionHeads shape{2, 2, 4, 4};
  test::Random random(862);
  LayerStatistics plain(shape), kept(shape);
  plain.add(random.batch(5, 8), random.batch(5, 8), random.batch(5, 8));
  CHECK(plain.slice(1, 1).sample().size() == 0);
  kept.keep_sample(4);
  CHECK(kept.sample().keys().rows() == 0);
  CHECK(kept.slice(0, 1).sample().values().cols() == 4);
  TokenSample sample(shape, 4);
  sample.add(0, Batch<double>(0, 8), Batch<double>(0, 8), {Batch<double>(0, 2), Batch<double>(0, 2)});
  CHECK(sample.size() == 0);
  TokenWeights weights{Batch<double>::Ones(1, 2), Batch<double>::Ones(1, 2)};
  weights.values(0, 1) = -1;
  CHECK_REFUSED(sample.add(0, random.batch(1, 8), random.batch(1, 8), weights), "weight is negative");
}
