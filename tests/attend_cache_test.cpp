// SPDX-License-Identifier: Apache-2.0
// Attention over a PagedCache: the reference outputs, exactly and from BF16 windows, and decoded tokens
// against exact attention.
#include <tuple>

#include "attention_reference.hpp"
#include "cache_support.hpp"
#include "wushkv/attend/attend.hpp"
#include "wushkv/measure/attention.hpp"
#include "wushkv/quantize/pass_through.hpp"
#include "wushkv/transform/centered.hpp"
#include "wushkv/transform/identity.hpp"

using namespace wushkv;

namespace {

using Exact = Codec<Identity<float>, PassThrough<float, float>>;

double through_cache(const CacheOptions& options, const AttendOptions& attend, const std::string& output) {
  const test::AttentionReference reference;
  const std::vector<Exact> codecs(2, Exact(Identity<float>(16), PassThrough<float, float>()));
  PagePool pool(PagedCache<Exact, Exact>::page_bytes(codecs, codecs, options), 8);
  PagedCache<Exact, Exact> cache(pool, codecs, codecs, options);
  const Attention<Exact, Exact> attention(reference.heads, codecs, codecs, attend);
  Attention<Exact, Exact>::Workspace workspace;
  const SequenceId id = cache.create();
  const Batch<float> q = reference.q.cast<float>(), k = reference.k.cast<float>(),
                     v = reference.v.cast<float>();
  Batch<float> decoded(40, 96), prefilled(40, 96);
  for (Index t = 0; t < 40; ++t) {
    cache.append(id, k.row(t), v.row(t));
    Vector<float> out(96);
    attention.decode(cache.view(id), q.row(t).transpose(), out, workspace);
    decoded.row(t) = out.transpose();
  }
  attention.prefill(cache.view(id), q, prefilled, workspace);
  const Batch<double> expected = reference.side_by_side(output);
  return std::max(test::relative_difference(decoded, expected),
                  test::relative_difference(prefilled, expected));
}

}  // namespace

TEST_CASE("reference outputs through the cache: a float pass-through within 2e-6, BF16 windows within 1e-2") {
  const CacheOptions quantized{.page_tokens = 16, .sink = 0, .recent = 0, .flush = 1},
      windows{.page_tokens = 16, .sink = 4, .recent = 64};
  for (const auto& [attend, name] : {std::pair<AttendOptions, const char*>{{}, "output"},
                                     {{.soft_cap = 20}, "output.softcap20"},
                                     {{.window = 8}, "output.window8"}}) {
    CHECK(through_cache(quantized, attend, name) < 2e-6);
    CHECK(through_cache(windows, attend, name) < 1e-2);
  }
}

TEST_CASE("centered keys and values change nothing, in pages and in windows, in both bases") {
  using Centering = Codec<Centered<Dense<float>>, PassThrough<float, float>>;
  const test::AttentionReference reference;
  test::Random random(352);
  std::vector<Centering> keys, values;
  for (std::vector<Centering>* side : {&keys, &values})
    for (int h = 0; h < 2; ++h)
      side->emplace_back(Centered(test::any_dense(random, 16), random.vector<float>(16)),
                         PassThrough<float, float>());
  const auto stored = [&](const Batch<float>& x, Index kv_heads) {
    Batch<float> y(x.rows(), x.cols());
    const Index heads = x.cols() / 16;
    for (Index g = 0; g < heads; ++g)
      y.middleCols(16 * g, 16) = values[static_cast<std::size_t>(g * kv_heads / heads)].transform().forward(
          x.middleCols(16 * g, 16));
    return y;
  };
  const Batch<float> q = reference.q.cast<float>(), k = reference.k.cast<float>(),
                     v = reference.v.cast<float>();
  using Cache = PagedCache<Centering, Centering>;
  for (const bool transformed : {false, true})
    for (const auto& [sink, recent, tolerance] :
         {std::tuple<Index, Index, double>{0, 0, 1e-5}, {4, 8, 2e-2}, {4, 64, 2e-2}}) {
      CacheOptions options{.page_tokens = 16, .sink = sink, .recent = recent, .flush = recent > 0 ? 8 : 1};
      AttendOptions attend;
      Batch<float> expected = reference.side_by_side("output").cast<float>();
      if (transformed) {
        options.value_basis = attend.new_value_basis = attend.output_basis = Basis::Transformed;
        expected = stored(expected, 2);
      }
      PagePool pool(Cache::page_bytes(keys, values, options), 16);
      Cache cache(pool, keys, values, options);
      const Attention<Centering, Centering> attention(reference.heads, keys, values, attend);
      Attention<Centering, Centering>::Workspace workspace;
      const Batch<float> given = transformed ? stored(v, 2) : v;
      const SequenceId id = cache.create();
      Batch<float> decoded(40, 96), prefilled(40, 96);
      for (Index t = 0; t < 40; ++t) {
        cache.append(id, k.row(t), given.row(t));
        Vector<float> out(96);
        attention.decode(cache.view(id), q.row(t).transpose(), out, workspace);
        decoded.row(t) = out.transpose();
      }
      attention.prefill(cache.view(id), q, prefilled, workspace);
      CHECK(test::relative_difference(decoded, expected) < tolerance);
      CHECK(test::relative_difference(prefilled, expected) < tolerance);
      // Exact new tokens beside cached ones.
      cache.truncate(id, 25);
      attention.prefill(cache.view(id), q.bottomRows(15), k.bottomRows(15), given.bottomRows(15),
                        prefilled.bottomRows(15), workspace);
      CHECK(test::relative_difference(prefilled.bottomRows(15), expected.bottomRows(15)) < tolerance);
    }
}

