// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_CODEC_CACHE_HPP
#define WUSHKV_EXAMPLES_ENGINE_CODEC_CACHE_HPP

#include <algorithm>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/head_codec.hpp"
#include "engine/kv_cache.hpp"
#include "wushkv/attend/attend.hpp"
#include "wushkv/cache/paged_cache.hpp"

namespace engine {

/// The codecs of all KV heads of one layer.
template <class Codec>
struct LayerCodecs {
  std::vector<Codec> keys, values;
};

/// `KvCache` over one type of codec: a pool for all layers, and a cache and an attention for each.
template <class Quantizer>
class CodecCache final : public KvCache {
 public:
  using Codec = HeadCodec<Quantizer>;
  using Cache = wushkv::PagedCache<Codec, Codec>;
  using Attention = wushkv::Attention<Codec, Codec>;

  CodecCache(const wushkv::AttentionHeads& heads, std::vector<LayerCodecs<Codec>> codecs,
             const CacheSettings& settings)
      : heads_(heads), settings_(settings) {
    wushkv::CacheOptions options;
    options.sink = settings.sink;
    options.recent = settings.recent;
    options.flush = settings.recent > 0 ? 8 : 1;
    options.value_basis = wushkv::Basis::Transformed;
    wushkv::AttendOptions attend;
    attend.new_value_basis = attend.output_basis = wushkv::Basis::Transformed;
    // Layers whose pages are alike share a pool.
    std::map<std::size_t, Index> layers_of_size;
    for (const LayerCodecs<Codec>& layer : codecs)
      ++layers_of_size[Cache::page_bytes(layer.keys, layer.values, options)];
    const Index pages_a_sequence = (settings.capacity + options.page_tokens - 1) / options.page_tokens;
    const Index pages_a_layer = std::max<Index>(1, pages_a_sequence * settings.sequences);
    for (const auto& [bytes, count] : layers_of_size)
      pools_.emplace(
          bytes, std::make_unique<wushkv::PagePool>(bytes, static_cast<std::size_t>(pages_a_layer * count)));
    for (LayerCodecs<Codec>& layer : codecs) {
      wushkv::PagePool& pool = *pools_.at(Cache::page_bytes(layer.keys, layer.values, options));
      layers_.push_back(std::make_unique<Layer>(pool, heads, std::move(layer), options, attend));
    }
    for (auto& layer : layers_)
      for (Index s = 0; s < settings.sequences; ++s) layer->sequences.push_back(layer->cache.create());
  }

  Index length(Index sequence) const override {
    return layers_.front()->cache.length(id_of(*layers_.front(), sequence));
  }
  Index capacity() const override { return settings_.capacity; }
  void truncate(Index sequence, Index length) override {
    for (auto& layer : layers_) layer->cache.truncate(id_of(*layer, sequence), length);
  }

  void attend(Index layer, std::span<const Part> parts, const Batch<float>& q, const Batch<float>& k,
              const Batch<float>& v, Batch<float>& out, Threads& threads) override {
    Layer& l = *layers_.at(static_cast<std::size_t>(layer));
    workspaces_.resize(static_cast<std::size_t>(threads.count()));
    const bool exact = settings_.new_tokens == NewTokens::Exact;
    if (!exact) append(l, parts, k, v);
    const std::vector<Block> blocks = cut(l, parts, exact ? 2 * threads.count() : 0);
    threads.for_each(static_cast<std::int64_t>(blocks.size()), [&](std::int64_t i, int thread) {
      attend_block(l, blocks[static_cast<std::size_t>(i)], exact, q, k, v, out,
                   workspaces_[static_cast<std::size_t>(thread)]);
    });
    if (exact) append(l, parts, k, v);
  }

  CacheUsage usage() const override {
    CacheUsage usage;
    const std::size_t token_bf16 =
        static_cast<std::size_t>(2 * heads_.kv_heads * (heads_.key_dim + heads_.value_dim));
    for (const auto& layer : layers_)
      for (const wushkv::SequenceId id : layer->sequences) {
        const auto tokens = static_cast<std::size_t>(layer->cache.length(id));
        usage.tokens += tokens;
        usage.bf16_bytes += tokens * token_bf16;
        usage.window_bytes += (tokens - static_cast<std::size_t>(layer->cache.quantized(id))) * token_bf16;
      }
    usage.tokens /= layers_.size();
    for (const auto& [bytes, pool] : pools_) usage.page_bytes += pool->statistics().used_bytes;
    const auto key_dim = static_cast<double>(heads_.key_dim),
               value_dim = static_cast<double>(heads_.value_dim);
    for (const auto& layer : layers_)
      usage.bits_per_element += (layer->cache.key_codecs().front().bits_per_element() * key_dim +
                                 layer->cache.value_codecs().front().bits_per_element() * value_dim) /
                                (key_dim + value_dim) / static_cast<double>(layers_.size());
    return usage;
  }

