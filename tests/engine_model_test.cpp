// SPDX-License-Identifier: Apache-2.0
#include "engine/model.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "engine/codec_choice.hpp"
#include "engine/gguf.hpp"
#include "engine/head_codec.hpp"
#include "engine/kv_cache.hpp"
#include "engine/threads.hpp"
#include "engine/tokenizer.hpp"
#include "engine/transformer.hpp"
#include "gguf_writer.hpp"
#include "support.hpp"

namespace {

using engine::CachePath;
using engine::CacheSettings;
using engine::KvCache;
using engine::Model;
using engine::NewTokens;
using engine::Probe;
using engine::QuantizerKind;
using engine::Threads;
using engine::Token;
using engine::Transformer;
using test::message_of;
using test::Random;
using wushkv::Batch;
using wushkv::FileError;
using wushkv::Index;
using wushkv::LayerTransforms;

using Parts = std::vector<KvCache::Part>;
using Tokens = std::vector<Token>;

// ---- Tiny models: what a file says, and what it has to mean ----

constexpr Index context = 320;
constexpr float epsilon = 0.01F;  // large enough to be seen

using Value = std::variant<std::int64_t, std::uint64_t, float, std::string>;

struct Shape {
  std::string architecture;
  Index query_heads = 6, kv_heads = 2, key_dim = 16, value_dim = 16;  // 6 * 16 is not the width
  bool tied = false;
  Index layers = 3, width = 48, ffn_width = 80;

  bool has_qk_norm() const { return architecture == "qwen3"; }
};

struct Tiny {
  Shape shape;
  Index rotary_dim = 0;
  wushkv::RopeFrequencies rope;

  std::map<std::string, Value> keys;
  std::vector<std::string> tokens, merges;
  std::map<std::string, Batch<float>> tensors;  // of one row: a vector

  void set(const std::string& name, const Value& value) { keys[shape.architecture + "." + name] = value; }
  /// What an unscaled file of this base means.
  void set_rope(double base) {
    rope = {};
    for (Index i = 0; i < rotary_dim / 2; ++i)
      rope.inv_freq.push_back(
          std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim)));
  }

  std::vector<std::byte> file() const {
    test::GgufWriter writer;
    for (const auto& [key, value] : keys)
      std::visit([&, &name = key](const auto& v) { writer.add(name, v); }, value);
    writer.add("tokenizer.ggml.model", "gpt2");
    writer.add("tokenizer.ggml.pre", "qwen2");
    writer.add("tokenizer.ggml.tokens", tokens);
    writer.add("tokenizer.ggml.merges", merges);
    for (const auto& [name, tensor] : tensors)
      if (tensor.rows() == 1)
        writer.add_tensor(name, wushkv::Vector<float>(tensor.row(0).transpose()));
      else
        writer.add_tensor(name, tensor);
    return writer.bytes();
  }
};

Model load(const Tiny& tiny) {
  const std::vector<std::byte> bytes = tiny.file();
  return engine::load_model(engine::GgufFile(bytes));
}

/// `outputs` rows that keep the size of what they multiply.
Batch<float> random_weight(Random& random, Index outputs, Index inputs) {
  return random.batch<float>(outputs, inputs) / std::sqrt(static_cast<float>(inputs));
}

Batch<float> random_norm(Random& random, Index size) {
  return (1 + 0.3F * random.batch<float>(1, size).array()).matrix();
}

/// Fifty characters and ten pairs of them.
void add_vocabulary(Tiny& tiny) {
  for (char c = '0'; c < '0' + 50; ++c) tiny.tokens.emplace_back(1, c);
  for (char c = 'A'; c < 'A' + 10; ++c) {
    tiny.tokens.push_back(std::string{c, 'A'});
    tiny.merges.push_back(std::string{c, ' ', 'A'});
  }
}

Tiny make_tiny(const Shape& shape, std::uint64_t seed) {
  Random random(seed);
  Tiny tiny;
  tiny.shape = shape;
  tiny.rotary_dim = shape.key_dim;
  const double base = shape.has_qk_norm() ? 1e6 : 10000;
  tiny.set_rope(base);
  tiny.keys["general.architecture"] = shape.architecture;
  tiny.set("block_count", shape.layers);
  tiny.set("embedding_length", shape.width);
  tiny.set("feed_forward_length", shape.ffn_width);
  tiny.set("context_length", context);
  tiny.set("attention.head_count", shape.query_heads);
  tiny.set("attention.head_count_kv", shape.kv_heads);
  tiny.set("attention.key_length", shape.key_dim);
  tiny.set("attention.value_length", shape.value_dim);
  tiny.set("attention.layer_norm_rms_epsilon", epsilon);
  if (shape.has_qk_norm()) tiny.set("rope.freq_base", static_cast<float>(base));
  add_vocabulary(tiny);

  const auto vocabulary = static_cast<Index>(tiny.tokens.size());
  auto& tensors = tiny.tensors;
  tensors["token_embd.weight"] = random.batch<float>(vocabulary, shape.width);
  if (!shape.tied) tensors["output.weight"] = random_weight(random, vocabulary, shape.width);
  tensors["output_norm.weight"] = random_norm(random, shape.width);
  for (Index layer = 0; layer < shape.layers; ++layer) {
    const std::string block = "blk." + std::to_string(layer) + ".";
    const auto add = [&](const std::string& name, Index outputs, Index inputs) {
      tensors[block + name + ".weight"] = random_weight(random, outputs, inputs);
    };
    add("attn_q", shape.query_heads * shape.key_dim, shape.width);
    add("attn_k", shape.kv_heads * shape.key_dim, shape.width);
    add("attn_v", shape.kv_heads * shape.value_dim, shape.width);
    add("attn_output", shape.width, shape.query_heads * shape.value_dim);
    add("ffn_gate", shape.ffn_width, shape.width);
    add("ffn_up", shape.ffn_width, shape.width);
    add("ffn_down", shape.width, shape.ffn_width);
    tensors[block + "attn_norm.weight"] = random_norm(random, shape.width);
    tensors[block + "ffn_norm.weight"] = random_norm(random, shape.width);
    if (!shape.has_qk_norm()) continue;
    tensors[block + "attn_q_norm.weight"] = 1.5F * random_norm(random, shape.key_dim);
    tensors[block + "attn_k_norm.weight"] = random_norm(random, shape.key_dim);
  }
  return tiny;
}

Tiny make_qwen3() { return make_tiny({.architecture = "qwen3"}, 1); }
Tiny make_llama() { return make_tiny({.architecture = "llama", .tied = true}, 2); }

Tokens random_tokens(Random& random, Index count) {
  Tokens tokens;
  for (Index i = 0; i < count; ++i) tokens.push_back(static_cast<Token>(random.integer(0, 59)));
  return tokens;
}

// ---- The architecture's definition, in double ----

struct Trace {
  Batch<double> q, k, v, y;  // of a layer: after RoPE, values, the attention module's output
};

struct Expected {
  Batch<double> logits;
  std::vector<Trace> layers;
};

class Definition {
 public:
  explicit Definition(const Tiny& tiny) : tiny_(tiny), shape_(tiny.shape) {}

