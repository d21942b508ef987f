// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_THREADS_HPP
#define WUSHKV_EXAMPLES_ENGINE_THREADS_HPP

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace engine {

/// A team of threads that share out the blocks of a loop; the caller is one of them. The library itself
/// starts none, that is its engine's business.
class Threads {
 public:
  /// Throws `std::system_error` if the threads cannot be started.
  explicit Threads(int count) {
    try {
      for (int i = 1; i < count; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (...) {
      stop();
      throw;
    }
  }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
  ~Threads() { stop(); }

  int count() const { return static_cast<int>(workers_.size()) + 1; }

  /// Calls `body(block, thread)` for every block in [0, blocks), each once, in any order and at the same
  /// time; `thread` is 0 to `count() - 1`. Throws what a body has thrown, once all have ended. One caller at
  /// a time, and not from within a body.
  void for_each(std::int64_t blocks, const std::function<void(std::int64_t, int)>& body) {
    if (blocks <= 1 || workers_.empty()) {
      for (std::int64_t block = 0; block < blocks; ++block) body(block, 0);
      return;
    }
    body_ = &body;
    blocks_ = blocks;
    next_ = 0;
    error_ = nullptr;
    running_ = static_cast<int>(workers_.size());
    start_.fetch_add(1);
    start_.notify_all();
    take_blocks(0);
    for (int left = running_; left != 0; left = running_) running_.wait(left);
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void stop() {
    stopping_ = true;
    start_.fetch_add(1);
    start_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void work(int thread) {
    for (std::uint64_t seen = 0;;) {
      start_.wait(seen);
      ++seen;  // a start is only given once the last one has ended, so none is missed
      if (stopping_) return;
      take_blocks(thread);
      if (running_.fetch_sub(1) == 1) running_.notify_one();
    }
  }

  void take_blocks(int thread) {
    try {
      for (std::int64_t block = next_.fetch_add(1); block < blocks_; block = next_.fetch_add(1))
        (*body_)(block, thread);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
      next_ = blocks_;
    }
  }

  std::vector<std::thread> workers_;
  std::atomic<std::uint64_t> start_{0};
  std::atomic<int> running_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<std::int64_t> next_{0};
  std::int64_t blocks_ = 0;
  const std::function<void(std::int64_t, int)>* body_ = nullptr;
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_THREADS_HPP
