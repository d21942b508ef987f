// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CACHE_PAGED_CACHE_HPP
#define WUSHKV_CACHE_PAGED_CACHE_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "wushkv/cache/identity.hpp"
#include "wushkv/cache/layout.hpp"
#include "wushkv/cache/page_pool.hpp"
#include "wushkv/cache/status.hpp"
#include "wushkv/cache/view.hpp"
#include "wushkv/codec/codec.hpp"
#include "wushkv/core/scratch.hpp"
#include "wushkv/quantize/storage.hpp"

namespace wushkv {

/// How a cache keeps its sequences; all sizes in tokens.
struct CacheOptions {
  Index page_tokens = 64;               ///< tokens of a page, a multiple of the layout's lanes
  Index sink = 64;                      ///< first tokens of a sequence, kept in BF16
  Index recent = 256;                   ///< last tokens, kept in BF16
  Index flush = 8;                      ///< the oldest recent tokens are quantized this many at a time
  Basis key_basis = Basis::Original;    ///< what `append` gets: keys after RoPE, or `T_K k` already
  Basis value_basis = Basis::Original;  ///< values, or `T_V v` already (folded into the weights)
};

/// A sequence of a cache. Never reused: a stale one is refused.
struct SequenceId {
  std::uint32_t slot = 0;
  std::uint64_t generation = 0;
  friend bool operator==(const SequenceId&, const SequenceId&) = default;
};

/// Where things lie in a page: the codes of all heads' keys, their parameters, and the same for values, each
/// part aligned.
class PageGeometry {
 public:
  template <PageLayout Layout>
  static PageGeometry of(const TokenShape& keys, const TokenShape& values, Index kv_heads,
                         Index page_tokens) {
    PageGeometry g;
    const Index rows = page_tokens / Layout::lanes;
    g.add(g.keys_, g.key_codes_, g.key_params_, Layout::code_row_bytes(keys),
          detail::param_row_bytes(keys, Layout::lanes), rows, kv_heads);
    g.add(g.values_, g.value_codes_, g.value_params_, Layout::code_row_bytes(values),
          detail::param_row_bytes(values, Layout::lanes), rows, kv_heads);
    return g;
  }
  std::size_t page_bytes() const { return bytes_; }
  /// The sides of the pages that begin at `data`, `page_stride` bytes apart.
  PageSide keys(const std::byte* data, std::size_t page_stride) const {
    return side(keys_, key_codes_, key_params_, data, page_stride);
  }
  PageSide values(const std::byte* data, std::size_t page_stride) const {
    return side(values_, value_codes_, value_params_, data, page_stride);
  }

 private:
  void add(PageSide& side, std::size_t& codes, std::size_t& params, Index code_row, Index param_row,
           Index rows, Index heads) {
    side.code_row_stride = code_row;
    side.code_head_stride = code_row * rows;
    side.param_row_stride = param_row;
    side.param_head_stride = param_row * rows;
    codes = place(static_cast<std::size_t>(side.code_head_stride * heads));
    params = place(static_cast<std::size_t>(side.param_head_stride * heads));
  }
  std::size_t place(std::size_t size) {
    const std::size_t begin = bytes_;
    bytes_ = (bytes_ + size + PagePool::alignment - 1) / PagePool::alignment * PagePool::alignment;
    return begin;
  }
  static PageSide side(PageSide side, std::size_t codes, std::size_t params, const std::byte* data,
                       std::size_t page_stride) {
    side.codes = data + codes;
    side.params = data + params;
    side.code_page_stride = side.param_page_stride = static_cast<std::ptrdiff_t>(page_stride);
    return side;
  }

