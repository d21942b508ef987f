// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CACHE_VIEW_HPP
#define WUSHKV_CACHE_VIEW_HPP

#include <cstddef>
#include <cstdint>
#include <span>

#include "wushkv/cache/page_pool.hpp"
#include "wushkv/core/types.hpp"

namespace wushkv {

/// The coordinates that vectors come in: as the model has them (keys and queries after RoPE), or transformed
/// already, as the cache stores them (`T k`, `T^-T q`, values from folded weights).
enum class Basis { Original, Transformed };

/// Where the keys, or the values, of quantized tokens lie: the codes of page p, head h and row r
/// (`PageLayout`) begin at `codes + p * code_page_stride + h * code_head_stride + r * code_row_stride`, their
/// parameters likewise. Strides are in bytes, so an engine's own pages fit: codes and scales in one buffer or
/// two, heads inside pages or outside.
struct PageSide {
  const std::byte* codes = nullptr;
  std::ptrdiff_t code_page_stride = 0, code_head_stride = 0, code_row_stride = 0;
  const std::byte* params = nullptr;
  std::ptrdiff_t param_page_stride = 0, param_head_stride = 0, param_row_stride = 0;
};

/// The quantized part of a sequence: token i of it is slot `i % page_tokens` of page `block_table[i /
/// page_tokens]`. Tokens before `first` have been given back (sliding window) and must not be read.
struct PagesView {
  PageSide keys, values;
  std::span<const PageId> block_table;
  Index page_tokens = 0;
  Index first = 0;
  Index tokens = 0;  ///< one past the last token, counted from the start of the quantized part
};

/// Tokens kept in BF16, transformed: head h of token i begins at `keys + h * key_head_stride + i * key_dim`,
/// values likewise. Strides are in elements.
struct WindowView {
  const Eigen::bfloat16* keys = nullptr;
  std::ptrdiff_t key_head_stride = 0;
  const Eigen::bfloat16* values = nullptr;
  std::ptrdiff_t value_head_stride = 0;
  Index tokens = 0;
};

/// A sequence as attention reads it: `[sink | quantized pages | recent]`, positions running through. Valid
/// until the sequence is next changed. `identity` tells the codecs it was written with
/// (`codec/identity.hpp`), so that it is not read with others.
struct SequenceView {
  WindowView sink;
  PagesView pages;
  WindowView recent;
  std::uint64_t identity = 0;

  Index length() const { return sink.tokens + pages.tokens + recent.tokens; }
};

}  // namespace wushkv

#endif  // WUSHKV_CACHE_VIEW_HPP
