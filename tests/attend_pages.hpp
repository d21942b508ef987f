// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TESTS_ATTEND_PAGES_HPP
#define WUSHKV_TESTS_ATTEND_PAGES_HPP

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "support.hpp"
#include "wushkv/attend/attend.hpp"
#include "wushkv/quantize/quantize.hpp"
#include "wushkv/transform/transform.hpp"

namespace test {

using namespace wushkv;

/// Where an engine keeps its tokens.
struct PageOptions {
  Index page_tokens = 16;
  Index sink = 0, recent = 0;  ///< at most so many tokens in BF16
  bool heads_outside = true;   ///< `[heads, pages, …]`, else `[pages, heads, …]`
  bool transformed = false;    ///< what comes is in the stored basis
};

/// A batch of one head through a codec's transform, in original coordinates and double. The matrices of the
/// transform are those it computes with.
template <class Codec>
Batch<double> brought_back(const Codec& codec, const Batch<double>& y) {
  using Scalar = typename Codec::Scalar;
  const Index dim = codec.head_dim();
  const Batch<Scalar> basis = Batch<Scalar>::Identity(dim, dim), zero = Batch<Scalar>::Zero(1, dim);
  const Batch<double> origin = codec.transform().inverse(zero).template cast<double>();
  const Batch<double> rows = codec.transform().inverse(basis).template cast<double>();
  return (y * (rows.rowwise() - origin.row(0))).rowwise() + origin.row(0);
}

/// Keys or values as an engine of its own would keep them: separate buffers for codes and parameters, odd
/// strides, a block table in no order, and rubbish wherever nothing was written.
template <class Codec, class Layout>
struct PageSideBuffer {
  using Scalar = typename Codec::Scalar;
  std::vector<std::byte> codes, params;
  std::vector<Eigen::bfloat16> sink, recent;
  PageSide side;
  Batch<double> decoded;   ///< `[tokens, heads * dim]`, in the stored basis
  Batch<double> original;  ///< the same brought back

  PageSideBuffer(const std::vector<Codec>& codecs, const Batch<Scalar>& x, const PageOptions& options,
                 Index sinks, Index recents, const std::vector<PageId>& table, Index pages) {
    const auto heads = static_cast<Index>(codecs.size());
    const Index dim = codecs.front().head_dim(), n = x.rows(), quantized = n - sinks - recents;
    const Index param_bytes = param_bits_v<std::remove_cvref_t<decltype(codecs.front().quantizer())>> / 8;
    const TokenShape shape{dim, codecs.front().bits(), codecs.front().groups(), param_bytes};
    const Index rows = (options.page_tokens + Layout::lanes - 1) / Layout::lanes;
    place(codes, Layout::code_row_bytes(shape), rows, heads, pages, options, side.code_page_stride,
          side.code_head_stride, side.code_row_stride);
    place(params, detail::param_row_bytes(shape, Layout::lanes), rows, heads, pages, options,
          side.param_page_stride, side.param_head_stride, side.param_row_stride);
    side.codes = codes.data();
    side.params = params.data();
    sink.resize(static_cast<std::size_t>(sinks * dim * heads));
    recent.resize(static_cast<std::size_t>(recents * dim * heads));
    decoded.resize(n, heads * dim);
    original.resize(n, heads * dim);
    for (Index h = 0; h < heads; ++h) {
      const Codec& codec = codecs[static_cast<std::size_t>(h)];
      const Batch<Scalar> given = x.middleCols(h * dim, dim);
      const Batch<Scalar> y = options.transformed ? given : codec.transform().forward(given);
      for (Index t = 0; t < n; ++t) {
        const bool early = t < sinks, late = t >= sinks + quantized;
        if (early || late) {
          auto& window = early ? sink : recent;
          Eigen::bfloat16* const to =
              window.data() + (h * (early ? sinks : recents) + (early ? t : t - sinks - quantized)) * dim;
          for (Index i = 0; i < dim; ++i) {
            to[i] = static_cast<Eigen::bfloat16>(static_cast<float>(y(t, i)));
            decoded(t, h * dim + i) = static_cast<double>(static_cast<float>(to[i]));
          }
          continue;
        }
        std::vector<typename Codec::Code> code(static_cast<std::size_t>(dim));
        std::vector<typename Codec::Params> param(static_cast<std::size_t>(codec.groups()));
        Vector<Scalar> token = y.row(t).transpose(), back(dim);
        const auto size = static_cast<std::size_t>(dim);
        codec.encode_transformed({token.data(), size}, code, param);
        codec.decode_transformed(code, param, {back.data(), size});
        decoded.row(t).segment(h * dim, dim) = back.transpose().template cast<double>();
        const Index at = t - sinks, slot = at % options.page_tokens, lane = slot % Layout::lanes;
        const auto page = static_cast<Index>(table[static_cast<std::size_t>(at / options.page_tokens)]);
        const Index row = slot / Layout::lanes;
        Layout::store_codes(codes.data() + page * side.code_page_stride + h * side.code_head_stride +
                                row * side.code_row_stride,
                            shape, lane, code.data());
        if (param_bytes > 0)
          detail::store_params(params.data() + page * side.param_page_stride + h * side.param_head_stride +
                                   row * side.param_row_stride,
                               shape, Layout::lanes, lane, reinterpret_cast<const std::byte*>(param.data()));
      }
      original.middleCols(h * dim, dim) = brought_back(codec, decoded.middleCols(h * dim, dim));
    }
  }

