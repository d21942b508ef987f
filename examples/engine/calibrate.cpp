// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>

#include "engine/evaluation.hpp"
#include "engine/progress.hpp"
#include "engine/session.hpp"
#include "engine/transform_source.hpp"
#include "engine/tuning.hpp"
#include "engine/verbs.hpp"
#include "wushkv/calibrate/build.hpp"
#include "wushkv/io/statistics.hpp"
#include "wushkv/io/transforms.hpp"
#include "wushkv/recipe/recipes.hpp"

namespace engine {
namespace {

void merge_into(std::vector<wushkv::LayerStatistics>& statistics,
                const std::vector<wushkv::LayerStatistics>& more, const std::string& name) {
  if (more.size() != statistics.size())
    throw std::invalid_argument("wushkv-lm calibrate: " + name + " has " + std::to_string(more.size()) +
                                " layers, expected the model's " + std::to_string(statistics.size()));
  for (std::size_t l = 0; l < statistics.size(); ++l) statistics[l].merge(more[l]);
}

}  // namespace

void calibrate(const std::vector<std::string>& words) {
  Arguments arguments(
      "calibrate",
      "Gathers the statistics that transforms are built from, in forward passes over a text or, without "
      "one,\n"
      "over samples of the model itself (temperature 1, min-p 0.02). Statistics of other runs can be added.",
      {"MODEL"},
      joined({{{"output", "FILE", "the statistics (or -o FILE)"},
               {"text", "FILE", "calibrate on this text"},
               {"self", "", "calibrate on the model's own samples, as without --text"},
               {"sequences", "N", "sequences", "8"},
               {"length", "N", "tokens of each", "1024"},
               {"seed", "N", "of the model's own samples", "0"},
               {"save-samples", "FILE", "write the model's own samples there, to read"},
               {"merge", "FILE", "add these statistics too; may be given more than once"}},
              common_options()}));
  if (!arguments.parse(words)) return;
  const std::string output = arguments.text("output");
  if (output.empty()) arguments.refuse("-o FILE is missing");
  if (arguments.given("text") && arguments.given("self"))
    arguments.refuse("--text and --self came, expected one of them");
  if (arguments.given("text") && arguments.given("save-samples"))
    arguments.refuse("--text and --save-samples came, expected samples only without a text");
  arguments.check_outputs({"output", "json", "save-samples"});
  const auto seed = static_cast<std::uint64_t>(arguments.integer("seed", 0, std::int64_t{1} << 40));
  const Index length = arguments.integer("length", 1, 1 << 30),
              sequences = arguments.integer("sequences", 1, 1 << 20);

  const double begin = seconds();
  Session session(arguments);
  Transformer transformer(session.model, length, session.threads);
  // Before the work: others' statistics may be of another model.
  std::vector<wushkv::LayerStatistics> statistics = empty_statistics(session.model);
  for (const std::string& other : arguments.texts("merge"))
    merge_into(statistics, wushkv::load_statistics(other), other);
  if (!statistics.front().attention())
    throw std::invalid_argument(
        "wushkv-lm calibrate: --merge came with statistics without attention-aware sums, expected those of a "
        "'calibrate' that gathers them");
  std::vector<std::vector<Token>> texts;
  if (arguments.given("text")) {
    texts = session.texts_of(arguments.text("text"), length, sequences);
  } else {
    Progress progress("sampling", static_cast<double>(length));
    texts = own_samples(transformer, session.first_token(), sequences, length, seed,
                        [&](Index) { progress.advance(); });
  }
  if (arguments.given("save-samples")) {
    std::string readable;
    for (const std::vector<Token>& sample : texts) readable += session.tokenizer.decode(sample, true) + "\n";
    write_text(arguments.text("save-samples"), readable);
  }

  Progress progress("calibrating", static_cast<double>(length * sequences));
  const auto step = [&](Index count) { progress.advance(static_cast<double>(count)); };
  merge_into(statistics, *gather_statistics(transformer, texts, step), "this run");
  progress.clear();
  wushkv::save_statistics(output, statistics);
  const auto megabytes = static_cast<double>(peak_memory()) / 1e6;
  std::printf("%lld tokens in %lld sequences, %zu layers, to %s in %.1f s; peak memory %.0f MB\n",
              static_cast<long long>(statistics.front().tokens()),
              static_cast<long long>(statistics.front().sequences()), statistics.size(), output.c_str(),
              seconds() - begin, megabytes);
  write_json(arguments.text("json"), Json::object()
                                         .set("tokens", statistics.front().tokens())
                                         .set("sequences", statistics.front().sequences())
                                         .set("layers", statistics.size())
                                         .set("peak_memory_mb", megabytes));
}

void build(const std::vector<std::string>& words) {
  Arguments arguments(
      "build", "Makes the transforms of all layers from statistics, for any quantizer and bit width.",
      {"STATS"},
      {{"output", "FILE", "the transforms (or -o FILE)"},
       {"recipe", "NAME", "best (joint, exponent 0.75) or paper (wush); --transform replaces both", "best"},
       {"transform", "NAME",
        "instead, with exponent 0.5: none, hadamard, random, pca, rotate-kv, oscar, oscar-per-head, wush, "
        "wush-a or joint"},
       {"exponent", "P", "of wush, wush-a and joint: 0.5 balances, 1 whitens the cache"},
       {"group", "N", "coordinates that share a scale, 0 for a whole head", "0"},
       {"damping", "X", "of the Hessian (and wush's Gram), relative to the mean of the diagonal", "0.01"},
       {"seed", "N", "of the random rotation", "0"},
       {"tune", "LIST",
        "quantizers to tune layer by layer on the statistics' sample, as percentile:2,quest:3"},
       {"threads", "N", "threads, 0 for one a core", "0"},
       {"json", "FILE", "write the results there as well"}});
  if (!arguments.parse(words)) return;
  const std::string output = arguments.text("output"), recipe = arguments.text("recipe");
  if (output.empty()) arguments.refuse("-o FILE is missing");
  if (recipe != "best" && recipe != "paper")
    arguments.refuse("--recipe is '" + recipe + "', expected best or paper");
  wushkv::BuildOptions options = recipe == "best" ? wushkv::BestRecipe<float>::build_options()
                                                  : wushkv::PaperRecipe<float>::build_options();
  if (arguments.given("transform")) {
    options = {};
    options.construction = wushkv::construction_from_string(arguments.text("transform"));
  }
  if (arguments.given("exponent")) options.exponent = arguments.number("exponent", 0, 1);
  options.key_group_size = options.value_group_size = arguments.integer("group", 0, 1 << 20);
  options.damping = arguments.number("damping", 0, 1e6);
  options.seed = static_cast<std::uint64_t>(arguments.integer("seed", 0, std::int64_t{1} << 62));
  arguments.check_outputs({"output", "json"});
  std::vector<CodecChoice> tuned;
  if (arguments.given("tune"))
    for (const std::string& name : arguments.list("tune")) {
      const std::size_t colon = std::min(name.find(':'), name.size());
      tuned.push_back(parse_codec("file+" + name.substr(0, colon) + "+tuned" + name.substr(colon)));
    }
  Threads threads(thread_count(arguments));

  const std::vector<wushkv::LayerStatistics> statistics = wushkv::load_statistics(arguments.positional(0));
  wushkv::ModelTransforms transforms;
  for (const wushkv::LayerStatistics& layer : statistics)
    transforms.layers.push_back(build_transforms(layer, options));
  for (const CodecChoice& choice : tuned)
    tune_layers(transforms.layers, statistics, choice, options.key_group_size, threads);
  transforms.metadata = transform_metadata(options);
  wushkv::save_transforms(output, transforms);
  std::printf("%s transforms of %zu layers to %s\n", std::string(to_string(options.construction)).c_str(),
              transforms.layers.size(), output.c_str());
  write_json(arguments.text("json"), Json::object()
                                         .set("transform", to_string(options.construction))
                                         .set("layers", transforms.layers.size()));
}

}  // namespace engine
