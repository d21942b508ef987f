// SPDX-License-Identifier: Apache-2.0
#include "engine/transform_source.hpp"

#include <algorithm>
#include <stdexcept>

#include "engine/evaluation.hpp"
#include "engine/tuning.hpp"
#include "wushkv/calibrate/build.hpp"
#include "wushkv/io/statistics.hpp"
#include "wushkv/io/transforms.hpp"

namespace engine {
namespace {

constexpr Index sample_tokens = 512;  // of each layer
constexpr int sign_trials = 8;

/// Throws `std::invalid_argument`, with the shapes, for statistics of another model.
void check_statistics(const std::vector<wushkv::LayerStatistics>& statistics,
                      const wushkv::AttentionHeads& heads, Index layers) {
  const wushkv::AttentionHeads& found = statistics.front().heads();
  if (static_cast<Index>(statistics.size()) != layers || found != heads)
    wushkv::detail::invalid_argument("statistics are of ", statistics.size(), " layers of ",
                                     found.query_heads, " query and ", found.kv_heads, " KV heads of ",
                                     found.key_dim, "/", found.value_dim, ", expected the model's ", layers,
                                     " of ", heads.query_heads, " query and ", heads.kv_heads,
                                     " KV heads of ", heads.key_dim, "/", heads.value_dim);
}

/// The transforms of all layers; empty for none without statistics.
std::vector<wushkv::LayerTransforms> build_all(const Statistics& statistics,
                                               const wushkv::AttentionHeads& heads, Index layers,
                                               const wushkv::BuildOptions& options) {
  std::vector<wushkv::LayerTransforms> transforms;
  // Statistics that are at hand tell any transform its sensitivity, and none too.
  if (!statistics) {
    if (options.construction == wushkv::Construction::None) return transforms;
    const wushkv::LayerTransforms each = build_transforms(wushkv::LayerStatistics(heads), options);
    transforms.assign(static_cast<std::size_t>(layers), each);
    return transforms;
  }
  for (const wushkv::LayerStatistics& layer : *statistics)
    transforms.push_back(build_transforms(layer, options));
  return transforms;
}

}  // namespace

Option statistics_option() {
  return {"stats", "FILE", "statistics of 'calibrate', for codecs built from data"};
}

std::vector<Option> transform_options() {
  return {{"transforms", "FILE", "transforms of 'build', for the codec 'file+…'"}, statistics_option()};
}

std::vector<Option> quantizer_options() {
  return {{"group", "N", "coordinates that share a scale, 0 for a whole head", "0"},
          {"params", "8|16|32", "bits that a scale or a zero point is kept in", "16"}};
}

std::vector<Option> window_options(const std::string& sink, const std::string& recent) {
  return {{"sink", "N", "first tokens of a sequence, kept in BF16", sink},
          {"recent", "N", "last tokens, kept in BF16", recent}};
}

TransformSource::TransformSource(const Model& model, const Arguments& arguments, Threads& threads)
    : model_(model), threads_(threads) {
  group_size_ = arguments.integer("group", 0, 1 << 20);
  sink_ = arguments.integer("sink", 0, 1 << 30);
  recent_ = arguments.integer("recent", 0, 1 << 30);
  const wushkv::AttentionHeads& heads = model.config.heads;
  if (group_size_ > 0 && (heads.key_dim % group_size_ != 0 || heads.value_dim % group_size_ != 0))
    arguments.refuse("--group is " + std::to_string(group_size_) +
                     ", expected a divisor of the head dimensions " + std::to_string(heads.key_dim) +
                     " and " + std::to_string(heads.value_dim));
  const std::string params = arguments.text("params");
  if (params != "8" && params != "16" && params != "32")
    arguments.refuse("--params is '" + params + "', expected 8, 16 or 32");
  param_bits_ = std::stoi(params);
  if (arguments.has("transforms") && arguments.given("transforms")) {
    file_ = wushkv::load_transforms(arguments.text("transforms")).layers;
    check_transforms(heads, model.config.layers, *file_);
  }
  if (arguments.given("stats")) {
    set_statistics(std::make_shared<const std::vector<wushkv::LayerStatistics>>(
        wushkv::load_statistics(arguments.text("stats"))));
    check_statistics(*statistics_, heads, model.config.layers);
  }
}

void TransformSource::check_use(const std::vector<CodecChoice>& choices) const {
  bool wants_file = false, quantizes = false;
  for (const CodecChoice& choice : choices) {
    // Roundings need sensitivities, which statistics or a file of 'build' have.
    const bool rounds = choice.rounding.feedback || choice.rounding.search;
    const bool from_data =
        choice.signs || choice.average_bits > 0 ||
        (!choice.from_file && (choice.tuned || rounds || needs_statistics(choice.construction)));
    if (choice.from_file && !file_)
      throw std::invalid_argument("wushkv-lm: codec " + choice.name + " needs --transforms FILE, of 'build'");
    if (from_data && !statistics_)
      throw std::invalid_argument("wushkv-lm: codec " + choice.name + " needs --stats FILE, of 'calibrate'");
    wants_file = wants_file || choice.from_file;
    quantizes = quantizes || choice.key_bits > 0;
  }
  if (file_ && !wants_file)
    throw std::invalid_argument("wushkv-lm: --transforms came, expected a codec 'file+…' that uses it");
  // The same command line may go through all codecs; but there has to be one.
  if (statistics_ && !quantizes)
    throw std::invalid_argument("wushkv-lm: --stats came, expected a codec, as wush+quest:2");
}

const TransformSource::Ready& TransformSource::of(const CodecChoice& choice) {
  // Most codecs share their transforms with others; what is settled for one codec is that codec's.
  std::string name = choice.name;
  if (!choice.signs && !choice.tuned && choice.average_bits == 0)
    name = choice.from_file ? "file" : std::string(to_string(choice.construction));
  if (choice.rounding.feedback && !choice.from_file) name += ", for feedback";
  const auto there = ready_.find(name);
  return there != ready_.end() ? there->second : ready_.emplace(name, make(choice)).first->second;
}

TransformSource::Ready TransformSource::make(const CodecChoice& choice) {
  Ready ready;
  if (choice.signs || choice.tuned || choice.average_bits > 0) {
    CodecChoice plain = choice;
    plain.signs = plain.tuned = false;
    plain.average_bits = 0;
    ready = of(plain);
    if (choice.signs)
      choose_all_signs(ready.transforms, *statistics_, choice, group_size_, sign_trials, threads_);
    if (choice.tuned && !choice.from_file)
      tune_layers(ready.transforms, *statistics_, choice, group_size_, threads_);
    if (choice.average_bits > 0) ready.layers = allot_bits(ready, choice);
    if (!choice.signs) return ready;  // with the plain one's weights
  } else if (choice.from_file) {
    ready.transforms = file_.value();
  } else {
    wushkv::BuildOptions options;
    options.construction = choice.construction;
    options.key_group_size = options.value_group_size = group_size_;
    if (choice.rounding.feedback) options.exponent = wushkv::feedback_exponent;
    ready.transforms = build_all(statistics_, model_.config.heads, model_.config.layers, options);
  }
  ready.folded = std::make_shared<const std::vector<FoldedWeights>>(fold(model_, ready.transforms));
  return ready;
}

/// Each side's squared error in the modules' outputs at each width, all layers with exact inputs, the other
/// side at 8 bits, which lose next to nothing.
std::vector<wushkv::LayerLosses> TransformSource::measured_losses(const Ready& plain,
                                                                  const CodecChoice& choice) {
  const wushkv::AttentionHeads& heads = model_.config.heads;
  std::vector<std::unique_ptr<KvCache>> caches;
  std::vector<Probe> probes;
  const std::vector<int> widths = widths_around(choice.average_bits);
  CacheSettings settings = this->settings(choice);
  settings.sink = settings.recent = 0;
  settings.capacity = static_cast<Index>(allotment_text_.size());
  for (const bool keys : {true, false})
    for (const int bits : widths) {
      settings.key_bits = keys ? bits : 8;
      settings.value_bits = keys ? 8 : bits;
      caches.push_back(make_cache(heads, model_.config.layers, plain.transforms, settings));
      probes.push_back({{caches.back().get(), plain.folded.get()}});
    }
  CacheSettings unquantized;
  unquantized.capacity = settings.capacity;
  const std::unique_ptr<KvCache> exact = make_cache(heads, model_.config.layers, {}, unquantized);
  module_errors(*transformer_, allotment_text_, *exact, probes, 0);
  std::vector<wushkv::LayerLosses> losses(plain.transforms.size(), {{{}, heads.kv_heads * heads.key_dim},
                                                                    {{}, heads.kv_heads * heads.value_dim}});
  for (std::size_t p = 0; p < probes.size(); ++p)
    for (std::size_t l = 0; l < losses.size(); ++l)
      (p < widths.size() ? losses[l].keys : losses[l].values).by_width.push_back(probes[p].errors[l].error);
  return losses;
}

std::vector<wushkv::LayerBits> TransformSource::allot_bits(const Ready& plain, const CodecChoice& choice) {
  const std::vector<wushkv::LayerLosses> losses =
      transformer_ != nullptr ? measured_losses(plain, choice)
                              : predicted_losses(plain.transforms, *statistics_, choice, group_size_);
  return allocate_bits(losses, choice.average_bits, widths_around(choice.average_bits)).layers;
}

CacheSettings TransformSource::settings(const CodecChoice& choice) const {
  CacheSettings settings;
  settings.quantizer = choice.quantizer;
  settings.key_bits = choice.key_bits;
  settings.value_bits = choice.value_bits;
  settings.param_bits = param_bits_;
  settings.rounding = choice.rounding;
  settings.tuned = choice.tuned;
  const bool quantized = choice.key_bits > 0;
  settings.group_size = quantized ? group_size_ : 0;
  // Windows are BF16: beside an unquantized cache they would be no gain, or a loss.
  settings.sink = quantized ? sink_ : 0;
  settings.recent = quantized ? recent_ : 0;
  return settings;
}

ReadyCache open_cache(const Model& model, TransformSource& source, const CodecChoice& choice,
                      const CacheSettings& settings) {
  const TransformSource::Ready& ready = source.of(choice);
  CacheSettings complete = settings;
  complete.layers = ready.layers;
  return {make_cache(model.config.heads, model.config.layers, ready.transforms, complete),
          ready.folded.get()};
}

void check_opens(const Model& model, TransformSource& source, const CodecChoice& choice) {
  CacheSettings settings = source.settings(choice);
  settings.capacity = 1;
  open_cache(model, source, choice, settings);
}

std::vector<wushkv::LayerStatistics> empty_statistics(const Model& model) {
  std::vector<wushkv::LayerStatistics> statistics(static_cast<std::size_t>(model.config.layers),
                                                  wushkv::LayerStatistics(model.config.heads));
  for (std::size_t l = 0; l < statistics.size(); ++l) {
    statistics[l].set_output_projection(model.layers[l].o.transpose());
    statistics[l].gather_attention();
    statistics[l].keep_sample(sample_tokens);
  }
  return statistics;
}

Statistics gather_statistics(Transformer& transformer, const std::vector<std::vector<Token>>& texts,
                             const std::function<void(Index tokens)>& progress) {
  const Model& model = transformer.model();
  std::vector<wushkv::LayerStatistics> statistics = empty_statistics(model);
  CacheSettings settings;
  for (const auto& text : texts)
    settings.capacity = std::max(settings.capacity, static_cast<Index>(text.size()));
  const std::unique_ptr<KvCache> cache = make_cache(model.config.heads, model.config.layers, {}, settings);
  struct Activations {
    Batch<float> q, k, v;
  };
  std::vector<Activations> layers(statistics.size());
  for (const std::vector<Token>& text : texts) {
    cache->truncate(0, 0);
    const KvCache::Part part{0, static_cast<Index>(text.size())};
    transformer.forward(
        text, {&part, 1}, {cache.get(), nullptr},
        [&](Index layer, const Batch<float>& q, const Batch<float>& k, const Batch<float>& v) {
          layers[static_cast<std::size_t>(layer)] = {q, k, v};
        });
    // A layer a thread: attention over a long text is most of the work.
    transformer.threads().for_each(static_cast<std::int64_t>(layers.size()), [&](std::int64_t layer, int) {
      const auto l = static_cast<std::size_t>(layer);
      statistics[l].add(layers[l].q, layers[l].k, layers[l].v);
    });
    if (progress) progress(part.tokens);
  }
  return std::make_shared<const std::vector<wushkv::LayerStatistics>>(std::move(statistics));
}

}  // namespace engine
