// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_KV_CACHE_HPP
#define WUSHKV_EXAMPLES_ENGINE_KV_CACHE_HPP

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/threads.hpp"
#include "wushkv/calibrate/allocate.hpp"
#include "wushkv/calibrate/layer_transforms.hpp"
#include "wushkv/core/heads.hpp"
#include "wushkv/core/types.hpp"

namespace engine {

using wushkv::Batch;
using wushkv::Index;

/// How new tokens see each other, and themselves.
enum class NewTokens {
  Exact,  ///< by their exact keys and values, as engines do: the cache is for those after them
  Cached  ///< as the cache has them: what quality is measured by
};

enum class QuantizerKind { Float, BFloat16, Quest, Percentile, MinMax, LloydMax, Compact };

/// The quantizer of that name (`float`, `bf16`, `quest`, `percentile`, `minmax`, `lloyd`, `compact`). Throws
/// `std::invalid_argument`, with the names there are, for another.
QuantizerKind quantizer_from_string(const std::string& name);

/// How a transformed token is rounded: with its errors fed back, with several steps tried.
struct RoundingChoice {
  bool feedback = false, search = false;
};

/// What a quantizer is made with.
struct QuantizerSettings {
  QuantizerKind kind = QuantizerKind::Float;
  int bits = 0;
  bool is_key = true;
  /// A clip ratio or a factor of the step, whatever the quantizer has; 0 for its usual one.
  double parameter = 0;
  RoundingChoice rounding{};
};

/// The name under which transforms keep what a quantizer was tuned to, as `quest:2` or `quest+feedback:2`.
std::string tuned_name(const QuantizerSettings& settings);

/// How a model's cache is made.
struct CacheSettings {
  QuantizerKind quantizer = QuantizerKind::Float;
  int key_bits = 2, value_bits = 2;  ///< of the quantizers that have a choice
  Index group_size = 0;              ///< coordinates that share a scale; 0 for the whole head
  int param_bits = 16;               ///< of a scale or zero: 8 (a scale alone), 16 or 32
  RoundingChoice rounding{};
  bool tuned = false;  ///< take the parameters that the transforms were tuned to
  std::vector<wushkv::LayerBits>
      layers{};                ///< one a layer, or none for `key_bits` and `value_bits` throughout
  Index sink = 0, recent = 0;  ///< tokens kept in BF16; with none, every token is quantized at once
  NewTokens new_tokens = NewTokens::Cached;
  Index sequences = 1;
  Index capacity = 0;  ///< tokens a sequence can have
};

struct CacheUsage {
  std::size_t tokens = 0;
  std::size_t page_bytes = 0;    ///< in use
  std::size_t window_bytes = 0;  ///< of the BF16 tokens in the windows
  std::size_t bf16_bytes = 0;    ///< what all tokens would take in BF16
  double bits_per_element = 0;   ///< of a quantized token, parameters included

  std::size_t bytes() const { return page_bytes + window_bytes; }
};

/// The caches and attentions of all layers of a model, behind one type whatever they are made of: an engine
/// that has one kind of codec needs no such class.
class KvCache {
 public:
  /// Some of the new tokens: `tokens` rows of the next call, of that sequence.
  struct Part {
    Index sequence = 0;
    Index tokens = 0;
  };

  virtual ~KvCache() = default;
  /// Tokens of a sequence, 0 to `sequences - 1`.
  virtual Index length(Index sequence) const = 0;
  virtual Index capacity() const = 0;
  /// Cuts a sequence back.
  virtual void truncate(Index sequence, Index length) = 0;
  /// One layer's share of a step: appends new tokens and attends with their queries. `q` and `k` come after
  /// RoPE and untransformed; `v` from a folded projection, and `out` goes into a folded one. `[tokens, heads
  /// * dim]`, the parts' rows one after the other.
  virtual void attend(Index layer, std::span<const Part> parts, const Batch<float>& q, const Batch<float>& k,
                      const Batch<float>& v, Batch<float>& out, Threads& threads) = 0;
  virtual CacheUsage usage() const = 0;
};

/// A cache under the transforms of a model, one entry a layer; empty for none. Throws `std::invalid_argument`
/// for transforms that do not fit the heads, and settings out of range.
std::unique_ptr<KvCache> make_cache(const wushkv::AttentionHeads& heads, Index layers,
                                    const std::vector<wushkv::LayerTransforms>& transforms,
                                    const CacheSettings& settings);

/// Throws `std::invalid_argument`, with the shapes, for transforms of another model.
void check_transforms(const wushkv::AttentionHeads& heads, Index layers,
                      const std::vector<wushkv::LayerTransforms>& transforms);

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_KV_CACHE_HPP
