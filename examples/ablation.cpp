// SPDX-License-Identifier: Apache-2.0
//
// The paper's ablation on real activations: transform x quantizer x bits, and what an attention module's
// output loses when every key and value of the evaluation text has been through the cache (no BF16 windows).
//
//   ablation [--activations FILE] [--bits 4,3,2] [--json FILE]
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "activations.hpp"
#include "wushkv/calibrate/build.hpp"
#include "wushkv/measure/measure.hpp"
#include "wushkv/quantize/quantize.hpp"
#include "wushkv/recipe/recipes.hpp"
#include "wushkv/recipe/tune.hpp"

using namespace wushkv;
using examples::Layer;

namespace {

enum class QuantizerKind { Quest, LloydMax, MinMax, Percentile };
enum class RoundingKind { Nearest, Search, Feedback, FeedbackSearch, BestOfSearch };

struct Variant {
  std::string name;
  Construction construction;
  QuantizerKind quantizer;
  RoundingKind rounding = RoundingKind::Nearest;
  bool tuned = false;      // the quantizer's clip ratio or step, layer by layer, on the calibration tokens
  bool predicted = false;  // each head's exponent
  int signs = 0;           // choices of eigenvectors' signs to try
  int seeds = 1;           // of the construction, to average over

  bool feeds_back() const { return rounding != RoundingKind::Nearest && rounding != RoundingKind::Search; }
};

const std::vector<Variant> variants = {
    {"none+minmax", Construction::None, QuantizerKind::MinMax},
    {"hadamard+quest", Construction::Hadamard, QuantizerKind::Quest},
    {"oscar+quest", Construction::Oscar, QuantizerKind::Quest},
    {"wush+quest", Construction::Wush, QuantizerKind::Quest},
    {"wush-a+quest", Construction::WushA, QuantizerKind::Quest},
    {.name = "random+lloyd (TurboQuant-style)",
     .construction = Construction::Random,
     .quantizer = QuantizerKind::LloydMax,
     .seeds = 8},
    {"hadamard+percentile", Construction::Hadamard, QuantizerKind::Percentile},
    {"oscar+percentile", Construction::Oscar, QuantizerKind::Percentile},
    {"wush+percentile", Construction::Wush, QuantizerKind::Percentile},
    {"wush-a+percentile", Construction::WushA, QuantizerKind::Percentile},
    {"hadamard+percentile tuned", Construction::Hadamard, QuantizerKind::Percentile, RoundingKind::Nearest,
     true},
    {"oscar+percentile tuned", Construction::Oscar, QuantizerKind::Percentile, RoundingKind::Nearest, true},
    {"wush+percentile tuned", Construction::Wush, QuantizerKind::Percentile, RoundingKind::Nearest, true},
    {"oscar+quest tuned", Construction::Oscar, QuantizerKind::Quest, RoundingKind::Nearest, true},
    {"wush+quest tuned", Construction::Wush, QuantizerKind::Quest, RoundingKind::Nearest, true},
    {"joint+quest", Construction::Joint, QuantizerKind::Quest},
    {"joint+affine search", Construction::Joint, QuantizerKind::MinMax, RoundingKind::Search},
    {"wush+quest feedback", Construction::Wush, QuantizerKind::Quest, RoundingKind::Feedback},
    {"joint+quest feedback", Construction::Joint, QuantizerKind::Quest, RoundingKind::Feedback},
    {"joint+quest feedback search", Construction::Joint, QuantizerKind::Quest, RoundingKind::FeedbackSearch},
    {"joint+affine feedback search", Construction::Joint, QuantizerKind::MinMax,
     RoundingKind::FeedbackSearch},
    {.name = "joint+affine feedback or nearest, search",
     .construction = Construction::Joint,
     .quantizer = QuantizerKind::MinMax,
     .rounding = RoundingKind::BestOfSearch},
    {.name = "joint+affine feedback search, predicted exponent",
     .construction = Construction::Joint,
     .quantizer = QuantizerKind::MinMax,
     .rounding = RoundingKind::FeedbackSearch,
     .predicted = true},
    {.name = "joint+affine feedback search, signs",
     .construction = Construction::Joint,
     .quantizer = QuantizerKind::MinMax,
     .rounding = RoundingKind::FeedbackSearch,
     .signs = 8},
};

// The heads of one side, keys or values, and the codec of each: a quantizer, made from the tuned parameter,
// under the variant's rounding.
class Side {
 public:
  Side(const Variant& variant, std::vector<HeadTransform> heads, std::vector<TuningTokens> tokens, bool keys,
       int bits)
      : variant_(variant), heads_(std::move(heads)), tokens_(std::move(tokens)), bits_(bits) {
    parameter_ = variant.quantizer == QuantizerKind::Percentile
                     ? (keys ? oscar_key_percentile : oscar_value_percentile)
                 : variant.rounding == RoundingKind::Feedback ? feedback_widening
                                                              : 1;
    if (variant.tuned)
      with_quantizer([&](auto quantizer_of) {
        const std::span<const double> candidates = variant.quantizer == QuantizerKind::Percentile
                                                       ? std::span<const double>(percentile_candidates)
                                                       : quest_candidates;
        parameter_ = tune(candidates, heads_, tokens_, [&](const HeadTransform& head, double parameter) {
                       return Codec(head.centered(), quantizer_of(parameter));
                     }).parameter;
      });
    if (variant.signs > 0)
      for (std::size_t h = 0; h < heads_.size(); ++h)
        with_codec(
            [&](auto codec_of) { heads_[h] = choose_signs(heads_[h], tokens_[h], codec_of, variant.signs); });
  }

