// SPDX-License-Identifier: Apache-2.0
#include "wushkv/calibrate/statistics.hpp"

#include "attention_reference.hpp"

using namespace wushkv;

namespace {

struct Sequence {
  Batch<double> q, k, v;
};

Sequence any_sequence(test::Random& random, const AttentionHeads& heads, Index tokens) {
  return {random.batch(tokens, heads.query_heads * heads.key_dim),
          random.batch(tokens, heads.kv_heads * heads.key_dim),
          random.batch(tokens, heads.kv_heads * heads.value_dim)};
}

bool same(const LayerStatistics& a, const LayerStatistics& b, double tolerance = 1e-12) {
  const auto near = [&](const SquareMatrix<double>& x, const SquareMatrix<double>& y) {
    return test::relative_difference(x, y) <= tolerance;
  };
  bool all = a.heads() == b.heads() && a.tokens() == b.tokens() && a.sequences() == b.sequences() &&
             a.has_output_projection() == b.has_output_projection() && near(a.key_sigma(), b.key_sigma()) &&
             near(a.value_sigma(), b.value_sigma());
  for (Index h = 0; all && h < a.heads().kv_heads; ++h) {
    const HeadStatistics &x = a.head(h), &y = b.head(h);
    all = near(x.key_gram, y.key_gram) && near(x.key_hessian, y.key_hessian) &&
          near(x.value_gram, y.value_gram) && near(x.value_hessian, y.value_hessian) &&
          near(x.value_sigma, y.value_sigma);
  }
  return all;
}

const AttentionHeads any_heads{6, 3, 4, 5};

}  // namespace

TEST_CASE("reference: M_K, H_K, M_V, H_V within 1e-9") {
  const test::AttentionReference reference;
  LayerStatistics statistics(reference.heads);
  statistics.set_output_projection(reference.w_o);
  statistics.add(reference.q, reference.k, reference.v);
  for (Index h = 0; h < reference.heads.kv_heads; ++h) {
    const HeadStatistics& head = statistics.head(h);
    CHECK(test::relative_difference(head.key_gram, reference.of_head("M_K", h)) < 1e-9);
    CHECK(test::relative_difference(head.key_hessian, reference.of_head("H_K", h)) < 1e-9);
    CHECK(test::relative_difference(head.value_gram, reference.of_head("M_V", h)) < 1e-9);
    CHECK(test::relative_difference(head.value_hessian, reference.of_head("H_V", h)) < 1e-9);
  }
  CHECK(statistics.tokens() == 40);
}

TEST_CASE("OSCAR's sums by their definition, token by token") {
  test::Random random(100);
  LayerStatistics statistics(any_heads);
  SquareMatrix<double> key_sigma = SquareMatrix<double>::Zero(4, 4),
                       value_sigma = SquareMatrix<double>::Zero(5, 5);
  for (const Index n : {1, 7, 20}) {
    const Sequence s = any_sequence(random, any_heads, n);
    statistics.add(s.q, s.k, s.v);
    for (Index h = 0; h < 3; ++h) {
      SquareMatrix<double> qq = SquareMatrix<double>::Zero(4, 4);
      for (Index g = 2 * h; g < 2 * h + 2; ++g)
        for (Index t = 0; t < n; ++t)
          qq += s.q.row(t).segment(4 * g, 4).transpose() * s.q.row(t).segment(4 * g, 4);
      key_sigma += qq;
      Vector<double> u(n);
      for (Index t = 0; t < n; ++t)
        u[t] = (s.k.row(t).segment(4 * h, 4) * qq).dot(s.k.row(t).segment(4 * h, 4));
      u *= static_cast<double>(n) / u.sum();
      for (Index t = 0; t < n; ++t)
        value_sigma += u[t] * s.v.row(t).segment(5 * h, 5).transpose() * s.v.row(t).segment(5 * h, 5);
    }
  }
  CHECK(test::relative_difference(statistics.key_sigma(), key_sigma) < 1e-12);
  CHECK(test::relative_difference(statistics.value_sigma(), value_sigma) < 1e-12);
}

