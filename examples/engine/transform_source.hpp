// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_TRANSFORM_SOURCE_HPP
#define WUSHKV_EXAMPLES_ENGINE_TRANSFORM_SOURCE_HPP

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/arguments.hpp"
#include "engine/codec_choice.hpp"
#include "engine/transformer.hpp"

namespace wushkv {
class LayerStatistics;
}

namespace engine {

/// Of all layers of a model; null for none. Declared only: what hands them on need not
/// compile their sums.
using Statistics = std::shared_ptr<const std::vector<wushkv::LayerStatistics>>;

/// `--stats`.
Option statistics_option();
/// Where transforms come from: `--transforms`, `--stats`.
std::vector<Option> transform_options();
/// How they are kept: `--group`, `--params`.
std::vector<Option> quantizer_options();
/// How a cache keeps its tokens: `--sink` and `--recent`, with these defaults.
std::vector<Option> window_options(const std::string& sink, const std::string& recent);

/// Transforms by codec, each built and folded once.
class TransformSource {
 public:
  struct Ready {
    std::vector<wushkv::LayerTransforms> transforms;
    std::shared_ptr<const std::vector<FoldedWeights>> folded;
    std::vector<wushkv::LayerBits> layers;  ///< where they differ
  };

  /// Reads what `transform_options` name. `arguments` have `quantizer_options` and `window_options`, too.
  /// Throws for files that are of another model.
  TransformSource(const Model& model, const Arguments& arguments, Threads& threads);
  /// Statistics that were gathered in this run.
  void set_statistics(Statistics statistics) { statistics_ = std::move(statistics); }
  /// A text, of calibration, on which what keys and values lose at each width is measured where layers share
  /// out bits; without one it is predicted. Keeps a reference.
  void set_allotment_text(Transformer& transformer, std::vector<Token> text) {
    transformer_ = &transformer;
    allotment_text_ = std::move(text);
  }
  bool has_statistics() const { return statistics_ != nullptr; }
  /// Throws `std::invalid_argument` for codecs that lack a file, for transforms that none of them uses, and
  /// for statistics where nothing is quantized.
  void check_use(const std::vector<CodecChoice>& choices) const;

  /// What the codec needs must be there (`check_use`).
  const Ready& of(const CodecChoice& choice);
  /// Everything of the cache that the choice, `quantizer_options` and `window_options` settle.
  CacheSettings settings(const CodecChoice& choice) const;

 private:
  Ready make(const CodecChoice& choice);
  std::vector<wushkv::LayerBits> allot_bits(const Ready& plain, const CodecChoice& choice);
  std::vector<wushkv::LayerLosses> measured_losses(const Ready& plain, const CodecChoice& choice);

  const Model& model_;
  Threads& threads_;
  Index group_size_ = 0, sink_ = 0, recent_ = 0;
  int param_bits_ = 16;
  std::optional<std::vector<wushkv::LayerTransforms>> file_;
  Statistics statistics_;
  std::map<std::string, Ready> ready_;
  Transformer* transformer_ = nullptr;
  std::vector<Token> allotment_text_;
};

/// A cache with the weights that go with it.
struct ReadyCache {
  std::unique_ptr<KvCache> cache;
  const std::vector<FoldedWeights>* folded = nullptr;
  CachePath path() const { return {cache.get(), folded}; }
};
ReadyCache open_cache(const Model& model, TransformSource& source, const CodecChoice& choice,
                      const CacheSettings& settings);
/// Throws what `open_cache` would, before the work on what comes first.
void check_opens(const Model& model, TransformSource& source, const CodecChoice& choice);

/// Statistics of no tokens, with the model's output projections, that gather attention and keep a sample.
std::vector<wushkv::LayerStatistics> empty_statistics(const Model& model);

/// Statistics of texts, `[tokens]` each, from forward passes.
Statistics gather_statistics(Transformer& transformer, const std::vector<std::vector<Token>>& texts,
                             const std::function<void(Index tokens)>& progress);

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_TRANSFORM_SOURCE_HPP
