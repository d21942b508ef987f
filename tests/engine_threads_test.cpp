// SPDX-License-Identifier: Apache-2.0
#include "engine/threads.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "support.hpp"

namespace {

using engine::Threads;

TEST_CASE("threads visit every block once") {
  for (int count = 1; count <= 4; ++count) {
    CAPTURE(count);
    Threads threads(count);
    CHECK(threads.count() == count);
    std::vector<int> visits(100), by(100);  // no atomics: a sanitizer sees two visitors of a block
    bool right = true;
    for (int round = 0; round < 1000; ++round) {
      const int blocks = round % 101;
      std::fill(visits.begin(), visits.end(), 0);
      threads.for_each(blocks, [&](std::int64_t block, int thread) {
        ++visits.at(static_cast<std::size_t>(block));
        by[static_cast<std::size_t>(block)] = thread;
      });
      for (int i = 0; i < 100; ++i) {
        const auto at = static_cast<std::size_t>(i);
        right =
            right && visits[at] == (i < blocks ? 1 : 0) && (i >= blocks || (by[at] >= 0 && by[at] < count));
      }
    }
    CHECK(right);
  }
}

TEST_CASE("what a thread's body throws reaches the caller") {
  for (int count = 1; count <= 4; ++count) {
    CAPTURE(count);
    Threads threads(count);
    for (int round = 0; round < 100; ++round) {
      const int blocks = 1 + round % 20, bad = round % blocks;
      const std::string message = test::message_of<std::runtime_error>([&] {
        threads.for_each(blocks, [&](std::int64_t block, int) {
          if (block == bad || round % 10 == 0) throw std::runtime_error("a body's");
        });
      });
      std::vector<int> visits(20);
      threads.for_each(20, [&](std::int64_t block, int) { ++visits[static_cast<std::size_t>(block)]; });
      if (message != "a body's" || visits != std::vector<int>(20, 1)) FAIL("in round " << round);
    }
  }
}

}  // namespace
