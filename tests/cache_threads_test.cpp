// SPDX-License-Identifier: Apache-2.0
// One writer a sequence and any number of readers of sequences that nobody writes, all at once; run under
// ThreadSanitizer in CI.
#include <atomic>
#include <thread>

#include "cache_support.hpp"
#include "wushkv/attend/attend.hpp"
#include "wushkv/cache/snapshot.hpp"

using namespace wushkv;

TEST_CASE("writers of distinct sequences and readers of shared ones do not disturb each other") {
  constexpr Index heads = 2, dim = 16;
  test::Random random(340);
  const std::vector<test::KeyCodec> keys = test::any_key_codecs(random, heads, dim);
  const std::vector<test::ValueCodec> values = test::any_value_codecs(random, heads, dim);
  using Cache = PagedCache<test::KeyCodec, test::ValueCodec>;
  const CacheOptions options{.page_tokens = 16, .sink = 4, .recent = 6, .flush = 2};
  PagePool pool(Cache::page_bytes(keys, values, options), 200);
  Cache cache(pool, keys, values, options);
  const Attention<test::KeyCodec, test::ValueCodec> attention({4, heads, dim, dim}, keys, values);

  const SequenceId read = cache.create();
  cache.append(read, random.batch<float>(100, heads * dim), random.batch<float>(100, heads * dim));
  // Forks: writers begin with pages that readers, and each other, hold too.
  const std::vector<SequenceId> written = {cache.fork(read), cache.fork(read), cache.create()};
  const Vector<float> q = random.vector<float>(4 * dim);
  Vector<float> expected(4 * dim);
  {
    Attention<test::KeyCodec, test::ValueCodec>::Workspace workspace;
    attention.decode(cache.view(read), q, expected, workspace);
  }
  const Batch<float> k = random.batch<float>(30, heads * dim), v = random.batch<float>(30, heads * dim);
  const auto grow = [&](SequenceId id) {
    for (Index round = 0; round < 12; ++round) {
      for (Index t = 0; t < 30; ++t) cache.append(id, k.row(t), v.row(t));
      cache.truncate(id, cache.length(id) - 12 - round);
    }
  };
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (const SequenceId id : written) threads.emplace_back([&grow, id] { grow(id); });
  for (int reader = 0; reader < 2; ++reader)
    threads.emplace_back([&] {
      Attention<test::KeyCodec, test::ValueCodec>::Workspace workspace;
      Vector<float> out(4 * dim);
      for (int round = 0; round < 100; ++round) {
        attention.decode(cache.view(read), q, out, workspace);
        if (!test::identical(out, expected)) ++wrong;
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);

  // What the writers left is what they leave one after the other.
  for (std::size_t i = 0; i < written.size(); ++i) {
    const SequenceId alone = i < 2 ? cache.fork(read) : cache.create();
    grow(alone);
    CHECK(test::identical(test::contents<true>(cache, written[i], 1), test::contents<true>(cache, alone, 1)));
    CHECK(
        test::identical(test::contents<false>(cache, written[i], 0), test::contents<false>(cache, alone, 0)));
  }
}
