// SPDX-License-Identifier: Apache-2.0
//
// The engine on a real model, SmolLM2-135M-Instruct, against figures of an independent study (perplexity of
// llama.cpp, and of the study in numpy that also gave tests/data/smollm2-module-errors.json).
#include <Eigen/QR>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/evaluation.hpp"
#include "engine_support.hpp"
#include "temporary_file.hpp"
#include "wushkv/calibrate/layer_transforms.hpp"

namespace {

using engine::CachePath;
using engine::CacheSettings;
using engine::KvCache;
using engine::Token;
using engine::Transformer;
using test::Batch;
using test::Index;

std::string read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// One for all tests: a quarter of a second to read, half a gigabyte.
const engine::Model* smollm() {
  static const std::unique_ptr<engine::Model> model = [] {
    const std::string path = test::model();
    return path.empty() ? nullptr : std::make_unique<engine::Model>(engine::load_model(path));
  }();
  return model.get();
}

/// Empty, with a message, where the study's texts are not.
std::string shared_text(const std::string& name) {
  const std::string path = test::shared("data/" + name);
  if (path.empty()) MESSAGE("left out: no " << name);
  return path;
}

std::vector<Token> tokens_of(const std::string& path) {
  return engine::Tokenizer(smollm()->vocabulary).encode(read(path));
}

CacheSettings of_length(Index length) {
  CacheSettings settings;
  settings.capacity = length;
  return settings;
}

TEST_CASE("perplexity on WikiText-2, unquantized") {
  const std::string text = shared_text("wikitext2-test.txt");
  if (smollm() == nullptr || text.empty()) return;
  engine::Threads threads(2);
  Transformer transformer(*smollm(), 1024, threads);
  const auto cache = make_cache(smollm()->config.heads, smollm()->config.layers, {}, of_length(1024));
  const std::vector<Token> tokens = tokens_of(text);
  const auto chunks = engine::cut_texts(tokens, {}, 1024, 2);
  engine::Likelihood sum = likelihood(transformer, chunks[0], {cache.get(), nullptr}, 0);
  CHECK(sum.late_perplexity() == doctest::Approx(9.20).epsilon(0.002));
  sum += likelihood(transformer, chunks[1], {cache.get(), nullptr}, 0);
  CHECK(std::abs(sum.perplexity() - 20.21) < 0.05);
  CHECK(sum.late_perplexity() == doctest::Approx(15.52).epsilon(0.002));
  CHECK(sum.predictions == 2046);
}

/// `T = A B` of random rotations and scales between 1/3 and 3.
std::vector<wushkv::LayerTransforms> random_transforms(const engine::ModelConfig& config) {
  test::Random random(7);
  const auto head = [&](Index dim) {
    const test::SquareMatrix<double> q = random.matrix(dim).householderQr().householderQ();
    test::SquareMatrix<double> t = q;
    for (Index i = 0; i < dim; ++i) t.row(i) *= std::exp(random.uniform(-1.1, 1.1));
    return wushkv::BlockTransform(
        wushkv::Dense<double>(t * random.matrix(dim).householderQr().householderQ()), 1);
  };
  std::vector<wushkv::LayerTransforms> transforms(static_cast<std::size_t>(config.layers));
  for (wushkv::LayerTransforms& layer : transforms)
    for (Index h = 0; h < config.heads.kv_heads; ++h) {
      layer.keys.push_back(head(config.heads.key_dim));
      layer.values.push_back(head(config.heads.value_dim));
    }
  return transforms;
}

TEST_CASE("folded values and transformed keys change nothing") {
  if (smollm() == nullptr) return;
  constexpr Index length = 1000;
  const engine::ModelConfig& config = smollm()->config;
  engine::Threads threads(2);
  Transformer transformer(*smollm(), length, threads);
  std::vector<Token> tokens = tokens_of(WUSHKV_EXAMPLE_DATA "/english.txt");
  tokens.resize(length);
  const std::vector<wushkv::LayerTransforms> transforms = random_transforms(config);
  const std::vector<engine::FoldedWeights> folded = fold(*smollm(), transforms);
  const auto plain = make_cache(config.heads, config.layers, {}, of_length(length)),
             transformed = make_cache(config.heads, config.layers, transforms, of_length(length));
  const KvCache::Part part{0, length};
  const Batch<float> expected = transformer.forward(tokens, {&part, 1}, CachePath{plain.get(), nullptr});
  const Batch<float> actual = transformer.forward(tokens, {&part, 1}, CachePath{transformed.get(), &folded});
  double worst = 0, largest = 0;
  Index same = 0;
  for (Index row = 0; row < length; row += 100) {
    const Batch<float> a = transformer.logits(actual.middleRows(row, 100)),
                       b = transformer.logits(expected.middleRows(row, 100));
    worst = std::max(worst, static_cast<double>((a - b).cwiseAbs().maxCoeff()));
    largest = std::max(largest, static_cast<double>(b.cwiseAbs().maxCoeff()));
    for (Index i = 0; i < 100; ++i) {
      Index at = 0, expected_at = 0;
      a.row(i).maxCoeff(&at);
      b.row(i).maxCoeff(&expected_at);
      same += at == expected_at ? 1 : 0;
    }
  }
  MESSAGE("logits differ by " << worst << " of " << largest << ", argmax equal on " << same);
  CHECK(worst < 1e-3);
  CHECK(same == length);
}

/// The tokens that `wushkv-lm generate` adds to a text, as it writes them to a JSON file.
std::string generated(const std::string& options) {
  const test::TemporaryFile json("text.json");
  const std::string prompt = read(WUSHKV_EXAMPLE_DATA "/english.txt").substr(0, 400);
  REQUIRE(prompt.find('\'') == std::string::npos);
  const std::string command = std::string("\"") + WUSHKV_LM + "\" generate \"" + test::model() +
                              "\" --tokens 30 --prompt '" + prompt + "' " + options + " --json \"" +
                              json.path().string() + "\" >/dev/null 2>&1";
  REQUIRE(std::system(command.c_str()) == 0);
  const std::string result = read(json.path().string());
  const std::size_t begin = result.find("\"tokens\": [");
  REQUIRE(begin != std::string::npos);
  return result.substr(begin, result.find(']', begin) - begin);
}

TEST_CASE("a prompt in one step, in several, and token by token gives the same text") {
  if (test::model().empty()) return;
  // Within the windows. A token that is quantized may get another code where its transform is a product of
  // one row and not of many, which round unlike each other, and where it is exact for one step and cached for
  // the next.
  for (const std::string codec : {"--codec bf16", "--codec hadamard+quest:2"}) {
    CAPTURE(codec);
    const std::string whole = generated(codec + " --prefill 512");
    CHECK(std::count(whole.begin(), whole.end(), ',') == 29);
    CHECK(generated(codec + " --prefill 7") == whole);
    CHECK(generated(codec + " --prefill 1") == whole);
  }
}

/// The number after `"key":` that follows `"row":` in a JSON text of wushkv-lm's.
double number_in(const std::string& json, const std::string& row, const std::string& key) {
  const std::size_t at = json.find("\"" + row + "\"");
  REQUIRE(at != std::string::npos);
  const std::size_t value = json.find("\"" + key + "\":", at);
  REQUIRE(value != std::string::npos);
  return std::strtod(json.c_str() + value + key.size() + 3, nullptr);
}

/// What `wushkv-lm` writes with `--json`, calibrated on WikiText-2's validation set; empty without model or
/// texts.
class Measured {
 public:
  Measured() {
    text_ = shared_text("wikitext2-test.txt");
    calibration_ = shared_text("wikitext2-valid.txt");
    if (test::model().empty() || text_.empty() || calibration_.empty()) return;
    ready_ = std::system((program("calibrate") + " --text \"" + calibration_ + "\" -o \"" +
                          stats_.path().string() + "\"")
                             .c_str()) == 0;
    CHECK(ready_);
  }
  bool ready() const { return ready_; }
  const std::string& calibration() const { return calibration_; }
  std::string json(const std::string& verb, const std::string& options) const {
    const test::TemporaryFile out("measured.json");
    const std::string command = program(verb) + " --text \"" + text_ + "\" --stats \"" +
                                stats_.path().string() + "\" --params 32 " + options + " --json \"" +
                                out.path().string() + "\"";
    REQUIRE(std::system(command.c_str()) == 0);
    return read(out.path().string());
  }

