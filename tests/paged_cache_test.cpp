// SPDX-License-Identifier: Apache-2.0
#include "wushkv/cache/paged_cache.hpp"

#include "allocation_counter.hpp"
#include "cache_support.hpp"
#include "wushkv/quantize/pass_through.hpp"
#include "wushkv/transform/identity.hpp"

using namespace wushkv;

namespace {

constexpr Index heads = 2, dk = 16, dv = 12;

struct Fixture {
  explicit Fixture(const CacheOptions& options, std::size_t pages = 64)
      : keys(test::any_key_codecs(random, heads, dk)),
        values(test::any_value_codecs(random, heads, dv)),
        pool(Cache::page_bytes(keys, values, options), pages),
        cache(pool, keys, values, options) {}

  using Cache = PagedCache<test::KeyCodec, test::ValueCodec>;
  test::Random random{310};
  std::vector<test::KeyCodec> keys;
  std::vector<test::ValueCodec> values;
  PagePool pool;
  Cache cache;

  Batch<float> k(Index tokens) { return random.batch<float>(tokens, heads * dk); }
  Batch<float> v(Index tokens) { return random.batch<float>(tokens, heads * dv); }
};

bool same_contents(const Fixture::Cache& a, SequenceId x, const Fixture::Cache& b, SequenceId y) {
  bool same = a.length(x) == b.length(y) && a.quantized(x) == b.quantized(y);
  for (Index h = 0; same && h < heads; ++h)
    same = test::identical(test::contents<true>(a, x, h), test::contents<true>(b, y, h)) &&
           test::identical(test::contents<false>(a, x, h), test::contents<false>(b, y, h));
  return same;
}

}  // namespace

TEST_CASE("windows and boundary: sink first, recent last, quantized between in flushes of eight") {
  Fixture f({.page_tokens = 16});
  const SequenceId id = f.cache.create();
  for (Index n = 1; n <= 700; ++n) {
    f.cache.append(id, f.k(1), f.v(1));
    const Index waiting = std::max<Index>(0, n - 64);
    const Index quantized = waiting < 264 ? 0 : (waiting - 256) / 8 * 8;
    REQUIRE(f.cache.length(id) == n);
    REQUIRE(f.cache.quantized(id) == quantized);
    REQUIRE(f.cache.sink(id).tokens == std::min<Index>(n, 64));
    REQUIRE(f.cache.recent(id).tokens == waiting - quantized);
    REQUIRE(static_cast<Index>(f.cache.block_table(id).size()) == (quantized + 15) / 16);
  }
  CHECK(f.cache.recent(id).tokens >= 256);
  CHECK(f.cache.recent(id).tokens <= 263);
}

TEST_CASE("without windows every token is quantized as it comes") {
  Fixture f({.page_tokens = 16, .sink = 0, .recent = 0, .flush = 1});
  const SequenceId id = f.cache.create();
  const Batch<float> k = f.k(37), v = f.v(37);
  f.cache.append(id, k, v);
  CHECK(f.cache.quantized(id) == 37);
  CHECK(f.cache.recent(id).tokens == 0);
  for (Index h = 0; h < heads; ++h) {
    const auto& codec = f.keys[static_cast<std::size_t>(h)];
    const Batch<float> expected = codec.decode_transformed(codec.encode(k.middleCols(h * dk, dk)));
    CHECK(test::identical(test::contents<true>(f.cache, id, h), expected));
  }
}

TEST_CASE("tokens go through the recent window in BF16") {
  Fixture f({.page_tokens = 16, .sink = 3, .recent = 4, .flush = 2});
  const SequenceId id = f.cache.create();
  const Batch<float> k = f.k(21), v = f.v(21);
  f.cache.append(id, k, v);
  CHECK(f.cache.quantized(id) == 14);
  for (Index h = 0; h < heads; ++h) {
    const auto& codec = f.keys[static_cast<std::size_t>(h)];
    const Batch<float> rounded = Batch<float>(codec.transform().forward(k.middleCols(h * dk, dk)))
                                     .cast<Eigen::bfloat16>()
                                     .cast<float>();
    Batch<float> expected = rounded;
    for (Index t = 3; t < 17; ++t) {
      std::vector<std::uint8_t> codes(dk);
      std::vector<test::KeyCodec::Params> params(1);
      codec.encode_transformed({rounded.row(t).data(), dk}, codes, params);
      codec.decode_transformed(codes, params, {expected.row(t).data(), dk});
    }
    CHECK(test::identical(test::contents<true>(f.cache, id, h), expected));
  }
}

