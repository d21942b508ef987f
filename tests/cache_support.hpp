// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TESTS_CACHE_SUPPORT_HPP
#define WUSHKV_TESTS_CACHE_SUPPORT_HPP

#include <cmath>
#include <cstring>
#include <vector>

#include "support.hpp"
#include "wushkv/cache/paged_cache.hpp"
#include "wushkv/codec/codec.hpp"
#include "wushkv/quantize/affine.hpp"
#include "wushkv/quantize/quest.hpp"
#include "wushkv/transform/dense.hpp"

namespace test {

using KeyCodec = wushkv::Codec<wushkv::Dense<float>, wushkv::Quest<float, wushkv::Dynamic, Eigen::half>>;
using ValueCodec = wushkv::Codec<wushkv::Dense<float>, wushkv::Affine<float, wushkv::Dynamic, Eigen::half>>;

inline wushkv::Dense<float> any_dense(Random& random, Index dim) {
  return wushkv::Dense<float>(SquareMatrix<double>::Identity(dim, dim) +
                              random.matrix(dim) / (4 * std::sqrt(static_cast<double>(dim))));
}

inline std::vector<KeyCodec> any_key_codecs(Random& random, Index heads, Index dim, int bits = 3,
                                            Index group = 0) {
  std::vector<KeyCodec> codecs;
  for (Index h = 0; h < heads; ++h)
    codecs.emplace_back(any_dense(random, dim), wushkv::Quest<float, wushkv::Dynamic, Eigen::half>(bits),
                        group);
  return codecs;
}
inline std::vector<ValueCodec> any_value_codecs(Random& random, Index heads, Index dim, int bits = 2,
                                                Index group = 0) {
  std::vector<ValueCodec> codecs;
  for (Index h = 0; h < heads; ++h)
    codecs.emplace_back(any_dense(random, dim),
                        wushkv::Affine<float, wushkv::Dynamic, Eigen::half>::min_max(bits), group);
  return codecs;
}

/// What one side of a quantized token decodes to, transformed, read through the view as attention does.
template <class Layout, class Codec>
std::vector<float> read_quantized(const Codec& codec, const wushkv::PageSide& side,
                                  const wushkv::PagesView& pages, Index head, Index token) {
  const wushkv::TokenShape shape = wushkv::token_shape(codec);
  const auto page =
      static_cast<std::ptrdiff_t>(pages.block_table[static_cast<std::size_t>(token / pages.page_tokens)]);
  const Index slot = token % pages.page_tokens, row = slot / Layout::lanes, lane = slot % Layout::lanes;
  std::vector<typename Codec::Code> codes(static_cast<std::size_t>(shape.dim));
  std::vector<typename Codec::Params> params(static_cast<std::size_t>(codec.groups()));
  Layout::template load_codes<typename Codec::Code>(
      side.codes + page * side.code_page_stride + head * side.code_head_stride + row * side.code_row_stride,
      shape, lane, codes.data());
  wushkv::detail::load_params(side.params + page * side.param_page_stride + head * side.param_head_stride +
                                  row * side.param_row_stride,
                              shape, Layout::lanes, lane, reinterpret_cast<std::byte*>(params.data()));
  std::vector<float> y(static_cast<std::size_t>(shape.dim));
  codec.decode_transformed(codes, params, y);
  return y;
}

/// All tokens of one head and side, transformed, `[length, dim]`, as attention sees them.
template <bool Keys, class Cache, class Layout = wushkv::TokenMajor>
Batch<float> contents(const Cache& cache, wushkv::SequenceId id, Index head) {
  const wushkv::SequenceView view = cache.view(id);
  const Index dim = Keys ? cache.key_dim() : cache.value_dim();
  Batch<float> rows(view.length(), dim);
  Index at = 0;
  const auto window = [&](const wushkv::WindowView& w) {
    const Eigen::bfloat16* const data =
        Keys ? w.keys + head * w.key_head_stride : w.values + head * w.value_head_stride;
    for (Index t = 0; t < w.tokens; ++t, ++at)
      for (Index i = 0; i < dim; ++i) rows(at, i) = static_cast<float>(data[t * dim + i]);
  };
  window(view.sink);
  for (Index t = 0; t < view.pages.tokens; ++t, ++at) {
    if (t < view.pages.first) {
      rows.row(at).setZero();
      continue;
    }
    const auto h = static_cast<std::size_t>(head);
    std::vector<float> y;
    if constexpr (Keys)
      y = read_quantized<Layout>(cache.key_codecs()[h], view.pages.keys, view.pages, head, t);
    else
      y = read_quantized<Layout>(cache.value_codecs()[h], view.pages.values, view.pages, head, t);
    for (Index i = 0; i < dim; ++i) rows(at, i) = y[static_cast<std::size_t>(i)];
  }
  window(view.recent);
  return rows;
}

}  // namespace test

#endif  // WUSHKV_TESTS_CACHE_SUPPORT_HPP