  Expected run(const Tokens& tokens) const {
    Expected result;
    const Batch<double> embedding = weight("token_embd.weight");
    Batch<double> x(static_cast<Index>(tokens.size()), shape_.width);
    for (Index i = 0; i < x.rows(); ++i) x.row(i) = embedding.row(tokens[static_cast<std::size_t>(i)]);
    for (Index layer = 0; layer < shape_.layers; ++layer) {
      const std::string block = "blk." + std::to_string(layer) + ".";
      result.layers.push_back(attention(block, normalized(x, block + "attn_norm.weight")));
      x += result.layers.back().y;
      const Batch<double> in = normalized(x, block + "ffn_norm.weight");
      Batch<double> gate = product(in, block + "ffn_gate.weight");
      const Batch<double> up = product(in, block + "ffn_up.weight");
      for (Index i = 0; i < gate.size(); ++i) {
        const double g = gate.data()[i];
        gate.data()[i] = g / (1 + std::exp(-g)) * up.data()[i];
      }
      x += product(gate, block + "ffn_down.weight");
    }
    result.logits =
        product(normalized(x, "output_norm.weight"), shape_.tied ? "token_embd.weight" : "output.weight");
    return result;
  }

 private:
  Batch<double> weight(const std::string& name) const { return test::as_doubles(tiny_.tensors.at(name)); }
  Batch<double> product(const Batch<double>& x, const std::string& name) const {
    return x * weight(name).transpose();
  }

  /// Every stretch of the weight's size by itself: a token, or each of its heads.
  Batch<double> normalized(Batch<double> x, const std::string& name) const {
    const Batch<double> w = weight(name);
    for (Index i = 0; i < x.rows(); ++i)
      for (Index at = 0; at < x.cols(); at += w.cols()) {
        double sum = 0;
        for (Index j = 0; j < w.cols(); ++j) sum += x(i, at + j) * x(i, at + j);
        const double rms = std::sqrt(sum / static_cast<double>(w.cols()) + static_cast<double>(epsilon));
        for (Index j = 0; j < w.cols(); ++j) x(i, at + j) *= w(0, j) / rms;
      }
    return x;
  }

  /// Token i is at position i.
  void rotate(Batch<double>& x) const {
    const Index pairs = tiny_.rotary_dim / 2;
    for (Index i = 0; i < x.rows(); ++i)
      for (Index at = 0; at < x.cols(); at += shape_.key_dim)
        for (Index p = 0; p < pairs; ++p) {
          const bool half = shape_.architecture == "qwen3";
          double& a = x(i, at + (half ? p : 2 * p));
          double& b = x(i, at + (half ? p + pairs : 2 * p + 1));
          const double angle = static_cast<double>(i) * tiny_.rope.inv_freq[static_cast<std::size_t>(p)];
          const double c = std::cos(angle) * tiny_.rope.attention_factor;
          const double s = std::sin(angle) * tiny_.rope.attention_factor;
          const double first = a;
          a = first * c - b * s;
          b = first * s + b * c;
        }
  }

  Trace attention(const std::string& block, const Batch<double>& in) const {
    Trace t{product(in, block + "attn_q.weight"),
            product(in, block + "attn_k.weight"),
            product(in, block + "attn_v.weight"),
            {}};
    if (shape_.has_qk_norm()) {
      t.q = normalized(t.q, block + "attn_q_norm.weight");
      t.k = normalized(t.k, block + "attn_k_norm.weight");
    }
    rotate(t.q);
    rotate(t.k);
    const Index d = shape_.key_dim, e = shape_.value_dim, group = shape_.query_heads / shape_.kv_heads;
    Batch<double> out = Batch<double>::Zero(in.rows(), shape_.query_heads * e);
    for (Index h = 0; h < shape_.query_heads; ++h)
      for (Index i = 0; i < in.rows(); ++i) {
        std::vector<double> p(static_cast<std::size_t>(i + 1));
        double sum = 0;
        for (Index j = 0; j <= i; ++j) {
          double dot = 0;
          for (Index c = 0; c < d; ++c) dot += t.q(i, h * d + c) * t.k(j, h / group * d + c);
          sum += p[static_cast<std::size_t>(j)] = std::exp(dot / std::sqrt(static_cast<double>(d)));
        }
        for (Index j = 0; j <= i; ++j)
          for (Index c = 0; c < e; ++c)
            out(i, h * e + c) += p[static_cast<std::size_t>(j)] / sum * t.v(j, h / group * e + c);
      }
    t.y = product(out, block + "attn_output.weight");
    return t;
  }

  const Tiny& tiny_;
  const Shape& shape_;
};

// ---- Running the engine ----

/// An engine with its cache, for `context` tokens a sequence.
class Runner {
 public:
  explicit Runner(const Model& model, CacheSettings settings = {}, int threads = 1,
                  const std::vector<LayerTransforms>& transforms = {})
      : threads_(threads), transformer_(model, context, threads_), folded_(engine::fold(model, transforms)) {
    if (settings.capacity == 0) settings.capacity = context;
    cache_ = engine::make_cache(model.config.heads, model.config.layers, transforms, settings);
  }

  KvCache& cache() { return *cache_; }
  CachePath path() { return {cache_.get(), &folded_}; }
  Transformer& transformer() { return transformer_; }
  Threads& threads() { return threads_; }

  /// The logits of all tokens.
  Batch<float> feed(const Tokens& tokens, const Parts& parts, const Transformer::Observer& observer = {},
                    std::span<Probe> probes = {}) {
    return transformer_.logits(transformer_.forward(tokens, parts, path(), observer, probes));
  }
  Batch<float> feed(const Tokens& tokens) { return feed(tokens, {{0, static_cast<Index>(tokens.size())}}); }

 private:
  Threads threads_;
  Transformer transformer_;
  std::vector<engine::FoldedWeights> folded_;
  std::unique_ptr<KvCache> cache_;
};

double difference(const Batch<float>& actual, const Batch<double>& expected) {
  return test::relative_difference(actual, expected);
}
double difference(const Batch<float>& actual, const Batch<float>& expected) {
  return test::relative_difference(actual, expected);
}

/// The engine against the definition; a hundredth more or less in the angles would be seen.
void check_definition(const Tiny& tiny, Index count) {
  Random random(static_cast<std::uint64_t>(count));
  const Tokens tokens = random_tokens(random, count);
  const Model model = load(tiny);
  const Batch<float> logits = Runner(model).feed(tokens);
  CHECK(difference(logits, Definition(tiny).run(tokens).logits) < 1e-5);
  if (count == 1) return;  // position 0 does not turn
  Tiny other = tiny;
  for (double& f : other.rope.inv_freq) f *= 1.01;
  CHECK(difference(logits, Definition(other).run(tokens).logits) > 1e-4);
}

// ---- Models ----

TEST_CASE("qwen3's logits are those of the definition") {
  const Tiny tiny = make_qwen3();
  check_definition(tiny, 20);
  check_definition(tiny, 1);
  check_definition(tiny, 300);  // several blocks of queries, and of pages

  const Model model = load(tiny);
  CHECK(model.config.architecture == "qwen3");
  CHECK(model.config.heads == wushkv::AttentionHeads{6, 2, 16, 16});
  CHECK(model.config.vocabulary == 60);
  CHECK(model.config.context == context);
  CHECK(model.config.rope_base == 1e6);
  CHECK(model.output.size() > 0);
  const engine::Tokenizer tokenizer(model.vocabulary);
  CHECK(tokenizer.encode("CAB") == Tokens{52, 18});
}

