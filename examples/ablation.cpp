// SPDX-License-Identifier: Apache-2.0
//
// The paper's ablation on real activations: transform x quantizer x bits, and what an attention module's
// output loses when every key and value of the evaluation text has been through the cache (no BF16 windows).
//
//   ablation [--activations FILE] [--bits 4,3,2] [--json FILE]
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "wushkv/calibrate/calibrate.hpp"
#include "wushkv/codec/codec.hpp"
#include "wushkv/io/safetensors.hpp"
#include "wushkv/measure/measure.hpp"
#include "wushkv/quantize/quantize.hpp"

#ifndef WUSHKV_EXAMPLE_DATA  // set by the build
#define WUSHKV_EXAMPLE_DATA "examples/data"
#endif

using namespace wushkv;

namespace {

struct Sequence {
  Batch<double> q, k, v;  // [tokens, heads * dim]
};

struct Layer {
  int number;
  AttentionHeads heads;
  Sequence calibration, evaluation;
  Batch<double> w_o;  // [query_heads * value_dim, model]
  LayerStatistics statistics;
};

// Tensors are [tokens, heads, dim]; the library takes heads side by side. A file that does not fit says so
// with its layer.
Sequence load_sequence(const SafetensorsView& file, const std::string& prefix, const AttentionHeads& heads) {
  file.expect_shape(prefix + ".q", {Dynamic, heads.query_heads, heads.key_dim});
  file.expect_shape(prefix + ".k", {Dynamic, heads.kv_heads, heads.key_dim});
  file.expect_shape(prefix + ".v", {Dynamic, heads.kv_heads, heads.value_dim});
  return {file.token_matrix<double>(prefix + ".q"), file.token_matrix<double>(prefix + ".k"),
          file.token_matrix<double>(prefix + ".v")};
}

Layer load_layer(const SafetensorsView& file, int number) {
  const std::string l = std::to_string(number);
  const TensorShape w_o = file.expect_shape(l + ".w_o", {Dynamic, Dynamic, Dynamic}).shape();
  const TensorShape k = file.expect_shape(l + ".calibration.k", {Dynamic, Dynamic, Dynamic}).shape();
  const AttentionHeads heads{w_o[0], k[1], k[2], w_o[1]};
  Layer layer{number,
              heads,
              load_sequence(file, l + ".calibration", heads),
              load_sequence(file, l + ".evaluation", heads),
              file.matrix<double>(l + ".w_o"),
              LayerStatistics(heads)};
  try {
    layer.statistics.set_output_projection(layer.w_o);
    layer.statistics.add(layer.calibration.q, layer.calibration.k, layer.calibration.v);
  } catch (const std::invalid_argument& error) {
    throw FileError("ablation: layer " + l + ": " + error.what());
  }
  return layer;
}

std::vector<Layer> load_layers(const std::string& path) {
  const SafetensorsFile file(path);
  std::set<int> numbers;
  for (const std::string& name : file.names()) {
    int number = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
    if (error == std::errc() && std::string_view(end) == ".w_o") numbers.insert(number);
  }
  if (numbers.empty()) throw FileError("ablation: " + path + " has no tensors L.w_o, expected one a layer");
  std::vector<Layer> layers;
  for (const int number : numbers) layers.push_back(load_layer(file, number));
  return layers;
}

// Every head's vectors through its codec and back.
template <class Q>
Batch<double> through_cache(const std::vector<BlockTransform>& transforms, const Q& quantizer,
                            const Batch<double>& x) {
  Batch<double> cached(x.rows(), x.cols());
  const Index d = x.cols() / static_cast<Index>(transforms.size());
  for (std::size_t h = 0; h < transforms.size(); ++h) {
    const Codec codec(transforms[h], quantizer);
    const Index at = static_cast<Index>(h) * d;
    cached.middleCols(at, d) = codec.reconstruct(x.middleCols(at, d));
  }
  return cached;
}

enum class QuantizerKind { Quest, LloydMax, MinMax, Percentile };

template <class Q>
double layer_error(const Layer& layer, const LayerTransforms& transforms, const Q& key_quantizer,
                   const Q& value_quantizer) {
  const Sequence& x = layer.evaluation;
  return module_error(layer.heads, x.q, x.k, x.v, through_cache(transforms.keys, key_quantizer, x.k),
                      through_cache(transforms.values, value_quantizer, x.v), layer.w_o)
      .relative();
}

double quantized_error(const Layer& layer, const LayerTransforms& transforms, QuantizerKind kind, int bits) {
  using Affine = wushkv::Affine<double>;
  switch (kind) {
    case QuantizerKind::Quest:
      return layer_error(layer, transforms, Quest<double>(bits), Quest<double>(bits));
    case QuantizerKind::LloydMax:
      return layer_error(layer, transforms, LloydMax<double>(bits), LloydMax<double>(bits));
    case QuantizerKind::MinMax:
      return layer_error(layer, transforms, Affine::min_max(bits), Affine::min_max(bits));
    case QuantizerKind::Percentile:
      break;
  }
  return layer_error(layer, transforms, Affine::percentile(oscar_key_percentile, bits),
                     Affine::percentile(oscar_value_percentile, bits));
}

struct Variant {
  std::string name;
  Construction construction;
  QuantizerKind quantizer;
  int seeds = 1;
};

const std::vector<Variant> variants = {
    {"none+minmax", Construction::None, QuantizerKind::MinMax},
    {"hadamard+quest", Construction::Hadamard, QuantizerKind::Quest},
    {"oscar+quest", Construction::Oscar, QuantizerKind::Quest},
    {"wush+quest", Construction::Wush, QuantizerKind::Quest},
    {"random+lloyd (TurboQuant-style)", Construction::Random, QuantizerKind::LloydMax, 8},
    {"hadamard+percentile", Construction::Hadamard, QuantizerKind::Percentile},
    {"oscar+percentile", Construction::Oscar, QuantizerKind::Percentile},
    {"wush+percentile", Construction::Wush, QuantizerKind::Percentile},
};

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
      BuildOptions options;
      options.construction = variant.construction;
      options.seed = static_cast<std::uint64_t>(seed);
      errors.push_back(
          quantized_error(layer, build_transforms(layer.statistics, options), variant.quantizer, bits));
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
  const std::vector<Layer> layers = load_layers(activations);
  std::ofstream json_file;
  if (!json.empty()) json_file.open(json);
  if (!json.empty() && !json_file) throw FileError("ablation: " + json + " cannot be opened for writing");
  std::printf(
      "Relative squared error of the attention module's output, every key and value quantized, one group a "
      "head\n\n");
  std::printf("bits  %-32s", "transform + quantizer");
  for (const Layer& layer : layers) std::printf("  layer %-3d", layer.number);
  std::printf("  geometric mean\n");
  std::map<int, std::vector<Result>> results;
  for (const int bits : widths) {
    for (const Variant& variant : variants) {
      const Result result = run(variant, layers, bits);
      std::printf("%4d  %-32s", bits, variant.name.c_str());
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
  std::string activations = WUSHKV_EXAMPLE_DATA "/smollm2-activations.safetensors", json, bits = "4,3,2";
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