TEST_CASE("a mask and a window together: cached new tokens give what exact ones do") {
  test::Random random(351);
  const std::vector<Exact> codecs(1, Exact(Identity<float>(8), PassThrough<float, float>()));
  const CacheOptions options{.page_tokens = 16, .sink = 0, .recent = 0, .flush = 1};
  PagePool pool(PagedCache<Exact, Exact>::page_bytes(codecs, codecs, options), 16);
  PagedCache<Exact, Exact> cache(pool, codecs, codecs, options);
  Attention<Exact, Exact>::Workspace workspace;
  for (int round = 0; round < 60; ++round) {
    const Index past = random.pick<Index>({0, 3, 20}), n = random.integer(1, 9),
                window = random.integer(1, 12);
    const Attention<Exact, Exact> attention({2, 1, 8, 8}, codecs, codecs, {.window = window});
    const Batch<float> k = random.batch<float>(past + n, 8), v = random.batch<float>(past + n, 8),
                       q = random.batch<float>(n, 16);
    std::vector<std::uint8_t> mask(static_cast<std::size_t>(n * n), 1);
    if (round % 3 != 0)
      for (Index i = 0; i < n * n; ++i)
        mask[static_cast<std::size_t>(i)] = i % (n + 1) == 0 || random.integer(0, 1) == 1 ? 1 : 0;
    const SequenceId id = cache.create();
    cache.append(id, k.topRows(past), v.topRows(past));
    Batch<float> exact(n, 16), cached(n, 16);
    attention.prefill(cache.view(id), q, k.bottomRows(n), v.bottomRows(n), exact, workspace, mask);
    cache.append(id, k.bottomRows(n), v.bottomRows(n));
    attention.prefill(cache.view(id), q, cached, workspace, mask);
    CHECK(test::relative_difference(cached, exact) < 2e-6);
    cache.release(id);
  }
}

TEST_CASE("a sliding window reads nothing that was given back") {
  test::Random random(350);
  const std::vector<test::KeyCodec> keys = test::any_key_codecs(random, 1, 16);
  const std::vector<test::ValueCodec> values = test::any_value_codecs(random, 1, 16);
  const CacheOptions options{.page_tokens = 16, .sink = 0, .recent = 0, .flush = 1};
  using Cache = PagedCache<test::KeyCodec, test::ValueCodec>;
  PagePool pool(Cache::page_bytes(keys, values, options), 8);
  Cache cache(pool, keys, values, options);
  const Attention<test::KeyCodec, test::ValueCodec> sliding({2, 1, 16, 16}, keys, values, {.window = 20}),
      whole({2, 1, 16, 16}, keys, values);
  Attention<test::KeyCodec, test::ValueCodec>::Workspace workspace;
  const SequenceId id = cache.create();
  cache.append(id, random.batch<float>(90, 16), random.batch<float>(90, 16));
  const Vector<float> q = random.vector<float>(32);
  Vector<float> before(32), after(32);
  sliding.decode(cache.view(id), q, before, workspace);
  cache.release_before(id, 70);
  sliding.decode(cache.view(id), q, after, workspace);
  CHECK(test::identical(before, after));
  CHECK_REFUSED(whole.decode(cache.view(id), q, after, workspace), "given back");
}
