// SPDX-License-Identifier: Apache-2.0
#include "wushkv/cache/page_pool.hpp"

#include <algorithm>
#include <thread>
#include <vector>

#include "support.hpp"

using namespace wushkv;

TEST_CASE("pages are aligned, apart and zeroed") {
  PagePool pool(100, 7);
  CHECK(pool.page_bytes() == 128);
  CHECK(pool.pages() == 7);
  std::vector<PageId> ids(7);
  pool.allocate(ids);
  std::vector<PageId> sorted = ids;
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < 7; ++i) CHECK(sorted[i] == i);
  for (const PageId id : ids) {
    CHECK(reinterpret_cast<std::uintptr_t>(pool.page(id).data()) % 64 == 0);
    CHECK(pool.page(id).data() == pool.data() + id * 128);
    CHECK(std::all_of(pool.page(id).begin(), pool.page(id).end(),
                      [](std::byte b) { return b == std::byte{0}; }));
    std::fill(pool.page(id).begin(), pool.page(id).end(), std::byte{0xFF});
  }
  pool.release(ids[3]);
  const PageId again = pool.allocate();
  CHECK(again == ids[3]);
  CHECK(pool.page(again)[17] == std::byte{0});
}

TEST_CASE("references, statistics and exhaustion") {
  PagePool pool(64, 3);
  const PageId a = pool.allocate(), b = pool.allocate();
  pool.share(a);
  pool.share(a);
  CHECK(pool.references(a) == 3);
  PagePool::Statistics s = pool.statistics();
  CHECK(s.pages == 3);
  CHECK(s.used == 2);
  CHECK(s.free == 1);
  CHECK(s.shared == 1);
  CHECK(s.bytes == 192);
  CHECK(s.used_bytes == 128);
  std::vector<PageId> two(2, 99);
  CHECK_FALSE(pool.try_allocate(two));
  CHECK(two == std::vector<PageId>(2, 99));
  CHECK(test::message_of<PoolExhausted>([&] { pool.allocate(two); }) ==
        "PagePool: 2 pages are needed, 1 of 3 are free");
  pool.release(a);
  pool.release(a);
  CHECK(pool.statistics().used == 2);
  pool.release(a);
  pool.release(b);
  CHECK(pool.statistics().free == 3);
}

TEST_CASE("double release and foreign pages are caught") {
  PagePool pool(64, 2);
  const PageId a = pool.allocate();
  pool.release(a);
  CHECK_REFUSED(pool.release(a), "release of page 0, which is free");
  CHECK_REFUSED(pool.share(a), "share of page 0, which is free");
  CHECK_REFUSED(pool.release(2), "page 2 is not of this pool");
  CHECK_REFUSED(pool.release(no_page), "not of this pool");
  CHECK_REFUSED(pool.page(17), "page 17 is not of this pool");
  CHECK_REFUSED(pool.references(2), "not of this pool");
  CHECK(pool.statistics().free == 2);
}

TEST_CASE("a budget in bytes, and sizes that make no pool") {
  CHECK(PagePool::of_bytes(1000, 100).pages() == 7);
  CHECK_REFUSED(PagePool::of_bytes(100, 100), "expected at least 128");
  CHECK_REFUSED(PagePool::of_bytes(100, 0), "page_bytes is 0");
  CHECK_REFUSED(PagePool::of_bytes(100, std::numeric_limits<std::size_t>::max()),
                "page_bytes is 18446744073709551615");
  CHECK_REFUSED(PagePool(0, 4), "page_bytes is 0");
  CHECK_REFUSED(PagePool(64, 0), "0 pages");
  CHECK_REFUSED(PagePool(std::numeric_limits<std::size_t>::max(), 4), "page_bytes");
  CHECK_REFUSED(PagePool(std::size_t{1} << 60, std::size_t{1} << 31), "more than can be addressed");
  CHECK_REFUSED(PagePool(64, std::size_t{1} << 40), "pages, expected");
}

TEST_CASE("threads take and give back at the same time") {
  PagePool pool(64, 64);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&pool] {
      for (int round = 0; round < 500; ++round) {
        std::vector<PageId> ids(static_cast<std::size_t>(1 + round % 5));
        if (!pool.try_allocate(ids)) continue;
        for (const PageId id : ids) pool.share(id);
        for (const PageId id : ids) pool.release(id);
        for (const PageId id : ids) pool.release(id);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(pool.statistics().free == 64);
}