TEST_CASE("llama's logits are those of the definition") {
  Tiny tiny = make_llama();
  SUBCASE("plain") { CHECK(load(tiny).output.size() == 0); }
  SUBCASE("with an output matrix") { tiny = make_tiny({.architecture = "llama"}, 3); }
  SUBCASE("values narrower than keys") {
    tiny = make_tiny({.architecture = "llama", .value_dim = 12, .tied = true}, 4);
  }
  SUBCASE("lengths of heads by the width, as many KV heads as query heads") {
    tiny = make_tiny({.architecture = "llama", .kv_heads = 6, .key_dim = 8, .value_dim = 8, .tied = true}, 5);
    for (const char* const key : {"head_count_kv", "key_length", "value_length"})
      tiny.keys.erase("llama.attention." + std::string(key));
  }
  SUBCASE("another base") {
    tiny.set("rope.freq_base", 500.0F);
    tiny.set_rope(500);
  }
  SUBCASE("linear scaling") {
    tiny.set("rope.scaling.type", "linear");
    tiny.set("rope.scaling.factor", 2.0F);
    for (double& f : tiny.rope.inv_freq) f /= 2;
  }
  SUBCASE("linear scaling, as older files have it") {
    tiny.set("rope.scale_linear", 4.0F);
    for (double& f : tiny.rope.inv_freq) f /= 4;
  }
  SUBCASE("divisors") {
    Batch<float>& divisors = tiny.tensors["rope_freqs.weight"];
    divisors.resize(1, 8);
    for (Index i = 0; i < 8; ++i) {
      divisors(0, i) = 1 + 0.75F * static_cast<float>(i);
      tiny.rope.inv_freq[static_cast<std::size_t>(i)] /= static_cast<double>(divisors(0, i));
    }
  }
  SUBCASE("part of a head") {
    tiny.set("rope.dimension_count", 10);
    tiny.rotary_dim = 10;
    tiny.set_rope(10000);
  }
  SUBCASE("YaRN") {
    tiny.set("rope.scaling.type", "yarn");
    tiny.set("rope.scaling.factor", 4.0F);
    tiny.set("rope.scaling.original_context_length", 4096);
    SUBCASE("") {}
    SUBCASE("with every setting") {
      tiny.set("rope.scaling.attn_factor", 1.5F);
      tiny.set("rope.scaling.yarn_beta_fast", 16.0F);
      tiny.set("rope.scaling.yarn_beta_slow", 4.0F);
    }
    wushkv::RopeYarn yarn{.factor = 4, .original_max_position = 4096};
    if (tiny.keys.contains("llama.rope.scaling.attn_factor")) {
      yarn.beta_fast = 16;
      yarn.beta_slow = 4;
      yarn.attention_factor = 1.5 * (0.1 * std::log(4.0) + 1);
    }
    tiny.rope = wushkv::rope_frequencies(16, 10000, yarn);
    CHECK(tiny.rope.attention_factor > 1.1);
  }
  check_definition(tiny, 20);
}

TEST_CASE("logits do not depend on how tokens come") {
  Random random(7);
  const Model model = load(make_qwen3());
  constexpr Index length = 40;
  std::vector<Tokens> texts;
  std::vector<Batch<float>> expected;
  for (Index s = 0; s < 3; ++s) {
    texts.push_back(random_tokens(random, length));
    expected.push_back(Runner(model).feed(texts.back()));
  }

  for (const NewTokens new_tokens : {NewTokens::Exact, NewTokens::Cached})
    for (const int threads : {1, 2, 3}) {
      CAPTURE(static_cast<int>(new_tokens));
      CAPTURE(threads);
      CacheSettings settings;
      settings.new_tokens = new_tokens;
      settings.sequences = 3;
      settings.capacity = length;
      Runner runner(model, settings, threads);
      // In one call. How many threads a product is cut for may change how it rounds.
      CHECK(difference(runner.feed(texts[0]), expected[0]) < 3e-6);
      // Token by token.
      runner.cache().truncate(0, 0);
      Batch<float> one_by_one(length, expected[0].cols());
      for (Index i = 0; i < length; ++i)
        one_by_one.row(i) = runner.feed({texts[0][static_cast<std::size_t>(i)]});
      CHECK(difference(one_by_one, expected[0]) < 1e-5);
      // Some tokens of some sequences a call, in any order; now and then a sequence is cut back.
      for (int step = 0; step < 60; ++step) {
        Tokens tokens;
        Parts parts;
        Batch<float> wanted(0, expected[0].cols());
        const Index first = random.integer(0, 2), count = random.integer(1, 3);
        for (Index i = 0; i < count; ++i) {
          const Index s = (first + 2 * i) % 3;
          const auto at = static_cast<std::size_t>(s);
          if (random.integer(0, 5) == 0 || runner.cache().length(s) == length)
            runner.cache().truncate(s, random.integer(0, std::min(runner.cache().length(s), length - 1)));
          const Index begin = runner.cache().length(s),
                      n = random.integer(1, std::min<Index>(length - begin, 9));
          parts.push_back({s, n});
          tokens.insert(tokens.end(), texts[at].begin() + begin, texts[at].begin() + begin + n);
          wanted.conservativeResize(wanted.rows() + n, Eigen::NoChange);
          wanted.bottomRows(n) = expected[at].middleRows(begin, n);
        }
        const std::vector<Index> before = {runner.cache().length(0), runner.cache().length(1),
                                           runner.cache().length(2)};
        CHECK(difference(runner.feed(tokens, parts), wanted) < 1e-5);
        for (const KvCache::Part& part : parts)
          CHECK(runner.cache().length(part.sequence) ==
                before[static_cast<std::size_t>(part.sequence)] + part.tokens);
      }
    }
}

TEST_CASE("the new tokens' exact keys and values are used if wanted") {
  Random random(8);
  const Model model = load(make_qwen3());
  const Tokens tokens = random_tokens(random, 20);
  const Batch<float> expected = Runner(model).feed(tokens);
  CacheSettings settings;
  settings.quantizer = QuantizerKind::Quest;
  settings.new_tokens = NewTokens::Exact;
  Runner exact(model, settings);
  CHECK(difference(exact.feed(tokens), expected) < 1e-5);  // nothing was cached before them
  settings.new_tokens = NewTokens::Cached;
  Runner cached(model, settings);
  CHECK(difference(cached.feed(tokens), expected) > 1e-2);
  CHECK(difference(exact.feed(tokens), cached.feed(tokens)) > 1e-2);
}

// ---- Transforms ----

/// Random matrices of a condition of at most ten or so: in one block or two.
wushkv::BlockTransform random_transform(Random& random, Index dim, Index count) {
  std::vector<wushkv::Dense<double>> blocks;
  const Index d = dim / count;
  for (Index i = 0; i < count; ++i) {
    wushkv::SquareMatrix<double> t = random.matrix(d) / std::sqrt(static_cast<double>(d));
    t.diagonal().array() += random.pick({-2.5, 2.5});
    blocks.emplace_back(t);
  }
  return wushkv::BlockTransform(std::move(blocks));
}

