// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_TRANSFORMER_HPP
#define WUSHKV_EXAMPLES_ENGINE_TRANSFORMER_HPP

#include <functional>
#include <span>
#include <vector>

#include "engine/kv_cache.hpp"
#include "engine/model.hpp"
#include "engine/threads.hpp"
#include "wushkv/measure/relative_error.hpp"

namespace engine {

/// The projections of a layer that value transforms fold into, `[outputs, inputs]`, and what centered ones
/// add to their outputs; no biases where every mean is zero.
struct FoldedWeights {
  Batch<float> v, o;
  Eigen::RowVectorXf v_bias{}, o_bias{};
};

/// `T_V W_V` and `T_V^-T W_O` of every layer, with the biases `-T_V mu` and `W_Oᵀ mu`; empty, for the model's
/// own weights, if there are no transforms. Throws `std::invalid_argument`, with the shapes, for transforms
/// of another model.
std::vector<FoldedWeights> fold(const Model& model, const std::vector<wushkv::LayerTransforms>& transforms);

/// A cache, and the weights that go with its value transforms: empty for the model's own.
struct CachePath {
  KvCache* cache = nullptr;
  const std::vector<FoldedWeights>* folded = nullptr;
};

/// What attention loses by a cache: filled layer by layer, all layers with exact inputs.
struct Probe {
  CachePath path;
  std::vector<wushkv::SquaredError> errors{};  ///< of the module's output, one a layer; summed up over calls
};

/// Runs a model over new tokens. Its buffers are as large as its largest call.
class Transformer {
 public:
  /// Keeps references: model and threads must outlive it. `context` tokens at most are in a sequence: RoPE's
  /// table. Throws `std::invalid_argument` for a context longer than the model's.
  Transformer(const Model& model, Index context, Threads& threads);

  using Parts = std::span<const KvCache::Part>;
  /// Sees a layer's queries and keys, after RoPE, and values, as the path's weights make them (unfolded
  /// without transforms): `[tokens, heads * dim]`.
  using Observer =
      std::function<void(Index layer, const Batch<float>& q, const Batch<float>& k, const Batch<float>& v)>;

  /// The new tokens' hidden states after the last norm, `[tokens, width]`; valid until the next call. The
  /// tokens of the parts come one after the other. Throws `std::invalid_argument` for tokens that are not in
  /// the vocabulary and sequences that would outgrow cache or context; nothing has changed then.
  const Batch<float>& forward(std::span<const Token> tokens, Parts parts, const CachePath& path,
                              const Observer& observer = {}, std::span<Probe> probes = {});

  /// The logits of some of the hidden states, `[rows, vocabulary]`. Throws `std::runtime_error` if they are
  /// not finite.
  Batch<float> logits(const Eigen::Ref<const Batch<float>>& hidden) const;

  const Model& model() const { return model_; }
  Index context() const { return rope_.max_position(); }
  Threads& threads() const { return threads_; }

 private:
  void check(std::span<const Token> tokens, Parts parts, const CachePath& path) const;
  void multiply(const Batch<float>& x, const Batch<float>& weight, Batch<float>& y) const;
  void attention(Index layer, Parts parts, const CachePath& path, const Observer& observer,
                 std::span<Probe> probes);
  void feed_forward(const LayerWeights& w);

  const Model& model_;
  Threads& threads_;
  wushkv::Rope<float> rope_;
  std::vector<Index> positions_;
  Batch<float> x_, normed_, q_, k_, v_, folded_v_, attended_, y_, probe_y_, gate_, up_;
};

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_TRANSFORMER_HPP
