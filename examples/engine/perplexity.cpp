// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "engine/evaluation.hpp"
#include "engine/progress.hpp"
#include "engine/session.hpp"
#include "engine/transform_source.hpp"
#include "engine/verbs.hpp"

namespace engine {
namespace {

/// `--codec`, or the one that `--transforms`, `--quantizer` and the bits describe.
CodecChoice chosen_codec(const Arguments& arguments) {
  const bool transformed = arguments.given("transforms"), described = arguments.given("quantizer");
  for (const char* name : {"bits-k", "bits-v", "quantizer"})
    if (arguments.given("codec") && arguments.given(name))
      arguments.refuse("--codec and --" + std::string(name) + " came, expected one of them");
  if (arguments.given("codec")) return parse_codec(arguments.text("codec"));
  for (const char* name : {"bits-k", "bits-v"})
    if (arguments.given(name) && !described && !transformed)
      arguments.refuse("--" + std::string(name) + " came, expected --quantizer or --transforms with it");
  if (!transformed && !described) return parse_codec("float");
  const std::string quantizer = arguments.text("quantizer");
  const QuantizerKind kind = quantizer_from_string(quantizer);
  if (kind == QuantizerKind::Float || kind == QuantizerKind::BFloat16)
    return parse_codec(transformed ? "file+" + quantizer : quantizer);
  return parse_codec((transformed ? "file+" : "none+") + quantizer + ":" +
                     std::to_string(arguments.integer("bits-k", 1, 8)) + "/" +
                     std::to_string(arguments.integer("bits-v", 1, 8)));
}

}  // namespace

void perplexity(const std::vector<std::string>& words) {
  Arguments arguments(
      "perplexity",
      "Measures how well a model predicts a text when its keys and values come from a cache. New tokens are "
      "seen\n"
      "as the cache has them, so that all that is quantized counts. Without a codec: unquantized.",
      {"MODEL"},
      joined({{{"text", "FILE", "the text; without, one that comes with the program"},
               {"quantizer", "NAME", "quest, percentile, minmax, lloyd, compact, bf16 or float", "quest"},
               {"bits-k", "B", "of keys, 1 to 8", "2"},
               {"bits-v", "B", "of values, 1 to 8", "2"},
               {"codec", "NAME",
                "instead of quantizer and bits: float, bf16, or as wush+quest:2 (with --stats)"},
               {"context", "N", "tokens of a chunk", "1024"},
               {"chunks", "N", "chunks of the text, 0 for all", "2"},
               {"batch", "N", "tokens a step; 0: a chunk, 32 with a recent window, 512 with --exact-prefill",
                "0"},
               {"exact-prefill", "", "new tokens see each other's exact keys and values, as engines do"},
               {"allot-on", "FILE", "a text of calibration, to measure what bits by layer are shared out by"},
               {"errors", "", "also measure the attention modules' errors"}},
              transform_options(),
              quantizer_options(),
              window_options("0", "0"),
              common_options()}));
  if (!arguments.parse(words)) return;
  const CodecChoice choice = chosen_codec(arguments);
  const Index context = arguments.integer("context", 3, 1 << 30),
              chunks = arguments.integer("chunks", 0, 1 << 30);
  Index batch = arguments.integer("batch", 0, 1 << 30);
  if (arguments.given("allot-on") && choice.average_bits == 0)
    arguments.refuse("--allot-on came, expected a codec with a fraction of bits, as best:2.25");
  arguments.check_outputs({"json"});

  Session session(arguments);
  Transformer transformer(session.model, context, session.threads);
  const std::vector<std::vector<Token>> texts = session.texts_of(arguments.text("text"), context, chunks);
  TransformSource source(session.model, arguments, session.threads);
  source.check_use({choice});
  if (arguments.given("allot-on"))
    source.set_allotment_text(transformer, session.texts_of(arguments.text("allot-on"), context, 1).front());
  CacheSettings settings = source.settings(choice);
  settings.capacity = context;
  settings.new_tokens = arguments.given("exact-prefill") ? NewTokens::Exact : NewTokens::Cached;
  // Tokens of a step that leave the window are quantized before the step's queries see them: small steps keep
  // that to a few. Exact tokens are only those of the same step: the steps of an engine.
  if (batch == 0 && settings.new_tokens == NewTokens::Exact) batch = 512;
  if (batch == 0 && settings.recent > 0) batch = 32;
  const ReadyCache cache = open_cache(session.model, source, choice, settings);

  const bool errors = arguments.given("errors");
  Progress progress("perplexity",
                    static_cast<double>(context) * static_cast<double>(texts.size()) * (errors ? 2 : 1));
  const auto step = [&](Index count) { progress.advance(static_cast<double>(count)); };
  Likelihood sum;
  for (const std::vector<Token>& text : texts)
    sum += likelihood(transformer, text, cache.path(), batch, step);
  const double time = progress.elapsed();
  const CacheUsage usage = cache.cache->usage();
  std::vector<Probe> probes{{cache.path()}};
  if (errors) {
    CacheSettings unquantized;
    unquantized.capacity = context;
    const std::unique_ptr<KvCache> exact =
        make_cache(session.model.config.heads, session.model.config.layers, {}, unquantized);
    for (const std::vector<Token>& text : texts) {
      module_errors(transformer, text, *exact, probes, batch);
      step(context);
    }
  }
  progress.clear();

  std::printf("%s: perplexity %.4f over %lld predictions, %.4f over the second half of each chunk\n",
              choice.name.c_str(), sum.perplexity(), static_cast<long long>(sum.predictions),
              sum.late_perplexity());
  std::printf(
      "cache of %zu tokens: %zu bytes, %zu of them BF16 windows; %.4f of BF16's %zu; %.3f bits an element "
      "where quantized\n",
      usage.tokens, usage.bytes(), usage.window_bytes,
      static_cast<double>(usage.bytes()) / static_cast<double>(usage.bf16_bytes), usage.bf16_bytes,
      usage.bits_per_element);
  Json json = Json::object();
  json.set("codec", choice.name)
      .set("perplexity", sum.perplexity())
      .set("second_half_perplexity", sum.late_perplexity())
      .set("predictions", sum.predictions)
      .set("cache_tokens", usage.tokens)
      .set("cache_bytes", usage.bytes())
      .set("bf16_bytes", usage.bf16_bytes)
      .set("bits_per_element", usage.bits_per_element)
      .set("seconds", time)
      .set("peak_memory_mb", static_cast<double>(peak_memory()) / 1e6);
  if (errors) {
    const std::vector<double> layers = relative_errors(probes.front());
    const double mean = wushkv::geometric_mean(layers);
    std::printf("module errors:");
    for (const double error : layers) std::printf(" %.4f", error);
    std::printf("\ngeometric mean %.4f\n", mean);
    json.set("errors", Json::array_of(layers)).set("geometric_mean", mean);
  }
  std::printf("%.1f s; peak memory %.0f MB\n", time, static_cast<double>(peak_memory()) / 1e6);
  write_json(arguments.text("json"), json);
}

}  // namespace engine
