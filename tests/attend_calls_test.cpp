// SPDX-License-Identifier: Apache-2.0
// The calls of Attention, its options and its errors, on one small layer over several tiles of pages.
#include <algorithm>
#include <string>

#include "allocation_counter.hpp"
#include "attend_pages.hpp"
#include "wushkv/attend/attend.hpp"
#include "wushkv/measure/attention.hpp"

using namespace wushkv;

namespace {

using Quantized = Quest<float, 3, Eigen::half>;
using KeyCodec = Codec<Dense<float>, Quantized>;
using ValueCodec = Codec<Centered<Dense<float>>, Quantized>;
using Attend = Attention<KeyCodec, ValueCodec>;
using Workspace = Attend::Workspace;

constexpr double tolerance = 3e-6;

/// A layer of 6 query heads on 2 KV heads, values centered, with 170 tokens of which 12 + 9 are in windows:
/// more than two tiles.
struct Layer {
  test::Random random{430};
  AttentionHeads heads{6, 2, 32, 16};
  std::vector<KeyCodec> keys = make_keys();
  std::vector<ValueCodec> values = make_values();
  Index n = 170;
  Batch<float> q = random.batch<float>(n, 192), k = random.batch<float>(n, 64),
               v = random.batch<float>(n, 32).array() + 1.0F;
  test::Pages<KeyCodec, ValueCodec> pages{keys, values, k, v, {.sink = 12, .recent = 9}};

  std::vector<KeyCodec> make_keys() {
    std::vector<KeyCodec> codecs;
    for (int h = 0; h < 2; ++h) codecs.emplace_back(test::well_conditioned(random, 32), Quantized(), 16);
    return codecs;
  }
  std::vector<ValueCodec> make_values() {
    std::vector<ValueCodec> codecs;
    for (int h = 0; h < 2; ++h)
      codecs.emplace_back(
          Centered(test::well_conditioned(random, 16),
                   Vector<float>(Vector<float>::Constant(16, 1.0F) + 0.1F * random.vector<float>(16))),
          Quantized());
    return codecs;
  }
  Attend attend(const AttendOptions& options = {}) const { return Attend(heads, keys, values, options); }
  Batch<double> exact(const AttentionOptions& options = {}) const {
    return attention(heads, q, pages.keys.original, pages.values.original, options);
  }
  Batch<float> blank(Index rows) const { return Batch<float>::Constant(rows, 96, -7.0F); }
  /// The last `rows` queries of the sequence, by prefill over cached tokens.
  Batch<float> prefill(const Attend& attention, Index rows, Attend::Mask mask = {}) const {
    Workspace workspace;
    Batch<float> out = blank(rows);
    attention.prefill(pages.view(), q.bottomRows(rows), out, workspace, mask);
    return out;
  }
  Vector<float> decode(const Attend& attention, const SequenceView& view) const {
    Workspace workspace;
    Vector<float> out(96);
    attention.decode(view, q.row(view.length() - 1).transpose(), out, workspace);
    return out;
  }
  /// A column per head, through the forward of the value transforms.
  Batch<float> to_stored(const Batch<float>& out) const {
    Batch<float> result(out.rows(), out.cols());
    for (Index h = 0; h < 6; ++h)
      result.middleCols(h * 16, 16) =
          values[static_cast<std::size_t>(h / 3)].transform().forward(out.middleCols(h * 16, 16));
    return result;
  }
  Batch<float> queries_to_stored(const Batch<float>& x) const {
    Batch<float> result(x.rows(), x.cols());
    for (Index h = 0; h < 6; ++h)
      result.middleCols(h * 32, 32) =
          keys[static_cast<std::size_t>(h / 3)].transform().adjoint_inverse(x.middleCols(h * 32, 32));
    return result;
  }
};

const Layer& layer() {
  static const Layer one;
  return one;
}

/// A tree of n nodes whose parents come before them, as a mask of ancestors and itself.
std::vector<std::uint8_t> tree_mask(test::Random& random, Index n) {
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(n * n), 0);
  for (Index i = 0; i < n; ++i) {
    if (i > 0) {
      const Index parent = random.integer(std::max<Index>(0, i - 4), i - 1);
      std::copy_n(mask.begin() + parent * n, n, mask.begin() + i * n);
    }
    mask[static_cast<std::size_t>(i * n + i)] = static_cast<std::uint8_t>(i % 255 + 1);
  }
  return mask;
}