  PageSide keys_, values_;
  std::size_t key_codes_ = 0, key_params_ = 0, value_codes_ = 0, value_params_ = 0, bytes_ = 0;
};

/// What one token of one head takes in a page under `codec`.
template <class Codec>
TokenShape token_shape(const Codec& codec) {
  using Q = std::remove_cvref_t<decltype(codec.quantizer())>;
  return {codec.head_dim(), codec.bits(), param_bits_v<Q> == 0 ? 0 : codec.groups(), param_bits_v<Q> / 8};
}

/// The KV cache of one layer: sequences `[sink | quantized pages | recent]` (design.md, section 3), one codec
/// a KV head for keys and one for values. Tokens enter transformed and in BF16; what leaves the recent window
/// is quantized into pages of the pool, `flush` tokens at a time, so `recent` holds `recent` to `recent +
/// flush - 1` tokens once there are that many. With `recent` 0 and `flush` 1 there is no window to pass
/// through, and tokens are quantized from the transform's own scalar as they come. A token's bytes depend on
/// its own values only, and on how many tokens one call appends (a product of one row may round unlike that
/// of many), not on what other sequences do.
///
/// Calls that change a sequence come in two forms: one throws (`std::invalid_argument`, `PoolExhausted`),
/// `try_…` returns a `CacheStatus`. After a failure everything is as before: pages are counted and taken
/// before anything is written.
///
/// One writer a sequence: calls on distinct sequences may run at the same time, and const calls with each
/// other, except that `create`, `fork` and `release` must be alone. The pool must outlive the cache and may
/// serve the caches of all layers.
template <HeadCodec KeyCodec, HeadCodec ValueCodec, PageLayout Layout = TokenMajor>
class PagedCache {
  using KeyScalar = typename KeyCodec::Scalar;
  using ValueScalar = typename ValueCodec::Scalar;

 public:
  using BFloat16 = Eigen::bfloat16;

  /// Codecs of one side share dimension, group and bits; the transforms differ by head. Throws
  /// `std::invalid_argument` for no head, codecs that do not go together, options out of range, or a pool
  /// whose pages are too small (`page_bytes` tells the size).
  PagedCache(PagePool& pool, std::vector<KeyCodec> keys, std::vector<ValueCodec> values,
             const CacheOptions& options = {})
      : pool_(&pool),
        keys_(std::move(keys)),
        values_(std::move(values)),
        options_(options),
        geometry_(checked_geometry(keys_, values_, options_)),
        identity_(cache_identity<Layout>(keys_, values_)) {
    if (pool.page_bytes() < geometry_.page_bytes())
      detail::invalid_argument("PagedCache: pool has pages of ", pool.page_bytes(),
                               " bytes, expected at least ", geometry_.page_bytes());
  }

  PagedCache(const PagedCache&) = delete;
  PagedCache& operator=(const PagedCache&) = delete;
  ~PagedCache() {
    for (const auto& sequence : sequences_)
      if (sequence) release_pages(*sequence, 0);
  }

  /// The bytes of a page of `page_tokens` tokens under these codecs: the least a pool's pages must have.
  static std::size_t page_bytes(const std::vector<KeyCodec>& keys, const std::vector<ValueCodec>& values,
                                const CacheOptions& options = {}) {
    return checked_geometry(keys, values, options).page_bytes();
  }

  Index kv_heads() const { return static_cast<Index>(keys_.size()); }
  Index key_dim() const { return keys_.front().head_dim(); }
  Index value_dim() const { return values_.front().head_dim(); }
  const std::vector<KeyCodec>& key_codecs() const { return keys_; }
  const std::vector<ValueCodec>& value_codecs() const { return values_; }
  const CacheOptions& options() const { return options_; }
  std::uint64_t identity() const { return identity_; }
  PagePool& pool() const { return *pool_; }
  /// Bytes of a quantized token, keys and values of all KV heads, parameters and padding included, as the
  /// pool has them.
  double bytes_per_token() const {
    return static_cast<double>(pool_->page_bytes()) / static_cast<double>(options_.page_tokens);
  }
  /// That, as a fraction of what BF16 takes.
  double compression() const {
    return bytes_per_token() / static_cast<double>(2 * kv_heads() * (key_dim() + value_dim()));
  }

  /// Starts an empty sequence, with its windows' memory.
  SequenceId create() {
    return add(std::make_unique<Sequence>(kv_heads(), key_dim(), value_dim(), options_));
  }

  /// Appends tokens to a sequence: `k` is `[tokens, kv_heads * key_dim]`, `v` `[tokens, kv_heads *
  /// value_dim]`, in the bases that the options say and the codecs' scalars, any row pitch. One token
  /// allocates nothing on the heap up to 2048 values a side, but for a block table that grows. Throws
  /// `std::invalid_argument` for a wrong shape, a value that is not finite or a sequence that is not there,
  /// `PoolExhausted` if the pool has too few pages.
  template <class K, class V>
  void append(SequenceId id, const Eigen::MatrixBase<K>& k, const Eigen::MatrixBase<V>& v) {
    try_append(id, k, v).raise_if_failed();
  }
  template <class K, class V>
  CacheStatus try_append(SequenceId id, const Eigen::MatrixBase<K>& k, const Eigen::MatrixBase<V>& v) {
    const Index count = k.rows();
    return try_append({&id, 1}, {&count, 1}, k, v);
  }

