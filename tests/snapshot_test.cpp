// SPDX-License-Identifier: Apache-2.0
#include "wushkv/cache/snapshot.hpp"

#include <sstream>
#include <string>

#include "cache_support.hpp"
#include "wushkv/attend/attend.hpp"
#include "wushkv/quantize/lloyd_max.hpp"
#include "wushkv/transform/centered.hpp"

using namespace wushkv;

namespace {

constexpr Index heads = 2, dk = 8, dv = 12;

template <class Layout>
struct Fixture {
  using Cache = PagedCache<test::KeyCodec, test::ValueCodec, Layout>;
  explicit Fixture(const CacheOptions& o, std::uint64_t seed = 320, std::size_t pages = 32, int bits = 3)
      : random(seed),
        options(o),
        keys(test::any_key_codecs(random, heads, dk, bits)),
        values(test::any_value_codecs(random, heads, dv)),
        pool(Cache::page_bytes(keys, values, options), pages),
        cache(pool, keys, values, options) {}

  SequenceId grown(Index tokens) {
    const SequenceId id = cache.create();
    cache.append(id, random.batch<float>(tokens, heads * dk), random.batch<float>(tokens, heads * dv));
    return id;
  }
  std::string saved(SequenceId id) const {
    std::ostringstream out;
    save_sequence(cache, id, out);
    return out.str();
  }
  SequenceId restored(const std::string& bytes) {
    std::istringstream in(bytes);
    return load_sequence(cache, in);
  }
  bool same(SequenceId a, SequenceId b) const {
    bool all = cache.length(a) == cache.length(b) && cache.quantized(a) == cache.quantized(b);
    for (Index h = 0; all && h < heads; ++h)
      all = test::identical(test::contents<true, Cache, Layout>(cache, a, h),
                            test::contents<true, Cache, Layout>(cache, b, h)) &&
            test::identical(test::contents<false, Cache, Layout>(cache, a, h),
                            test::contents<false, Cache, Layout>(cache, b, h));
    return all;
  }

  test::Random random;
  CacheOptions options;
  std::vector<test::KeyCodec> keys;
  std::vector<test::ValueCodec> values;
  PagePool pool;
  Cache cache;
};

const CacheOptions windows{.page_tokens = 16, .sink = 3, .recent = 5, .flush = 2};
const CacheOptions none{.page_tokens = 16, .sink = 0, .recent = 0, .flush = 1};

}  // namespace

TEST_CASE_TEMPLATE("a restored sequence has the same bytes, and grows the same way", Layout, TokenMajor,
                   TokenInterleaved<16>) {
  for (const CacheOptions& options : {windows, none})
    for (const Index length : {0, 1, 3, 7, 8, 24, 41, 70}) {
      Fixture<Layout> f(options);
      const SequenceId id = f.grown(length);
      const std::string bytes = f.saved(id);
      const SequenceId back = f.restored(bytes);
      CHECK(f.same(id, back));
      CHECK(f.saved(back) == bytes);
      const Batch<float> k = f.random.template batch<float>(20, heads * dk),
                         v = f.random.template batch<float>(20, heads * dv);
      f.cache.append(id, k, v);
      f.cache.append(back, k, v);
      CHECK(f.same(id, back));
      // Another process with the same codecs.
      Fixture<Layout> other(options);
      CHECK(other.saved(other.restored(bytes)) == bytes);
    }
}

TEST_CASE("a restored sequence attends bit for bit alike, in another cache too") {
  for (const CacheOptions& options : {windows, none}) {
    Fixture<TokenMajor> f(options), other(options);
    const SequenceId id = f.grown(45);
    const std::string bytes = f.saved(id);
    const SequenceId back = f.restored(bytes), elsewhere = other.restored(bytes);
    const Attention<test::KeyCodec, test::ValueCodec> attention({4, heads, dk, dv}, f.keys, f.values);
    Attention<test::KeyCodec, test::ValueCodec>::Workspace workspace;
    const Vector<float> q = f.random.vector<float>(4 * dk);
    Vector<float> first(4 * dv), second(4 * dv), third(4 * dv);
    attention.decode(f.cache.view(id), q, first, workspace);
    attention.decode(f.cache.view(back), q, second, workspace);
    attention.decode(other.cache.view(elsewhere), q, third, workspace);
    CHECK(test::identical(first, second));
    CHECK(test::identical(first, third));
  }
}

