// SPDX-License-Identifier: Apache-2.0
#include "engine/model.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string_view>
#include <utility>

#include "engine/dequantize.hpp"
#include "wushkv/core/error.hpp"

namespace engine {
namespace {

using wushkv::detail::file_error;

/// Metadata of the architecture: keys are `<architecture>.<name>`.
class Settings {
 public:
  Settings(const GgufFile& file, std::string architecture)
      : file_(file), architecture_(std::move(architecture)) {}

  std::string key(std::string_view name) const { return architecture_ + "." + std::string(name); }
  /// A size, which is at least 1 and so small that products of two do not overflow.
  Index size(std::string_view name) const { return checked(name, file_.integer(key(name))); }
  Index size_or(std::string_view name, Index otherwise) const {
    return file_.contains(key(name)) ? size(name) : otherwise;
  }
  double positive(std::string_view name) const {
    const double value = file_.number(key(name));
    if (!(value > 0)) file_error("gguf: ", key(name), " is ", value, ", expected more than 0");
    return value;
  }
  double positive_or(std::string_view name, double otherwise) const {
    return file_.contains(key(name)) ? positive(name) : otherwise;
  }

 private:
  Index checked(std::string_view name, std::uint64_t value) const {
    constexpr std::uint64_t most = std::numeric_limits<std::int32_t>::max();
    if (value < 1 || value > most) file_error("gguf: ", key(name), " is ", value, ", expected 1 to ", most);
    return static_cast<Index>(value);
  }
  const GgufFile& file_;
  std::string architecture_;
};

wushkv::RopeScaling read_scaling(const GgufFile& file, const Settings& settings, Index context) {
  const std::string_view type = file.string_or(settings.key("rope.scaling.type"), "linear");
  if (type == "none") return wushkv::RopeDefault{};
  if (type == "linear") {
    // Older files have another name for it, and many have the type without any factor.
    for (const char* name : {"rope.scaling.factor", "rope.scale_linear"})
      if (file.contains(settings.key(name))) return wushkv::RopeLinear{settings.positive(name)};
    return wushkv::RopeDefault{};
  }
  if (type == "yarn") {
    wushkv::RopeYarn yarn;
    yarn.factor = settings.positive("rope.scaling.factor");
    yarn.original_max_position =
        static_cast<double>(settings.size_or("rope.scaling.original_context_length", context));
    yarn.beta_fast = settings.positive_or("rope.scaling.yarn_beta_fast", yarn.beta_fast);
    yarn.beta_slow = settings.positive_or("rope.scaling.yarn_beta_slow", yarn.beta_slow);
    if (file.contains(settings.key("rope.scaling.attn_factor")))
      yarn.attention_factor = settings.positive("rope.scaling.attn_factor") *
                              (yarn.factor > 1 ? 0.1 * std::log(yarn.factor) + 1 : 1.0);
    return yarn;
  }
  file_error("gguf: ", settings.key("rope.scaling.type"), " is ", quote_name(type),
             ", expected none, linear or yarn (Llama 3's comes as a tensor)");
}

ModelConfig read_config(const GgufFile& file) {
  ModelConfig config;
  config.architecture = file.string("general.architecture");
  if (config.architecture != "llama" && config.architecture != "qwen3")
    file_error("gguf: general.architecture is ", quote_name(config.architecture),
               ", expected llama or qwen3");
  const Settings settings(file, config.architecture);
  config.layers = settings.size("block_count");
  config.width = settings.size("embedding_length");
  config.ffn_width = settings.size("feed_forward_length");
  config.context = settings.size("context_length");
  config.heads.query_heads = settings.size("attention.head_count");
  config.heads.kv_heads = settings.size_or("attention.head_count_kv", config.heads.query_heads);
  const bool named_width = file.contains(settings.key("attention.key_length"));
  if (!named_width && config.width % config.heads.query_heads != 0)
    file_error("gguf: ", settings.key("attention.head_count"), " is ", config.heads.query_heads,
               ", expected a divisor of the embedding length ", config.width);
  config.heads.key_dim =
      settings.size_or("attention.key_length", std::max<Index>(1, config.width / config.heads.query_heads));
  config.heads.value_dim = settings.size_or("attention.value_length", config.heads.key_dim);
  if (config.heads.query_heads % config.heads.kv_heads != 0)
    file_error("gguf: ", settings.key("attention.head_count_kv"), " is ", config.heads.kv_heads,
               ", expected a divisor of the ", config.heads.query_heads, " query heads");
  config.norm_epsilon = settings.positive("attention.layer_norm_rms_epsilon");
  config.rotary_dim = settings.size_or("rope.dimension_count", config.heads.key_dim);
  if (config.rotary_dim % 2 != 0 || config.rotary_dim > config.heads.key_dim)
    file_error("gguf: ", settings.key("rope.dimension_count"), " is ", config.rotary_dim,
               ", expected an even number up to the head dimension ", config.heads.key_dim);
  config.rope_base = settings.positive_or("rope.freq_base", 10000);
  config.rope_scaling = read_scaling(file, settings, config.context);
  // Converters permute the rows of llama's query and key projections, so that pairs lie side by side; qwen3
  // keeps its halves.
  config.rope_pairs =
      config.architecture == "llama" ? wushkv::RopePairs::Interleaved : wushkv::RopePairs::Half;
  return config;
}

/// Takes tensors out of a file by name, with the shape they must have, and knows which nobody took.
class Tensors {
 public:
  explicit Tensors(const GgufFile& file) : file_(file) {}