  /// Appends to several sequences at once, all or none: the first `counts[0]` rows to `ids[0]`, the next to
  /// `ids[1]`, ….
  template <class K, class V>
  void append(std::span<const SequenceId> ids, std::span<const Index> counts, const Eigen::MatrixBase<K>& k,
              const Eigen::MatrixBase<V>& v) {
    try_append(ids, counts, k, v).raise_if_failed();
  }
  template <class K, class V>
  CacheStatus try_append(std::span<const SequenceId> ids, std::span<const Index> counts,
                         const Eigen::MatrixBase<K>& k, const Eigen::MatrixBase<V>& v) {
    if (CacheStatus status = check_append(ids, counts, k.derived(), v.derived()); !status) return status;
    detail::Scratch<KeyScalar, staged_inline> key_scratch(k.size());
    detail::Scratch<ValueScalar, staged_inline> value_scratch(v.size());
    Eigen::Map<Batch<KeyScalar>> staged_keys(key_scratch.data(), k.rows(), k.cols());
    Eigen::Map<Batch<ValueScalar>> staged_values(value_scratch.data(), v.rows(), v.cols());
    stage(keys_, options_.key_basis, k.derived(), counts, staged_keys);
    stage(values_, options_.value_basis, v.derived(), counts, staged_values);
    if (!all_finite(staged_keys) || !all_finite(staged_values))
      return CacheStatus::invalid(
          "append: a transformed value is not finite, the token overflows its transform's scalar");
    EncodeScratch scratch(*this, k.rows());
    if (CacheStatus status = take_pages(ids, counts); !status) return status;
    Index row = 0;
    for (std::size_t i = 0; i < ids.size(); row += counts[i++])
      push(*find(ids[i]), staged_keys.middleRows(row, counts[i]), staged_values.middleRows(row, counts[i]),
           scratch);
    return {};
  }

  /// A second sequence with the same tokens, which shares the pages until one of the two writes (copy on
  /// write). Throws `std::invalid_argument` for a sequence that is not there.
  SequenceId fork(SequenceId id) {
    const Sequence& from = checked("fork", id);
    auto copy = std::make_unique<Sequence>(from);
    copy->pages.reserve(2 * from.pages.size());
    reserve_slot();
    for (const PageId page : from.pages)
      if (page != no_page) pool_->share(page);
    return add(std::move(copy));
  }
  CacheStatus try_fork(SequenceId id, SequenceId& result) {
    if (find(id) == nullptr) return missing("fork", id);
    result = fork(id);
    return {};
  }

  /// Cuts a sequence back to its first `length` tokens (speculative decoding): the quantized boundary becomes
  /// the lesser of itself and the new length. Pages past it are given back. Throws `std::invalid_argument`
  /// for a sequence that is not there, a length that is negative or greater than now, or one that ends among
  /// tokens given back behind a sliding window.
  void truncate(SequenceId id, Index length) { try_truncate(id, length).raise_if_failed(); }
  CacheStatus try_truncate(SequenceId id, Index length) {
    Sequence* const s = find(id);
    if (s == nullptr) return missing("truncate", id);
    if (length < 0 || length > s->length)
      return CacheStatus::invalid("truncate: length is ", length, ", expected 0 to ", s->length);
    const Index quantized = std::min(s->quantized, std::max<Index>(0, length - options_.sink));
    if (quantized > 0 && quantized < s->first)
      return CacheStatus::invalid("truncate: length is ", length, ", but tokens up to ",
                                  options_.sink + s->first, " were given back, expected more");
    release_pages(*s,
                  static_cast<std::size_t>((quantized + options_.page_tokens - 1) / options_.page_tokens));
    if (quantized == 0) s->first = 0;
    s->quantized = quantized;
    s->length = length;
    return {};
  }

  /// Ends a sequence and gives its pages back. Throws `std::invalid_argument` for a sequence that is not
  /// there.
  void release(SequenceId id) { try_release(id).raise_if_failed(); }
  CacheStatus try_release(SequenceId id) {
    Sequence* const s = find(id);
    if (s == nullptr) return missing("release", id);
    release_pages(*s, 0);
    sequences_[id.slot].reset();
    return {};
  }