TEST_CASE("interleaved appends give the same as one sequence after another") {
  for (const CacheOptions& options : {CacheOptions{.page_tokens = 16, .sink = 5, .recent = 9, .flush = 4},
                                      CacheOptions{.page_tokens = 32, .sink = 0, .recent = 0, .flush = 1}}) {
    Fixture together(options), apart(options);
    const SequenceId a = together.cache.create(), b = together.cache.create(), c = apart.cache.create(),
                     d = apart.cache.create();
    std::vector<Batch<float>> ks, vs;
    for (int i = 0; i < 120; ++i) {
      ks.push_back(together.k(1 + i % 3));
      vs.push_back(together.v(1 + i % 3));
    }
    for (std::size_t i = 0; i < 120; ++i) together.cache.append(i % 2 == 0 ? a : b, ks[i], vs[i]);
    for (std::size_t i = 0; i < 120; i += 2) apart.cache.append(c, ks[i], vs[i]);
    for (std::size_t i = 1; i < 120; i += 2) apart.cache.append(d, ks[i], vs[i]);
    CHECK(same_contents(together.cache, a, apart.cache, c));
    CHECK(same_contents(together.cache, b, apart.cache, d));
  }
}

TEST_CASE("several sequences in one call") {
  const CacheOptions options{.page_tokens = 16, .sink = 2, .recent = 3, .flush = 2};
  Fixture at_once(options), one_by_one(options);
  const std::vector<SequenceId> ids = {at_once.cache.create(), at_once.cache.create(),
                                       at_once.cache.create()};
  const std::vector<SequenceId> others = {one_by_one.cache.create(), one_by_one.cache.create(),
                                          one_by_one.cache.create()};
  const std::vector<Index> counts = {20, 0, 7};
  const Batch<float> k = at_once.k(27), v = at_once.v(27);
  at_once.cache.append(ids, counts, k, v);
  one_by_one.cache.append(others[0], k.topRows(20), v.topRows(20));
  one_by_one.cache.append(others[2], k.bottomRows(7), v.bottomRows(7));
  CHECK(at_once.cache.length(ids[1]) == 0);
  for (const std::size_t i : {0U, 2U})
    CHECK(same_contents(at_once.cache, ids[i], one_by_one.cache, others[i]));
}

TEST_CASE("siblings that write their shared page in one call need a page less than writers") {
  Fixture f({.page_tokens = 16, .sink = 0, .recent = 0, .flush = 1}, 3);
  const SequenceId a = f.cache.create();
  f.cache.append(a, f.k(8), f.v(8));
  const std::vector<SequenceId> all = {a, f.cache.fork(a), f.cache.fork(a)};
  const std::vector<Index> one_each = {1, 1, 1};
  f.cache.append(all, one_each, f.k(3), f.v(3));
  CHECK(f.pool.statistics().used == 3);
  CHECK(f.pool.statistics().shared == 0);
}

