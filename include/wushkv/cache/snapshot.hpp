// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CACHE_SNAPSHOT_HPP
#define WUSHKV_CACHE_SNAPSHOT_HPP

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <istream>
#include <memory>
#include <ostream>
#include <span>
#include <vector>

#include "wushkv/cache/paged_cache.hpp"
#include "wushkv/codec/identity.hpp"

namespace wushkv {

/// Saves a sequence to a stream and restores it, in the same cache or in one with the same codecs, layout and
/// options (another process, a prefix kept on disk). The form, little-endian:
///
///     header    "wushkvSQ", version (u32), 0 (u32), identity of the codecs and the layout (u64),
///     page_tokens, sink, recent, flush,
///               length, quantized, first (i64 each), bytes of payload (u64)
///     u64       checksum of the header
///     payload   quantized pages from `first` on, as the layout has them, unused slots zero; BF16 sink and
///     recent keys and values u64       checksum of the payload
///
/// What is restored attends bit for bit like what was saved.
template <HeadCodec KeyCodec, HeadCodec ValueCodec, PageLayout Layout>
class SequenceSnapshot {
  static_assert(std::endian::native == std::endian::little,
                "wushkv: snapshots are little-endian, and so must the machine be");
  using Cache = PagedCache<KeyCodec, ValueCodec, Layout>;
  using Sequence = typename Cache::Sequence;
  using Window = typename Cache::Window;

 public:
  static CacheStatus save(const Cache& cache, SequenceId id, std::ostream& out) {
    const Sequence* const found = cache.find(id);
    if (found == nullptr) return Cache::missing("save_sequence", id);
    const Sequence& s = *found;
    const std::vector<std::byte> payload = pack(cache, s);
    const Header header = describe(cache, s, payload.size());
    write(out, std::as_bytes(std::span(&header, 1)));
    write_checksum(out, std::as_bytes(std::span(&header, 1)));
    write(out, payload);
    write_checksum(out, payload);
    if (!out.flush()) return CacheStatus::file("snapshot: the stream cannot be written");
    return {};
  }

  static CacheStatus load(Cache& cache, std::istream& in, SequenceId& id) {
    Header header;
    const auto header_bytes = std::as_writable_bytes(std::span(&header, 1));
    if (CacheStatus status = read_checked(in, header_bytes, "header"); !status) return status;
    auto sequence =
        std::make_unique<Sequence>(cache.kv_heads(), cache.key_dim(), cache.value_dim(), cache.options_);
    if (CacheStatus status = check(cache, header, *sequence); !status) return status;
    std::vector<std::byte> payload;
    if (CacheStatus status = read_payload(in, header.payload, payload); !status) return status;
    if (CacheStatus status = check_checksum(in, payload, "payload"); !status) return status;
    cache.reserve_slot();
    if (CacheStatus status = restore(cache, *sequence, payload); !status) return status;
    id = cache.add(std::move(sequence));
    return {};
  }

 private:
  static constexpr std::array<char, 8> magic = {'w', 'u', 's', 'h', 'k', 'v', 'S', 'Q'};

  struct Header {
    std::array<char, 8> mark = magic;
    std::uint32_t version = 1, reserved = 0;
    std::uint64_t identity = 0;
    std::int64_t page_tokens = 0, sink = 0, recent = 0, flush = 0;
    std::int64_t length = 0, quantized = 0, first = 0;
    std::uint64_t payload = 0;
  };
  static_assert(sizeof(Header) == 88, "the header has no padding");

  static Header describe(const Cache& cache, const Sequence& s, std::size_t payload) {
    Header header;
    header.identity = cache.identity();
    header.page_tokens = cache.options_.page_tokens;
    header.sink = cache.options_.sink;
    header.recent = cache.options_.recent;
    header.flush = cache.options_.flush;
    header.length = s.length;
    header.quantized = s.quantized;
    header.first = s.first;
    header.payload = payload;
    return header;
  }