TEST_CASE("identity tells groups, parameters' types and means apart") {
  test::Random random(321);
  const Dense<float> dense = test::any_dense(random, 16);
  const Vector<float> mean = random.vector<float>(16);
  using Half = Quest<float, Dynamic, Eigen::half>;
  using Brain = Quest<float, Dynamic, Eigen::bfloat16>;
  const std::uint64_t plain = codec_identity(Codec(dense, Half(2)));
  CHECK(codec_identity(Codec(dense, Half(2))) == plain);
  CHECK(codec_identity(Codec(dense, Half(2), 8)) != plain);
  CHECK(codec_identity(Codec(dense, Half(3))) != plain);
  CHECK(codec_identity(Codec(dense, Brain(2))) != plain);
  CHECK(codec_identity(Codec(dense, LloydMax<float, Dynamic, Eigen::half>(2))) != plain);
  CHECK(codec_identity(Codec(Centered(dense, mean), Half(2))) != plain);
  CHECK(codec_identity(Codec(Centered(dense, mean), Half(2))) !=
        codec_identity(Codec(Centered(dense, Vector<float>(2 * mean)), Half(2))));
  CHECK(codec_identity(Codec(dense, Half(2, 1.15))) == plain);  // widens what is written, not what it means
}

TEST_CASE("truncated tokens leave no trace, pages given back stay so") {
  Fixture<TokenMajor> f(none);
  const SequenceId id = f.grown(40);
  const std::string before = f.saved(id);
  const Batch<float> k = f.random.batch<float>(30, heads * dk), v = f.random.batch<float>(30, heads * dv);
  f.cache.append(id, k, v);
  f.cache.truncate(id, 40);
  CHECK(f.saved(id) == before);
  f.cache.release_before(id, 20);
  const SequenceId back = f.restored(f.saved(id));
  CHECK(f.cache.view(back).pages.first == 16);
  CHECK(f.cache.block_table(back)[0] == no_page);
  CHECK(f.same(id, back));
}

TEST_CASE("a snapshot cut at any byte, or with any byte flipped, is refused, and the cache is unchanged") {
  Fixture<TokenMajor> f(windows);
  const SequenceId id = f.grown(30);
  const std::string bytes = f.saved(id);
  const std::size_t free = f.pool.free_pages();
  for (std::size_t size = 0; size < bytes.size(); ++size)
    REQUIRE_FALSE(test::message_of<FileError>([&] { f.restored(bytes.substr(0, size)); }).empty());
  for (std::size_t at = 0; at < bytes.size(); ++at)
    for (const int flip : {0x01, 0x80, 0xFF}) {
      std::string broken = bytes;
      broken[at] = static_cast<char>(broken[at] ^ flip);
      REQUIRE_FALSE(test::message_of<FileError>([&] { f.restored(broken); }).empty());
    }
  CHECK(f.pool.free_pages() == free);
  CHECK(f.cache.contains(f.restored(bytes)));
  // What follows in the stream is left there.
  std::istringstream in(bytes + bytes + "rest");
  load_sequence(f.cache, in);
  load_sequence(f.cache, in);
  std::string rest;
  in >> rest;
  CHECK(rest == "rest");
}

TEST_CASE("headers that lie with a right checksum are refused") {
  Fixture<TokenMajor> f(windows);
  const std::string bytes = f.saved(f.grown(30));
  const auto with = [&](std::size_t offset, std::int64_t value) {
    std::string broken = bytes;
    std::memcpy(broken.data() + offset, &value, 8);
    Fingerprint sum;
    sum.add(std::as_bytes(std::span(broken.data(), 88)));
    const std::uint64_t check = sum.value();
    std::memcpy(broken.data() + 88, &check, 8);
    return test::message_of<FileError>([&] { f.restored(broken); });
  };
  CHECK(with(8, 2).find("version is 2") != std::string::npos);
  CHECK(with(16, 0).find("other codecs") != std::string::npos);
  CHECK(with(24, 32).find("page_tokens") != std::string::npos);
  for (const std::size_t count : {56U, 64U, 72U})
    for (const std::int64_t lie : {std::int64_t{-1}, std::int64_t{1} << 62,
                                   std::numeric_limits<std::int64_t>::min(), std::int64_t{29}})
      CHECK_FALSE(with(count, lie).empty());
  for (const std::int64_t lie : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 50})
    CHECK(with(80, lie).find("payload") != std::string::npos);
}

TEST_CASE("another codec, layout or setting refuses a snapshot") {
  Fixture<TokenMajor> f(windows);
  const std::string bytes = f.saved(f.grown(30));
  Fixture<TokenMajor> other_transform(windows, 99), other_bits(windows, 320, 32, 2);
  Fixture<TokenInterleaved<16>> other_layout(windows);
  Fixture<TokenMajor> other_windows({.page_tokens = 16, .sink = 3, .recent = 6, .flush = 2});
  const auto message = [&](auto& fixture) {
    return test::message_of<FileError>([&] { fixture.restored(bytes); });
  };
  CHECK(message(other_transform).find("other codecs") != std::string::npos);
  CHECK(message(other_bits).find("other codecs") != std::string::npos);
  CHECK(message(other_layout).find("other codecs or another page layout") != std::string::npos);
  CHECK(message(other_windows).find("3, 6, 2") != std::string::npos);
  Fixture<TokenMajor> small(windows, 320, 1);
  CHECK_FALSE(test::message_of<PoolExhausted>([&] { small.restored(bytes); }).empty());
  CHECK(small.pool.free_pages() == 1);
  CHECK_REFUSED(f.saved(SequenceId{7, 7}), "not in the cache");
}