TEST_CASE("any bits, groups, dimensions and layouts") {
  test::Random random(311);
  for (const int bits : {1, 4, 8}) {
    const std::vector<test::KeyCodec> keys = test::any_key_codecs(random, 3, 24, bits, 8);
    const std::vector<test::ValueCodec> values = test::any_value_codecs(random, 3, 20, 9 - bits, 5);
    const CacheOptions options{.page_tokens = 32, .sink = 1, .recent = 2, .flush = 2};
    using Interleaved = PagedCache<test::KeyCodec, test::ValueCodec, TokenInterleaved<16>>;
    using Major = PagedCache<test::KeyCodec, test::ValueCodec>;
    PagePool interleaved_pool(Interleaved::page_bytes(keys, values, options), 8),
        major_pool(Major::page_bytes(keys, values, options), 8);
    Interleaved interleaved(interleaved_pool, keys, values, options);
    Major major(major_pool, keys, values, options);
    const SequenceId a = interleaved.create(), b = major.create();
    const Batch<float> k = random.batch<float>(90, 72), v = random.batch<float>(90, 60);
    interleaved.append(a, k, v);
    major.append(b, k, v);
    for (Index h = 0; h < 3; ++h) {
      CHECK(test::identical((test::contents<true, Interleaved, TokenInterleaved<16>>(interleaved, a, h)),
                            test::contents<true>(major, b, h)));
      CHECK(test::identical((test::contents<false, Interleaved, TokenInterleaved<16>>(interleaved, a, h)),
                            test::contents<false>(major, b, h)));
    }
    CHECK(interleaved.identity() != major.identity());
  }
}

TEST_CASE("folded values and rotated keys come in transformed") {
  Fixture plain({.page_tokens = 16, .sink = 2, .recent = 3, .flush = 1});
  Fixture folded({.page_tokens = 16,
                  .sink = 2,
                  .recent = 3,
                  .flush = 1,
                  .key_basis = Basis::Transformed,
                  .value_basis = Basis::Transformed});
  const SequenceId a = plain.cache.create(), b = folded.cache.create();
  const Batch<float> k = plain.k(30), v = plain.v(30);
  Batch<float> tk(30, heads * dk), tv(30, heads * dv);
  for (Index h = 0; h < heads; ++h) {
    tk.middleCols(h * dk, dk) =
        plain.keys[static_cast<std::size_t>(h)].transform().forward(k.middleCols(h * dk, dk));
    tv.middleCols(h * dv, dv) =
        plain.values[static_cast<std::size_t>(h)].transform().forward(v.middleCols(h * dv, dv));
  }
  plain.cache.append(a, k, v);
  folded.cache.append(b, tk, tv);
  CHECK(same_contents(plain.cache, a, folded.cache, b));
}

TEST_CASE("an exhausted pool fails the whole call, and the retry gives the same bytes") {
  const CacheOptions options{.page_tokens = 16, .sink = 4, .recent = 6, .flush = 3};
  Fixture f(options, 4), ample(options, 64);
  const SequenceId a = f.cache.create(), b = f.cache.create(), x = ample.cache.create(),
                   y = ample.cache.create();
  const Batch<float> k0 = f.k(40), v0 = f.v(40), k1 = f.k(50), v1 = f.v(50);
  f.cache.append(a, k0, v0);  // 30 quantized: 2 pages
  const Index before = f.cache.length(b);
  const std::string message =
      test::message_of<PoolExhausted>([&] { f.cache.append(b, k1, v1); });  // 39: 3 pages
  CHECK(message == "append: PagePool: 3 pages are needed, 2 of 4 are free");
  CHECK(f.cache.length(b) == before);
  CHECK(f.pool.free_pages() == 2);
  const CacheStatus status = f.cache.try_append(b, k1, v1);
  CHECK(status.code() == CacheStatus::Code::PoolExhausted);
  // A call for several sequences appends to none.
  const std::vector<SequenceId> both = {a, b};
  const std::vector<Index> counts = {10, 40};
  CHECK_FALSE(f.cache.try_append(both, counts, k1, v1));
  CHECK(f.cache.length(a) == 40);
  f.cache.release(a);
  f.cache.append(b, k1, v1);
  ample.cache.append(x, k0, v0);
  ample.cache.append(y, k1, v1);
  CHECK(same_contents(f.cache, b, ample.cache, y));
}