  /// Sets the counts of `s` from the header if a cache like this one can have written it.
  static CacheStatus check(const Cache& cache, const Header& header, Sequence& s) {
    const CacheOptions& options = cache.options_;
    if (header.mark != magic)
      return CacheStatus::file(
          "snapshot: the stream does not begin with 'wushkvSQ', expected a saved sequence");
    if (header.version != 1 || header.reserved != 0)
      return CacheStatus::file("snapshot: version is ", header.version, ", expected 1");
    if (header.identity != cache.identity())
      return CacheStatus::file(
          "snapshot: it was written with other codecs or another page layout than the cache's");
    if (header.page_tokens != options.page_tokens || header.sink != options.sink ||
        header.recent != options.recent || header.flush != options.flush)
      return CacheStatus::file("snapshot: page_tokens, sink, recent and flush are ", header.page_tokens, ", ",
                               header.sink, ", ", header.recent, ", ", header.flush, ", expected ",
                               options.page_tokens, ", ", options.sink, ", ", options.recent, ", ",
                               options.flush);
    s.length = header.length;
    s.quantized = header.quantized;
    s.first = header.first;
    const std::int64_t most = std::int64_t{1} << 40;
    const bool counts = s.length >= 0 && s.length < most && s.quantized >= 0 &&
                        s.quantized <= std::max<Index>(0, s.length - options.sink) && s.first >= 0 &&
                        s.first <= s.quantized && s.first % options.page_tokens == 0 &&
                        s.recent_tokens(options) < options.recent + options.flush;
    if (!counts)
      return CacheStatus::file("snapshot: length, quantized and first are ", header.length, ", ",
                               header.quantized, ", ", header.first,
                               ", which no cache with these options has");
    // Before sizes are computed from it: a table of that many pages is no cache's.
    if (page_count(cache, s) > std::int64_t{1} << 24)
      return CacheStatus::file("snapshot: quantized is ", header.quantized, ", expected at most 2^24 pages");
    const std::size_t held = static_cast<std::size_t>(page_count(cache, s) - first_page(cache, s));
    if (held > cache.pool_->pages())
      return CacheStatus::exhausted("load_sequence: ", cache.pool_->exhausted_message(held));
    const std::uint64_t expected = payload_bytes(cache, s);
    if (header.payload != expected)
      return CacheStatus::file("snapshot: the payload has ", header.payload, " bytes, expected ", expected);
    return {};
  }

  static Index first_page(const Cache& cache, const Sequence& s) {
    return s.first / cache.options_.page_tokens;
  }
  static Index page_count(const Cache& cache, const Sequence& s) {
    return (s.quantized + cache.options_.page_tokens - 1) / cache.options_.page_tokens;
  }
  static std::uint64_t payload_bytes(const Cache& cache, const Sequence& s) {
    const Index windows = s.sink_tokens(cache.options_) + s.recent_tokens(cache.options_);
    return static_cast<std::uint64_t>(page_count(cache, s) - first_page(cache, s)) *
               cache.geometry_.page_bytes() +
           static_cast<std::uint64_t>(windows * cache.kv_heads() * (cache.key_dim() + cache.value_dim())) *
               sizeof(Eigen::bfloat16);
  }

  /// Calls `visit(bytes)` for the rows of a window in the order of the payload.
  template <class WindowRef, class Visit>
  static void each_window_row(const Cache& cache, WindowRef& window, Index begin, Index tokens, Visit visit) {
    for (Index h = 0; h < cache.kv_heads(); ++h) {
      visit(window.keys.data() + (h * window.capacity + begin) * window.key_dim, tokens * window.key_dim);
      visit(window.values.data() + (h * window.capacity + begin) * window.value_dim,
            tokens * window.value_dim);
    }
  }

