// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_PROGRESS_HPP
#define WUSHKV_EXAMPLES_ENGINE_PROGRESS_HPP

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <utility>

namespace engine {

/// Seconds since some moment.
inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// A line on standard error that tells how far a long task is and, from its pace, how long it will still
/// take. Silent where that is no terminal.
class Progress {
 public:
  Progress(std::string title, double total)
      : title_(std::move(title)), total_(total), begin_(seconds()), shown_(isatty(STDERR_FILENO) != 0) {}
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() { clear(); }

  void advance(double amount = 1) {
    done_ = std::min(total_, done_ + amount);
    const double now = seconds();
    if (!shown_ || now - last_ < 0.1) return;
    last_ = now;
    std::fprintf(stderr, "\r%s: %3.0f %%, %.0f s left \033[K", title_.c_str(), 100 * done_ / total_,
                 (now - begin_) / done_ * (total_ - done_));
  }
  /// Takes the line away, for a result to be printed in its place.
  void clear() {
    if (shown_ && last_ > 0) std::fputs("\r\033[K", stderr);
    last_ = 0;
  }
  double elapsed() const { return seconds() - begin_; }

 private:
  std::string title_;
  double total_, done_ = 0, begin_, last_ = 0;
  bool shown_;
};

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_PROGRESS_HPP