  /// Gives back the pages that lie wholly before `position`, for a sliding window that has moved past them;
  /// sink and recent tokens stay. Reading those tokens is refused afterwards. Throws `std::invalid_argument`
  /// for a sequence that is not there.
  void release_before(SequenceId id, Index position) { try_release_before(id, position).raise_if_failed(); }
  CacheStatus try_release_before(SequenceId id, Index position) {
    Sequence* const s = find(id);
    if (s == nullptr) return missing("release_before", id);
    if (position < 0 || position > s->length)
      return CacheStatus::invalid("release_before: position is ", position, ", expected 0 to ", s->length);
    const Index pages =
        std::min(std::max<Index>(0, position - options_.sink), s->quantized) / options_.page_tokens;
    for (Index p = s->first / options_.page_tokens; p < pages; ++p)
      pool_->release(std::exchange(s->pages[static_cast<std::size_t>(p)], no_page));
    s->first = std::max(s->first, pages * options_.page_tokens);
    return {};
  }

  bool contains(SequenceId id) const { return find(id) != nullptr; }
  /// Tokens of a sequence. This and the calls below throw `std::invalid_argument` for a sequence that is not
  /// there.
  Index length(SequenceId id) const { return checked("length", id).length; }
  /// Tokens in quantized pages; they follow the sink.
  Index quantized(SequenceId id) const { return checked("quantized", id).quantized; }
  std::span<const PageId> block_table(SequenceId id) const { return checked("block_table", id).pages; }
  WindowView sink(SequenceId id) const { return view(id).sink; }
  WindowView recent(SequenceId id) const { return view(id).recent; }

  /// The sequence as attention reads it; valid until it is next changed.
  SequenceView view(SequenceId id) const {
    const Sequence& s = checked("view", id);
    SequenceView view;
    view.sink = s.sink.view(0, s.sink_tokens(options_));
    view.recent = s.recent.view(s.recent_begin, s.recent_tokens(options_));
    view.pages.keys = geometry_.keys(pool_->data(), pool_->page_bytes());
    view.pages.values = geometry_.values(pool_->data(), pool_->page_bytes());
    view.pages.block_table = s.pages;
    view.pages.page_tokens = options_.page_tokens;
    view.pages.first = s.first;
    view.pages.tokens = s.quantized;
    view.identity = identity_;
    return view;
  }

 private:
  template <HeadCodec K, HeadCodec V, PageLayout L>
  friend class SequenceSnapshot;

  // 16 KB of stack a side: a decode step's token of 16 KV heads of 128.
  static constexpr std::size_t staged_inline = 2048;
  // Windows have their memory from the start; far above any use, far below where sizes in bytes overflow.
  static constexpr Index max_page_tokens = Index{1} << 20, max_window_tokens = Index{1} << 24;

  // Values of a side of one head that are encoded together, and the tokens that this makes at most: enough
  // for a rounding to run across, few enough for the stack.
  static constexpr Index encoded_values = 4096, encoded_tokens = 32;
  template <class Params>
  static constexpr std::size_t inline_params = std::max<std::size_t>(64, 8192 / sizeof(Params));
  Index encode_block(Index appended) const {
    const Index tokens =
        std::min(encoded_tokens, direct(options_) ? std::max<Index>(1, appended) : options_.flush);
    return std::clamp<Index>(encoded_values / std::max(key_dim(), value_dim()), 1, tokens);
  }

  /// Working memory to encode some tokens of one head, taken before anything is written: afterwards nothing
  /// can fail.
  struct EncodeScratch {
    EncodeScratch(const PagedCache& cache, Index appended)
        : block(cache.encode_block(appended)),
          k(block * cache.key_dim()),
          v(block * cache.value_dim()),
          key_codes(block * cache.key_dim()),
          value_codes(block * cache.value_dim()),
          key_params(block * cache.keys_.front().groups()),
          value_params(block * cache.values_.front().groups()) {}
    static constexpr auto inline_values = static_cast<std::size_t>(encoded_values);
    Index block;
    detail::Scratch<KeyScalar, inline_values> k;
    detail::Scratch<ValueScalar, inline_values> v;
    detail::Scratch<typename KeyCodec::Code, inline_values> key_codes;
    detail::Scratch<typename ValueCodec::Code, inline_values> value_codes;
    detail::Scratch<typename KeyCodec::Params, inline_params<typename KeyCodec::Params>> key_params;
    detail::Scratch<typename ValueCodec::Params, inline_params<typename ValueCodec::Params>> value_params;
  };