TEST_CASE("forks share pages until one writes") {
  Fixture f({.page_tokens = 16, .sink = 0, .recent = 0, .flush = 1});
  const SequenceId a = f.cache.create();
  f.cache.append(a, f.k(40), f.v(40));  // two full pages and half of one
  const SequenceId b = f.cache.fork(a);
  CHECK(f.pool.statistics().used == 3);
  CHECK(f.pool.statistics().shared == 3);
  const Batch<float> before = test::contents<true>(f.cache, a, 1);
  f.cache.append(b, f.k(1), f.v(1));
  CHECK(f.pool.statistics().used == 4);
  CHECK(f.pool.statistics().shared == 2);
  CHECK(test::identical(test::contents<true>(f.cache, a, 1), before));
  CHECK(test::identical(test::contents<true>(f.cache, b, 1).topRows(40), before));
  f.cache.append(a, f.k(1), f.v(1));  // sole owner of its last page now: no copy
  CHECK(f.pool.statistics().used == 4);
  f.cache.release(a);
  CHECK(f.pool.statistics().used == 3);
  CHECK(test::identical(test::contents<true>(f.cache, b, 1).topRows(40), before));
  f.cache.release(b);
  CHECK(f.pool.statistics().used == 0);
}

TEST_CASE("truncate into recent, quantized and sink, and go on") {
  Fixture f({.page_tokens = 16, .sink = 4, .recent = 6, .flush = 3});
  const SequenceId id = f.cache.create();
  const Batch<float> k = f.k(60), v = f.v(60);
  f.cache.append(id, k, v);
  CHECK(f.cache.quantized(id) == 48);
  f.cache.truncate(id, 55);
  CHECK(f.cache.quantized(id) == 48);
  CHECK(f.cache.recent(id).tokens == 3);
  f.cache.truncate(id, 30);
  CHECK(f.cache.quantized(id) == 26);
  CHECK(f.cache.recent(id).tokens == 0);
  CHECK(f.pool.statistics().used == 2);
  const Batch<float> kept = test::contents<true>(f.cache, id, 0);
  f.cache.append(id, k.bottomRows(30), v.bottomRows(30));
  CHECK(f.cache.length(id) == 60);
  CHECK(test::identical(test::contents<true>(f.cache, id, 0).topRows(30), kept));
  f.cache.truncate(id, 2);
  CHECK(f.cache.quantized(id) == 0);
  CHECK(f.cache.sink(id).tokens == 2);
  CHECK(f.pool.statistics().used == 0);
  f.cache.truncate(id, 0);
  CHECK(f.cache.length(id) == 0);
}

TEST_CASE("pages behind a sliding window are given back") {
  Fixture f({.page_tokens = 16, .sink = 4, .recent = 6, .flush = 3});
  const SequenceId id = f.cache.create();
  f.cache.append(id, f.k(100), f.v(100));
  CHECK(f.pool.statistics().used == 6);
  f.cache.release_before(id, 50);  // quantized tokens 0 … 45: two whole pages
  CHECK(f.pool.statistics().used == 4);
  CHECK(f.cache.block_table(id)[1] == no_page);
  CHECK(f.cache.view(id).pages.first == 32);
  f.cache.release_before(id, 40);
  CHECK(f.cache.view(id).pages.first == 32);
  CHECK_REFUSED(f.cache.truncate(id, 30), "given back");
  const SequenceId other = f.cache.fork(id);
  f.cache.append(other, f.k(10), f.v(10));
  f.cache.truncate(other, 3);
  CHECK(f.cache.view(other).pages.first == 0);
  CHECK_REFUSED(f.cache.release_before(id, 1000), "position is 1000, expected 0 to 100");
  CHECK_REFUSED(f.cache.release_before(id, -1), "position is -1");
  f.cache.release_before(id, 100);
  CHECK(f.pool.statistics().used == 1);  // the last page is not full
  f.cache.release(id);
  f.cache.release(other);
  CHECK(f.pool.statistics().used == 0);
}