/// What a query of n new tokens after `first` others sees, by the definition in the class comment.
auto tree_sees(const std::vector<std::uint8_t>& mask, Index n, Index first, Index window) {
  return [&mask, n, first, window](Index i, Index t) {
    const auto depth = [&](Index row) {
      return first - 1 + n - std::count(mask.begin() + row * n, mask.begin() + (row + 1) * n, 0);
    };
    const Index at = t < first ? t : depth(t - first);
    return (t < first || mask[static_cast<std::size_t>(i * n + t - first)] != 0) &&
           (window == 0 || at > depth(i) - window);
  };
}

Batch<double> stacked(const Batch<double>& a, const Batch<double>& b) {
  Batch<double> result(a.rows() + b.rows(), a.cols());
  result << a, b;
  return result;
}

}  // namespace

TEST_CASE("options: scale, soft cap and sliding window as in measure/attention.hpp") {
  const Layer& l = layer();
  for (const AttentionOptions& o :
       {AttentionOptions{}, AttentionOptions{.scale = -0.4}, AttentionOptions{.soft_cap = 2},
        AttentionOptions{.window = 1}, AttentionOptions{.window = 8}, AttentionOptions{.window = 40},
        AttentionOptions{.window = 160}, AttentionOptions{.soft_cap = 1, .window = 70}}) {
    CAPTURE(o.window);
    const Attend attend = l.attend({.scale = o.scale, .soft_cap = o.soft_cap, .window = o.window});
    const Batch<double> expected = l.exact(o);
    for (const Index rows : {1, 2, 23, 170})
      CHECK(test::relative_difference(l.prefill(attend, rows), expected.bottomRows(rows)) < tolerance);
    CHECK(test::relative_difference(l.decode(attend, l.pages.view()), expected.row(169).transpose()) <
          tolerance);
  }
}

TEST_CASE("pages behind the window can be given back") {
  const Layer& l = layer();
  const Attend attend = l.attend({.window = 60});
  SequenceView view = l.pages.view();
  const Vector<float> before = l.decode(attend, view);
  std::vector<PageId> table(view.pages.block_table.begin(), view.pages.block_table.end());
  view.pages.first = 170 - 60 - 12;  // the first quantized token that is seen
  std::fill_n(table.begin(), view.pages.first / 16, no_page);
  view.pages.block_table = table;
  CHECK(test::identical(l.decode(attend, view), before));
  Workspace workspace;
  Batch<float> out = l.blank(2);
  CHECK_REFUSED(attend.prefill(view, l.q.bottomRows(2), out, workspace),
                "quantized token 97 is needed, and those before 98 were given back");
  view.pages.first = 0;
  table[6] = no_page;
  CHECK_REFUSED(l.decode(attend, view), "block_table has no page at 6");
  CHECK_REFUSED(l.decode(l.attend(), view), "block_table has no page at 0");
  CHECK(test::identical(out, l.blank(2)));
}

TEST_CASE("sink logits take a share, and a centered value's mean the rest") {
  const Layer& l = layer();
  const std::vector<double> sinks = {-2, 0, 1, 3, 20, 60};
  AttendOptions options{.sink_logits = sinks};
  const Batch<double> expected = test::direct(
      l.heads, l.q.cast<double>(), l.pages.keys.original, l.pages.values.original,
      [](Index i, Index t) { return t <= i; }, 0, sinks);
  const Batch<float> out = l.prefill(l.attend(options), 170);
  CHECK(test::relative_difference(out, expected) < tolerance);
  CHECK(test::relative_difference(l.decode(l.attend(options), l.pages.view()),
                                  expected.row(169).transpose()) < tolerance);
  options.output_basis = Basis::Transformed;
  CHECK(test::relative_difference(l.prefill(l.attend(options), 170), l.to_stored(expected.cast<float>())) <
        tolerance);
}