  bool contains(const std::string& name) const { return file_.find(name) != nullptr; }
  Batch<float> matrix(const std::string& name, Index rows, Index cols) {
    const GgufTensor& tensor = file_.tensor(name);
    if (tensor.dims.size() > 2 || tensor.rows() != rows || tensor.cols() != cols)
      file_error("gguf: tensor ", name, " is ", tensor.rows(), " x ", tensor.cols(), ", expected ", rows,
                 " x ", cols);
    taken_.insert(name);
    return dequantize(tensor);
  }
  Vector<float> vector(const std::string& name, Index size) {
    return matrix(name, 1, size).row(0).transpose();
  }
  /// A bias or an expert that was left out would make another model, silently.
  void check_all_taken() const {
    for (const GgufTensor& tensor : file_.tensors())
      if (taken_.find(tensor.name) == taken_.end())
        file_error("gguf: tensor ", quote_name(tensor.name),
                   " is there, expected none but those of plain llama and qwen3 models");
  }

 private:
  const GgufFile& file_;
  std::set<std::string> taken_;
};

LayerWeights read_layer(Tensors& tensors, const ModelConfig& config, Index layer) {
  const std::string block = "blk." + std::to_string(layer) + ".";
  const Index width = config.width, ffn = config.ffn_width;
  const wushkv::AttentionHeads& heads = config.heads;
  LayerWeights w;
  w.attention_norm = tensors.vector(block + "attn_norm.weight", width);
  w.ffn_norm = tensors.vector(block + "ffn_norm.weight", width);
  w.q = tensors.matrix(block + "attn_q.weight", heads.query_heads * heads.key_dim, width);
  w.k = tensors.matrix(block + "attn_k.weight", heads.kv_heads * heads.key_dim, width);
  w.v = tensors.matrix(block + "attn_v.weight", heads.kv_heads * heads.value_dim, width);
  w.o = tensors.matrix(block + "attn_output.weight", width, heads.query_heads * heads.value_dim);
  w.gate = tensors.matrix(block + "ffn_gate.weight", ffn, width);
  w.up = tensors.matrix(block + "ffn_up.weight", ffn, width);
  w.down = tensors.matrix(block + "ffn_down.weight", width, ffn);
  if (config.architecture == "qwen3") {
    w.q_norm.emplace(tensors.vector(block + "attn_q_norm.weight", heads.key_dim), config.norm_epsilon);
    w.k_norm.emplace(tensors.vector(block + "attn_k_norm.weight", heads.key_dim), config.norm_epsilon);
  }
  return w;
}

/// Llama 3's frequencies come as divisors, one a pair.
wushkv::RopeFrequencies read_rope(Tensors& tensors, const ModelConfig& config) {
  wushkv::RopeFrequencies rope =
      wushkv::rope_frequencies(config.rotary_dim, config.rope_base, config.rope_scaling);
  if (!tensors.contains("rope_freqs.weight")) return rope;
  const Vector<float> divisors = tensors.vector("rope_freqs.weight", config.rotary_dim / 2);
  for (std::size_t i = 0; i < rope.inv_freq.size(); ++i) {
    const double divisor = divisors[static_cast<Index>(i)];
    if (!(divisor > 0))
      file_error("gguf: tensor rope_freqs.weight has an entry ", divisor, ", expected more than 0");
    rope.inv_freq[i] /= divisor;
  }
  return rope;
}

}  // namespace

Model load_model(const GgufFile& file) {
  Model model;
  model.config = read_config(file);
  model.vocabulary = read_vocabulary(file);
  ModelConfig& config = model.config;
  config.vocabulary = static_cast<Index>(model.vocabulary.tokens.size());
  Tensors tensors(file);
  try {
    model.rope = read_rope(tensors, config);
    model.embedding = tensors.matrix("token_embd.weight", config.vocabulary, config.width);
    if (tensors.contains("output.weight"))
      model.output = tensors.matrix("output.weight", config.vocabulary, config.width);
    model.output_norm = tensors.vector("output_norm.weight", config.width);
    for (Index layer = 0; layer < config.layers; ++layer)
      model.layers.push_back(read_layer(tensors, config, layer));
  } catch (const std::invalid_argument& error) {
    file_error("gguf: ", error.what());  // the library's checks of what the file says
  }
  tensors.check_all_taken();
  return model;
}

Model load_model(const std::filesystem::path& path) {
  const GgufFile file(path);
  try {
    return load_model(file);
  } catch (const wushkv::FileError& error) {
    file_error(path.string(), ": ", error.what());
  }
}

}  // namespace engine