std::vector<LayerTransforms> random_transforms(Random& random, Index layers,
                                               const wushkv::AttentionHeads& heads) {
  std::vector<LayerTransforms> transforms(static_cast<std::size_t>(layers));
  for (LayerTransforms& layer : transforms)
    for (Index h = 0; h < heads.kv_heads; ++h) {
      layer.keys.emplace_back(random_transform(random, heads.key_dim, 2), random.vector(heads.key_dim));
      layer.values.emplace_back(random_transform(random, heads.value_dim, 1), random.vector(heads.value_dim));
    }
  return transforms;
}

void check_folding(const Tiny& tiny) {
  Random random(9);
  const Model model = load(tiny);
  const Tokens tokens = random_tokens(random, 30);
  const Batch<float> expected = Runner(model).feed(tokens);
  const std::vector<LayerTransforms> transforms =
      random_transforms(random, model.config.layers, model.config.heads);
  const auto folded = engine::fold(model, transforms);
  REQUIRE(folded.size() == model.layers.size());
  for (std::size_t l = 0; l < folded.size(); ++l)
    for (Index g = 0; g < 6; ++g) {
      const Index dim = model.config.heads.value_dim, h = g / 3;
      const auto t = wushkv::to_matrix(transforms[l].values[static_cast<std::size_t>(h)].linear);
      const Batch<double> v = t * test::as_doubles(model.layers[l].v.middleRows(h * dim, dim));
      const Batch<double> o = test::as_doubles(folded[l].o.middleCols(g * dim, dim)) * t;
      CHECK(test::relative_difference(folded[l].v.middleRows(h * dim, dim), v) < 1e-6);
      CHECK(test::relative_difference(o, model.layers[l].o.middleCols(g * dim, dim)) < 1e-5);
    }
  for (const NewTokens new_tokens : {NewTokens::Exact, NewTokens::Cached}) {
    CacheSettings settings;
    settings.new_tokens = new_tokens;
    Runner runner(model, settings, 2, transforms);
    Batch<float> logits(30, expected.cols());
    logits.topRows(20) = runner.feed({tokens.begin(), tokens.begin() + 20});
    logits.bottomRows(10) = runner.feed({tokens.begin() + 20, tokens.end()});
    CHECK(difference(logits, expected) < 1e-4);
    for (Index i = 0; i < logits.rows(); ++i) {
      Index actual = 0, wanted = 0;
      logits.row(i).maxCoeff(&actual);
      expected.row(i).maxCoeff(&wanted);
      CHECK(actual == wanted);
    }
    // The two weights go together.
    runner.cache().truncate(0, 0);
    auto half_folded = folded;
    half_folded[1].o = model.layers[1].o;
    const CachePath path{&runner.cache(), &half_folded};
    CHECK(difference(runner.transformer().logits(runner.transformer().forward(tokens, Parts{{0, 30}}, path)),
                     expected) > 1e-2);
  }
}

TEST_CASE("folding transforms changes nothing") {
  check_folding(make_qwen3());
  check_folding(make_tiny({.architecture = "llama", .value_dim = 12, .tied = true}, 4));
  CHECK(engine::fold(load(make_llama()), {}).empty());
  // Linear transforms need no biases.
  Random random(11);
  const Model model = load(make_qwen3());
  std::vector<LayerTransforms> transforms =
      random_transforms(random, model.config.layers, model.config.heads);
  CHECK(engine::fold(model, transforms)[1].v_bias.size() == 32);
  for (wushkv::HeadTransform& head : transforms[1].values) head.mean.setZero();
  CHECK(engine::fold(model, transforms)[1].v_bias.size() == 0);
  CHECK(engine::fold(model, transforms)[1].o_bias.size() == 0);
}

TEST_CASE("probes and observers see what the cache costs") {
  Random random(10);
  const Tiny tiny = make_qwen3();
  const Model model = load(tiny);
  const Tokens tokens = random_tokens(random, 30);
  const Expected expected = Definition(tiny).run(tokens);
  const auto transforms = random_transforms(random, model.config.layers, model.config.heads);
  CacheSettings quest;
  quest.quantizer = QuantizerKind::Quest;

  Runner exact(model, {}, 2), transformed(model, {}, 1, transforms), quantized(model, quest),
      quantized_transformed(model, quest, 1, transforms);
  std::vector<Probe> probes = {{transformed.path()}, {quantized.path()}, {quantized_transformed.path()}};
  std::vector<Trace> seen(3);
  const auto observe = [&](Index layer, const Batch<float>& q, const Batch<float>& k, const Batch<float>& v) {
    Trace& trace = seen.at(static_cast<std::size_t>(layer));
    for (const auto& [all, rows] :
         {std::pair(&trace.q, &q), std::pair(&trace.k, &k), std::pair(&trace.v, &v)}) {
      all->conservativeResize(all->rows() + rows->rows(), rows->cols());
      all->bottomRows(rows->rows()) = rows->cast<double>();
    }
  };
  Batch<float> logits(30, expected.logits.cols());
  logits.topRows(25) = exact.feed({tokens.begin(), tokens.begin() + 25}, {{0, 25}}, observe, probes);
  logits.bottomRows(5) = exact.feed({tokens.begin() + 25, tokens.end()}, {{0, 5}}, observe, probes);
  CHECK(difference(logits, expected.logits) < 1e-5);  // probes leave the run alone
  for (Runner* const runner : {&exact, &transformed, &quantized, &quantized_transformed})
    CHECK(runner->cache().length(0) == 30);

  Runner again(model, quest);
  for (std::size_t l = 0; l < 3; ++l) {
    CAPTURE(l);
    const Trace& trace = expected.layers[l];
    CHECK(test::relative_difference(seen[l].q, trace.q) < 1e-5);
    CHECK(test::relative_difference(seen[l].k, trace.k) < 1e-5);
    CHECK(test::relative_difference(seen[l].v, trace.v) < 1e-5);
    for (const Probe& probe : probes) {
      REQUIRE(probe.errors.size() == 3);
      CHECK(probe.errors[l].signal == doctest::Approx(trace.y.squaredNorm()).epsilon(1e-5));
    }
    CHECK(probes[0].errors[l].relative() < 1e-10);
    CHECK(probes[1].errors[l].relative() > 1e-4);
    CHECK(probes[2].errors[l].relative() > 1e-4);
    CHECK(probes[2].errors[l].relative() < 1);
    // The layer's own input, exact, through the quantized cache.
    Batch<float> out(30, 96);
    again.cache().attend(static_cast<Index>(l), Parts{{0, 30}}, trace.q.cast<float>(), trace.k.cast<float>(),
                         trace.v.cast<float>(), out, again.threads());
    const Batch<double> y = out.cast<double>() * model.layers[l].o.cast<double>().transpose();
    CHECK(probes[1].errors[l].error == doctest::Approx((y - trace.y).squaredNorm()).epsilon(1e-2));
  }
}