TEST_CASE("bases of queries and outputs") {
  const Layer& l = layer();
  const Batch<double> expected = l.exact();
  Workspace workspace;
  const Attend attend = l.attend({.query_basis = Basis::Transformed, .output_basis = Basis::Transformed});
  const Batch<float> q = l.queries_to_stored(l.q);
  Batch<float> out = l.blank(170);
  attend.prefill(l.pages.view(), q, out, workspace);
  CHECK(test::relative_difference(out, l.to_stored(expected.cast<float>())) < tolerance);
  Vector<float> last(96);
  attend.decode(l.pages.view(), q.row(169).transpose(), last, workspace);
  CHECK(test::relative_difference(last, l.to_stored(expected.cast<float>()).row(169).transpose()) <
        tolerance);
}

TEST_CASE("centered keys: the shift drops out") {
  const Layer& l = layer();
  test::Random random(431);
  using Centering = Codec<Centered<Dense<float>>, Quantized>;
  const std::vector<Centering> keys(
      2, Centering(Centered(test::well_conditioned(random, 32), random.vector<float>(32)), Quantized()));
  const test::Pages<Centering, ValueCodec> pages(keys, l.values, l.k, l.v, {.sink = 12, .recent = 9});
  const Attention attend(l.heads, keys, l.values);
  decltype(attend)::Workspace workspace;
  Batch<float> out = l.blank(170);
  attend.prefill(pages.view(), l.q, out, workspace);
  CHECK(test::relative_difference(out, attention(l.heads, l.q, pages.keys.original, pages.values.original)) <
        tolerance);
  // New exact keys are shifted alike.
  attend.prefill(pages.view(), l.q.topRows(5), l.k.topRows(5), l.v.topRows(5), out.topRows(5), workspace);
  const Batch<double> expected = test::direct(l.heads, l.q.topRows(5).cast<double>(),
                                              stacked(pages.keys.original, l.k.topRows(5).cast<double>()),
                                              stacked(pages.values.original, l.v.topRows(5).cast<double>()),
                                              [](Index i, Index t) { return t <= 170 + i; });
  CHECK(test::relative_difference(out.topRows(5), expected) < tolerance);
  CHECK_REFUSED(Attention(l.heads, keys, l.values, {.soft_cap = 20}), "soft_cap came with a key codec");
  CHECK_REFUSED(Attention(l.heads, keys, l.values, {.sink_logits = std::vector<double>(6, 0.0)}),
                "sink_logits came with a key codec that is centered");
}

TEST_CASE("prefill with the new tokens' exact keys and values") {
  const Layer& l = layer();
  test::Random random(432);
  Workspace workspace;
  SequenceView empty;
  empty.identity = l.attend().identity();
  for (const Index n : {1, 2, 40, 131})
    for (const Index window : {0, 3, 90, 200})
      for (const bool cached : {true, false}) {
        CAPTURE(n);
        CAPTURE(window);
        const Batch<float> q = random.batch<float>(n, 192), k = random.batch<float>(n, 64),
                           v = random.batch<float>(n, 32);
        const Index first = cached ? 170 : 0;
        const Batch<double> expected = test::direct(
            l.heads, q.cast<double>(), stacked(l.pages.keys.original.topRows(first), k.cast<double>()),
            stacked(l.pages.values.original.topRows(first), v.cast<double>()),
            [&](Index i, Index t) { return t <= first + i && (window == 0 || t > first + i - window); });
        const SequenceView view = cached ? l.pages.view() : empty;
        Batch<float> out = l.blank(n);
        l.attend({.window = window}).prefill(view, q, k, v, out, workspace);
        CHECK(test::relative_difference(out, expected) < tolerance);

        Batch<float> stored_k(n, 64), stored_v(n, 32);
        for (Index h = 0; h < 2; ++h) {
          stored_k.middleCols(h * 32, 32) =
              l.keys[static_cast<std::size_t>(h)].transform().forward(k.middleCols(h * 32, 32));
          stored_v.middleCols(h * 16, 16) =
              l.values[static_cast<std::size_t>(h)].transform().forward(v.middleCols(h * 16, 16));
        }
        out = l.blank(n);
        l.attend(
             {.window = window, .new_key_basis = Basis::Transformed, .new_value_basis = Basis::Transformed})
            .prefill(view, q, stored_k, stored_v, out, workspace);
        CHECK(test::relative_difference(out, expected) < tolerance);
      }
}

