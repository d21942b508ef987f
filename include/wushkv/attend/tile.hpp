// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_ATTEND_TILE_HPP
#define WUSHKV_ATTEND_TILE_HPP

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "wushkv/cache/layout.hpp"
#include "wushkv/cache/view.hpp"
#include "wushkv/codec/codec.hpp"

namespace wushkv::detail {

/// The keys, or the values, of a sequence.
struct ViewSide {
  const Eigen::bfloat16* sink;
  std::ptrdiff_t sink_head_stride;
  const PageSide& pages;
  const Eigen::bfloat16* recent;
  std::ptrdiff_t recent_head_stride;
};

inline ViewSide key_side(const SequenceView& view) {
  return {view.sink.keys, view.sink.key_head_stride, view.pages.keys, view.recent.keys,
          view.recent.key_head_stride};
}
inline ViewSide value_side(const SequenceView& view) {
  return {view.sink.values, view.sink.value_head_stride, view.pages.values, view.recent.values,
          view.recent.value_head_stride};
}

/// Room for a tile of decoded tokens of one head, and for the codes and parameters of one token.
template <class Codec>
struct TileBuffer {
  std::vector<typename Codec::Scalar> values;  ///< `[tokens, head_dim]`, transformed
  std::vector<typename Codec::Code> codes;     ///< `[head_dim]`
  std::vector<typename Codec::Params> params;  ///< `[groups]`

  void resize(const Codec& codec, Index tokens) {
    values.resize(static_cast<std::size_t>(tokens * codec.head_dim()));
    codes.resize(static_cast<std::size_t>(codec.head_dim()));
    params.resize(static_cast<std::size_t>(codec.groups()));
  }
};

inline void check_window(const char* name, const WindowView& window, Index begin, Index end) {
  if (std::max<Index>(begin, 0) >= std::min(end, window.tokens)) return;
  if (window.keys == nullptr || window.values == nullptr)
    invalid_argument("Attention: view.", name, " has ", window.tokens,
                     " tokens and a null pointer, expected keys and values");
}

/// Tokens `[begin, end)` of the quantized part can be read: not given back, and each with a page.
inline void check_pages(const PagesView& pages, Index begin, Index end) {
  begin = std::max<Index>(begin, 0);
  end = std::min(end, pages.tokens);
  if (begin >= end) return;
  if (pages.page_tokens < 1)
    invalid_argument("Attention: view.pages.page_tokens is ", pages.page_tokens, ", expected at least 1");
  if (begin < pages.first)
    invalid_argument("Attention: quantized token ", begin, " is needed, and those before ", pages.first,
                     " were given back, expected a window that excludes them");
  if (pages.keys.codes == nullptr || pages.values.codes == nullptr)
    invalid_argument("Attention: view.pages has ", pages.tokens,
                     " tokens and a null pointer, expected codes of keys and values");
  const Index last = (end - 1) / pages.page_tokens, held = static_cast<Index>(pages.block_table.size());
  if (last >= held)
    invalid_argument("Attention: view.pages.block_table has ", held, " entries for ", pages.tokens,
                     " tokens, expected ", (pages.tokens - 1) / pages.page_tokens + 1);
  for (Index page = begin / pages.page_tokens; page <= last; ++page)
    if (pages.block_table[static_cast<std::size_t>(page)] == no_page)
      invalid_argument("Attention: view.pages.block_table has no page at ", page,
                       ", expected one: its tokens are needed");
}

/// Tokens `[begin, end)` of the sequence can be read. Throws `std::invalid_argument` otherwise.
inline void check_readable(const SequenceView& view, Index begin, Index end) {
  check_window("sink", view.sink, begin, end);
  check_pages(view.pages, begin - view.sink.tokens, end - view.sink.tokens);
  const Index recent = view.sink.tokens + view.pages.tokens;
  check_window("recent", view.recent, begin - recent, end - recent);
}

template <class Scalar>
void read_window_token(const Eigen::bfloat16* from, Index dim, Scalar* to) {
  for (Index i = 0; i < dim; ++i) to[i] = static_cast<Scalar>(static_cast<float>(from[i]));
}

template <class Layout, class Codec>
void read_page_token(const Codec& codec, const PageSide& side, PageId page, Index head, Index slot,
                     TileBuffer<Codec>& buffer, typename Codec::Scalar* to) {
  constexpr Index param_bytes = std::is_empty_v<typename Codec::Params> ? 0 : sizeof(typename Codec::Params);
  const TokenShape shape{codec.head_dim(), codec.bits(), codec.groups(), param_bytes};
  const Index row = slot / Layout::lanes, lane = slot % Layout::lanes;
  const auto at = static_cast<std::ptrdiff_t>(page);
  Layout::load_codes(
      side.codes + at * side.code_page_stride + head * side.code_head_stride + row * side.code_row_stride,
      shape, lane, buffer.codes.data());
  if constexpr (param_bytes > 0)
    load_params(side.params + at * side.param_page_stride + head * side.param_head_stride +
                    row * side.param_row_stride,
                shape, Layout::lanes, lane, reinterpret_cast<std::byte*>(buffer.params.data()));
  codec.decode_transformed(buffer.codes, buffer.params, {to, static_cast<std::size_t>(shape.dim)});
}

/// Decodes tokens `[begin, begin + count)` of head `head` to `buffer.values`, in the stored basis. They must
/// be readable.
template <class Layout, class Codec>
void read_tile(const Codec& codec, const SequenceView& view, const ViewSide& side, Index head, Index begin,
               Index count, TileBuffer<Codec>& buffer) {
  const Index dim = codec.head_dim(), sink = view.sink.tokens, recent = sink + view.pages.tokens;
  auto* to = buffer.values.data();
  for (Index token = begin; token < begin + count; ++token, to += dim) {
    if (token < sink) {
      read_window_token(side.sink + head * side.sink_head_stride + token * dim, dim, to);
    } else if (token >= recent) {
      read_window_token(side.recent + head * side.recent_head_stride + (token - recent) * dim, dim, to);
    } else {
      const Index at = token - sink;
      const PageId page = view.pages.block_table[static_cast<std::size_t>(at / view.pages.page_tokens)];
      read_page_token<Layout>(codec, side.pages, page, head, at % view.pages.page_tokens, buffer, to);
    }
  }
}

}  // namespace wushkv::detail

#endif  // WUSHKV_ATTEND_TILE_HPP