TEST_CASE("sequences in any split merge to the same sums") {
  test::Random random(101);
  const Batch<double> w_o = random.batch(30, 9);
  LayerStatistics whole(any_heads), left(any_heads), right(any_heads);
  whole.set_output_projection(w_o);
  left.set_output_projection(w_o);
  for (int i = 0; i < 6; ++i) {
    const Sequence s = any_sequence(random, any_heads, random.integer(1, 30));
    whole.add(s.q, s.k, s.v);
    (i % 2 == 0 ? left : right).add(s.q, s.k, s.v);
  }
  LayerStatistics merged = right;  // has no projection: takes left's
  merged.merge(left);
  CHECK(same(merged, whole));
  left.merge(right);
  CHECK(same(left, whole));
}

TEST_CASE("a slice has its heads' sums and the whole layer's rotation") {
  test::Random random(102);
  const Batch<double> w_o = random.batch(30, 9);
  LayerStatistics whole(any_heads);
  whole.set_output_projection(w_o);
  LayerStatistics rank({4, 2, 4, 5});
  rank.set_output_projection(w_o.middleRows(10, 20));
  for (int i = 0; i < 3; ++i) {
    const Sequence s = any_sequence(random, any_heads, 10);
    whole.add(s.q, s.k, s.v);
    rank.add(s.q.middleCols(8, 16), s.k.middleCols(4, 8), s.v.middleCols(5, 10));
  }
  const LayerStatistics slice = whole.slice(1, 2);
  CHECK(slice.heads() == rank.heads());
  for (Index h = 0; h < 2; ++h) {
    CHECK(test::relative_difference(slice.head(h).key_gram, rank.head(h).key_gram) < 1e-12);
    CHECK(test::relative_difference(slice.head(h).key_hessian, rank.head(h).key_hessian) < 1e-12);
    CHECK(test::relative_difference(slice.head(h).value_gram, rank.head(h).value_gram) < 1e-12);
    CHECK(test::relative_difference(slice.head(h).value_hessian, rank.head(h).value_hessian) < 1e-12);
    CHECK(test::relative_difference(slice.head(h).value_sigma, rank.head(h).value_sigma) < 1e-12);
  }
  CHECK(test::identical(slice.key_sigma(), whole.key_sigma()));
  CHECK(same(whole.slice(0, 3), whole));
}

TEST_CASE("masked tokens count for nothing") {
  test::Random random(103);
  const Sequence s = any_sequence(random, any_heads, 12);
  std::vector<std::uint8_t> mask(12, 1);
  for (const std::size_t t : {0U, 3U, 4U, 11U}) mask[t] = 0;
  Sequence kept = any_sequence(random, any_heads, 8);
  for (Index t = 0, at = 0; t < 12; ++t)
    if (mask[static_cast<std::size_t>(t)] != 0) {
      kept.q.row(at) = s.q.row(t);
      kept.k.row(at) = s.k.row(t);
      kept.v.row(at++) = s.v.row(t);
    }
  LayerStatistics masked(any_heads), expected(any_heads);
  Sequence padded = s;
  padded.q.row(0).setConstant(test::nan);  // what padding holds is nobody's business
  padded.k.row(3).setConstant(test::infinity);
  padded.v.row(11).setConstant(test::nan);
  masked.add(padded.q, padded.k, padded.v, mask);
  expected.add(kept.q, kept.k, kept.v);
  CHECK(same(masked, expected, 0));
}

TEST_CASE("any scalar and strides: float, half, bfloat16, slices of one wide QKV buffer, column-major") {
  test::Random random(104);
  const Batch<float> wide = random.batch<float>(9, 24 + 12 + 15 + 7);
  const auto q = wide.middleCols(1, 24), k = wide.middleCols(26, 12), v = wide.middleCols(39, 15);
  LayerStatistics expected(any_heads), strided(any_heads), column_major(any_heads);
  expected.add(q.cast<double>(), k.cast<double>(), v.cast<double>());
  strided.add(q, k, v);
  column_major.add(Eigen::MatrixXf(q), Eigen::MatrixXf(k), Eigen::MatrixXf(v));
  CHECK(same(strided, expected, 0));
  CHECK(same(column_major, expected, 0));
  LayerStatistics half(any_heads), rounded(any_heads);
  half.add(q.cast<Eigen::half>(), k.cast<Eigen::bfloat16>(), v.cast<Eigen::half>());
  rounded.add(q.cast<Eigen::half>().cast<double>(), k.cast<Eigen::bfloat16>().cast<double>(),
              v.cast<Eigen::half>().cast<double>());
  CHECK(same(half, rounded, 0));
}