  /// BF16 tokens of all heads, `[kv_heads][capacity][dim]`.
  struct Window {
    Window(Index heads, Index dk, Index dv, Index capacity_tokens)
        : capacity(capacity_tokens),
          key_dim(dk),
          value_dim(dv),
          keys(static_cast<std::size_t>(heads * capacity_tokens * dk)),
          values(static_cast<std::size_t>(heads * capacity_tokens * dv)) {}

    BFloat16* key(Index head, Index token) { return keys.data() + (head * capacity + token) * key_dim; }
    BFloat16* value(Index head, Index token) { return values.data() + (head * capacity + token) * value_dim; }
    WindowView view(Index begin, Index tokens) const {
      return {keys.data() + begin * key_dim, capacity * key_dim, values.data() + begin * value_dim,
              capacity * value_dim, tokens};
    }
    void move_to_front(Index begin, Index tokens, Index heads) {
      for (Index h = 0; h < heads; ++h) {
        std::copy_n(key(h, begin), tokens * key_dim, key(h, 0));
        std::copy_n(value(h, begin), tokens * value_dim, value(h, 0));
      }
    }

    Index capacity, key_dim, value_dim;
    std::vector<BFloat16> keys, values;
  };

  struct Sequence {
    Sequence(Index heads, Index dk, Index dv, const CacheOptions& options)
        : sink(heads, dk, dv, options.sink),
          // Twice what it holds: tokens move to the front once in a window's length, not at every flush.
          recent(heads, dk, dv, direct(options) ? 0 : 2 * (options.recent + options.flush)) {}

    Index sink_tokens(const CacheOptions& options) const { return std::min(length, options.sink); }
    Index recent_tokens(const CacheOptions& options) const {
      return length - sink_tokens(options) - quantized;
    }

    Index length = 0, quantized = 0;
    Index first = 0;  // quantized tokens before it were given back
    std::vector<PageId> pages;
    Window sink, recent;
    Index recent_begin = 0;
    std::uint64_t generation = 0;
  };

  /// No window to pass through: tokens are quantized as they come.
  static bool direct(const CacheOptions& options) { return options.recent == 0 && options.flush == 1; }

  static PageGeometry checked_geometry(const std::vector<KeyCodec>& keys,
                                       const std::vector<ValueCodec>& values, const CacheOptions& options) {
    if (keys.empty() || keys.size() != values.size())
      detail::invalid_argument("PagedCache: ", keys.size(), " key and ", values.size(),
                               " value codecs, expected one each a KV head");
    if (options.page_tokens < 1 || options.page_tokens % Layout::lanes != 0 ||
        options.page_tokens > max_page_tokens)
      detail::invalid_argument("PagedCache: page_tokens is ", options.page_tokens,
                               ", expected a positive multiple of ", Layout::lanes, " up to ",
                               max_page_tokens);
    if (options.sink < 0 || options.recent < 0 || options.flush < 1 || options.sink > max_window_tokens ||
        options.recent > max_window_tokens || options.flush > max_window_tokens)
      detail::invalid_argument("PagedCache: sink is ", options.sink, ", recent ", options.recent, ", flush ",
                               options.flush, ", expected 0 or more, 0 or more, 1 or more, and at most ",
                               max_window_tokens, " each");
    const auto check = [](const char* side, const auto& codecs) {
      const auto& first = codecs.front();
      using Code = typename std::remove_cvref_t<decltype(first)>::Code;
      if (first.bits() < 1 || first.bits() > static_cast<int>(8 * sizeof(Code)))
        detail::invalid_argument("PagedCache: ", side, " codecs have ", first.bits(),
                                 " bits, expected 1 to the ", 8 * sizeof(Code), " of their codes");
      for (const auto& codec : codecs)
        if (codec.head_dim() != first.head_dim() || codec.group_size() != first.group_size() ||
            codec.bits() != first.bits())
          detail::invalid_argument("PagedCache: ", side, " codecs of dimension ", codec.head_dim(),
                                   ", group ", codec.group_size(), ", ", codec.bits(), " bits and ",
                                   first.head_dim(), ", ", first.group_size(), ", ", first.bits(),
                                   ", expected all alike");
    };
    check("key", keys);
    check("value", values);
    return PageGeometry::of<Layout>(token_shape(keys.front()), token_shape(values.front()),
                                    static_cast<Index>(keys.size()), options.page_tokens);
  }