TEST_CASE("an explicit mask among the new tokens") {
  const Layer& l = layer();
  test::Random random(433);
  Workspace workspace;
  for (const Index n : {1, 7, 33, 100})
    for (const Index window : {0, 2, 30}) {
      CAPTURE(n);
      CAPTURE(window);
      const std::vector<std::uint8_t> mask = tree_mask(random, n);
      const Attend attend = l.attend({.window = window});
      // Cached: the last n of the view.
      const Index first = 170 - n;
      CHECK(test::relative_difference(
                l.prefill(attend, n, mask),
                test::direct(l.heads, l.q.bottomRows(n).cast<double>(), l.pages.keys.original,
                             l.pages.values.original, tree_sees(mask, n, first, window))) < tolerance);
      // Exact: n more.
      const Batch<float> q = random.batch<float>(n, 192), k = random.batch<float>(n, 64),
                         v = random.batch<float>(n, 32);
      Batch<float> out = l.blank(n);
      attend.prefill(l.pages.view(), q, k, v, out, workspace, mask);
      CHECK(test::relative_difference(
                out, test::direct(l.heads, q.cast<double>(), stacked(l.pages.keys.original, k.cast<double>()),
                                  stacked(l.pages.values.original, v.cast<double>()),
                                  tree_sees(mask, n, 170, window))) < tolerance);
      // Causality as a mask.
      std::vector<std::uint8_t> triangle(static_cast<std::size_t>(n * n), 0);
      for (Index i = 0; i < n; ++i) std::fill_n(triangle.begin() + i * n, i + 1, std::uint8_t{1});
      CHECK(test::identical(l.prefill(attend, n, triangle), l.prefill(attend, n)));
    }
}

TEST_CASE("a row that sees nothing gives zeros") {
  const Layer& l = layer();
  SequenceView empty;
  empty.identity = l.attend().identity();
  const std::vector<std::uint8_t> mask = {1, 0, 0, 0};
  for (const auto& sinks : {std::vector<double>{}, std::vector<double>(6, 1.0)}) {
    Workspace workspace;
    Batch<float> out = l.blank(2);
    l.attend({.sink_logits = sinks})
        .prefill(empty, l.q.topRows(2), l.k.topRows(2), l.v.topRows(2), out, workspace, mask);
    CHECK(!out.row(0).isZero(0));
    CHECK(out.row(1).isZero(0));
    l.attend({.sink_logits = sinks, .output_basis = Basis::Transformed})
        .prefill(empty, l.q.topRows(2), l.k.topRows(2), l.v.topRows(2), out, workspace, mask);
    CHECK(test::relative_difference(out.row(1), l.to_stored(Batch<float>::Zero(1, 96))) < 1e-6);
  }
}

TEST_CASE("many sequences at once give the outputs of one by one") {
  const Layer& l = layer();
  const Attend attend = l.attend();
  std::vector<SequenceView> views;
  for (const Index tokens : {149, 1, 64, 100}) {
    views.push_back(l.pages.view());
    views.back().pages.tokens = tokens;
  }
  views[1].recent = {};
  Workspace workspace;
  Batch<float> out = l.blank(4), q = l.q.topRows(4);
  attend.decode(views, q, out, workspace);
  for (Index i = 0; i < 4; ++i) {
    Vector<float> one(96);
    attend.decode(views[static_cast<std::size_t>(i)], q.row(i).transpose(), one, workspace);
    CHECK(test::identical(out.row(i).transpose(), one));
  }
  attend.decode(std::span<const SequenceView>(), q.topRows(0), out.topRows(0), workspace);
}

TEST_CASE("both layouts give the same bits; so does a workspace that served others") {
  const Layer& l = layer();
  const test::Pages<KeyCodec, ValueCodec, TokenInterleaved<>> pages(
      l.keys, l.values, l.k, l.v, {.page_tokens = 32, .sink = 12, .recent = 9, .heads_outside = false});
  const Attention attend(l.heads, l.keys, l.values, {}, TokenInterleaved<>());
  decltype(attend)::Workspace workspace;
  Batch<float> out = l.blank(170);
  attend.prefill(pages.view(), l.q, out, workspace);
  CHECK(test::identical(out, l.prefill(l.attend(), 170)));
  Vector<float> last(96);
  attend.decode(pages.view(), l.q.row(169).transpose(), last, workspace);
  CHECK(test::identical(last, l.decode(l.attend(), l.pages.view())));
  CHECK_REFUSED(attend.decode(l.pages.view(), l.q.row(0).transpose(), last, workspace), "view.identity is");
}