TEST_CASE("memory: 2 bits at head dimension 128, half scale and zero, at most 0.15 of BF16") {
  using C = Codec<Identity<float>, Affine<float, 2, Eigen::half>>;
  const std::vector<C> codecs(8, C(Identity<float>(128), Affine<float, 2, Eigen::half>::min_max()));
  for (const Index page_tokens : {16, 32, 64}) {
    const CacheOptions options{.page_tokens = page_tokens};
    PagePool pool(PagedCache<C, C>::page_bytes(codecs, codecs, options), 4);
    const PagedCache<C, C> cache(pool, codecs, codecs, options);
    CHECK(cache.compression() <= 0.15);
    CHECK(cache.bytes_per_token() == 8 * 2 * (32 + 4));
  }
}

TEST_CASE("one cache for all layers' pool, sequences that end with the cache") {
  test::Random random(312);
  PagePool pool(4096, 16);
  {
    const CacheOptions options{.page_tokens = 16, .sink = 0, .recent = 0, .flush = 1};
    PagedCache<test::KeyCodec, test::ValueCodec> one(pool, test::any_key_codecs(random, 1, 16),
                                                     test::any_value_codecs(random, 1, 16), options);
    PagedCache<test::KeyCodec, test::ValueCodec> two(pool, test::any_key_codecs(random, 1, 32),
                                                     test::any_value_codecs(random, 1, 8), options);
    one.append(one.create(), random.batch<float>(20, 16), random.batch<float>(20, 16));
    two.append(two.create(), random.batch<float>(20, 32), random.batch<float>(20, 8));
    CHECK(pool.statistics().used == 4);
  }
  CHECK(pool.statistics().used == 0);
}

TEST_CASE("one token's append allocates nothing while the block table does not grow") {
  Fixture f({.page_tokens = 64, .sink = 4, .recent = 6, .flush = 3});
  const SequenceId id = f.cache.create();
  f.cache.append(id, f.k(30), f.v(30));
  const Batch<float> k = f.k(1), v = f.v(1);
  CHECK(test::allocations_of([&] {
          for (int i = 0; i < 20; ++i) f.cache.append(id, k, v);
        }) == 0);
  CHECK(f.cache.length(id) == 50);
  // Quantized as they come, 128 groups a head.
  const std::vector<test::KeyCodec> keys = test::any_key_codecs(f.random, 1, 128, 2, 1);
  const std::vector<test::ValueCodec> values = test::any_value_codecs(f.random, 1, 128, 2, 1);
  const CacheOptions direct{.page_tokens = 64, .sink = 0, .recent = 0, .flush = 1};
  PagePool pool(Fixture::Cache::page_bytes(keys, values, direct), 4);
  Fixture::Cache cache(pool, keys, values, direct);
  const SequenceId wide = cache.create();
  const Batch<float> token = f.random.batch<float>(1, 128);
  cache.append(wide, token, token);
  CHECK(test::allocations_of([&] {
          for (int i = 0; i < 20; ++i) cache.append(wide, token, token);
        }) == 0);
}

