// SPDX-License-Identifier: Apache-2.0
#include "wushkv/measure/attention.hpp"

#include "attention_reference.hpp"

using namespace wushkv;

TEST_CASE("reference: outputs, soft cap and sliding window within 1e-9") {
  const test::AttentionReference reference;
  const auto run = [&](const AttentionOptions& options) {
    return attention(reference.heads, reference.q, reference.k, reference.v, options);
  };
  CHECK(test::relative_difference(run({}), reference.side_by_side("output")) < 1e-9);
  CHECK(test::relative_difference(run({.scale = 0.25}), reference.side_by_side("output")) < 1e-9);
  CHECK(test::relative_difference(run({.soft_cap = 20}), reference.side_by_side("output.softcap20")) < 1e-9);
  CHECK(test::relative_difference(run({.window = 8}), reference.side_by_side("output.window8")) < 1e-9);
}

TEST_CASE("weights sum to one, see only what they may, and make the output") {
  test::Random random(110);
  for (int round = 0; round < 20; ++round) {
    const Index kv = random.integer(1, 3), n = random.integer(1, 20);
    const AttentionHeads heads{kv * random.integer(1, 3), kv, 8, 6};
    const Batch<float> q = random.batch<float>(n, heads.query_heads * 8), k = random.batch<float>(n, kv * 8),
                       v = random.batch<float>(n, kv * 6);
    const AttentionOptions options{.scale = random.uniform(-3, 3),
                                   .causal = random.pick({true, false}),
                                   .soft_cap = random.pick({0.0, 5.0}),
                                   .window = random.pick<Index>({0, 1, 4, 100})};
    const Batch<double> output = attention(heads, q, k, v, options);
    for (Index h = 0; h < heads.query_heads; ++h) {
      const Batch<double> w = attention_weights(heads, q, k, h, options);
      CHECK(test::relative_difference(w.rowwise().sum(), Vector<double>::Ones(n)) < 1e-12);
      for (Index i = 0; i < n; ++i)
        for (Index t = 0; t < n; ++t)
          CHECK((w(i, t) > 0) ==
                ((!options.causal || t <= i) && (options.window == 0 || t > i - options.window)));
      CHECK(test::relative_difference(
                output.middleCols(h * 6, 6),
                w * v.middleCols(h / heads.queries_per_kv_head() * 6, 6).cast<double>()) < 1e-12);
    }
  }
}

TEST_CASE("huge logits do not overflow") {
  const AttentionHeads heads{1, 1, 2, 2};
  const Batch<double> x = Batch<double>::Constant(3, 2, 1e100);
  CHECK(attention(heads, x, x, x).allFinite());
}

TEST_CASE("bad input is refused") {
  test::Random random(111);
  const AttentionHeads heads{4, 2, 8, 8};
  const Batch<double> q = random.batch(5, 32), k = random.batch(5, 16), v = random.batch(5, 16);
  CHECK_REFUSED(attention(heads, k, k, v), "q is 5 x 16, expected 5 x 32");
  CHECK_REFUSED(attention(heads, q, k.topRows(4), v), "k is 4 x 16");
  CHECK_REFUSED(attention(heads, q, k, q), "v is 5 x 32");
  CHECK_REFUSED(attention({4, 3, 8, 8}, q, k, v), "4 query heads and 3 KV heads");
  CHECK_REFUSED(attention(heads, q.topRows(0), k.topRows(0), v.topRows(0)), "0 tokens");
  CHECK_REFUSED(attention(heads, q, k, v, {.scale = test::nan}), "scale");
  CHECK_REFUSED(attention(heads, q, k, v, {.soft_cap = -1}), "soft_cap is -1");
  CHECK_REFUSED(attention(heads, q, k, v, {.window = -1}), "window is -1");
  CHECK_REFUSED(attention_weights(heads, q, k, 4), "head 4");
  Batch<double> bad = v;
  bad(4, 15) = test::nan;
  CHECK_REFUSED(attention(heads, q, k, bad), "v has a value that is not finite");
}
