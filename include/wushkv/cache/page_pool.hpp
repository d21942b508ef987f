// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CACHE_PAGE_POOL_HPP
#define WUSHKV_CACHE_PAGE_POOL_HPP

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <vector>

#include "wushkv/core/error.hpp"
#include "wushkv/core/types.hpp"

namespace wushkv {

/// The pool has fewer free pages than a call needs; nothing has changed, and the call can be made again.
class PoolExhausted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The number of a page within its pool.
using PageId = std::uint32_t;

/// Stands in a block table where a page was given back (behind a sliding window).
inline constexpr PageId no_page = std::numeric_limits<PageId>::max();

/// A fixed number of pages of one size in one allocation, aligned to 64 bytes, with a reference count each
/// (design.md, section 3). It knows nothing of what they hold: all layers of a model can share one pool, and
/// so one budget. A page holds `page_tokens` tokens of *one* layer: layers append one after the other, may
/// have codecs of different sizes, and are read one at a time, so a page of all layers would be written and
/// read in scattered pieces.
///
/// Taking, sharing and giving back pages is safe from several threads; the bytes of a page belong to whoever
/// holds it.
class PagePool {
 public:
  static constexpr std::size_t alignment = 64;

  /// `pages` pages of at least `page_bytes` bytes, rounded up to the alignment. Throws
  /// `std::invalid_argument` for a size or number below 1 or too large to address; `std::bad_alloc` if there
  /// is no memory.
  PagePool(std::size_t page_bytes, std::size_t pages) {
    check_page_bytes(page_bytes);
    if (pages < 1 || pages >= no_page)
      detail::invalid_argument("PagePool: ", pages, " pages, expected 1 to ", no_page - 1);
    page_bytes_ = (page_bytes + alignment - 1) / alignment * alignment;
    if (pages > std::numeric_limits<std::size_t>::max() / 2 / page_bytes_)
      detail::invalid_argument("PagePool: ", pages, " pages of ", page_bytes_,
                               " bytes are more than can be addressed");
    bytes_.reset(static_cast<std::byte*>(::operator new(page_bytes_* pages, std::align_val_t(alignment))));
    references_.assign(pages, 0);
    free_.reserve(pages);
    for (std::size_t p = pages; p > 0; --p) free_.push_back(static_cast<PageId>(p - 1));
  }

  /// As many pages of `page_bytes` as a budget in bytes allows. Throws `std::invalid_argument` if that is
  /// none.
  static PagePool of_bytes(std::size_t budget, std::size_t page_bytes) {
    check_page_bytes(page_bytes);
    const std::size_t rounded = (page_bytes + alignment - 1) / alignment * alignment;
    if (budget < rounded)
      detail::invalid_argument("PagePool: a budget of ", budget, " bytes holds no page of ", page_bytes,
                               " bytes, expected at least ", rounded);
    return PagePool(page_bytes, budget / rounded);
  }

  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  std::size_t page_bytes() const { return page_bytes_; }
  std::size_t pages() const { return references_.size(); }
  /// The first byte of page 0; page p begins `p * page_bytes()` later.
  const std::byte* data() const { return bytes_.get(); }
  std::span<std::byte> page(PageId id) { return {bytes_.get() + offset(id), page_bytes_}; }
  std::span<const std::byte> page(PageId id) const { return {bytes_.get() + offset(id), page_bytes_}; }

  /// Takes one free page for each entry of `ids`, zeroed and with one reference; all of them or, if there are
  /// too few, none, and false.
  bool try_allocate(std::span<PageId> ids) {
    {
      const std::lock_guard lock(mutex_);
      if (free_.size() < ids.size()) return false;
      for (PageId& id : ids) {
        id = free_.back();
        free_.pop_back();
        references_[id] = 1;
      }
    }
    for (const PageId id : ids) std::memset(bytes_.get() + offset(id), 0, page_bytes_);
    return true;
  }

  /// The same, throwing `PoolExhausted` with what was needed and what is free.
  void allocate(std::span<PageId> ids) {
    if (!try_allocate(ids)) detail::raise<PoolExhausted>(exhausted_message(ids.size()));
  }
  PageId allocate() {
    PageId id = no_page;
    allocate({&id, 1});
    return id;
  }

  /// Adds a reference to a page in use. Throws `std::invalid_argument` for a page that is free or not this
  /// pool's.
  void share(PageId id) {
    const std::lock_guard lock(mutex_);
    check_in_use("share", id);
    if (references_[id] == std::numeric_limits<std::uint32_t>::max())
      detail::invalid_argument("PagePool: page ", id, " has too many references");
    ++references_[id];
  }

  /// Takes a reference off; the page is free when none is left. Throws as `share`: releasing twice is caught.
  void release(PageId id) {
    const std::lock_guard lock(mutex_);
    check_in_use("release", id);
    if (--references_[id] == 0) free_.push_back(id);
  }

  std::uint32_t references(PageId id) const {
    const std::lock_guard lock(mutex_);
    static_cast<void>(offset(id));
    return references_[id];
  }

  struct Statistics {
    std::size_t pages = 0, free = 0, used = 0;
    std::size_t shared = 0;  ///< in use with more than one reference
    std::size_t bytes = 0, used_bytes = 0;
  };
  Statistics statistics() const {
    const std::lock_guard lock(mutex_);
    Statistics s;
    s.pages = references_.size();
    s.free = free_.size();
    s.used = s.pages - s.free;
    for (const std::uint32_t count : references_) s.shared += count > 1 ? 1 : 0;
    s.bytes = s.pages * page_bytes_;
    s.used_bytes = s.used * page_bytes_;
    return s;
  }
  std::size_t free_pages() const {
    const std::lock_guard lock(mutex_);
    return free_.size();
  }
  std::string exhausted_message(std::size_t needed) const {
    return detail::concat("PagePool: ", needed, " pages are needed, ", free_pages(), " of ", pages(),
                          " are free");
  }

 private:
  struct Free {
    void operator()(std::byte* bytes) const { ::operator delete(bytes, std::align_val_t(alignment)); }
  };

  static void check_page_bytes(std::size_t page_bytes) {
    constexpr std::size_t most = std::numeric_limits<std::size_t>::max() / 4;
    if (page_bytes < 1 || page_bytes > most)
      detail::invalid_argument("PagePool: page_bytes is ", page_bytes, ", expected 1 to ", most);
  }

  std::size_t offset(PageId id) const {
    if (id >= references_.size()) [[unlikely]]
      detail::invalid_argument("PagePool: page ", id, " is not of this pool, expected less than ",
                               references_.size());
    return static_cast<std::size_t>(id) * page_bytes_;
  }
  void check_in_use(const char* what, PageId id) const {
    static_cast<void>(offset(id));
    if (references_[id] == 0) [[unlikely]]
      detail::invalid_argument("PagePool: ", what, " of page ", id, ", which is free");
  }

  std::size_t page_bytes_ = 0;
  std::unique_ptr<std::byte, Free> bytes_;
  std::vector<std::uint32_t> references_;
  std::vector<PageId> free_;
  mutable std::mutex mutex_;
};

}  // namespace wushkv

#endif  // WUSHKV_CACHE_PAGE_POOL_HPP