TEST_CASE("a sequence split into 1 to 8 parts, merged in any order") {
  const Layer& l = layer();
  test::Random random(434);
  double worst = 0;
  for (int round = 0; round < 48; ++round) {
    const Index parts = round % 8 + 1, n = random.pick<Index>({1, 1, 5, 40}),
                window = random.pick<Index>({0, 50, 3});  // 3: whole parts are masked
    const bool sinks = random.pick({true, false}), exact = random.pick({true, false});
    const Attend attend = l.attend(
        {.window = window, .sink_logits = sinks ? std::vector<double>(6, 0.3) : std::vector<double>{}});
    const Batch<float> q = l.q.bottomRows(n), k = l.k.topRows(n), v = l.v.topRows(n);
    const Index first = exact ? 170 : 170 - n;
    Workspace workspace;
    Batch<float> whole = l.blank(n), out = l.blank(n);
    if (exact)
      attend.prefill(l.pages.view(), q, k, v, whole, workspace);
    else
      attend.prefill(l.pages.view(), q, whole, workspace);

    std::vector<Index> cuts = {0, 170};
    for (Index i = 1; i < parts; ++i) cuts.push_back(random.integer(0, 170));
    std::sort(cuts.begin(), cuts.end());
    std::vector<Attend::State> states(static_cast<std::size_t>(parts));
    for (std::size_t i = 0; i < states.size(); ++i) {
      attend.reset(states[i], n);
      attend.accumulate(l.pages.view(), q, first, cuts[i], cuts[i + 1], states[i], workspace);
    }
    if (exact) attend.accumulate_new(q, k, v, first, states.front(), workspace);
    while (states.size() > 1) {
      const auto at = static_cast<std::size_t>(random.integer(0, static_cast<Index>(states.size()) - 2));
      if (round % 2 == 0) std::swap(states[at], states.back());
      states[at].merge(states.back());
      states.pop_back();
    }
    attend.finish(states.front(), out, workspace);
    worst = std::max(worst, test::relative_difference(out, whole));
  }
  CHECK(worst < 2e-6);
  MESSAGE("largest difference, relative to the largest output: " << worst);
}

TEST_CASE("a prefill with exact new tokens, its queries shared out") {
  const Layer& l = layer();
  test::Random random(435);
  double worst = 0;
  for (int round = 0; round < 30; ++round) {
    const Index n = random.integer(2, 150), parts = random.integer(2, 5);
    const Attend attend = l.attend({.window = random.pick<Index>({0, 50, 3})});
    const Batch<float> q = l.q.bottomRows(n), k = l.k.topRows(n), v = l.v.topRows(n);
    Workspace workspace;
    Batch<float> whole = l.blank(n), out = l.blank(n);
    attend.prefill(l.pages.view(), q, k, v, whole, workspace);
    for (Index part = 0; part < parts; ++part) {
      const Index begin = part * n / parts, end = (part + 1) * n / parts;
      if (begin == end) continue;
      Attend::State state;
      attend.reset(state, end - begin);
      const auto queries = q.middleRows(begin, end - begin);
      attend.accumulate(l.pages.view(), queries, 170 + begin, 0, 170, state, workspace);
      attend.accumulate_new(queries, k.topRows(end), v.topRows(end), 170, state, workspace);
      attend.finish(state, out.middleRows(begin, end - begin), workspace);
    }
    worst = std::max(worst, test::relative_difference(out, whole));
  }
  CHECK(worst < 2e-6);
  // Of the last queries a mask, as for a whole call of them.
  const Batch<float> q = l.q.bottomRows(4), k = l.k.topRows(9), v = l.v.topRows(9);
  const std::vector<std::uint8_t> lower = {1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1};
  const Attend attend = l.attend({});
  Workspace workspace;
  Batch<float> masked = l.blank(4), plain = l.blank(4);
  for (const bool mask : {false, true}) {
    Attend::State state;
    attend.reset(state, 4);
    attend.accumulate_new(q, k, v, 170, state, workspace, mask ? Attend::Mask(lower) : Attend::Mask());
    attend.finish(state, mask ? masked : plain, workspace);
  }
  CHECK(test::identical(masked, plain));
}