TEST_CASE("bad input is refused and appends nothing") {
  Fixture f({.page_tokens = 16, .sink = 0, .recent = 0, .flush = 1});
  const SequenceId id = f.cache.create();
  f.cache.append(id, f.k(3), f.v(3));
  CHECK_REFUSED(f.cache.append(id, f.k(2), f.v(3)), "k has 2 and v 3 rows");
  CHECK_REFUSED(f.cache.append(id, f.v(2), f.v(2)), "k has 24 columns, expected 2 heads of 16");
  CHECK_REFUSED(f.cache.append(id, f.k(2), f.k(2)), "v has 32 columns, expected 2 heads of 12");
  for (const double bad : {test::nan, test::infinity}) {
    Batch<float> k = f.k(2), v = f.v(2);
    k(1, 31) = static_cast<float>(bad);
    CHECK_REFUSED(f.cache.append(id, k, v), "k has a value that is not finite");
    k = f.k(2);
    v(0, 0) = static_cast<float>(bad);
    CHECK_REFUSED(f.cache.append(id, k, v), "v has a value that is not finite");
  }
  CHECK_REFUSED(f.cache.append(id, Batch<float>::Constant(1, 32, 3e38F), f.v(1)), "overflows");
  CHECK_REFUSED(f.cache.truncate(id, 4), "length is 4, expected 0 to 3");
  CHECK_REFUSED(f.cache.truncate(id, -1), "length is -1");
  const std::vector<SequenceId> twice = {id, id};
  const std::vector<Index> counts = {1, 1}, too_many = {1, 2}, negative = {3, -1}, one = {2};
  CHECK_REFUSED(f.cache.append(twice, counts, f.k(2), f.v(2)), "came twice");
  const std::vector<SequenceId> two = {id, f.cache.create()};
  CHECK_REFUSED(f.cache.append(two, too_many, f.k(2), f.v(2)), "counts want more");
  CHECK_REFUSED(f.cache.append(two, negative, f.k(2), f.v(2)), "counts want more");
  CHECK_REFUSED(f.cache.append(two, one, f.k(2), f.v(2)), "1 counts");
  CHECK_REFUSED(f.cache.append(two, counts, f.k(3), f.v(3)), "3 and v 3 rows, expected 2");
  CHECK(f.cache.length(id) == 3);
  f.cache.append(id, f.k(0), f.v(0));
  CHECK(f.cache.length(id) == 3);
  f.cache.release(id);
  CHECK_FALSE(f.cache.contains(id));
  CHECK_REFUSED(f.cache.release(id), "not in the cache");
  CHECK_REFUSED(f.cache.fork(id), "not in the cache");
  CHECK_REFUSED(f.cache.append(id, f.k(1), f.v(1)), "not in the cache");
  CHECK_REFUSED(f.cache.view(id), "not in the cache");
  const SequenceId next = f.cache.create();  // takes the slot, not the name
  CHECK(next.slot == id.slot);
  CHECK_REFUSED(f.cache.length(id), "not in the cache");
  SequenceId forked;
  CHECK_FALSE(f.cache.try_fork(id, forked));
  CHECK(f.cache.try_fork(next, forked));
}

TEST_CASE("settings that make no cache are refused") {
  test::Random random(313);
  using Cache = PagedCache<test::KeyCodec, test::ValueCodec>;
  using Interleaved = PagedCache<test::KeyCodec, test::ValueCodec, TokenInterleaved<16>>;
  const std::vector<test::KeyCodec> keys = test::any_key_codecs(random, 2, 16);
  const std::vector<test::ValueCodec> values = test::any_value_codecs(random, 2, 16);
  PagePool pool(1 << 16, 2), small(64, 2);
  CHECK_REFUSED(Cache(pool, {}, {}), "0 key and 0 value codecs");
  CHECK_REFUSED(Cache(pool, keys, test::any_value_codecs(random, 1, 16)), "2 key and 1 value codecs");
  std::vector<test::KeyCodec> mixed = keys;
  mixed[1] = test::any_key_codecs(random, 1, 16, 4)[0];
  CHECK_REFUSED(Cache(pool, mixed, values), "expected all alike");
  CHECK_REFUSED(Cache(small, keys, values), "pool has pages of 64 bytes");
  CHECK_REFUSED(Cache(pool, keys, values, {.page_tokens = 0}), "page_tokens is 0");
  CHECK_REFUSED(Interleaved(pool, keys, values, {.page_tokens = 24}), "positive multiple of 16");
  CHECK_REFUSED(Cache(pool, keys, values, {.sink = -1}), "sink is -1");
  CHECK_REFUSED(Cache(pool, keys, values, {.recent = -1}), "recent -1");
  CHECK_REFUSED(Cache(pool, keys, values, {.flush = 0}), "flush 0");
  const Index largest = std::numeric_limits<Index>::max();
  for (const Index huge : {largest, largest / 2, Index{1} << 40}) {
    CHECK_REFUSED(Cache(pool, keys, values, {.recent = huge}), "at most 16777216");
    CHECK_REFUSED(Cache(pool, keys, values, {.sink = huge}), "at most 16777216");
    CHECK_REFUSED(Cache(pool, keys, values, {.flush = huge}), "at most 16777216");
    CHECK_REFUSED(Cache(pool, keys, values, {.page_tokens = huge}), "page_tokens");
  }
}