 private:
  struct Layer {
    Layer(wushkv::PagePool& pool, const wushkv::AttentionHeads& heads, LayerCodecs<Codec> codecs,
          const wushkv::CacheOptions& options, const wushkv::AttendOptions& attend)
        : cache(pool, codecs.keys, codecs.values, options),
          attention(heads, std::move(codecs.keys), std::move(codecs.values), attend) {}
    Cache cache;
    Attention attention;
    std::vector<wushkv::SequenceId> sequences;
  };
  struct Workspace {
    typename Attention::Workspace attention;
    typename Attention::State state;
  };
  /// Some queries of a part: what one thread does at a time.
  struct Block {
    wushkv::SequenceView view;
    Index part_row, part_tokens;  ///< the part's first row, and its rows
    Index begin, end;             ///< of the part's queries
  };

  static wushkv::SequenceId id_of(const Layer& l, Index sequence) {
    const auto count = static_cast<Index>(l.sequences.size());
    if (sequence < 0 || sequence >= count)
      wushkv::detail::invalid_argument("sequence ", sequence, " asked for, expected 0 to ", count - 1);
    return l.sequences[static_cast<std::size_t>(sequence)];
  }

  void append(Layer& l, std::span<const Part> parts, const Batch<float>& k, const Batch<float>& v) {
    std::vector<wushkv::SequenceId> ids;
    std::vector<Index> counts;
    for (const Part& part : parts) {
      ids.push_back(id_of(l, part.sequence));
      counts.push_back(part.tokens);
    }
    l.cache.append(ids, counts, k, v);
  }

  /// Later queries see more: blocks of a part come with the last ones first, so that threads end together. A
  /// block of exact tokens transforms all new keys before it again, so there are at most `most` of those a
  /// part (0: any number).
  static std::vector<Block> cut(const Layer& l, std::span<const Part> parts, Index most) {
    std::vector<Block> blocks;
    Index row = 0;
    for (const Part& part : parts) {
      const wushkv::SequenceView view = l.cache.view(id_of(l, part.sequence));
      const Index block_queries = most > 0 ? std::max<Index>(128, (part.tokens + most - 1) / most) : 128;
      for (Index end = part.tokens; end > 0; end -= std::min(end, block_queries))
        blocks.push_back({view, row, part.tokens, std::max<Index>(0, end - block_queries), end});
      row += part.tokens;
    }
    return blocks;
  }

  static void attend_block(const Layer& l, const Block& block, bool exact, const Batch<float>& q,
                           const Batch<float>& k, const Batch<float>& v, Batch<float>& out,
                           Workspace& workspace) {
    const Index n = block.end - block.begin, row = block.part_row + block.begin;
    const Index cached = block.view.length(), first = exact ? cached : cached - block.part_tokens;
    const auto queries = q.middleRows(row, n);
    l.attention.reset(workspace.state, n);
    l.attention.accumulate(block.view, queries, first + block.begin, 0, cached, workspace.state,
                           workspace.attention);
    if (exact)
      l.attention.accumulate_new(queries, k.middleRows(block.part_row, block.end),
                                 v.middleRows(block.part_row, block.end), first, workspace.state,
                                 workspace.attention);
    l.attention.finish(workspace.state, out.middleRows(row, n), workspace.attention);
  }

  wushkv::AttentionHeads heads_;
  CacheSettings settings_;
  std::map<std::size_t, std::unique_ptr<wushkv::PagePool>> pools_;  // by their pages' bytes
  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<Workspace> workspaces_;
};

/// A cache of the quantizers that `quantizer_of` makes of `QuantizerSettings`.
template <class QuantizerOf>
std::unique_ptr<KvCache> make_codec_cache(const wushkv::AttentionHeads& heads, Index layers,
                                          const std::vector<wushkv::LayerTransforms>& transforms,
                                          const CacheSettings& settings, QuantizerOf quantizer_of) {
  using Quantizer = decltype(quantizer_of(QuantizerSettings()));
  using Codec = typename CodecCache<Quantizer>::Codec;
  const auto side_of = [&](const std::vector<wushkv::HeadTransform>* side, Index dim, int bits, bool is_key) {
    std::vector<Codec> codecs;
    for (Index h = 0; h < heads.kv_heads; ++h) {
      const wushkv::HeadTransform* const head =
          side != nullptr ? &(*side)[static_cast<std::size_t>(h)] : nullptr;
      QuantizerSettings of_head{settings.quantizer, bits, is_key, 0, settings.rounding};
      if (settings.tuned) of_head.parameter = tuned_parameter(head, of_head);
      codecs.push_back(head_codec(head, dim, quantizer_of(of_head), of_head, settings.group_size));
    }
    return codecs;
  };
  std::vector<LayerCodecs<Codec>> codecs;
  for (std::size_t l = 0; l < static_cast<std::size_t>(layers); ++l) {
    const wushkv::LayerBits bits = settings.layers.empty()
                                       ? wushkv::LayerBits{settings.key_bits, settings.value_bits}
                                       : settings.layers[l];
    const wushkv::LayerTransforms* const layer = transforms.empty() ? nullptr : &transforms[l];
    codecs.push_back(
        {side_of(layer != nullptr ? &layer->keys : nullptr, heads.key_dim, bits.keys, true),
         side_of(layer != nullptr ? &layer->values : nullptr, heads.value_dim, bits.values, false)});
  }
  return std::make_unique<CodecCache<Quantizer>>(heads, std::move(codecs), settings);
}

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_CODEC_CACHE_HPP