  static std::vector<std::byte> pack(const Cache& cache, const Sequence& s) {
    std::vector<std::byte> payload(static_cast<std::size_t>(payload_bytes(cache, s)));
    std::byte* at = payload.data();
    for (Index p = first_page(cache, s); p < page_count(cache, s); ++p) {
      const std::byte* const page =
          std::as_const(*cache.pool_).page(s.pages[static_cast<std::size_t>(p)]).data();
      const Index used = std::min(cache.options_.page_tokens, s.quantized - p * cache.options_.page_tokens);
      copy_slots(cache.keys_.front(), cache, cache.geometry_.keys(page, 0), page, at, used);
      copy_slots(cache.values_.front(), cache, cache.geometry_.values(page, 0), page, at, used);
      at += cache.geometry_.page_bytes();
    }
    const auto append = [&](const Eigen::bfloat16* values, Index count) {
      const auto bytes = static_cast<std::size_t>(count) * sizeof(Eigen::bfloat16);
      if (bytes > 0) std::memcpy(at, values, bytes);
      at += bytes;
    };
    each_window_row(cache, s.sink, 0, s.sink_tokens(cache.options_), append);
    each_window_row(cache, s.recent, s.recent_begin, s.recent_tokens(cache.options_), append);
    return payload;
  }

  /// Copies the first `used` slots only: what a truncated token left behind is nobody's business.
  template <class Codec>
  static void copy_slots(const Codec& codec, const Cache& cache, const PageSide& side, const std::byte* page,
                         std::byte* to, Index used) {
    const TokenShape shape = token_shape(codec);
    std::vector<typename Codec::Code> codes(static_cast<std::size_t>(shape.dim));
    std::vector<std::byte> params(static_cast<std::size_t>(shape.groups * shape.param_bytes));
    for (Index h = 0; h < cache.kv_heads(); ++h)
      for (Index slot = 0; slot < used; ++slot) {
        const Index row = slot / Layout::lanes, lane = slot % Layout::lanes;
        const std::ptrdiff_t code_row =
            side.codes - page + h * side.code_head_stride + row * side.code_row_stride;
        const std::ptrdiff_t param_row =
            side.params - page + h * side.param_head_stride + row * side.param_row_stride;
        Layout::template load_codes<typename Codec::Code>(page + code_row, shape, lane, codes.data());
        Layout::template store_codes<typename Codec::Code>(to + code_row, shape, lane, codes.data());
        detail::load_params(page + param_row, shape, Layout::lanes, lane, params.data());
        detail::store_params(to + param_row, shape, Layout::lanes, lane, params.data());
      }
  }

  static CacheStatus restore(Cache& cache, Sequence& s, std::span<const std::byte> payload) {
    const Index first = first_page(cache, s), count = page_count(cache, s);
    s.pages.assign(static_cast<std::size_t>(count), no_page);
    const auto taken = std::span(s.pages).subspan(static_cast<std::size_t>(first));
    if (!cache.pool_->try_allocate(taken))
      return CacheStatus::exhausted("load_sequence: ", cache.pool_->exhausted_message(taken.size()));
    const std::byte* at = payload.data();
    const std::size_t page_bytes = cache.geometry_.page_bytes();
    for (Index p = first; p < count; ++p) {
      std::memcpy(cache.pool_->page(s.pages[static_cast<std::size_t>(p)]).data(), at, page_bytes);
      at += page_bytes;
    }
    const auto take = [&](Eigen::bfloat16* values, Index elements) {
      const auto bytes = static_cast<std::size_t>(elements) * sizeof(Eigen::bfloat16);
      if (bytes > 0) std::memcpy(static_cast<void*>(values), at, bytes);
      at += bytes;
    };
    each_window_row(cache, s.sink, 0, s.sink_tokens(cache.options_), take);
    each_window_row(cache, s.recent, 0, s.recent_tokens(cache.options_), take);
    return {};
  }

