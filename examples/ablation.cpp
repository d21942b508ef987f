// SPDX-License-Identifier: Apache-2.0
//
// The paper's ablation on real activations: transform x quantizer x bits, and what an attention module's
// output loses when every key and value of the evaluation text has been through the cache (no BF16 windows).
//
//   ablation [--activations FILE] [--bits 4,3,2] [--json FILE]
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "wushkv/calibrate/calibrate.hpp"
#include "wushkv/codec/codec.hpp"
#include "wushkv/io/safetensors.hpp"
#include "wushkv/measure/measure.hpp"
#include "wushkv/quantize/quantize.hpp"

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

// Tensors are [tokens, heads, dim]: row-major, so the same numbers are [tokens, heads * dim].
Batch<double> heads_side_by_side(const SafetensorsView& file, const std::string& name) {
  const TensorShape shape = file.expect_shape(name, {Dynamic, Dynamic, Dynamic}).shape();
  const Batch<double> rows = file.matrix<double>(name);
  return Eigen::Map<const Batch<double>>(rows.data(), shape[0], shape[1] * shape[2]);
}

Sequence load_sequence(const SafetensorsView& file, const std::string& prefix) {
  return {heads_side_by_side(file, prefix + ".q"), heads_side_by_side(file, prefix + ".k"),
          heads_side_by_side(file, prefix + ".v")};
}

std::vector<Layer> load_layers(const std::string& path) {
  const SafetensorsFile file(path);
  std::map<int, bool> numbers;
  for (const std::string& name : file.names())
    if (name.ends_with(".w_o")) numbers[std::atoi(name.c_str())] = true;
  std::vector<Layer> layers;
  for (const auto& [number, present] : numbers) {
    const std::string l = std::to_string(number);
    const TensorShape q = file.tensor(l + ".calibration.q").shape(),
                      v = file.tensor(l + ".calibration.v").shape();
    const AttentionHeads heads{q[1], v[1], q[2], v[2]};
    Layer layer{number,
                heads,
                load_sequence(file, l + ".calibration"),
                load_sequence(file, l + ".evaluation"),
                file.matrix<double>(l + ".w_o", {heads.query_heads, heads.value_dim, Dynamic}),
                LayerStatistics(heads)};
    layer.statistics.set_output_projection(layer.w_o);
    layer.statistics.add(layer.calibration.q, layer.calibration.k, layer.calibration.v);
    layers.push_back(std::move(layer));
  }
  if (layers.empty()) throw FileError("ablation: " + path + " has no tensors L.w_o, expected one a layer");
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

template <class Q>
double layer_error(const Layer& layer, const BuildOptions& options, const Q& key_quantizer,
                   const Q& value_quantizer) {
  const LayerTransforms transforms = build_transforms(layer.statistics, options);
  const Sequence& x = layer.evaluation;
  return module_error(layer.heads, x.q, x.k, x.v, through_cache(transforms.keys, key_quantizer, x.k),
                      through_cache(transforms.values, value_quantizer, x.v), layer.w_o)
      .relative();
}

double quantized_error(const Layer& layer, const BuildOptions& options, std::string_view quantizer,
                       int bits) {
  using Affine = wushkv::Affine<double>;
  if (quantizer == "quest") return layer_error(layer, options, Quest<double>(bits), Quest<double>(bits));
  if (quantizer == "lloyd")
    return layer_error(layer, options, LloydMax<double>(bits), LloydMax<double>(bits));
  if (quantizer == "minmax") return layer_error(layer, options, Affine::min_max(bits), Affine::min_max(bits));
  return layer_error(layer, options, Affine::percentile(oscar_key_percentile, bits),
                     Affine::percentile(oscar_value_percentile, bits));
}

struct Variant {
  std::string name;
  Construction construction;
  std::string_view quantizer;
  int seeds = 1;
};

const std::vector<Variant> variants = {
    {"none+minmax", Construction::None, "minmax"},
    {"hadamard+quest", Construction::Hadamard, "quest"},
    {"oscar+quest", Construction::Oscar, "quest"},
    {"wush+quest", Construction::Wush, "quest"},
    {"random+lloyd (TurboQuant-style)", Construction::Random, "lloyd", 8},
    {"hadamard+percentile", Construction::Hadamard, "percentile"},
    {"oscar+percentile", Construction::Oscar, "percentile"},
    {"wush+percentile", Construction::Wush, "percentile"},
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
      errors.push_back(quantized_error(layer, options, variant.quantizer, bits));
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

void write_json(const std::string& path, const std::vector<Layer>& layers,
                const std::map<int, std::vector<Result>>& results) {
  std::ofstream out(path);
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
  for (const char c : text)
    if (c >= '1' && c <= '8')
      bits.push_back(c - '0');
    else if (c != ',')
      throw std::invalid_argument("ablation: --bits is '" + text +
                                  "', expected numbers 1 to 8 with commas between");
  return bits;
}

void ablation(const std::string& activations, const std::vector<int>& widths, const std::string& json) {
  const std::vector<Layer> layers = load_layers(activations);
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
  if (!json.empty()) write_json(json, layers, results);
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
      std::fputs(usage, option == "--help" ? stdout : stderr);
      return option == "--help" ? 0 : 2;
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