TEST_CASE("decode allocates nothing after the first call of its size") {
  const Layer& l = layer();
  for (const Basis basis : {Basis::Original, Basis::Transformed}) {
    const Attend attend = l.attend({.soft_cap = 30,
                                    .window = 100,
                                    .sink_logits = std::vector<double>(6, 0.0),
                                    .query_basis = basis,
                                    .output_basis = basis});
    Workspace workspace;
    const std::vector<SequenceView> views = {l.pages.view(), l.pages.view()};
    const Batch<float> q = l.q.topRows(2);
    const Vector<float> one = l.q.row(0).transpose();
    Batch<float> out = l.blank(2);
    Vector<float> last(96);
    Attend::State state;
    const auto run = [&] {
      attend.decode(views[0], one, last, workspace);
      attend.decode(views, q, out, workspace);
      attend.reset(state, 1);
      attend.accumulate(views[0], q.topRows(1), 169, 20, 150, state, workspace);
      attend.finish(state, out.topRows(1), workspace);
    };
    run();
    CHECK(test::allocations_of(run) == 0);
  }
}

namespace {

/// A user's transform with the concept's members only.
struct Doubling {
  using Scalar = double;
  Index dim() const { return 16; }
  template <class X>
  auto forward(const X& x) const {
    return X(2 * x);
  }
  template <class X>
  auto inverse(const X& x) const {
    return X(x / 2);
  }
  template <class X>
  auto adjoint_inverse(const X& x) const {
    return X(x / 2);
  }
};

}  // namespace

TEST_CASE("a user's transform, in double") {
  test::Random random(435);
  using UserCodec = Codec<Doubling, PassThrough<double, double>>;
  const AttentionHeads heads{2, 1, 16, 16};
  const std::vector<UserCodec> codecs(1, UserCodec(Doubling(), PassThrough<double, double>()));
  const Batch<double> q = random.batch(90, 32), k = random.batch(90, 16), v = random.batch(90, 16);
  const test::Pages<UserCodec, UserCodec> pages(codecs, codecs, k, v);
  const Attention attend(heads, codecs, codecs);
  decltype(attend)::Workspace workspace;
  Batch<double> out(90, 32);
  attend.prefill(pages.view(), q, out, workspace);
  CHECK(test::relative_difference(out, attention(heads, q, k, v)) < 1e-14);
}

TEST_CASE("logits that overflow give finite outputs") {
  const Layer& l = layer();
  Workspace workspace;
  Batch<float> k = Batch<float>::Constant(3, 64, 1e25F), q = Batch<float>::Constant(3, 192, 1e25F),
               out = l.blank(3);
  SequenceView empty;
  empty.identity = l.attend().identity();
  l.attend({.query_basis = Basis::Transformed, .new_key_basis = Basis::Transformed})
      .prefill(empty, q, k, l.v.topRows(3), out, workspace);
  CHECK(test::relative_difference(out.row(0).head(16), l.v.row(0).head(16)) < 1e-5);
  CHECK(all_finite(out));
}

TEST_CASE("heads, codecs and options that do not fit are refused") {
  const Layer& l = layer();
  const auto one_key = std::vector<KeyCodec>(l.keys.begin(), l.keys.begin() + 1);
  CHECK_REFUSED(Attend({6, 4, 32, 16}, l.keys, l.values), "6 query heads and 4 KV heads");
  CHECK_REFUSED(Attend(l.heads, one_key, l.values), "keys has 1 codecs, expected one a KV head, 2");
  CHECK_REFUSED(Attend(l.heads, l.keys, {}), "values has 0 codecs");
  CHECK_REFUSED(Attend({6, 2, 64, 16}, l.keys, l.values), "keys has head dimension 32, expected 64");
  CHECK_REFUSED(Attend({6, 2, 32, 32}, l.keys, l.values), "values has head dimension 16, expected 32");
  CHECK_REFUSED(l.attend({.scale = test::nan}), "scale is nan");
  CHECK_REFUSED(l.attend({.soft_cap = -1}), "soft_cap is -1");
  CHECK_REFUSED(l.attend({.soft_cap = test::infinity}), "soft_cap is inf");
  CHECK_REFUSED(l.attend({.window = -3}), "window is -3");
  CHECK_REFUSED(l.attend({.sink_logits = {0, 1}}), "sink_logits has 2 entries, expected one a query head, 6");
  CHECK_REFUSED(l.attend({.sink_logits = {0, 1, 2, 3, 4, 1e300}}), "sink_logits has the value 1e+300");
}