TEST_CASE("each head has transforms of its own") {
  Random random(15);
  const wushkv::AttentionHeads heads{6, 2, 16, 16};
  CacheSettings settings;
  settings.quantizer = QuantizerKind::Quest;
  settings.capacity = 20;
  const auto transforms = random_transforms(random, 2, heads);
  const auto all = engine::make_cache(heads, 2, transforms, settings);
  const auto plain = engine::make_cache(heads, 2, {}, settings);
  const auto q = random.batch<float>(20, 96), k = random.batch<float>(20, 32),
             v = random.batch<float>(20, 32);
  const Parts parts = {{0, 20}};
  Threads threads(1);
  Batch<float> out(20, 96), plain_out(20, 96), head_out(20, 48);
  for (Index layer = 0; layer < 2; ++layer) {
    all->attend(layer, parts, q, k, v, out, threads);
    plain->attend(layer, parts, q, k, v, plain_out, threads);
    CHECK(difference(out, plain_out) > 1e-2);  // the values are quantized the same, the keys are not
    for (Index h = 0; h < 2; ++h) {
      const auto& [keys, values] = transforms[static_cast<std::size_t>(layer)];
      const auto at = static_cast<std::size_t>(h);
      const auto head = engine::make_cache({3, 1, 16, 16}, 1, {{{keys[at]}, {values[at]}}}, settings);
      head->attend(0, parts, q.middleCols(48 * h, 48), k.middleCols(16 * h, 16), v.middleCols(16 * h, 16),
                   head_out, threads);
      CHECK(difference(head_out, Batch<float>(out.middleCols(48 * h, 48))) < 1e-5);
    }
  }
}

// ---- Refusals ----

struct Damage {
  std::string part;  // of the message
  std::function<void(Tiny&)> apply;
};

/// A key set to a value that it must not have.
Damage setting(const char* name, const Value& value) {
  return {name, [name, value](Tiny& tiny) { tiny.set(name, value); }};
}

TEST_CASE("a model that is not what it should be is refused") {
  const auto tensor = [](const char* name, Index rows, Index cols) {
    return [=](Tiny& t) { t.tensors[name] = Batch<float>::Ones(rows, cols); };
  };
  const auto scaling = [](const char* type, float factor) {
    return [=](Tiny& t) {
      t.set("rope.scaling.type", type);
      t.set("rope.scaling.factor", factor);
    };
  };
  const std::vector<Damage> damages = {
      {"general.architecture is \"gemma\", expected",
       [](Tiny& t) { t.keys["general.architecture"] = "gemma"; }},
      {"\"general.architecture\" is missing", [](Tiny& t) { t.keys.erase("general.architecture"); }},
      {"\"qwen3.feed_forward_length\" is missing",
       [](Tiny& t) { t.keys.erase("qwen3.feed_forward_length"); }},
      {"no tensor \"blk.1.ffn_up.weight\"", [](Tiny& t) { t.tensors.erase("blk.1.ffn_up.weight"); }},
      {"no tensor \"blk.2.attn_k_norm.weight\"",
       [](Tiny& t) { t.tensors.erase("blk.2.attn_k_norm.weight"); }},
      {"no tensor \"output_norm.weight\"", [](Tiny& t) { t.tensors.erase("output_norm.weight"); }},
      {"no tensor \"token_embd.weight\"", [](Tiny& t) { t.tensors.erase("token_embd.weight"); }},
      {"tensor blk.0.attn_v.weight is 48 x 32, expected 32 x 48", tensor("blk.0.attn_v.weight", 48, 32)},
      {"tensor blk.0.attn_norm.weight is 1 x 47, expected 1 x 48", tensor("blk.0.attn_norm.weight", 1, 47)},
      {"tensor blk.0.attn_q_norm.weight is 1 x 96", tensor("blk.0.attn_q_norm.weight", 1, 96)},
      {"tensor output.weight is 59 x 48, expected 60 x 48", tensor("output.weight", 59, 48)},
      {"tensor token_embd.weight is 60 x 48, expected 59 x 48",
       [](Tiny& t) { t.tokens.pop_back(), t.merges.pop_back(); }},
      {"tensor \"blk.0.attn_q.bias\" is there", tensor("blk.0.attn_q.bias", 1, 96)},
      {"tensor \"blk.3.attn_norm.weight\" is there", tensor("blk.3.attn_norm.weight", 1, 48)},
      {"tensor rope_freqs.weight has an entry 0", tensor("rope_freqs.weight", 1, 8)},  // one is zeroed below
      {"tensor rope_freqs.weight is 1 x 7, expected 1 x 8", tensor("rope_freqs.weight", 1, 7)},
      {"qwen3.rope.scaling.type is \"longrope\", expected", scaling("longrope", 2)},
      {"qwen3.rope.scaling.factor is 0", scaling("linear", 0)},
      {"beta_fast is 1, expected at least beta_slow (2)",
       [](Tiny& t) {
         t.set("rope.scaling.type", "yarn");
         t.set("rope.scaling.factor", 2.0F);
         t.set("rope.scaling.yarn_beta_fast", 1.0F);
         t.set("rope.scaling.yarn_beta_slow", 2.0F);
       }},
      setting("rope.scale_linear", -1.0F),
      setting("rope.freq_base", 0.0F),
      setting("attention.head_count_kv", 4),
      setting("attention.head_count_kv", 0),
      setting("attention.head_count", 0),
      {"qwen3.attention.head_count is 7, expected a divisor of the embedding length 48",
       [](Tiny& t) {
         t.set("attention.head_count", 7);
         t.keys.erase("qwen3.attention.key_length");
       }},
      setting("rope.dimension_count", 15),
      setting("rope.dimension_count", 18),
      setting("rope.dimension_count", 0),
      {"qwen3.rope.dimension_count is 15", [](Tiny& t) { t.set("attention.key_length", 15); }},
      setting("attention.layer_norm_rms_epsilon", 0.0F),
      setting("attention.layer_norm_rms_epsilon", -1e-5F),
      setting("attention.layer_norm_rms_epsilon", static_cast<float>(test::nan)),
      setting("block_count", 0),
      setting("block_count", std::int64_t{1} << 40),
      setting("block_count", "3"),
      setting("context_length", 0),
      setting("embedding_length", std::uint64_t{1} << 63),
  };
  const Tiny good = make_qwen3();
  REQUIRE(message_of<FileError>([&] { load(good); }).empty());
  for (const Damage& damage : damages) {
    Tiny bad = good;
    damage.apply(bad);
    if (const auto at = bad.tensors.find("rope_freqs.weight"); at != bad.tensors.end()) at->second(0, 5) = 0;
    const std::string message = message_of<FileError>([&] { load(bad); });
    CHECK_MESSAGE(message.find(damage.part) != message.npos, damage.part << " gave '" << message << "'");
  }

  // Qwen3's norms would be left out silently.
  Tiny llama = make_llama();
  llama.tensors["blk.0.attn_q_norm.weight"] = Batch<float>::Ones(1, 16);
  CHECK(message_of<FileError>([&] { load(llama); }).find("\"blk.0.attn_q_norm.weight\" is there") !=
        std::string::npos);
}