  // `tokens` `[n, heads * dim]` through the codecs and back.
  Batch<double> through_cache(const Batch<double>& tokens) const {
    Batch<double> cached;
    with_codec([&](auto codec_of) {
      cached = examples::through_cache(static_cast<Index>(heads_.size()), tokens, [&](Index h) {
        return codec_of(heads_[static_cast<std::size_t>(h)]);
      });
    });
    return cached;
  }

 private:
  // Calls `use` with what makes a codec of a head.
  template <class Use>
  void with_codec(Use use) const {
    with_quantizer([&](auto quantizer_of) {
      const auto quantizer = quantizer_of(parameter_);
      const bool affine = variant_.quantizer == QuantizerKind::MinMax;
      const std::span<const double> factors =
          affine ? std::span<const double>(affine_range_factors) : quest_step_factors;
      const auto with_rounding = [&](auto rounding_of) {
        use([=](const HeadTransform& head) {
          return Codec(head.centered(), quantizer, 0, rounding_of(sensitivity_of<double>(head)));
        });
      };
      using S = Sensitivity<double>;
      switch (variant_.rounding) {
        case RoundingKind::Nearest:
          return use([=](const HeadTransform& head) { return Codec(head.centered(), quantizer); });
        case RoundingKind::Search:
          return with_rounding([=](const S& s) { return StepSearch(SensitiveNearest<double>(s), factors); });
        case RoundingKind::Feedback:
          return with_rounding([](const S& s) { return Feedback<double>(s); });
        case RoundingKind::FeedbackSearch:
          return with_rounding([=](const S& s) { return StepSearch(Feedback<double>(s), factors); });
        case RoundingKind::BestOfSearch:
          return with_rounding([=](const S& s) { return StepSearch(BestOf<double>(s), factors); });
      }
    });
  }

  // Calls `use` with what makes the quantizer from its parameter.
  template <class Use>
  void with_quantizer(Use use) const {
    using Affine = wushkv::Affine<double>;
    const int bits = bits_;
    switch (variant_.quantizer) {
      case QuantizerKind::Quest:
        return use([=](double widen) { return Quest<double>(bits, widen); });
      case QuantizerKind::LloydMax:
        return use([=](double) { return LloydMax<double>(bits); });
      case QuantizerKind::MinMax:
        return use([=](double) { return Affine::min_max(bits); });
      case QuantizerKind::Percentile:
        return use([=](double kappa) { return Affine::percentile(kappa, bits); });
    }
  }