 private:
  static void place(std::vector<std::byte>& bytes, Index row_bytes, Index rows, Index heads, Index pages,
                    const PageOptions& options, std::ptrdiff_t& page, std::ptrdiff_t& head,
                    std::ptrdiff_t& row) {
    row = row_bytes + 3;
    page = options.heads_outside ? rows * row + 7 : heads * (rows * row + 5) + 7;
    head = options.heads_outside ? pages * page + 1 : rows * row + 5;
    bytes.assign(static_cast<std::size_t>(pages * page + heads * head), std::byte{0xff});
  }
};

template <class KeyCodec, class ValueCodec, class Layout = TokenMajor>
class Pages {
  using Scalar = typename KeyCodec::Scalar;

 public:
  /// `k` and `v` are `[tokens, heads * dim]`.
  Pages(const std::vector<KeyCodec>& key_codecs, const std::vector<ValueCodec>& value_codecs,
        const Batch<Scalar>& k, const Batch<Scalar>& v, const PageOptions& options = {})
      : options_(options),
        sink_(std::min(options.sink, k.rows())),
        recent_(std::min(options.recent, k.rows() - sink_)),
        tokens_(k.rows() - sink_ - recent_),
        table(shuffled((tokens_ + options.page_tokens - 1) / options.page_tokens)),
        keys(key_codecs, k, options, sink_, recent_, table, page_count()),
        values(value_codecs, v, options, sink_, recent_, table, page_count()),
        identity_(cache_identity<Layout>(key_codecs, value_codecs)),
        key_dim_(key_codecs.front().head_dim()),
        value_dim_(value_codecs.front().head_dim()) {}

  SequenceView view() const {
    SequenceView view;
    view.sink = window(keys.sink, values.sink, sink_);
    view.recent = window(keys.recent, values.recent, recent_);
    view.pages = {keys.side, values.side, table, options_.page_tokens, 0, tokens_};
    view.identity = identity_;
    return view;
  }

 private:
  PageOptions options_;
  Index sink_, recent_, tokens_;

 public:
  std::vector<PageId> table;
  PageSideBuffer<KeyCodec, Layout> keys;
  PageSideBuffer<ValueCodec, Layout> values;

 private:
  Index page_count() const { return static_cast<Index>(table.size()) + 3; }
  static std::vector<PageId> shuffled(Index needed) {
    std::vector<PageId> ids(static_cast<std::size_t>(needed + 3));
    std::iota(ids.begin(), ids.end(), PageId{0});
    std::mt19937 generator(7);
    std::shuffle(ids.begin(), ids.end(), generator);
    ids.resize(static_cast<std::size_t>(needed));
    return ids;
  }
  WindowView window(const std::vector<Eigen::bfloat16>& k, const std::vector<Eigen::bfloat16>& v,
                    Index tokens) const {
    return {k.data(), tokens * key_dim_, v.data(), tokens * value_dim_, tokens};
  }

  std::uint64_t identity_;
  Index key_dim_, value_dim_;
};

/// Attention in double by its definition, for whatever `sees(query, token)` says; `sinks` may be empty.
template <class Sees>
Batch<double> direct(const AttentionHeads& heads, const Batch<double>& q, const Batch<double>& k,
                     const Batch<double>& v, Sees sees, double cap = 0,
                     const std::vector<double>& sinks = {}) {
  const Index dk = heads.key_dim, dv = heads.value_dim;
  const double scale = 1 / std::sqrt(static_cast<double>(dk));
  Batch<double> out = Batch<double>::Zero(q.rows(), heads.query_heads * dv);
  for (Index i = 0; i < q.rows(); ++i)
    for (Index h = 0; h < heads.query_heads; ++h) {
      const Index kv = h / heads.queries_per_kv_head();
      double total = sinks.empty() ? 0 : std::exp(sinks[static_cast<std::size_t>(h)]);
      for (Index t = 0; t < k.rows(); ++t) {
        if (!sees(i, t)) continue;
        double z = scale * q.row(i).segment(h * dk, dk).dot(k.row(t).segment(kv * dk, dk));
        if (cap > 0) z = cap * std::tanh(z / cap);
        total += std::exp(z);
        out.row(i).segment(h * dv, dv) += std::exp(z) * v.row(t).segment(kv * dv, dv);
      }
      if (total > 0) out.row(i).segment(h * dv, dv) /= total;
    }
  return out;
}

inline Dense<float> well_conditioned(Random& random, Index dim) {
  const SquareMatrix<double> noise = random.matrix(dim) / std::sqrt(static_cast<double>(dim));
  return Dense<float>(SquareMatrix<double>::Identity(dim, dim) + 0.4 * noise);
}

}  // namespace test

#endif  // WUSHKV_TESTS_ATTEND_PAGES_HPP