TEST_CASE("a call that cannot be done changes nothing") {
  Random random(11);
  const Model model = load(make_llama());
  const Tokens text = random_tokens(random, 12);
  const Batch<float> expected = Runner(model).feed(text);
  CacheSettings settings;
  settings.sequences = 2;
  settings.capacity = 14;
  for (const NewTokens new_tokens : {NewTokens::Exact, NewTokens::Cached}) {
    settings.new_tokens = new_tokens;
    Runner runner(model, settings), small(model, settings);
    runner.feed({text.begin(), text.begin() + 10});
    small.feed(random_tokens(random, 14));
    const auto check = [&](const Tokens& tokens, const Parts& parts, const char* part,
                           std::span<Probe> probes = {}) {
      CHECK_REFUSED(runner.feed(tokens, parts, {}, probes), part);
      CHECK(runner.cache().length(0) == 10);
      CHECK(runner.cache().length(1) == 0);
    };
    check({60}, {{0, 1}}, "token 60 came, expected 0 to 59");
    check({3, -1}, {{1, 2}}, "token -1 came, expected 0 to 59");
    check({1, 2, 3, 4, 5}, {{0, 5}},
          "5 new tokens came for a sequence of 10, expected at least one and at most 14 in all");
    check({1, 2, 3, 4, 5, 6}, {{1, 1}, {0, 5}}, "at most 14 in all");
    check({1, 2, 3}, {{0, 2}}, "3 tokens came, expected the parts' 2");
    check({1, 2, 3}, {{0, 2}, {1, 2}}, "3 tokens came, expected the parts' 4");
    check({1, 2}, {}, "2 tokens came, expected the parts' 0");
    check({}, {}, "0 tokens came");
    check({}, {{0, 0}}, "expected at least one and at most 14");
    check({1}, {{0, 1}, {1, 0}}, "expected at least one and at most 14");
    check({1}, {{0, 2}, {1, -1}}, "expected at least one and at most 14");
    check({1, 2}, {{0, 1}, {0, 1}}, "sequence 0 came twice");
    std::vector<Probe> probes = {{small.path()}};
    check({1}, {{0, 1}}, "1 new tokens came for a sequence of 14", probes);
    Runner shorter(model, settings);
    probes = {{shorter.path()}};
    check({1}, {{0, 1}}, "a probe's cache has 0 tokens, expected 10", probes);
    check({1}, {{0, std::numeric_limits<Index>::max()}}, "at most 14 in all");
    CHECK(small.cache().length(0) == 14);
    check({1}, {{2, 1}}, "sequence 2 asked for, expected 0 to 1");
    check({1}, {{-1, 1}}, "sequence -1 asked for");
    CHECK_REFUSED(runner.cache().truncate(0, 11), "length is 11");
    const Batch<float> rest = runner.feed({text.begin() + 10, text.end()});
    CHECK(difference(rest, Batch<float>(expected.bottomRows(2))) < 1e-5);
  }
}

TEST_CASE("a context or transforms of another model are refused") {
  Random random(12);
  const Model model = load(make_qwen3());
  const auto& [heads, layers] = std::pair(model.config.heads, model.config.layers);
  Threads threads(1);
  CHECK_REFUSED(Transformer(model, context + 1, threads),
                "context is 321 tokens, expected 1 to the model's 320");
  CHECK_REFUSED(Transformer(model, 0, threads), "context is 0 tokens");
  CHECK(Transformer(model, context, threads).context() == context);
  // The context is a bound of its own.
  Transformer transformer(model, 5, threads);
  Runner runner(model);
  CHECK_REFUSED(transformer.forward(random_tokens(random, 6), Parts{{0, 6}}, runner.path()),
                "at most 5 in all");
  CHECK(runner.cache().length(0) == 0);

  const auto check = [&](const std::vector<LayerTransforms>& transforms, const char* part) {
    CHECK_REFUSED(engine::fold(model, transforms), part);
    CHECK_REFUSED(engine::make_cache(model.config.heads, model.config.layers, transforms, {}), part);
  };
  check(random_transforms(random, 2, heads),
        "transforms are of 2 layers of 2 KV heads of 16/16, expected the model's 3 layers of 2 KV heads of "
        "16/16");
  check(random_transforms(random, 4, heads), "transforms are of 4 layers");
  check(random_transforms(random, layers, {3, 3, 16, 16}), "of 3 KV heads of 16/16");
  check(random_transforms(random, layers, {6, 2, 8, 16}), "of 2 KV heads of 8/16");
  check(random_transforms(random, layers, {6, 2, 16, 32}), "of 2 KV heads of 16/32");
  check(std::vector<LayerTransforms>(3), "of 0 KV heads of 0/0");
  std::vector<LayerTransforms> one_layer = random_transforms(random, layers, heads);
  one_layer[2] = random_transforms(random, 1, {6, 2, 8, 8})[0];
  check(one_layer, "of 2 KV heads of 8/8");
}

// ---- Caches ----

TEST_CASE("a cache of no sequences, or of a length that is none, is refused") {
  const Model model = load(make_llama());
  const auto refuse = [&](Index sequences, Index capacity, const char* part) {
    CacheSettings settings;
    settings.sequences = sequences;
    settings.capacity = capacity;
    CHECK_REFUSED(engine::make_cache(model.config.heads, model.config.layers, {}, settings), part);
  };
  refuse(0, 5, "cache of 0 sequences of 5 tokens");
  refuse(-1, 5, "cache of -1 sequences");
  refuse(1, 0, "of 0 tokens asked for");
  refuse(1, std::numeric_limits<Index>::max(), "expected 1 to 2147483648 of each");
}

TEST_CASE("every quantizer makes a cache") {
  CHECK(engine::quantizer_from_string("float") == QuantizerKind::Float);
  CHECK_REFUSED(engine::quantizer_from_string("int4"),
                "'int4' is unknown, expected one of float, bf16, quest");
  Random random(13);
  const Model model = load(make_llama());
  const Tokens tokens = random_tokens(random, 40);
  Runner exact(model);
  for (const std::string name : {"bf16", "quest", "percentile", "minmax", "lloyd", "compact"}) {
    CAPTURE(name);
    CacheSettings settings;
    settings.quantizer = engine::quantizer_from_string(name);
    settings.key_bits = settings.value_bits = 4;
    Runner four(model, settings);
    settings.param_bits = 32;
    settings.key_bits = settings.value_bits = 2;
    settings.group_size = 8;
    Runner two(model, settings);
    settings.sink = 3;
    settings.recent = 320;
    Runner window(model, settings);
    std::vector<Probe> probes = {{window.path()}, {four.path()}, {two.path()}};
    exact.cache().truncate(0, 0);
    exact.feed(tokens, {{0, 40}}, {}, probes);
    for (std::size_t l = 0; l < 3; ++l) {
      CHECK(probes[0].errors[l].relative() < 1e-4);
      CHECK(probes[0].errors[l].relative() > 1e-8);
      CHECK(probes[1].errors[l].relative() < 0.1);
      CHECK(probes[2].errors[l].relative() < 1);
      if (name != "bf16")  // has no bits to choose
        CHECK(probes[2].errors[l].relative() > probes[1].errors[l].relative());
    }
    CHECK(window.cache().usage().window_bytes == window.cache().usage().bf16_bytes);
  }
}

TEST_CASE("a cache counts its bytes") {
  Random random(14);
  const Model model = load(make_llama());
  CacheSettings settings;
  settings.sequences = 2;
  Runner exact(model, settings);
  exact.feed(random_tokens(random, 30), {{1, 20}, {0, 10}});
  engine::CacheUsage usage = exact.cache().usage();
  CHECK(usage.tokens == 30);
  CHECK(usage.bf16_bytes == 30 * 3 * 2 * (16 + 16) * 2);  // tokens, layers, heads, coordinates, bytes
  CHECK(usage.window_bytes == 0);
  CHECK(usage.page_bytes >= 2 * usage.bf16_bytes);
  CHECK(usage.bits_per_element == 32);

  settings.quantizer = QuantizerKind::Quest;
  settings.sink = 4;
  settings.recent = 10;
  Runner quantized(model, settings);
  quantized.feed(random_tokens(random, 40), {{1, 40}});
  usage = quantized.cache().usage();
  CHECK(usage.tokens == 40);
  CHECK(usage.window_bytes == usage.bf16_bytes / 40 * 16);  // the sink, ten, and two short of eight
  CHECK(usage.bits_per_element == doctest::Approx(2 + 16.0 / 16));
  CHECK(usage.bytes() == usage.page_bytes + usage.window_bytes);
}