  /// Makes `add` unable to fail.
  void reserve_slot() {
    if (sequences_.size() == sequences_.capacity()) sequences_.reserve(2 * sequences_.size() + 8);
  }

  SequenceId add(std::unique_ptr<Sequence> sequence) {
    std::size_t slot = 0;
    while (slot < sequences_.size() && sequences_[slot]) ++slot;
    sequence->generation = ++generation_;
    if (slot == sequences_.size())
      sequences_.push_back(std::move(sequence));
    else
      sequences_[slot] = std::move(sequence);
    return {static_cast<std::uint32_t>(slot), generation_};
  }

  const Sequence* find(SequenceId id) const {
    if (id.slot >= sequences_.size() || !sequences_[id.slot] ||
        sequences_[id.slot]->generation != id.generation)
      return nullptr;
    return sequences_[id.slot].get();
  }
  Sequence* find(SequenceId id) { return const_cast<Sequence*>(std::as_const(*this).find(id)); }
  static CacheStatus missing(const char* what, SequenceId id) {
    return CacheStatus::invalid(what, ": sequence ", id.slot, "/", id.generation,
                                " is not in the cache, expected one that was not released");
  }
  const Sequence& checked(const char* what, SequenceId id) const {
    const Sequence* const s = find(id);
    if (s == nullptr) [[unlikely]]
      missing(what, id).raise_if_failed();
    return *s;
  }
  template <class K, class V>
  CacheStatus check_append(std::span<const SequenceId> ids, std::span<const Index> counts, const K& k,
                           const V& v) const {
    static_assert(
        std::is_same_v<typename K::Scalar, KeyScalar> && std::is_same_v<typename V::Scalar, ValueScalar>,
        "wushkv: append takes keys and values in the codecs' scalars; use .cast<Scalar>()");
    if (ids.size() != counts.size())
      return CacheStatus::invalid("append: ", counts.size(), " counts, expected one a sequence, ",
                                  ids.size());
    Index rows = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (find(ids[i]) == nullptr) return missing("append", ids[i]);
      for (std::size_t j = 0; j < i; ++j)
        if (ids[j] == ids[i])
          return CacheStatus::invalid("append: sequence ", ids[i].slot, " came twice, expected each once");
      if (counts[i] < 0 || counts[i] > k.rows() - rows)
        return CacheStatus::invalid("append: counts want more than the ", k.rows(),
                                    " rows of k, expected as many");
      rows += counts[i];
    }
    if (rows != k.rows() || rows != v.rows())
      return CacheStatus::invalid("append: k has ", k.rows(), " and v ", v.rows(), " rows, expected ", rows,
                                  " each");
    if (k.cols() != kv_heads() * key_dim())
      return CacheStatus::invalid("append: k has ", k.cols(), " columns, expected ", kv_heads(), " heads of ",
                                  key_dim());
    if (v.cols() != kv_heads() * value_dim())
      return CacheStatus::invalid("append: v has ", v.cols(), " columns, expected ", kv_heads(), " heads of ",
                                  value_dim());
    if (!all_finite(k)) return CacheStatus::invalid("append: k has a value that is not finite");
    if (!all_finite(v)) return CacheStatus::invalid("append: v has a value that is not finite");
    return {};
  }

  /// Each sequence's rows by themselves: a product of many rows may round unlike that of few, and a token's
  /// bytes must not depend on whom it shares a call with.
  template <class Codec, class X, class Staged>
  static void stage(const std::vector<Codec>& codecs, Basis basis, const X& x, std::span<const Index> counts,
                    Staged& staged) {
    if (basis == Basis::Transformed || x.rows() == 0) {
      staged = x;
      return;
    }
    const Index d = codecs.front().head_dim();
    Index row = 0;
    for (const Index count : counts) {
      for (Index h = 0; h < static_cast<Index>(codecs.size()) && count > 0; ++h)
        wushkv::forward_to(codecs[static_cast<std::size_t>(h)].transform(), x.block(row, h * d, count, d),
                           staged.block(row, h * d, count, d));
      row += count;
    }
  }

  /// Tokens that are quantized once a sequence has `length` of them, given what is quantized now.
  Index quantized_at(const Sequence& s, Index length) const {
    const Index waiting = length - options_.sink - s.quantized;
    return s.quantized + std::max<Index>(0, waiting - options_.recent) / options_.flush * options_.flush;
  }