  static std::uint64_t checksum(std::span<const std::byte> bytes) {
    Fingerprint fingerprint;
    fingerprint.add(bytes);
    return fingerprint.value();
  }
  static void write(std::ostream& out, std::span<const std::byte> bytes) {
    out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }
  static void write_checksum(std::ostream& out, std::span<const std::byte> bytes) {
    const std::uint64_t sum = checksum(bytes);
    write(out, std::as_bytes(std::span(&sum, 1)));
  }
  static CacheStatus read(std::istream& in, std::span<std::byte> bytes, const char* what) {
    in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    if (in.gcount() == static_cast<std::streamsize>(bytes.size())) return {};
    return CacheStatus::file("snapshot: the stream ends within the ", what, ", expected ", bytes.size(),
                             " bytes, got ", in.gcount());
  }
  static CacheStatus read_checked(std::istream& in, std::span<std::byte> bytes, const char* what) {
    if (CacheStatus status = read(in, bytes, what); !status) return status;
    return check_checksum(in, bytes, what);
  }
  /// In pieces, so that a length that no stream has does not ask for memory that no machine has.
  static CacheStatus read_payload(std::istream& in, std::uint64_t size, std::vector<std::byte>& payload) {
    constexpr std::uint64_t piece = std::uint64_t{1} << 20;
    while (payload.size() < size) {
      const std::size_t begin = payload.size();
      payload.resize(begin + static_cast<std::size_t>(std::min(piece, size - begin)));
      if (CacheStatus status = read(in, std::span(payload).subspan(begin), "payload"); !status) return status;
    }
    return {};
  }
  static CacheStatus check_checksum(std::istream& in, std::span<const std::byte> bytes, const char* what) {
    std::uint64_t sum = 0;
    if (CacheStatus status = read(in, std::as_writable_bytes(std::span(&sum, 1)), "checksum"); !status)
      return status;
    if (sum == checksum(bytes)) return {};
    return CacheStatus::file("snapshot: the ", what,
                             " does not match its checksum, the stream is damaged or no snapshot");
  }
};

/// Writes a sequence to a stream. Throws `std::invalid_argument` for a sequence that is not there,
/// `FileError` if the stream cannot be written; `try_save_sequence` returns that as a status.
template <HeadCodec KeyCodec, HeadCodec ValueCodec, PageLayout Layout>
CacheStatus try_save_sequence(const PagedCache<KeyCodec, ValueCodec, Layout>& cache, SequenceId id,
                              std::ostream& out) {
  return SequenceSnapshot<KeyCodec, ValueCodec, Layout>::save(cache, id, out);
}
template <HeadCodec KeyCodec, HeadCodec ValueCodec, PageLayout Layout>
void save_sequence(const PagedCache<KeyCodec, ValueCodec, Layout>& cache, SequenceId id, std::ostream& out) {
  try_save_sequence(cache, id, out).raise_if_failed();
}

/// Reads what `save_sequence` wrote as a new sequence of `cache`. Throws `FileError` for a stream that ends
/// too soon, is damaged, or was written under other codecs, another layout or other options; `PoolExhausted`
/// if the pages do not suffice. `try_load_sequence` returns that as a status, and sets `id` only if it
/// succeeds. The cache is unchanged after a failure. Needs the cache alone, as `create` does.
template <HeadCodec KeyCodec, HeadCodec ValueCodec, PageLayout Layout>
CacheStatus try_load_sequence(PagedCache<KeyCodec, ValueCodec, Layout>& cache, std::istream& in,
                              SequenceId& id) {
  return SequenceSnapshot<KeyCodec, ValueCodec, Layout>::load(cache, in, id);
}
template <HeadCodec KeyCodec, HeadCodec ValueCodec, PageLayout Layout>
SequenceId load_sequence(PagedCache<KeyCodec, ValueCodec, Layout>& cache, std::istream& in) {
  SequenceId id;
  try_load_sequence(cache, in, id).raise_if_failed();
  return id;
}

}  // namespace wushkv

#endif  // WUSHKV_CACHE_SNAPSHOT_HPP