TEST_CASE("cache settings out of range are refused") {
  const auto message = [](const std::function<void(CacheSettings&)>& apply) {
    CacheSettings settings;
    settings.quantizer = QuantizerKind::Quest;
    settings.capacity = 10;
    apply(settings);
    return message_of([&] { engine::make_cache({6, 2, 16, 16}, 3, {}, settings); });
  };
  CHECK(message([](CacheSettings&) {}).empty());
  CHECK(!message([](CacheSettings& s) { s.key_bits = 0; }).empty());
  CHECK(!message([](CacheSettings& s) { s.value_bits = 17; }).empty());
  CHECK(!message([](CacheSettings& s) { s.group_size = 5; }).empty());
  CHECK(!message([](CacheSettings& s) { s.sink = -1; }).empty());
  CHECK(!message([](CacheSettings& s) { s.recent = -1; }).empty());
  const auto has = [&](const char* part, const std::function<void(CacheSettings&)>& apply) {
    const std::string said = message(apply);
    CHECK_MESSAGE(said.find(part) != said.npos, "expected '", part, "' in '", said, "'");
  };
  has("settings of 2 layers came, expected none or the model's 3", [](CacheSettings& s) {
    s.layers = {{2, 2}, {2, 2}};
  });
  CHECK(!message([](CacheSettings& s) { s.layers = {{2, 2}, {2, 9}, {2, 2}}; }).empty());
  has("not tuned for quest:2, expected those of a 'build' with --tune quest:2",
      [](CacheSettings& s) { s.tuned = true; });
  for (const auto& [feedback, search] : {std::pair(true, false), {false, true}, {true, true}})
    has("expected transforms of statistics", [&, f = feedback, s = search](CacheSettings& settings) {
      settings.rounding = {f, s};
    });
  for (const QuantizerKind kind : {QuantizerKind::MinMax, QuantizerKind::Percentile})
    has("of 8 bits asked for, expected 16 or 32 bits, or the quantizer compact", [kind](CacheSettings& s) {
      s.quantizer = kind;
      s.param_bits = 8;
    });
}

TEST_CASE("bits by layer give, layer by layer, what the same bits give throughout") {
  Random random(16);
  const Model model = load(make_qwen3());
  const Tokens tokens = random_tokens(random, 40);
  const Parts parts = {{1, 25}, {0, 15}};
  auto transforms = random_transforms(random, model.config.layers, model.config.heads);
  for (LayerTransforms& layer : transforms)
    for (auto* const side : {&layer.keys, &layer.values})
      for (wushkv::HeadTransform& head : *side)
        for (const int bits : {2, 3, 4, 8})
          head.tuned["quest:" + std::to_string(bits)] = random.uniform(0.7, 1.3);
  // The first two differ, and have pages of one size.
  const std::vector<wushkv::LayerBits> bits = {{2, 4}, {4, 2}, {3, 8}};
  for (const bool tuned : {false, true}) {
    CAPTURE(tuned);
    CacheSettings settings;
    settings.quantizer = QuantizerKind::Quest;
    settings.sequences = 2;
    settings.capacity = 25;  // no more than the longer one takes
    settings.tuned = tuned;
    std::vector<std::unique_ptr<Runner>> uniform;
    for (const wushkv::LayerBits& layer : bits) {
      settings.key_bits = layer.keys;
      settings.value_bits = layer.values;
      uniform.push_back(std::make_unique<Runner>(model, settings, 1, transforms));
    }
    settings.layers = bits;
    Runner mixed(model, settings, 1, transforms);
    settings = {};
    settings.sequences = 2;
    Runner exact(model, settings);
    std::vector<Probe> probes = {{mixed.path()}};
    for (const auto& runner : uniform) probes.push_back({runner->path()});
    for (int time = 0; time < 2; ++time) {  // again, from pages that were given back
      for (const Index sequence : {0, 1}) {
        exact.cache().truncate(sequence, 0);
        for (Probe& probe : probes) probe.path.cache->truncate(sequence, 0);
      }
      exact.feed(tokens, parts, {}, probes);
    }
    double pages = 0;
    for (std::size_t l = 0; l < bits.size(); ++l) {
      CHECK(probes[0].errors[l].error == probes[l + 1].errors[l].error);
      for (std::size_t other = 0; other < bits.size(); ++other)
        if (other != l) CHECK(probes[0].errors[l].error != probes[other + 1].errors[l].error);
      const engine::CacheUsage usage = uniform[l]->cache().usage();
      CHECK(usage.bits_per_element == doctest::Approx((bits[l].keys + bits[l].values) / 2.0 + 1));
      pages += static_cast<double>(usage.page_bytes) / 3;
    }
    const engine::CacheUsage usage = mixed.cache().usage();
    CHECK(usage.tokens == 40);
    CHECK(usage.bits_per_element == doctest::Approx((6 + 6 + 11) / 6.0 + 1));
    CHECK(static_cast<double>(usage.page_bytes) == doctest::Approx(pages));
  }
}

// ---- Codecs ----

/// Codes and parameters, as bytes.
struct Encoded {
  std::vector<std::byte> codes, params;
  friend bool operator==(const Encoded&, const Encoded&) = default;
};

constexpr Index coded_dim = 16, coded_group = 8;

template <class Rounding, class Quantizer>
Encoded encoded(const Rounding& rounding, const Quantizer& quantizer, const Batch<float>& y, bool batch) {
  const auto size = static_cast<std::size_t>(y.size()), group = std::size_t{coded_group};
  std::vector<wushkv::code_t<Quantizer>> codes(size);
  std::vector<typename Quantizer::Params> params(size / group);
  const std::span<const float> in(y.data(), size);
  const std::span<wushkv::code_t<Quantizer>> out(codes);
  const std::span<typename Quantizer::Params> of_groups(params);
  if constexpr (wushkv::BatchRounding<Rounding, Quantizer>)
    if (batch) rounding.encode_batch(quantizer, in, y.rows(), coded_group, out, of_groups);
  constexpr bool only_single = !wushkv::BatchRounding<Rounding, Quantizer>;
  const std::size_t dim = coded_dim;
  for (std::size_t t = 0; (only_single || !batch) && t < static_cast<std::size_t>(y.rows()); ++t)
    rounding.encode(quantizer, in.subspan(t * dim, dim), coded_group, out.subspan(t * dim, dim),
                    of_groups.subspan(t * dim / group, dim / group));
  const auto bytes = [](auto& values) {
    const auto all = std::as_bytes(std::span(values));
    return std::vector<std::byte>(all.begin(), all.end());
  };
  return {bytes(codes), bytes(params)};
}