TEST_CASE("bad arguments are refused and nothing is written") {
  const Layer& l = layer();
  const Attend attend = l.attend();
  Workspace workspace;
  const SequenceView view = l.pages.view();
  Batch<float> out = l.blank(3);
  Attend::State state;
  attend.reset(state, 3);
  const Batch<float> q = l.q.topRows(3), k = l.k.topRows(3), v = l.v.topRows(3);
  const auto bad = [](Batch<float> x) {
    x(x.rows() - 1, 5) = std::numeric_limits<float>::quiet_NaN();
    return x;
  };
  const std::vector<std::uint8_t> mask(8, 1);

  CHECK_REFUSED(attend.prefill(view, q.leftCols(191), out, workspace), "q is 3 x 191, expected 3 x 192");
  CHECK_REFUSED(attend.prefill(view, q, out.topRows(2), workspace), "out is 2 x 96, expected 3 x 96");
  CHECK_REFUSED(attend.prefill(view, q.topRows(0), out.topRows(0), workspace), "q has 0 tokens");
  CHECK_REFUSED(attend.prefill(view, bad(q), out, workspace), "q has a value that is not finite");
  CHECK_REFUSED(attend.prefill(view, q, out, workspace, mask), "mask has 8 entries, expected none or 3 x 3");
  CHECK_REFUSED(attend.prefill(view, q, k.topRows(2), v, out, workspace), "k is 2 x 64, expected 3 x 64");
  CHECK_REFUSED(attend.prefill(view, q, k, k, out, workspace), "v is 3 x 64, expected 3 x 32");
  CHECK_REFUSED(attend.prefill(view, q, bad(k), v, out, workspace), "k has a value that is not finite");
  CHECK_REFUSED(attend.prefill(view, q, k, bad(v), out, workspace), "v has a value that is not finite");
  CHECK_REFUSED(attend.prefill(view, q, k, v, out, workspace, mask), "mask has 8 entries");
  const float huge = std::numeric_limits<float>::max();
  CHECK_REFUSED(attend.prefill(view, Batch<float>::Constant(3, 192, huge), out, workspace),
                "q overflows when it is transformed");
  CHECK_REFUSED(attend.prefill(view, q, Batch<float>::Constant(3, 64, huge), v, out, workspace),
                "k overflows when it is transformed");

  SequenceView short_view = view;
  short_view.recent = {};
  short_view.pages.tokens = 0;
  short_view.sink.tokens = 2;
  CHECK_REFUSED(attend.prefill(short_view, q, out, workspace),
                "q has 3 tokens, expected at most the view's 2");
  short_view.sink.tokens = 0;
  const std::vector<SequenceView> views = {view, view, short_view};
  CHECK_REFUSED(attend.decode(views, q, out, workspace), "view has 0 tokens, expected at least one");
  CHECK_REFUSED(attend.decode(views, q.topRows(2), out, workspace), "q is 2 x 192, expected 3 x 192");
  short_view.sink.tokens = -1;
  CHECK_REFUSED(attend.prefill(short_view, q, out, workspace), "-1 + 0 + 0 tokens");

  const auto refuse = [&](auto change, const char* part) {
    SequenceView changed = view;
    change(changed);
    CHECK_REFUSED(attend.prefill(changed, q, out, workspace), part);
    CHECK_REFUSED(attend.prefill(changed, q, k, v, out, workspace), part);
    CHECK_REFUSED(attend.decode({&changed, 1}, q.topRows(1), out.topRows(1), workspace), part);
    CHECK_REFUSED(attend.accumulate(changed, q, 167, 0, 170, state, workspace), part);
  };
  refuse([](SequenceView& s) { ++s.identity; }, "written with other codecs or another layout");
  refuse([](SequenceView& s) { s.pages.first = 1; }, "quantized token 0 is needed");
  refuse([](SequenceView& s) { s.pages.block_table = s.pages.block_table.first(9); },
         "block_table has 9 entries for 149 tokens, expected 10");
  refuse([](SequenceView& s) { s.pages.page_tokens = 0; }, "page_tokens is 0");
  refuse([](SequenceView& s) { s.sink.keys = nullptr; }, "view.sink has 12 tokens and a null pointer");
  refuse([](SequenceView& s) { s.recent.values = nullptr; }, "view.recent has 9 tokens and a null pointer");
  refuse([](SequenceView& s) { s.pages.keys.codes = nullptr; }, "view.pages has 149 tokens and a null");
  const std::vector<Eigen::bfloat16> rubbish(12 * 32 * 2, std::numeric_limits<Eigen::bfloat16>::quiet_NaN());
  SequenceView damaged = view;
  damaged.sink.keys = rubbish.data();
  CHECK_REFUSED(attend.prefill(damaged, q, out, workspace), "overflows) has a value");
  CHECK_REFUSED(attend.decode({&damaged, 1}, q.topRows(1), out.topRows(1), workspace), "a row's sum");
  attend.accumulate(damaged, q, 167, 0, 170, state, workspace);
  CHECK_REFUSED(attend.finish(state, out, workspace), "a row's sum (by the cache, the state");
  CHECK_REFUSED(attend.accumulate(view, q, 167, 0, 170, state, workspace), "a row's sum");
  attend.reset(state, 3);

  CHECK_REFUSED(attend.accumulate(view, q, -1, 0, 170, state, workspace), "first is -1");
  CHECK_REFUSED(attend.accumulate(view, q, 167, -1, 170, state, workspace), "tokens -1 to 170 asked for");
  CHECK_REFUSED(attend.accumulate(view, q, 167, 9, 8, state, workspace), "tokens 9 to 8 asked for");
  CHECK_REFUSED(attend.accumulate(view, q, 167, 0, 171, state, workspace),
                "expected a part of the view's 170");
  CHECK_REFUSED(attend.accumulate(view, q.topRows(2), 167, 0, 170, state, workspace),
                "state has 18 rows of 16 values, expected 2 queries x 6 heads of 16");
  CHECK_REFUSED(attend.accumulate_new(q.topRows(2), k.topRows(2), v.topRows(2), 170, state, workspace),
                "state has 18 rows");
  CHECK_REFUSED(attend.accumulate_new(q, k, v, -2, state, workspace), "first is -2");
  CHECK_REFUSED(attend.accumulate_new(q, k.topRows(2), v.topRows(2), 170, state, workspace),
                "k has 2 rows, expected at least q's 3");
  CHECK_REFUSED(attend.accumulate_new(q, k, v.topRows(2), 170, state, workspace), "v is 2 x");
  CHECK_REFUSED(attend.finish(state, out.topRows(2), workspace), "out is 2 x 96, expected 3 x 96");
  CHECK_REFUSED(attend.finish(Attend::State(17, 16), out, workspace), "state has 17 rows");
  CHECK_REFUSED(attend.finish(Attend::State(18, 15), out, workspace), "state has 18 rows of 15 values");
  CHECK(state.sum().isZero(0));
  CHECK(test::identical(out, l.blank(3)));
}

TEST_CASE("identity: layout, order and each codec count") {
  const Layer& l = layer();
  const std::uint64_t own = l.attend().identity();
  CHECK(own == cache_identity<TokenMajor>(l.keys, l.values));
  CHECK(own == cache_identity<TokenMajor>(std::span(l.keys), std::span(l.values)));
  CHECK(own != cache_identity<TokenInterleaved<>>(l.keys, l.values));
  CHECK(cache_identity<TokenInterleaved<4>>(l.keys, l.values) !=
        cache_identity<TokenInterleaved<32>>(l.keys, l.values));
  CHECK(own != cache_identity<TokenMajor>(l.values, l.keys));
  std::vector<KeyCodec> keys = l.keys;
  std::swap(keys[0], keys[1]);
  CHECK(own != cache_identity<TokenMajor>(keys, l.values));
}
