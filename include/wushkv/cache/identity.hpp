// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CACHE_IDENTITY_HPP
#define WUSHKV_CACHE_IDENTITY_HPP

#include <cstdint>
#include <ranges>

#include "wushkv/cache/layout.hpp"
#include "wushkv/codec/identity.hpp"

namespace wushkv {

/// The number that goes into `SequenceView::identity`: two caches share it only if one reads what the other
/// wrote, in windows and in pages. It covers the page layout and every head's `codec_identity`; `keys` and
/// `values` are ranges with one codec a KV head. How many tokens a page holds and where pages lie is not part
/// of it: the view tells.
template <PageLayout Layout, std::ranges::sized_range Keys, std::ranges::sized_range Values>
std::uint64_t cache_identity(const Keys& keys, const Values& values) {
  Fingerprint fingerprint;
  fingerprint.add("wushkv cache 1");
  fingerprint.add(std::string_view(Layout::name));
  fingerprint.add(static_cast<std::uint64_t>(Layout::lanes));
  fingerprint.add(static_cast<std::uint64_t>(std::ranges::size(keys)));
  for (const auto& codec : keys) fingerprint.add(codec_identity(codec));
  fingerprint.add(static_cast<std::uint64_t>(std::ranges::size(values)));
  for (const auto& codec : values) fingerprint.add(codec_identity(codec));
  return fingerprint.value();
}

}  // namespace wushkv

#endif  // WUSHKV_CACHE_IDENTITY_HPP