template <class Quantizer>
void check_roundings(const Quantizer& quantizer, const std::string& name) {
  CAPTURE(name);
  static_assert(wushkv::ScalableQuantizer<Quantizer>);  // a search would silently be none
  Random random(17);
  const Batch<float> y = 2 * random.batch<float>(7, coded_dim);
  const wushkv::HeadTransform head(
      wushkv::BlockTransform(wushkv::Dense<double>(wushkv::SquareMatrix<double>::Identity(16, 16)), 1),
      wushkv::Vector<double>::Zero(coded_dim), random.definite(coded_dim));
  const auto sensitivity = wushkv::sensitivity_of<float>(head);
  const std::span<const double> factors = name == "quest" || name == "lloyd"
                                              ? std::span<const double>(wushkv::quest_step_factors)
                                              : wushkv::affine_range_factors;
  std::vector<Encoded> all;
  const auto check = [&](engine::RoundingChoice choice, const auto& own) {
    CAPTURE(choice.feedback);
    CAPTURE(choice.search);
    engine::QuantizerSettings settings;
    settings.kind = engine::quantizer_from_string(name);
    settings.rounding = choice;
    const engine::AnyRounding any = engine::rounding_of(settings, &head);
    for (const bool batch : {false, true})
      CHECK((encoded(any, quantizer, y, batch) == encoded(own, quantizer, y, batch)));
    const Encoded single = encoded(any, quantizer, y, false);
    CHECK((single == encoded(any, quantizer, y, true)));
    for (const Encoded& other : all) CHECK((single.codes != other.codes));
    all.push_back(single);
  };
  const wushkv::Feedback<float> feedback(sensitivity);
  const wushkv::SensitiveNearest<float> nearest(sensitivity);
  check({}, wushkv::Nearest());
  check({.search = true}, wushkv::StepSearch(nearest, factors));
  check({.feedback = true}, feedback);
  check({.feedback = true, .search = true}, wushkv::StepSearch(feedback, factors));
}

TEST_CASE("the engine's roundings are the library's own, code for code") {
  engine::QuantizerSettings settings;
  settings.bits = 3;
  check_roundings(engine::quest_quantizer<Eigen::half>(settings), "quest");
  check_roundings(engine::quest_quantizer<wushkv::Log8>(settings), "quest");
  check_roundings(engine::lloyd_quantizer<wushkv::Log8>(settings), "lloyd");
  check_roundings(engine::compact_quantizer(settings), "compact");
  check_roundings(engine::affine_quantizer<float>(settings), "minmax");
  settings.kind = QuantizerKind::Percentile;
  check_roundings(engine::affine_quantizer<Eigen::half>(settings), "percentile");
}

TEST_CASE("codec names with every combination of flags") {
  const std::vector<std::string> flags = {"feedback", "search", "tuned", "signs"};
  for (const std::string quantizer : {"quest", "percentile", "minmax", "lloyd", "compact"})
    for (unsigned chosen = 0; chosen < 16; ++chosen) {
      std::string forward = "oscar+" + quantizer, backward = forward;
      for (std::size_t i = 0; i < 4; ++i) {
        if ((chosen >> i & 1U) != 0) forward += "+" + flags[i];
        if ((chosen >> (3 - i) & 1U) != 0) backward += "+" + flags[3 - i];
      }
      const bool feedback = (chosen & 1U) != 0, search = (chosen & 2U) != 0, tuned = (chosen & 4U) != 0,
                 signs = (chosen & 8U) != 0;
      const bool has_parameter = quantizer == "quest" || quantizer == "percentile";
      for (const std::string& codec : {forward, backward})
        for (const std::string bits : {":3", ":3/2", ":2.25"}) {
          CAPTURE(codec + bits);
          const bool fraction = bits == ":2.25";
          if (tuned && (!has_parameter || fraction || (search && quantizer == "quest"))) {
            CHECK_REFUSED(engine::parse_codec(codec + bits), !has_parameter ? "expected quest or percentile"
                                                             : fraction     ? "expected one width"
                                                                            : "tuned and searches");
            continue;
          }
          const engine::CodecChoice choice = engine::parse_codec(codec + bits);
          CHECK(choice.name == codec + bits);
          CHECK(choice.construction == wushkv::Construction::Oscar);
          CHECK(choice.quantizer == engine::quantizer_from_string(quantizer));
          CHECK(choice.key_bits == (fraction ? 2 : 3));
          CHECK(choice.value_bits == (bits == ":3" ? 3 : 2));
          CHECK(choice.average_bits == (fraction ? 2.25 : 0));
          CHECK(choice.rounding.feedback == feedback);
          CHECK(choice.rounding.search == search);
          CHECK(choice.tuned == tuned);
          CHECK(choice.signs == signs);
          CHECK_FALSE(choice.from_file);
        }
    }
  const engine::CodecChoice best = engine::parse_codec("best+signs:2"),
                            paper = engine::parse_codec("paper:3");
  CHECK(best.construction == wushkv::Construction::Joint);
  CHECK(best.quantizer == QuantizerKind::MinMax);
  CHECK((best.rounding.feedback && best.rounding.search && best.signs && !best.tuned));
  CHECK(paper.construction == wushkv::Construction::Wush);
  CHECK(paper.quantizer == QuantizerKind::Percentile);
  CHECK_FALSE((paper.rounding.feedback || paper.rounding.search || paper.signs || paper.tuned));
  CHECK(engine::parse_codec("file+quest+tuned:2").from_file);
  CHECK(engine::parse_codec("best:8.0").average_bits == 8);
}

TEST_CASE("codec names that are none are refused by what is wrong") {
  const auto refused = [](const std::string& name, const char* part) {
    CAPTURE(name);
    const std::string message = message_of([&] { engine::parse_codec(name); });
    CHECK(message.find("'" + name + "'") != message.npos);
    CHECK(message.find(part) != message.npos);
    CHECK(message.find("expected") != message.npos);
  };
  refused("wush+quest+fed:2", "has 'fed', which it cannot");
  refused("wush+quest+:2", "has '', which it cannot");
  refused("wush+quest+quest:2", "has 'quest', which it cannot");
  for (const std::string flag : {"feedback", "search", "tuned", "signs"}) {
    const std::string part = "has '" + flag + "', which it cannot";
    refused("wush+percentile+" + flag + "+" + flag + ":2", part.c_str());
    refused("none+float+" + flag, part.c_str());
    refused("none+bf16+" + flag, part.c_str());
    if (flag == "feedback" || flag == "search") refused("best+" + flag + ":2", part.c_str());
  }
  refused("best+tuned:2", "is tuned, expected quest or percentile");
  refused("wush+minmax+tuned:2", "is tuned, expected quest or percentile");
  refused("wush+quest+tuned:2.5", "tuned for a fraction of bits, expected one width");
  refused("wush+quest+search+tuned:2", "tuned and searches, expected one of them");
  refused("file+quest+tuned+signs:2", "chooses signs");
  for (const std::string bits : {"",        ":",      ":0",     ":9",   ":0.5",  ":0.99",  ":8.5",    ":9.0",
                                 ":2.25.1", ":nan",   ":inf",   ":1e9", ":1.e9", ":1.e99", ":-1.e99", ":-2.5",
                                 ":.",      ":2.5/3", ":3/2.5", ":2,5", ":+2",   ": 2.5"})
    refused("best" + bits, "has the wrong bits");
  refused("none+bf16:2", "has the wrong bits");
  refused("better:2", "is unknown");
  refused("float:2", "is unknown");
}

}  // namespace