  Variant variant_;
  std::vector<HeadTransform> heads_;
  std::vector<TuningTokens> tokens_;
  int bits_;
  double parameter_ = 1;
};

double quantized_error(const Layer& layer, const Variant& variant, std::uint64_t seed, int bits) {
  BuildOptions options;
  options.construction = variant.construction;
  options.exponent = variant.feeds_back() ? feedback_exponent : 0.5;
  options.seed = seed;
  if (variant.predicted)
    options.choose_exponent_for =
        noise_factor(Affine<double>::min_max(bits), layer.heads.key_dim, Index{1} << 16);
  const LayerTransforms transforms = build_transforms(layer.statistics, options);
  std::vector<TuningTokens> keys, values;
  for (Index h = 0; h < layer.heads.kv_heads; ++h) {
    keys.push_back(tuning_keys(layer.statistics.sample(), h));
    values.push_back(tuning_values(layer.statistics.sample(), h));
  }
  const Side key_side(variant, transforms.keys, std::move(keys), true, bits);
  const Side value_side(variant, transforms.values, std::move(values), false, bits);
  const examples::Sequence& x = layer.evaluation;
  return module_error(layer.heads, x.q, x.k, x.v, key_side.through_cache(x.k), value_side.through_cache(x.v),
                      layer.w_o)
      .relative();
}

struct Result {
  std::vector<double> layers;
  double geometric_mean = 0;
};

// A random rotation's error depends on its seed: errors and their geometric mean are averaged over the seeds.
Result run(const Variant& variant, const std::vector<Layer>& layers, int bits) {
  Result result{std::vector<double>(layers.size(), 0.0), 0};
  for (int seed = 0; seed < variant.seeds; ++seed) {
    std::vector<double> errors;
    for (const Layer& layer : layers) {
      errors.push_back(quantized_error(layer, variant, static_cast<std::uint64_t>(seed), bits));
      result.layers[errors.size() - 1] += errors.back() / variant.seeds;
    }
    result.geometric_mean += geometric_mean(errors) / variant.seeds;
  }
  return result;
}

std::string number(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

void write_json(std::ofstream& out, const std::string& path, const std::vector<Layer>& layers,
                const std::map<int, std::vector<Result>>& results) {
  out << "{\n \"layers\": [";
  for (std::size_t l = 0; l < layers.size(); ++l) out << (l ? ", " : "") << layers[l].number;
  out << "],\n \"error\": {";
  const char* between_bits = "";
  for (const auto& [bits, rows] : results) {
    out << between_bits << "\n  \"" << bits << "\": {";
    for (std::size_t v = 0; v < rows.size(); ++v) {
      out << (v ? "," : "") << "\n   \"" << variants[v].name << "\": {\"layers\": [";
      for (std::size_t l = 0; l < rows[v].layers.size(); ++l)
        out << (l ? ", " : "") << number(rows[v].layers[l]);
      out << "], \"geometric_mean\": " << number(rows[v].geometric_mean) << "}";
    }
    out << "\n  }";
    between_bits = ",";
  }
  out << "\n }\n}\n";
  if (!out.flush()) throw FileError("ablation: " + path + " cannot be written");
}

std::vector<int> parse_bits(const std::string& text) {
  std::vector<int> bits;
  for (std::size_t at = 0; at <= text.size(); at += 2) {
    const bool digit = at < text.size() && text[at] >= '1' && text[at] <= '8' &&
                       std::count(text.begin(), text.end(), text[at]) == 1;
    if (!digit || (at + 1 < text.size() && text[at + 1] != ','))
      throw std::invalid_argument("ablation: --bits is '" + text +
                                  "', expected different numbers 1 to 8 with commas between");
    bits.push_back(text[at] - '0');
    if (at + 1 == text.size()) break;
  }
  return bits;
}

void ablation(const std::string& activations, const std::vector<int>& widths, const std::string& json) {
  const std::vector<Layer> layers = examples::load_layers(activations);
  std::ofstream json_file;
  if (!json.empty()) json_file.open(json);
  if (!json.empty() && !json_file) throw FileError("ablation: " + json + " cannot be opened for writing");
  std::printf(
      "Relative squared error of the attention module's output, every key and value quantized, one group a "
      "head\n\n");
  std::printf("bits  %-50s", "transform + quantizer");
  for (const Layer& layer : layers) std::printf("  layer %-3d", layer.number);
  std::printf("  geometric mean\n");
  std::map<int, std::vector<Result>> results;
  for (const int bits : widths) {
    for (const Variant& variant : variants) {
      const Result result = run(variant, layers, bits);
      std::string label = variant.name;
      if (label == "wush+percentile") label += ": recipe " + std::string(PaperRecipe<double>::name);
      if (label == "joint+affine feedback search")
        label += ": recipe " + std::string(BestRecipe<double>::name);
      std::printf("%4d  %-50s", bits, label.c_str());
      for (const double error : result.layers) std::printf("  %9.5f", error);
      std::printf("  %14.5f\n", result.geometric_mean);
      results[bits].push_back(result);
    }
    std::printf("\n");
  }
  if (!json.empty()) write_json(json_file, json, layers, results);
}

}  // namespace

int main(int argc, char** argv) {
  std::string activations = examples::default_activations, json, bits = "4,3,2";
  const char* const usage = "usage: ablation [--activations FILE] [--bits 4,3,2] [--json FILE]\n";
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    std::string* const value = option == "--activations" ? &activations
                               : option == "--json"      ? &json
                               : option == "--bits"      ? &bits
                                                         : nullptr;
    if (value == nullptr || i + 1 == argc) {
      const bool help = option == "--help" || option == "-h";
      std::fputs(usage, help ? stdout : stderr);
      return help ? 0 : 2;
    }
    *value = argv[++i];
  }
  try {
    ablation(activations, parse_bits(bits), json);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  return 0;
}
