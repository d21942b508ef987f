// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CACHE_STATUS_HPP
#define WUSHKV_CACHE_STATUS_HPP

#include <string>
#include <utility>

#include "wushkv/cache/page_pool.hpp"
#include "wushkv/core/error.hpp"

namespace wushkv {

/// How a cache's call ended, for engines without exceptions. Nothing has changed unless it is ok.
class [[nodiscard]] CacheStatus {
 public:
  enum class Code { Ok, InvalidArgument, PoolExhausted, File };

  CacheStatus() = default;
  template <class... Parts>
  static CacheStatus invalid(const Parts&... parts) {
    return {Code::InvalidArgument, detail::concat(parts...)};
  }
  template <class... Parts>
  static CacheStatus exhausted(const Parts&... parts) {
    return {Code::PoolExhausted, detail::concat(parts...)};
  }

  template <class... Parts>
  static CacheStatus file(const Parts&... parts) {
    return {Code::File, detail::concat(parts...)};
  }

  explicit operator bool() const { return code_ == Code::Ok; }
  Code code() const { return code_; }
  /// One sentence, empty if ok.
  const std::string& message() const { return message_; }

  /// Throws what the code stands for: `std::invalid_argument`, `PoolExhausted` or `FileError`.
  void raise_if_failed() const {
    if (code_ == Code::InvalidArgument) detail::raise<std::invalid_argument>(message_);
    if (code_ == Code::PoolExhausted) detail::raise<PoolExhausted>(message_);
    if (code_ == Code::File) detail::raise<FileError>(message_);
  }

 private:
  CacheStatus(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  Code code_ = Code::Ok;
  std::string message_;
};

}  // namespace wushkv

#endif  // WUSHKV_CACHE_STATUS_HPP