  struct Need {
    std::size_t fresh = 0;
    bool copy = false;  // the last page is shared and about to be written
  };
  Need need(const Sequence& s, Index count) const {
    const Index quantized = quantized_at(s, s.length + count);
    Need need;
    need.fresh = static_cast<std::size_t>((quantized + options_.page_tokens - 1) / options_.page_tokens) -
                 s.pages.size();
    need.copy = quantized > s.quantized && s.quantized % options_.page_tokens != 0 &&
                pool_->references(s.pages.back()) > 1;
    return need;
  }

  /// Whether all other holders of a shared page copy it earlier in the same call: the last one writes in
  /// place.
  bool is_last_holder(std::span<const SequenceId> ids, std::span<const Index> counts, std::size_t i,
                      PageId page) const {
    std::uint32_t writers = 1;
    for (std::size_t j = 0; j < i; ++j) {
      const Sequence& other = *find(ids[j]);
      if (!other.pages.empty() && other.pages.back() == page && need(other, counts[j]).copy) ++writers;
    }
    return writers == pool_->references(page);
  }

  /// Takes all pages that an append will write, or none.
  CacheStatus take_pages(std::span<const SequenceId> ids, std::span<const Index> counts) {
    std::size_t total = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      Sequence& s = *find(ids[i]);
      const Need n = need(s, counts[i]);
      total += n.fresh + (n.copy && !is_last_holder(ids, counts, i, s.pages.back()) ? 1 : 0);
      if (s.pages.capacity() < s.pages.size() + n.fresh)
        s.pages.reserve(std::max(2 * s.pages.capacity(), s.pages.size() + n.fresh));
    }
    if (total == 0) return {};
    detail::Scratch<PageId> taken(static_cast<Index>(total));
    const std::span<PageId> pages(taken.data(), total);
    if (!pool_->try_allocate(pages))
      return CacheStatus::exhausted("append: ", pool_->exhausted_message(total));
    std::size_t at = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      Sequence& s = *find(ids[i]);
      const Need n = need(s, counts[i]);
      if (n.copy) {
        const auto from = std::as_const(*pool_).page(s.pages.back());
        std::copy(from.begin(), from.end(), pool_->page(pages[at]).begin());
        pool_->release(std::exchange(s.pages.back(), pages[at++]));
      }
      for (std::size_t p = 0; p < n.fresh; ++p) s.pages.push_back(pages[at++]);
    }
    // Another writer may have let go of a shared page since they were counted: what was taken for its copy
    // goes back.
    while (at < total) pool_->release(pages[at++]);
    return {};
  }

  /// Appends the rows of `k` and `v`, staged and contiguous, to one sequence.
  template <class K, class V>
  void push(Sequence& s, const K& k, const V& v, EncodeScratch& scratch) {
    Index row = 0;
    for (; row < k.rows() && s.length < options_.sink; ++row)
      write(s.sink, s.length++, k.row(row).data(), v.row(row).data());
    if (direct(options_)) {
      while (row < k.rows()) {
        const Index count = std::min(scratch.block, k.rows() - row);
        for (Index h = 0; h < kv_heads(); ++h) {
          for (Index i = 0; i < count; ++i) {
            std::copy_n(k.row(row + i).data() + h * key_dim(), key_dim(), scratch.k.data() + i * key_dim());
            std::copy_n(v.row(row + i).data() + h * value_dim(), value_dim(),
                        scratch.v.data() + i * value_dim());
          }
          quantize(s, s.quantized, count, h, scratch);
        }
        s.quantized += count;
        s.length += count;
        row += count;
      }
      return;
    }
    for (; row < k.rows(); ++row) {
      const Index waiting = s.recent_tokens(options_);
      if (s.recent_begin + waiting == s.recent.capacity) {
        s.recent.move_to_front(s.recent_begin, waiting, kv_heads());
        s.recent_begin = 0;
      }
      write(s.recent, s.recent_begin + waiting, k.row(row).data(), v.row(row).data());
      ++s.length;
      if (waiting + 1 >= options_.recent + options_.flush) flush(s, scratch);
    }
  }

  void write(Window& window, Index token, const KeyScalar* k, const ValueScalar* v) {
    for (Index h = 0; h < kv_heads(); ++h) {
      for (Index i = 0; i < key_dim(); ++i)
        window.key(h, token)[i] = saturate_cast<BFloat16>(k[h * key_dim() + i]);
      for (Index i = 0; i < value_dim(); ++i)
        window.value(h, token)[i] = saturate_cast<BFloat16>(v[h * value_dim() + i]);
    }
  }

  void flush(Sequence& s, EncodeScratch& scratch) {
    for (Index begin = 0; begin < options_.flush; begin += scratch.block) {
      const Index count = std::min(scratch.block, options_.flush - begin);
      for (Index h = 0; h < kv_heads(); ++h) {
        std::transform(s.recent.key(h, s.recent_begin + begin),
                       s.recent.key(h, s.recent_begin + begin + count), scratch.k.data(),
                       [](BFloat16 x) { return static_cast<KeyScalar>(x); });
        std::transform(s.recent.value(h, s.recent_begin + begin),
                       s.recent.value(h, s.recent_begin + begin + count), scratch.v.data(),
                       [](BFloat16 x) { return static_cast<ValueScalar>(x); });
        quantize(s, s.quantized + begin, count, h, scratch);
      }
    }
    s.quantized += options_.flush;
    s.recent_begin += options_.flush;
  }

  /// Encodes the `count` transformed tokens of one head that are in `scratch` into their places from `token`
  /// on, where nobody looks until `quantized` says so.
  void quantize(Sequence& s, Index token, Index count, Index head, EncodeScratch& scratch) {
    const KeyCodec& key_codec = keys_[static_cast<std::size_t>(head)];
    const ValueCodec& value_codec = values_[static_cast<std::size_t>(head)];
    encode(key_codec, scratch.k.data(), count, scratch.key_codes.data(), scratch.key_params.data());
    encode(value_codec, scratch.v.data(), count, scratch.value_codes.data(), scratch.value_params.data());
    for (Index i = 0; i < count; ++i) {
      const Index at = token + i, slot = at % options_.page_tokens;
      std::byte* const page =
          pool_->page(s.pages[static_cast<std::size_t>(at / options_.page_tokens)]).data();
      put(key_codec, geometry_.keys(page, 0), page, head, slot, scratch.key_codes.data() + i * key_dim(),
          scratch.key_params.data() + i * key_codec.groups());
      put(value_codec, geometry_.values(page, 0), page, head, slot,
          scratch.value_codes.data() + i * value_dim(),
          scratch.value_params.data() + i * value_codec.groups());
    }
  }

  template <class Codec>
  static void encode(const Codec& codec, const typename Codec::Scalar* y, Index count,
                     typename Codec::Code* codes, typename Codec::Params* params) {
    const auto values = static_cast<std::size_t>(count * codec.head_dim()),
               groups = static_cast<std::size_t>(count * codec.groups());
    detail::encode_tokens(codec, {y, values}, count, {codes, values}, {params, groups});
  }

  template <class Codec>
  static void put(const Codec& codec, const PageSide& side, std::byte* page, Index head, Index slot,
                  const typename Codec::Code* codes, const typename Codec::Params* params) {
    const TokenShape shape = token_shape(codec);
    const Index row = slot / Layout::lanes, lane = slot % Layout::lanes;
    // The sides point into this page, which is writable; a view has them const.
    std::byte* const code_row =
        page + (side.codes - page) + head * side.code_head_stride + row * side.code_row_stride;
    std::byte* const param_row =
        page + (side.params - page) + head * side.param_head_stride + row * side.param_row_stride;
    Layout::template store_codes<typename Codec::Code>(code_row, shape, lane, codes);
    detail::store_params(param_row, shape, Layout::lanes, lane, reinterpret_cast<const std::byte*>(params));
  }

  /// Gives back the pages from number `from` on.
  void release_pages(Sequence& s, std::size_t from) {
    for (std::size_t p = from; p < s.pages.size(); ++p)
      if (s.pages[p] != no_page) pool_->release(s.pages[p]);
    if (from < s.pages.size()) s.pages.resize(from);
  }

  PagePool* pool_;
  std::vector<KeyCodec> keys_;
  std::vector<ValueCodec> values_;
  CacheOptions options_;
  PageGeometry geometry_;
  std::uint64_t identity_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::uint64_t generation_ = 0;
};

}  // namespace wushkv

#endif  // WUSHKV_CACHE_PAGED_CACHE_HPP