 private:
  static std::string program(const std::string& verb) {
    return std::string("\"") + WUSHKV_LM + "\" " + verb + " \"" + test::model() + "\"";
  }
  std::string text_, calibration_;
  test::TemporaryFile stats_{"stats.safetensors"};
  bool ready_ = false;
};

const Measured& measured() {
  static const Measured once;
  return once;
}

TEST_CASE("the table at 2 bits is the study's") {
  if (!measured().ready()) return;
  struct Expected {
    const char* row;
    double error, perplexity;
  };
  const Expected study[] = {{"hadamard+quest", 0.2283, 72.78},       {"oscar+quest", 0.2451, 71.16},
                            {"wush+quest", 0.1364, 41.05},           {"hadamard+percentile", 0.3404, 99.42},
                            {"oscar+percentile", 0.3648, 104.94},    {"wush+percentile", 0.1705, 44.06},
                            {"wush-a+quest", 0.1364, 43.31},         {"joint+quest", 0.1266, 37.94},
                            {"joint+minmax+search", 0.0969, 31.55},  {"wush+quest+feedback", 0.0869, 29.40},
                            {"joint+quest+feedback", 0.0688, 27.38}, {"best", 0.0646, 25.75}};
  std::string codecs;
  for (const Expected& e : study) codecs += (codecs.empty() ? "" : ",") + std::string(e.row);
  const std::string result = measured().json("table", "--bits 2 --codecs " + codecs);
  std::map<std::string, double> error, perplexity;
  for (const Expected& e : study) {
    CAPTURE(e.row);
    error[e.row] = number_in(result, e.row, "geometric_mean");
    perplexity[e.row] = number_in(result, e.row, "perplexity");
    CHECK(error[e.row] == doctest::Approx(e.error).epsilon(0.01));
    CHECK(perplexity[e.row] == doctest::Approx(e.perplexity).epsilon(0.08));
  }
  for (const std::string quantizer : {"quest", "percentile"})
    for (const std::string other : {"hadamard+", "oscar+"}) {
      CHECK(error["wush+" + quantizer] < error[other + quantizer]);
      CHECK(perplexity["wush+" + quantizer] < perplexity[other + quantizer]);
    }
  CHECK(perplexity["best"] <= 27.0);
}

TEST_CASE("the default recipe at 3 and 4 bits, and bits that layers share out") {
  if (!measured().ready()) return;
  const std::string three = measured().json("perplexity", "--codec best:3 --errors"),
                    four = measured().json("perplexity", "--codec best:4 --errors");
  CHECK(number_in(three, "codec", "geometric_mean") == doctest::Approx(0.0162).epsilon(0.02));
  CHECK(number_in(three, "codec", "perplexity") <= 22.0);
  CHECK(number_in(four, "codec", "geometric_mean") == doctest::Approx(0.0039).epsilon(0.02));
  CHECK(number_in(four, "codec", "perplexity") <= 20.7);
  const std::string mixed = measured().json(
      "perplexity", "--codec best:2.25 --errors --allot-on \"" + measured().calibration() + "\"");
  // 2.25 bits lose less than a mixture of 2 and 3 bits would, log-linearly; scale and zero are half a bit
  // more each at 32 bits.
  const std::string two = measured().json("perplexity", "--codec best:2 --errors");
  const double interpolated = std::pow(number_in(two, "codec", "geometric_mean"), 0.75) *
                              std::pow(number_in(three, "codec", "geometric_mean"), 0.25);
  CHECK(number_in(mixed, "codec", "geometric_mean") < 0.99 * interpolated);
  CHECK(number_in(mixed, "codec", "bits_per_element") <= 2.25 + 1 + 1e-9);
  // An extra bit belongs to the keys.
  const std::string keys = measured().json("perplexity", "--codec best:3/2 --errors"),
                    values = measured().json("perplexity", "--codec best:2/3 --errors");
  CHECK(number_in(keys, "codec", "geometric_mean") < 0.9 * number_in(values, "codec", "geometric_mean"));
}

}  // namespace