TEST_CASE("keys that no query looks at weigh values alike") {
  test::Random random(105);
  Sequence s = any_sequence(random, any_heads, 6);
  s.k.setZero();
  LayerStatistics statistics(any_heads);
  statistics.add(s.q, s.k, s.v);
  CHECK(test::relative_difference(statistics.head(1).value_sigma, statistics.head(1).value_gram) < 1e-14);
}

TEST_CASE("bad input is refused and changes nothing") {
  test::Random random(106);
  for (const AttentionHeads& heads :
       {AttentionHeads{0, 1, 4, 4}, {3, 2, 4, 4}, {2, 0, 4, 4}, {2, 2, 0, 4}, {2, 2, 4, -1}, {-2, -1, 4, 4}})
    CHECK_REFUSED(LayerStatistics{heads}, "heads: ");
  LayerStatistics statistics(any_heads);
  const Sequence s = any_sequence(random, any_heads, 5);
  statistics.add(s.q, s.k, s.v);
  const LayerStatistics before = statistics;
  CHECK_REFUSED(statistics.add(s.q.topRows(4), s.k, s.v), "k is 5 x 12, expected 4 x 12");
  CHECK_REFUSED(statistics.add(s.q, s.k, s.v.leftCols(14)), "v is 5 x 14, expected 5 x 15");
  CHECK_REFUSED(statistics.add(s.k, s.k, s.v), "q is 5 x 12, expected 5 x 24");
  CHECK_REFUSED(statistics.add(s.q.topRows(0), s.k.topRows(0), s.v.topRows(0)), "0 tokens");
  CHECK_REFUSED(statistics.add(s.q, s.k, s.v, std::vector<std::uint8_t>(4, 1)), "mask has 4 entries");
  CHECK_REFUSED(statistics.add(s.q, s.k, s.v, std::vector<std::uint8_t>(5, 0)), "mask leaves 0 tokens");
  for (int which = 0; which < 3; ++which)
    for (const double bad : {test::nan, test::infinity}) {
      Sequence broken = s;
      Batch<double>& x = which == 0 ? broken.q : which == 1 ? broken.k : broken.v;
      x(random.integer(0, x.rows() - 1), random.integer(0, x.cols() - 1)) = bad;
      CHECK_REFUSED(statistics.add(broken.q, broken.k, broken.v), "not finite");
    }
  CHECK_REFUSED(statistics.add(s.q, Batch<double>(1e200 * s.k), s.v), "overflow");
  CHECK_REFUSED(statistics.set_output_projection(random.batch(29, 9)), "expected 30 x 9");
  CHECK_REFUSED(statistics.set_output_projection(Batch<double>(30, 0)), "0 columns");
  CHECK_REFUSED(statistics.set_output_projection(Batch<double>::Constant(30, 9, test::nan)), "not finite");
  CHECK_REFUSED(statistics.merge(LayerStatistics({6, 3, 4, 4})),
                "merge: other has 6 query and 3 KV heads of 4/4");
  LayerStatistics one(any_heads), other(any_heads);
  one.set_output_projection(random.batch(30, 9));
  other.set_output_projection(random.batch(30, 9));
  CHECK_REFUSED(one.merge(other), "another output projection");
  using Range = std::pair<Index, Index>;
  for (const Range& range : {Range{-1, 1}, {0, 0}, {0, 4}, {3, 1}, {1, std::numeric_limits<Index>::max()}})
    CHECK_REFUSED(statistics.slice(range.first, range.second), "expected a range within 0 to 2");
  CHECK_REFUSED(statistics.head(3), "KV head 3");
  CHECK(same(statistics, before, 0));
}
