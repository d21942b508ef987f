// SPDX-License-Identifier: Apache-2.0
//
// Runs wushkv-lm as a user does, on a tiny random model.
#include <doctest/doctest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "gguf_writer.hpp"
#include "temporary_file.hpp"
#include "wushkv/io/statistics.hpp"
#include "wushkv/io/transforms.hpp"

namespace {

namespace fs = std::filesystem;
using wushkv::Batch;
using wushkv::Index;
using wushkv::Vector;
using Strings = std::vector<std::string>;

// ---- Files ------------------------------------------------------------------------------------------------

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

void write(const fs::path& path, std::string_view text) { std::ofstream(path, std::ios::binary) << text; }

/// What the model of a file is like. Its tokens are the 256 bytes and three control tokens, so that a text
/// has as many tokens as bytes.
struct Tiny {
  std::uint32_t layers = 2, width = 32, query_heads = 4, kv_heads = 2, head_dim = 8, ffn = 48, context = 256;
  std::string architecture = "llama", pre = "smollm", type = "gpt2";
  bool chat = true;   // with <|im_start|> and <|im_end|>
  bool mute = false;  // ends every text at once
  float norm = 1;     // every weight of the last norm
  float epsilon = 1e-5F, rope_base = 10000;
  std::uint32_t embedding_type = engine::type_f32;
  std::int32_t bos = -1;            // wanted before a text, if not negative
  std::string left_out{}, extra{};  // tensors
};

/// GPT-2's name of a byte.
std::string byte_name(unsigned byte) {
  const auto printable = [](unsigned b) {
    return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xFF && b != 0xAD);
  };
  unsigned code = byte;
  if (!printable(byte)) {
    code = 0x100;
    for (unsigned b = 0; b < byte; ++b) code += printable(b) ? 0 : 1;
  }
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xC0 | (code >> 6U)), static_cast<char>(0x80 | (code & 0x3FU))};
}

void write_model(const fs::path& path, const Tiny& tiny) {
  test::GgufWriter out;
  const std::string& a = tiny.architecture;
  out.add("general.architecture", a);
  out.add(a + ".block_count", tiny.layers);
  out.add(a + ".embedding_length", tiny.width);
  out.add(a + ".feed_forward_length", tiny.ffn);
  out.add(a + ".context_length", tiny.context);
  out.add(a + ".attention.head_count", tiny.query_heads);
  out.add(a + ".attention.head_count_kv", tiny.kv_heads);
  out.add(a + ".attention.key_length", tiny.head_dim);
  out.add(a + ".attention.value_length", tiny.head_dim);
  out.add(a + ".attention.layer_norm_rms_epsilon", tiny.epsilon);
  out.add(a + ".rope.freq_base", tiny.rope_base);
  Strings tokens;
  for (unsigned byte = 0; byte < 256; ++byte) tokens.push_back(byte_name(byte));
  tokens.push_back("<|endoftext|>");
  if (tiny.chat) tokens.insert(tokens.end(), {"<|im_start|>", "<|im_end|>"});
  std::vector<std::int32_t> types(tokens.size(), 1);
  std::fill(types.begin() + 256, types.end(), 3);
  out.add("tokenizer.ggml.model", tiny.type);
  out.add("tokenizer.ggml.pre", tiny.pre);
  out.add("tokenizer.ggml.tokens", tokens);
  out.add("tokenizer.ggml.token_type", types);
  out.add("tokenizer.ggml.merges", Strings{});
  out.add("tokenizer.ggml.eos_token_id", std::uint32_t{256});
  if (tiny.bos >= 0) {
    out.add("tokenizer.ggml.bos_token_id", tiny.bos);
    out.add("tokenizer.ggml.add_bos_token", true);
  }

  std::mt19937 random(7);
  const auto matrix = [&](std::uint32_t rows, std::uint32_t cols, float scale) {
    Batch<float> m(rows, cols);
    for (float* x = m.data(); x != m.data() + m.size(); ++x)
      *x = scale * (static_cast<float>(random() % 65536) / 32768 - 1);
    return m;
  };
  const auto add = [&](const std::string& name, const auto& tensor) {
    if (name != tiny.left_out) out.add_tensor(name, tensor);
  };
  const auto vocabulary = static_cast<std::uint32_t>(tokens.size());
  Batch<float> embedding = matrix(vocabulary, tiny.width, 1), output = matrix(vocabulary, tiny.width, 0.4F);
  output.bottomRows(vocabulary - 256).setZero();  // never the likeliest
  if (tiny.mute) {
    embedding.col(0).setConstant(100);
    output.setZero();
    output(256, 0) = 100;
  }
  if (tiny.embedding_type == engine::type_f32)
    add("token_embd.weight", embedding);
  else  // of IQ4_NL's size, which is as good as any
    out.add_tensor("token_embd.weight", {tiny.width, vocabulary}, tiny.embedding_type,
                   std::vector<std::byte>(std::size_t{vocabulary} * tiny.width / 32 * 18));
  add("output.weight", output);
  add("output_norm.weight", Vector<float>(Vector<float>::Constant(tiny.width, tiny.norm)));
  const Vector<float> ones = Vector<float>::Ones(tiny.width);
  for (std::uint32_t layer = 0; layer < tiny.layers; ++layer) {
    const std::string block = "blk." + std::to_string(layer) + ".";
    const std::uint32_t queries = tiny.query_heads * tiny.head_dim, keys = tiny.kv_heads * tiny.head_dim;
    add(block + "attn_norm.weight", ones);
    add(block + "ffn_norm.weight", ones);
    add(block + "attn_q.weight", matrix(queries, tiny.width, 0.5F));
    add(block + "attn_k.weight", matrix(keys, tiny.width, 0.5F));
    add(block + "attn_v.weight", matrix(keys, tiny.width, 0.5F));
    add(block + "attn_output.weight", matrix(tiny.width, queries, 0.5F));
    add(block + "ffn_gate.weight", matrix(tiny.ffn, tiny.width, 0.3F));
    add(block + "ffn_up.weight", matrix(tiny.ffn, tiny.width, 0.3F));
    add(block + "ffn_down.weight", matrix(tiny.width, tiny.ffn, 0.3F));
  }
  if (!tiny.extra.empty()) out.add_tensor(tiny.extra, ones);
  out.save(path);
}

// ---- The program ------------------------------------------------------------------------------------------

struct Run {
  int code = -1;  // as the shell has it: more than 128 for a signal
  std::string out, err;
};

/// Runs shell lines in a directory that has models, texts, statistics and transforms by short names.
class Workshop {
 public:
  Workshop() : marker_("marker") {
    write_model(path("m"), {});
    write_model(path("wide"), {.kv_heads = 4});
    write_model(path("deep"), {.layers = 3});
    write_model(path("plain"), {.chat = false});
    write_model(path("mute"), {.mute = true});
    write_model(path("begun"), {.bos = 256});
    write_model(path("marked"), {.bos = 257});
    write(path("text"), english(600));
    write(path("short"), english(40));
    write(path("empty"), "");
    write(path("noise"), std::string(5000, '\x93'));
    fs::create_directory(path("dir"));
    for (const std::string name : {"m", "wide", "deep"}) {
      REQUIRE(
          run("calibrate " + name + " -o " + name + ".stats --text text --sequences 4 --length 64").code ==
          0);
      REQUIRE(run("build " + name + ".stats -o " + name + ".wush --recipe paper").code == 0);
    }
  }

  fs::path path(const std::string& name) const { return marker_.path().parent_path() / name; }

  /// `wushkv-lm line`, by the shell, with `input` on standard input.
  Run run(const std::string& line, std::string_view input = {}) const {
    write(path("stdin"), input);
    // A run that hangs, or works on what it should have refused, ends after seconds.
    const std::string command = "ulimit -t 20; cd '" + path(".").string() + "' && '" +
                                fs::absolute(WUSHKV_LM).string() + "' " + line + " >stdout 2>stderr <stdin";
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 255, read(path("stdout")), read(path("stderr"))};
  }

  static std::string english(std::size_t size) {
    const std::string part =
        "It was a small boat, and \"too old\" for the sea.\n\nHe painted it in 1987; na\xC3\xAFve, said she, "
        "but it's blue.\n\nAt night the lamps along the quay went out, one by one.\n\n";
    std::string text;
    while (text.size() < size) text += part;
    return text.substr(0, size);
  }

 private:
  test::TemporaryFile marker_;
};

const Workshop& workshop() {
  static const Workshop it;
  return it;
}

Run run(const std::string& line, std::string_view input = {}) { return workshop().run(line, input); }
fs::path path(const std::string& name) { return workshop().path(name); }

bool has(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

/// Removes the outputs of refused lines, which are called bad…; names one of them, if there were any.
std::string remove_outputs() {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(path(".")))
    if (entry.path().filename().string().starts_with("bad")) found.push_back(entry.path());
  for (const fs::path& file : found) fs::remove(file);
  return found.empty() ? "" : found.front().filename().string();
}

/// The line is refused: exit code 2, one line on standard error that has all of `says`, and none of the files
/// that it was to write, which are called bad….
void check_refused(const std::string& line, const Strings& says, std::string_view input = {}) {
  INFO("wushkv-lm ", line);
  const Run r = run(line, input);
  INFO("stderr: ", r.err);
  CHECK(r.code == 2);
  CHECK(std::count(r.err.begin(), r.err.end(), '\n') == 1);
  CHECK(r.err.ends_with('\n'));
  for (const std::string& what : says) CHECK_MESSAGE(has(r.err, what), "expected on stderr: ", what);
  for (const char* crash : {"Sanitizer", "terminate", "filesystem error", "std::"})
    CHECK_FALSE(has(r.err, crash));
  CHECK(remove_outputs() == "");
}

/// Whatever is wrong with a file: it is refused, or it does no harm.
void check_survives(const std::string& line) {
  INFO("wushkv-lm ", line);
  const Run r = run(line);
  INFO("stderr: ", r.err);
  CHECK((r.code == 0 || r.code == 2));
  if (r.code == 2) CHECK(std::count(r.err.begin(), r.err.end(), '\n') == 1);
}

Run check_works(const std::string& line, std::string_view input = {}) {
  INFO("wushkv-lm ", line);
  Run r = run(line, input);
  INFO("stderr: ", r.err);
  CHECK(r.code == 0);
  CHECK_FALSE(has(r.out + r.err, "nan"));
  return r;
}

// ---- JSON -------------------------------------------------------------------------------------------------

/// A parsed value.
struct Json {
  char kind = '!';  // { [ " 0 t f n, and ! for none
  double number = std::numeric_limits<double>::quiet_NaN();
  std::string text;
  Strings keys;  // of an object
  std::vector<Json> values;

  const Json& operator[](std::string_view key) const {
    static const Json none;
    const auto found = std::find(keys.begin(), keys.end(), key);
    CHECK_MESSAGE(found != keys.end(), "JSON has no key ", std::string(key));
    return found != keys.end() ? values[static_cast<std::size_t>(found - keys.begin())] : none;
  }
  const Json& at(std::size_t index) const { return values.at(index); }
  std::size_t size() const { return values.size(); }
  bool finite() const { return kind == '0' && std::isfinite(number); }
};

class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : rest_(text) {}
  Json all() {
    Json result = value();
    space();
    if (!rest_.empty()) fail();
    return bad_ ? Json{} : result;
  }

 private:
  void fail() {
    bad_ = true;
    rest_ = {};
  }
  void space() { rest_.remove_prefix(std::min(rest_.find_first_not_of(" \n\r\t"), rest_.size())); }
  bool take(std::string_view what) {
    space();
    if (!rest_.starts_with(what)) return false;
    rest_.remove_prefix(what.size());
    return true;
  }
  void need(std::string_view what) {
    if (!take(what)) fail();
  }

  Json value() {
    Json v;
    space();
    if (rest_.empty()) return fail(), v;
    v.kind = rest_.front();
    if (take("{"))
      list(v, "}", true);
    else if (take("["))
      list(v, "]", false);
    else if (v.kind == '"')
      v.text = string();
    else if (!take("true") && !take("false") && !take("null"))
      number(v);
    return v;
  }
  void list(Json& v, std::string_view close, bool with_keys) {
    if (take(close)) return;
    do {
      if (with_keys) {
        space();
        v.keys.push_back(string());
        need(":");
      }
      v.values.push_back(value());
    } while (!bad_ && take(","));
    need(close);
  }
  void number(Json& v) {
    const std::size_t size = std::min(rest_.find_first_not_of("+-.0123456789eE"), rest_.size());
    const std::string digits(rest_.substr(0, size));
    char* end = nullptr;
    v.kind = '0';
    v.number = std::strtod(digits.c_str(), &end);
    if (digits.empty() || *end != '\0' || digits.front() == '+' || digits.front() == '.') fail();
    rest_.remove_prefix(std::min(size, rest_.size()));
  }
  std::string string() {
    std::string out;
    need("\"");
    while (!rest_.empty() && rest_.front() != '"') {
      const char c = rest_.front();
      if (static_cast<unsigned char>(c) < 0x20) return fail(), out;
      if (c == '\\') {
        if (rest_.size() < 2) return fail(), out;
        const bool code = rest_[1] == 'u';
        if (!has("\"\\/bfnrtu", rest_.substr(1, 1)) || (code && rest_.size() < 6)) return fail(), out;
        if (code)
          out += static_cast<char>(std::stoi(std::string(rest_.substr(2, 4)), nullptr, 16));
        else
          out += rest_[1];
        rest_.remove_prefix(code ? 6 : 2);
        continue;
      }
      out += c;
      rest_.remove_prefix(1);
    }
    need("\"");
    return out;
  }

  std::string_view rest_;
  bool bad_ = false;
};

/// No more than enough to tell bytes that are no text: overlong forms and surrogates pass.
bool is_utf8(std::string_view text) {
  for (std::size_t i = 0, more = 0; i < text.size(); i += more + 1) {
    const auto c = static_cast<unsigned char>(text[i]);
    if ((c >= 0x80 && c < 0xC2) || c > 0xF4) return false;
    more = c < 0x80 ? 0 : c < 0xE0 ? 1 : c < 0xF0 ? 2 : 3;
    for (std::size_t k = 1; k <= more; ++k)
      if (i + k >= text.size() || (static_cast<unsigned char>(text[i + k]) & 0xC0U) != 0x80) return false;
  }
  return true;
}

/// Runs the line with --json and reads what it wrote.
Json json_of(const std::string& line, std::string_view input = {}) {
  INFO("wushkv-lm ", line);
  fs::remove(path("json"));
  check_works(line + " --json json", input);
  const std::string text = read(path("json"));
  Json json = JsonReader(text).all();
  CHECK_MESSAGE(json.kind == '{', "no well-formed JSON: ", text);
  CHECK_MESSAGE(is_utf8(text), "JSON that is not UTF-8");
  return json;
}

double perplexity_of(const std::string& options) {
  const Json json = json_of("perplexity m --text text --context 96 --chunks 2 " + options);
  CHECK(json["perplexity"].finite());
  return json["perplexity"].number;
}

/// Token numbers of every turn.
std::vector<std::vector<double>> tokens_of(const Json& json) {
  std::vector<std::vector<double>> turns;
  for (const Json& turn : json["turns"].values) {
    turns.emplace_back();
    for (const Json& token : turn["tokens"].values) turns.back().push_back(token.number);
  }
  return turns;
}

// ---- Refused ----------------------------------------------------------------------------------------------

struct Refusal {
  const char* line;
  Strings says;
};

void check_all(const std::vector<Refusal>& refusals) {
  for (const Refusal& r : refusals) check_refused(r.line, r.says);
}

struct Verb {
  const char* name;
  const char* line;  // works, but for what is added; outputs are called bad…
  Strings integers, reals, options;
};

const std::vector<Verb> verbs = {
    {"calibrate",
     "calibrate m -o bad.stats --sequences 1 --length 8",
     {"sequences", "length", "seed", "threads"},
     {},
     {"output", "text", "self", "sequences", "length", "seed", "save-samples", "merge", "threads", "json"}},
    {"build",
     "build m.stats -o bad.wush",
     {"group", "seed", "threads"},
     {"damping", "exponent"},
     {"output", "recipe", "transform", "group", "damping", "exponent", "seed", "tune", "threads", "json"}},
    {"perplexity",
     "perplexity m --text text --context 32 --chunks 1 --quantizer quest",
     {"bits-k", "bits-v", "context", "chunks", "batch", "group", "params", "sink", "recent", "threads"},
     {},
     {"text", "quantizer", "bits-k", "bits-v", "codec", "context", "chunks", "batch", "exact-prefill",
      "errors", "allot-on", "transforms", "stats", "group", "params", "sink", "recent", "threads", "json"}},
    {"table",
     "table m --text text --stats m.stats --context 32 --chunks 1 --length 32 --bits 2",
     {"context", "chunks", "length", "sequences", "group", "params", "sink", "recent", "threads", "bits"},
     {},
     {"text", "calibrate-on", "sequences", "length", "codecs", "bits", "context", "chunks", "markdown",
      "stats", "group", "params", "sink", "recent", "threads", "json"}},
    {"generate",
     "generate m --prompt hi --tokens 2",
     {"tokens", "context", "top-k", "seed", "prefill", "group", "params", "sink", "recent", "threads"},
     {"temperature", "top-p", "min-p"},
     {"prompt",  "chat",           "interactive", "system", "codec", "tokens",
      "context", "temperature",    "top-k",       "top-p",  "min-p", "seed",
      "prefill", "cached-prefill", "transforms",  "stats",  "group", "params",
      "sink",    "recent",         "threads",     "json"}},
    {"needle",
     "needle m --text text --codecs bf16 --lengths 220 --depths 50 --trials 1",
     {"trials", "seed", "prefill", "group", "params", "sink", "recent", "threads", "lengths", "depths"},
     {},
     {"text", "codecs", "lengths", "depths", "trials", "seed", "prefill", "cached-prefill", "svg",
      "transforms", "stats", "group", "params", "sink", "recent", "threads", "json"}},
};

TEST_CASE("what the verbs' lines begin with works") {
  for (const Verb& verb : verbs) check_works(verb.line);
  CHECK(remove_outputs() != "");
}

TEST_CASE("words that are no command line are refused") {
  const Run none = run("");
  CHECK(none.code == 2);
  CHECK(none.out.empty());
  CHECK(none.err.starts_with("usage: wushkv-lm VERB"));
  check_all({
      {"perplex", {"'perplex'", "--help"}},
      {"''", {"verb ''", "--help"}},
      {"--perplexity", {"--perplexity"}},
  });
  for (const Verb& verb : verbs) {
    const std::string name = verb.name, line = verb.line, positional = name == "build" ? "STATS" : "MODEL";
    check_refused(name, {"wushkv-lm " + name, positional, "missing"});
    check_refused(line + " --colour", {name, "--colour", "unknown", "--help"});
    check_refused(line + " --", {name, "--", "unknown"});
    check_refused(line + " -x", {name, "-x", "unknown"});
    check_refused(line + " --json", {name, "--json", "without a value", "FILE"});
    check_refused(line + " extra", {name, "'extra'", "no more"});
    check_refused(line + " ''", {name, "''", "no more"});
  }
}

TEST_CASE("numbers that are none, and numbers out of range, are refused") {
  for (const Verb& verb : verbs) {
    const auto check = [&](const std::string& option, const std::string& value, const Strings& says) {
      Strings all = says;
      all.insert(all.end(), {"wushkv-lm " + std::string(verb.name), "--" + option});
      check_refused(std::string(verb.line) + " --" + option + " '" + value + "'", all);
    };
    for (const std::string& option : verb.integers)
      for (const std::string value : {"x", "-1", "1.5", "99999999999999999999", " 3", "0x10", "3,,"})
        if (option != "depths" || value != "1.5") check(option, value, {"expected"});
    for (const std::string& option : verb.reals)
      for (const std::string value : {"x", "-1", "nan", "inf", "1e9", "", "0.5x"})
        check(option, value, {"'" + value + "'", "expected a number from 0"});
  }
  check_all({
      {"calibrate m -o bad.stats --length 0", {"--length is '0'", "from 1"}},
      {"calibrate m -o bad.stats --sequences 0", {"--sequences is '0'", "from 1"}},
      {"calibrate m -o bad.stats --text text --sequences 1 --length 8 --seed x", {"--seed is 'x'"}},
      {"build m.stats -o bad.wush --exponent 1.01", {"--exponent is '1.01'", "from 0 to 1"}},
      {"perplexity m --text text --context 1", {"--context is '1'", "from "}},
      {"perplexity m --text text --context 32 --quantizer quest --bits-k 9", {"--bits-k is '9'", "1 to 8"}},
      {"perplexity m --text text --context 32 --quantizer quest --bits-v 0", {"--bits-v is '0'", "1 to 8"}},
      {"perplexity m --text text --context 32 --threads 1025", {"--threads is '1025'", "0 to 1024"}},
      {"perplexity m --text text --context 32 --params 24", {"--params", "16 or 32"}},
      {"table m --text text --context 32 --length 32 --bits 9", {"--bits has '9'", "1 to 8"}},
      {"table m --text text --context 32 --length 32 --bits 2,2", {"--bits has '2'", "different"}},
      {"generate m --prompt hi --tokens 0", {"--tokens is '0'", "from 1"}},
      {"generate m --prompt hi --prefill 0", {"--prefill is '0'", "from 1"}},
      {"generate m --prompt hi --top-p 1.5", {"--top-p is '1.5'", "0 to 1"}},
      {"needle m --codecs bf16 --lengths 0", {"--lengths has '0'", "from 1"}},
      {"needle m --codecs bf16 --lengths 220 --depths 101", {"--depths has '101'", "0 to 100"}},
      {"needle m --codecs bf16 --lengths 220 --trials 0", {"--trials is '0'", "from 1"}},
  });
}

TEST_CASE("lists with empty parts are refused") {
  for (const std::string list : {"", ",", "2,", ",2", "2,,3"}) {
    check_refused("table m --text text --stats m.stats --context 32 --length 32 --bits '" + list + "'",
                  {"empty part"});
    for (const std::string option : {"codecs", "lengths", "depths"})
      check_refused("needle m --codecs bf16 --lengths 220 --" + option + " '" + list + "'", {"empty part"});
  }
}

TEST_CASE("options that do not go together, or lack something, are refused") {
  check_all({
      {"calibrate m", {"-o FILE", "missing"}},
      {"calibrate m -o bad.stats --text text --self", {"--text", "--self"}},
      {"build m.stats", {"-o FILE", "missing"}},
      {"perplexity m --codec float --quantizer quest", {"--codec", "--quantizer"}},
      {"perplexity m --codec float --bits-k 2", {"--codec", "--bits-k"}},
      {"perplexity m --codec float --bits-v 2", {"--codec", "--bits-v"}},
      {"generate m", {"--prompt", "missing"}},
      {"generate m --chat", {"--prompt", "missing"}},
      {"generate m --prompt ''", {"--prompt", "empty"}},
      {"generate plain --prompt hi --chat", {"<|im_start|>"}},
      {"generate plain --interactive", {"<|im_start|>"}},
  });
}

TEST_CASE("codecs that are none, or lack their files, are refused") {
  const Strings names = {"wush",
                         "wush+quest",
                         "wush+quest:9",
                         "wush+quest:0",
                         "wush+foo:2",
                         "foo+quest:2",
                         "wush+quest:2/",
                         "+quest:2",
                         "wush+:2",
                         "wush+quest:",
                         "wush+quest:/2",
                         "wush+quest:2/9",
                         "wush+quest:x",
                         "wush+quest:2:2",
                         "wush+quest:2/2/2",
                         "wush+quest: 2",
                         "quest:2",
                         "wush:2",
                         "+:",
                         "Wush+quest:2",
                         "wush+quest+x:2",
                         "FLOAT",
                         "bf16 ",
                         "wush+quest:-2",
                         "file+:2"};
  for (const std::string& name : names) {
    const Strings says = {"'", "expected"};
    check_refused("generate m --prompt hi --stats m.stats --codec '" + name + "'", says);
    check_refused("perplexity m --text text --context 32 --stats m.stats --codec '" + name + "'", says);
    check_refused("needle m --text text --lengths 220 --stats m.stats --codecs 'bf16," + name + "'", says);
  }
  check_refused("generate m --prompt hi --codec ''", {"codec ''", "expected"});
  for (const std::string line :
       {"generate m --prompt hi --codec ", "perplexity m --text text --context 32 --codec ",
        "needle m --text text --lengths 220 --codecs bf16,"}) {
    for (const std::string name : {"wush", "pca", "rotate-kv", "oscar", "oscar-per-head", "wush-a", "joint"})
      check_refused(line + name + "+quest:2", {name + "+quest:2", "--stats"});
    check_refused(line + "file+quest:2", {"file+quest:2", "--transforms"});
    check_refused(line + "file+quest:2 --stats m.stats", {"file+quest:2", "--transforms"});
  }
  check_all({
      {"build m.stats -o bad.wush --transform foo", {"'foo'", "rotate-kv"}},
      {"build m.stats -o bad.wush --transform ''", {"''", "rotate-kv"}},
      {"perplexity m --text text --context 32 --quantizer foo", {"'foo'", "percentile"}},
      {"perplexity m --text text --context 32 --quantizer wush+quest:2", {"wush+quest:2", "expected"}},
  });
}

TEST_CASE("texts that are not there, empty or too short are refused") {
  const Strings short_says = {"40 tokens", "expected"};
  for (const std::string line :
       {"calibrate m -o bad.stats --length 64 --sequences 1 --text ",
        "perplexity m --context 64 --chunks 1 --text ",
        "table m --stats m.stats --context 64 --length 64 --bits 2 --text ",
        "table m --text text --context 64 --chunks 1 --length 64 --bits 2 --calibrate-on "}) {
    check_refused(line + "empty", {"empty"});
    check_refused(line + "none.txt", {"none.txt", "cannot be read"});
    check_refused(line + "dir", {"dir", "cannot be read"});
    check_refused(line + "short", short_says);
    check_refused(line + "short --length 64 --sequences 0", {"--"});
  }
  check_all({
      {"needle m --codecs bf16 --lengths 220 --text empty", {"empty"}},
      {"needle m --codecs bf16 --lengths 220 --text none.txt", {"none.txt", "cannot be read"}},
      {"perplexity m --text short --context 64 --chunks 0", short_says},
      {"perplexity m --text short --context 10 --chunks 5", short_says},
      {"calibrate m -o bad.stats --text short --sequences 5 --length 10", short_says},
      {"needle m --text text --codecs bf16 --lengths 20", {"--lengths has 20", "at least"}},
      {"needle m --text text --codecs bf16 --lengths 220,20", {"--lengths has 20", "at least"}},
  });
}

TEST_CASE("what is longer than the model's context is refused") {
  const std::string long_prompt = "\"$(cat text)\"";
  check_all({
      {"calibrate m -o bad.stats --length 257 --sequences 1", {"257", "256"}},
      {"calibrate m -o bad.stats --text text --length 257 --sequences 1", {"257", "256"}},
      {"perplexity m --text text --context 257", {"257", "256"}},
      {"table m --text text --stats m.stats --bits 2 --length 8 --context 257", {"257", "256"}},
      {"table m --text text --bits 2 --context 32 --length 257", {"257", "256"}},
      {"generate m --prompt hi --context 257", {"257", "256"}},
      {"needle m --codecs bf16 --lengths 220,257", {"257", "256"}},
      {"generate m --prompt hello --context 4", {"5 tokens", "4"}},
      {"generate m --prompt hello --chat --context 16", {"16"}},
  });
  check_refused("generate m --prompt " + long_prompt, {"600 tokens", "256"});
  check_refused("generate m --prompt hi --tokens 3 --prompt " + long_prompt, {"tokens", "256"});
}

TEST_CASE("groups that do not divide the head are refused") {
  check_all({
      {"build m.stats -o bad.wush --group 3", {"3", "8"}},
      {"build m.stats -o bad.wush --group 16", {"16", "8"}},
      {"perplexity m --text text --context 32 --quantizer quest --group 3", {"3", "8"}},
      {"perplexity m --text text --context 32 --stats m.stats --codec wush+quest:2 --group 16", {"16", "8"}},
      {"table m --text text --stats m.stats --context 32 --length 32 --bits 2 --group 3", {"3", "8"}},
      {"generate m --prompt hi --codec none+quest:2 --group 3", {"3", "8"}},
      {"needle m --text text --codecs bf16,none+quest:2 --lengths 220 --group 3", {"3", "8"}},
  });
}

TEST_CASE("what one of several codecs or lengths lacks is said before the work on the first") {
  const std::string line = "needle m --text text --trials 1048576 --codecs bf16,";
  check_refused(line + "wush+quest:2 --lengths 220", {"wush+quest:2", "--stats"});
  check_refused(line + "file+quest:2 --lengths 220", {"file+quest:2", "--transforms"});
  check_refused(line + "none+quest:2 --lengths 220 --group 3", {"3", "8"});
  check_refused(line + "float --lengths 220,20", {"--lengths has 20"});
  check_refused(line + "wush+quest:2 --lengths 220 --stats wide.stats", {"statistics", "4 KV heads"});
}

/// A line for each verb that reads a model, which is called X in it.
const Strings model_lines = {
    "calibrate X -o bad.stats --sequences 1 --length 8 --json bad.json",
    "perplexity X --text text --context 32 --chunks 1 --json bad.json",
    "table X --text text --stats m.stats --context 32 --length 32 --bits 2 --markdown bad.md --json bad.json",
    "generate X --prompt hi --tokens 1 --json bad.json",
    "needle X --text text --codecs bf16 --lengths 220 --svg bad.svg --json bad.json",
};

std::string put(std::string line, const std::string& name) { return line.replace(line.find('X'), 1, name); }

TEST_CASE("models that are none are refused") {
  for (const std::string& line : model_lines) {
    check_refused(put(line, "none.gguf"), {"none.gguf", "cannot be opened"});
    check_refused(put(line, "''"), {"cannot be opened"});
    check_refused(put(line, "empty"), {"empty"});
    check_refused(put(line, "dir"), {"dir", "not a regular file"});
    check_refused(put(line, "text"), {"text", "GGUF"});
    check_refused(put(line, "noise"), {"noise", "GGUF"});
    check_refused(put(line, "m.stats"), {"m.stats", "GGUF"});
  }
}

TEST_CASE("models with wrong fields are refused by the field") {
  struct Case {
    Tiny tiny;
    Strings says;
  };
  const std::vector<Case> cases = {
      {{.architecture = "gemma3"}, {"\"gemma3\"", "llama or qwen3"}},
      {{.architecture = "qwen3"}, {"attn_q_norm"}},
      {{.pre = "tekken"}, {"'tekken'", "'smollm'"}},
      {{.type = "llama"}, {"'llama'", "'gpt2'"}},
      {{.embedding_type = 20}, {"token_embd.weight", "IQ4_NL"}},
      {{.embedding_type = 99}, {"token_embd.weight", "99"}},
      {{.left_out = "blk.1.ffn_up.weight"}, {"blk.1.ffn_up.weight"}},
      {{.left_out = "token_embd.weight"}, {"token_embd.weight"}},
      {{.extra = "blk.0.attn_q.bias"}, {"blk.0.attn_q.bias"}},
      {{.layers = 0}, {"block_count", "0"}},
      {{.query_heads = 4, .kv_heads = 3}, {"head_count_kv", "3", "divisor"}},
      {{.query_heads = 2, .kv_heads = 4}, {"head_count_kv", "4", "divisor"}},
      {{.head_dim = 7}, {"rope.dimension_count", "7", "even"}},
      {{.context = 0}, {"context_length", "0"}},
      {{.epsilon = 0}, {"epsilon", "0"}},
      {{.epsilon = std::numeric_limits<float>::quiet_NaN()}, {"epsilon"}},
      {{.rope_base = -1}, {"freq_base", "-1"}},
  };
  for (const Case& c : cases) {
    write_model(path("wrong"), c.tiny);
    check_refused(put(model_lines[3], "wrong"), c.says);
  }
  // Numbers that only the file's own keys contradict.
  std::string file = read(path("m"));
  const auto patch = [&](const std::string& key, std::uint32_t value, const Strings& says) {
    std::string bytes = file;
    const std::size_t at = bytes.find(key) + key.size() + 4;
    for (std::size_t i = 0; i < 4; ++i) bytes[at + i] = static_cast<char>(value >> (8 * i));
    write(path("wrong"), bytes);
    check_refused(put(model_lines[3], "wrong"), says);
  };
  patch("llama.embedding_length", 48, {"token_embd.weight", "259 x 32", "48"});
  patch("llama.feed_forward_length", 49, {"ffn_", "48", "49"});
  patch("llama.block_count", 3, {"blk.2."});
  patch("llama.block_count", 1, {"blk.1."});
  patch("llama.block_count", 0xFFFFFFFF, {"block_count", "4294967295"});
  patch("llama.attention.head_count", 8, {"attn_q.weight"});
  patch("llama.attention.key_length", 16, {"attn_q.weight"});
  patch("eos_token_id", 259, {"eos", "259"});
}

TEST_CASE("models cut or damaged anywhere do no harm") {
  const std::string file = read(path("m"));
  const std::size_t header = file.find("blk.1.ffn_down.weight") + 64;
  for (std::size_t size = 1; size < file.size(); size += size < header ? 149 : 9001) {
    write(path("wrong"), file.substr(0, size));
    check_refused(put(model_lines[3], "wrong"), {"wrong"});
  }
  write(path("wrong"), file.substr(0, file.size() - 1));
  check_refused(put(model_lines[3], "wrong"), {"wrong"});
  std::mt19937 random(3);
  for (int i = 0; i < 150; ++i) {
    std::string bytes = file;
    for (std::uint32_t n = 1 + random() % 2; n > 0; --n)
      bytes[random() % header] = static_cast<char>(random() % 3 == 0 ? 0xFF : random());
    write(path("wrong"), bytes);
    check_survives("generate wrong --prompt hi --tokens 2 --context 8 --threads 1");
  }
}

TEST_CASE("models whose weights are no numbers do no harm") {
  for (const float norm :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 1e38F}) {
    write_model(path("wrong"), {.norm = norm});
    for (const std::string& line : model_lines) {
      check_survives(put(line, "wrong"));
      remove_outputs();
    }
    check_survives("generate wrong --prompt hi --tokens 2 --temperature 1");
    check_survives("perplexity wrong --text text --context 32 --chunks 1 --quantizer quest --errors");
  }
}

TEST_CASE("transforms and statistics of another model are refused") {
  const Strings of_wide = {"4 KV heads", "2 layers of 2 KV heads of 8/8"},
                of_deep = {"3 layers", "2 layers of 2 KV heads of 8/8"},
                stats_wide = {"statistics", "4 KV heads", "2 KV heads of 8/8"},
                stats_deep = {"statistics", "3 layers", "model's 2"};
  for (const std::string line :
       {"perplexity m --text text --context 32 --chunks 1", "generate m --prompt hi --codec file+quest:2",
        "needle m --text text --codecs bf16,file+quest:2 --lengths 220"}) {
    check_refused(line + " --transforms wide.wush", of_wide);
    check_refused(line + " --transforms deep.wush", of_deep);
  }
  for (const std::string line : {"perplexity m --text text --context 32 --chunks 1 --codec wush+quest:2",
                                 "table m --text text --context 32 --chunks 1 --length 32 --bits 2",
                                 "generate m --prompt hi --codec wush+quest:2",
                                 "needle m --text text --codecs bf16,wush+quest:2 --lengths 220"}) {
    check_refused(line + " --stats wide.stats", stats_wide);
    check_refused(line + " --stats deep.stats", stats_deep);
  }
  const std::string calibrate =
      "calibrate m -o bad.stats --text text --sequences 1 --length 8 --merge m.stats --merge ";
  check_refused(calibrate + "wide.stats", {"4", "2"});
  check_refused(calibrate + "deep.stats", {"deep.stats", "3 layers", "2"});
}

TEST_CASE("transforms and statistics files that are none are refused") {
  struct Case {
    std::string line, good, other;
  };
  const std::vector<Case> cases = {
      {"perplexity m --text text --context 32 --chunks 1 --transforms ", "m.wush", "m.stats"},
      {"generate m --prompt hi --codec file+quest:2 --transforms ", "m.wush", "m.stats"},
      {"generate m --prompt hi --codec wush+quest:2 --stats ", "m.stats", "m.wush"},
      {"build -o bad.wush --json bad.json ", "m.stats", "m.wush"},
      {"calibrate m -o bad.stats --sequences 1 --length 8 --merge ", "m.stats", "m.wush"},
  };
  for (const Case& c : cases) {
    for (const std::string name : {"none", "empty", "text", "noise", "m", "dir"})
      check_refused(c.line + name, {});
    check_refused(c.line + "none", {"none"});
    check_refused(c.line + c.other, {"format"});
    const std::string file = read(path(c.good));
    std::mt19937 random(5);
    for (std::size_t i = 0; i < 12; ++i) {
      write(path("wrong"), file.substr(0, random() % (i % 2 == 0 ? 1500 : file.size())));
      check_refused(c.line + "wrong", {});
      std::string bytes = file;
      for (int n = 0; n < 3; ++n)
        bytes[random() % (i % 2 == 0 ? 1500 : file.size())] = static_cast<char>(random());
      write(path("wrong"), bytes);
      check_survives(c.line + "wrong");
      remove_outputs();
    }
  }
}

TEST_CASE("outputs that cannot be written are refused before the work") {
  // Before the work: the input is not even there.
  for (const std::string output : {"none/bad", "dir", "text/bad"}) {
    const Strings says = {output, "cannot be opened for writing"};
    for (const std::string line :
         {"calibrate none.gguf -o ", "calibrate none.gguf --output ",
          "calibrate none.gguf -o bad.stats --json ", "calibrate none.gguf -o bad.stats --save-samples ",
          "build none.stats -o ", "build none.stats -o bad.wush --json ", "perplexity none.gguf --json ",
          "table none.gguf --json ", "table none.gguf --json bad.json --markdown ",
          "generate none.gguf --prompt hi --json ", "needle none.gguf --json ",
          "needle none.gguf --json bad.json --svg "})
      check_refused(line + output, says);
  }
  // And what only the writing shows.
  if (fs::exists("/dev/full")) {
    check_refused("build m.stats -o full.wush --json /dev/full", {"/dev/full", "cannot be written"});
    check_refused("perplexity m --text text --context 32 --json /dev/full",
                  {"/dev/full", "cannot be written"});
  }
  // A file that was there stays as it was.
  write(path("kept"), "kept");
  for (const std::string line : {"calibrate none.gguf -o kept", "build none.stats -o kept",
                                 "perplexity none.gguf --json kept", "table none.gguf --markdown kept",
                                 "needle none.gguf --svg kept", "generate none.gguf --prompt hi --json kept"})
    check_refused(line, {"none."});
  CHECK(read(path("kept")) == "kept");
}

// ---- Help -------------------------------------------------------------------------------------------------

TEST_CASE("help is on standard output and lists every option") {
  for (const char* line : {"--help", "-h"}) {
    const Run r = check_works(line);
    CHECK(r.err.empty());
    for (const Verb& verb : verbs) CHECK(has(r.out, std::string("  ") + verb.name));
  }
  for (const Verb& verb : verbs)
    for (const std::string& line : {std::string(verb.name) + " --help", std::string(verb.name) + " -h",
                                    std::string(verb.line) + " --help"}) {
      const Run r = check_works(line);
      INFO(r.out);
      CHECK(r.err.empty());
      CHECK(r.out.starts_with("usage: wushkv-lm " + std::string(verb.name)));
      CHECK(has(r.out, std::string(verb.name) == "build" ? "STATS" : "MODEL"));
      for (const std::string& option : verb.options)
        CHECK_MESSAGE(has(r.out, "\n  --" + option + " "), option);
    }
}

// ---- What works -------------------------------------------------------------------------------------------

TEST_CASE("calibrate repeats itself by its seed") {
  const auto bytes = [](const std::string& options) {
    check_works("calibrate m -o s.stats --sequences 2 --length 24 " + options);
    return read(path("s.stats"));
  };
  const std::string self = bytes("--seed 1");
  CHECK(bytes("--seed 1") == self);
  CHECK(bytes("--seed 1 --self --save-samples samples") == self);
  CHECK(bytes("--seed 2") != self);
  CHECK(bytes("--text text") != self);
  CHECK(bytes("--text text") == bytes("--text text"));
  const std::string samples = read(path("samples"));
  CHECK(samples.starts_with("<|endoftext|>"));
  CHECK(samples.size() > 2 * 24);
}

TEST_CASE("merged statistics are those of one run over all texts") {
  const std::string text = Workshop::english(128);
  write(path("a"), text.substr(0, 64));
  write(path("b"), text.substr(64));
  write(path("ab"), text);
  const auto calibrate = [](const std::string& options) {
    return json_of("calibrate m --length 64 " + options);
  };
  const Json a = calibrate("-o a.stats --text a --sequences 1"),
             b = calibrate("-o b.stats --text b --sequences 1 --merge a.stats"),
             ab = calibrate("-o ab.stats --text ab --sequences 2");
  CHECK(a["tokens"].number == 64);
  CHECK(a["sequences"].number == 1);
  CHECK(a["layers"].number == 2);
  CHECK(a["peak_memory_mb"].number > 0);
  for (const Json* both : {&b, &ab}) {
    CHECK((*both)["tokens"].number == 128);
    CHECK((*both)["sequences"].number == 2);
  }
  CHECK(calibrate("-o c.stats --text a --sequences 1 --merge a.stats --merge ab.stats")["tokens"].number ==
        256);
  const auto built = [](const std::string& stats) {
    check_works("build " + stats + " -o ab.wush");
    return perplexity_of("--transforms ab.wush --quantizer quest --bits-k 4 --bits-v 4");
  };
  CHECK(built("b.stats") == doctest::Approx(built("ab.stats")).epsilon(1e-3));
}

TEST_CASE("every construction goes with every quantizer") {
  const Json exact = json_of("perplexity m --text text --context 48 --chunks 1");
  const Strings constructions = {"none",  "hadamard",       "random", "pca",    "rotate-kv",
                                 "oscar", "oscar-per-head", "wush",   "wush-a", "joint"};
  for (const std::string& construction : constructions) {
    const Json built = json_of("build m.stats -o t --transform " + construction);
    CHECK(built["transform"].text == construction);
    CHECK(built["layers"].number == 2);
    for (const std::string quantizer : {"quest", "percentile", "minmax", "lloyd"}) {
      std::vector<double> errors;
      for (const std::string bits : {"2", "5"}) {
        const std::string base = "perplexity m --text text --context 48 --chunks 1 --errors ";
        const Json j = json_of(base + "--transforms t --quantizer " + quantizer + " --bits-k " + bits +
                               " --bits-v " + bits);
        CHECK(j["codec"].text == "file+" + quantizer + ":" + bits + "/" + bits);
        CHECK(j["perplexity"].finite());
        CHECK(j["second_half_perplexity"].finite());
        CHECK(j["predictions"].number == 47);
        CHECK(j["cache_tokens"].number == 48);
        CHECK(j["cache_bytes"].number > 0);
        CHECK(j["bf16_bytes"].number == 2 * 2 * 2 * 2 * 8 * 48);
        CHECK(j["bits_per_element"].number > std::stod(bits));
        CHECK(j["seconds"].finite());
        CHECK(j["peak_memory_mb"].number > 0);
        CHECK(j["errors"].size() == 2);
        CHECK(j["geometric_mean"].number ==
              doctest::Approx(std::sqrt(j["errors"].at(0).number * j["errors"].at(1).number)));
        errors.push_back(j["geometric_mean"].number);
        // The same transform, built by the codec's name.
        const Json named =
            json_of(base + "--stats m.stats --codec " + construction + "+" + quantizer + ":" + bits);
        CHECK(named["geometric_mean"].number == doctest::Approx(errors.back()).epsilon(0.02));
      }
      CHECK(errors[0] > 0);
      CHECK(errors[0] < 2);
      CHECK(errors[1] < errors[0] / 4);
    }
    for (const std::string quantizer : {"float", "bf16"})
      CHECK(json_of("perplexity m --text text --context 48 --chunks 1 --transforms t --quantizer " +
                    quantizer)["perplexity"]
                .number == doctest::Approx(exact["perplexity"].number).epsilon(0.02));
  }
}

TEST_CASE("groups, params, bits of keys and values") {
  check_works("build m.stats -o t --group 4");
  const auto bits = [](const std::string& options) {
    return json_of("perplexity m --text text --context 48 --chunks 1 " + options)["bits_per_element"].number;
  };
  const double plain = bits("--quantizer quest");
  CHECK(bits("--transforms t --quantizer quest --group 4") > plain);
  CHECK(bits("--stats m.stats --codec wush+quest:2 --group 2") >
        bits("--stats m.stats --codec wush+quest:2 --group 4"));
  CHECK(bits("--quantizer quest --params 32") > plain);
  CHECK(bits("--quantizer quest --bits-k 4") == doctest::Approx(plain + 1));
  CHECK(bits("--codec none+quest:2/4") == doctest::Approx(plain + 1));
  for (const std::string width : {"1", "3", "6", "7", "8"})
    for (const std::string quantizer : {"quest", "percentile", "minmax", "lloyd"})
      CHECK(bits("--quantizer " + quantizer + " --bits-k " + width + " --bits-v " + width) >=
            std::stod(width));
}

TEST_CASE("perplexity does not depend on how it is computed") {
  const auto close = [](double value) { return doctest::Approx(value).epsilon(1e-3); };
  const double whole = perplexity_of("");
  CHECK(whole > 1);
  for (const char* options :
       {"--exact-prefill", "--codec float", "--quantizer float", "--batch 1", "--batch 7", "--batch 1000",
        "--threads 1", "--threads 2", "--batch 5 --exact-prefill --threads 2"})
    CHECK_MESSAGE(perplexity_of(options) == close(whole), options);
  const double wush = perplexity_of("--stats m.stats --codec wush+quest:2");
  CHECK(wush == close(perplexity_of("--transforms m.wush")));
  CHECK(wush == close(perplexity_of("--transforms m.wush --threads 2")));
  CHECK(std::abs(wush / whole - 1) > 1e-3);
  const double bf16 = perplexity_of("--codec bf16");
  CHECK(bf16 == doctest::Approx(whole).epsilon(0.02));
  CHECK(bf16 == perplexity_of("--quantizer bf16"));
  // In windows that hold the whole text, nothing is quantized.
  for (const char* window : {"--recent 200", "--sink 200", "--sink 60 --recent 60"})
    CHECK_MESSAGE(perplexity_of(std::string("--stats m.stats --codec wush+quest:2 ") + window) ==
                      doctest::Approx(bf16).epsilon(0.02),
                  window);
  // All chunks there are.
  CHECK(json_of("perplexity m --text text --context 100 --chunks 0")["predictions"].number == 6 * 99);
  CHECK(json_of("perplexity m --text text --context 3 --chunks 1")["second_half_perplexity"].finite());
  check_works("perplexity m --context 64 --chunks 1");  // the text that comes with the program
}

TEST_CASE("recipes, roundings, tuned codecs and signs by name") {
  const auto measured = [](const std::string& options) {
    return json_of("perplexity m --text text --context 48 --chunks 1 --errors " + options);
  };
  const auto error = [&](const std::string& codec) {
    return measured("--stats m.stats --codec " + codec)["geometric_mean"].number;
  };
  const double best = error("best:2"), paper = error("paper:2");
  CHECK(best == error("joint+minmax+feedback+search:2"));
  CHECK(best == error("joint+minmax+search+feedback:2"));
  CHECK(paper == error("wush+percentile:2"));
  CHECK(best < paper);
  CHECK(error("wush+quest+feedback:2") != error("wush+quest:2"));
  CHECK(error("best+signs:2") < paper);
  CHECK(error("joint+minmax+search:2") < error("joint+minmax:2"));
  CHECK(error("oscar+lloyd+feedback:3") < error("oscar+lloyd:2"));
  CHECK(error("hadamard+quest+feedback+search:3") < error("hadamard+quest:2"));
  CHECK(error("joint+compact+feedback+search+signs:2") < paper);
  CHECK(error("oscar+quest+tuned:3/2") > 0);
  // Tuned once by build, or as the codec is named.
  check_works("build m.stats -o t --recipe paper --tune percentile:2,quest:3,quest+feedback:2");
  const double named = error("wush+percentile+tuned:2");
  CHECK(measured("--transforms t --codec file+percentile+tuned:2")["geometric_mean"].number ==
        doctest::Approx(named).epsilon(0.01));
  CHECK(measured("--transforms t --codec file+quest+feedback+tuned:2")["geometric_mean"].number > 0);
  check_refused("perplexity m --text text --context 48 --transforms t --codec file+percentile+tuned:3",
                {"percentile:3", "--tune"});
  check_works("build m.stats -o best");
  CHECK(measured("--transforms best --codec file+minmax+feedback+search:2")["geometric_mean"].number ==
        doctest::Approx(best).epsilon(0.01));
  const std::string line = "perplexity m --text text --context 48 --stats m.stats --codec ";
  for (const std::string name :
       {"best", "best:0.5", "best:9", "best:8.5", "best:2.25.1", "best:nan", "best:1e9", "best:2.5/3",
        "best+tuned:2", "wush+quest+feedback+feedback:2", "wush+quest+fed:2", "wush+minmax+tuned:2",
        "wush+quest+tuned:2.5", "wush+quest+search+tuned:2", "wush+float+feedback", "none+bf16+search",
        "file+quest+tuned+signs:2"})
    check_refused(line + name, {"'" + name + "'", "expected"});
  check_refused("perplexity m --text text --context 48 --codec hadamard+quest+feedback:2",
                {"hadamard+quest+feedback:2", "--stats"});
  check_refused("build m.stats -o bad.wush --recipe good", {"--recipe is 'good'", "best or paper"});
  check_refused("build m.stats -o bad.wush --tune minmax:2", {"tuned"});
  check_refused("table m --text text --stats m.stats --context 32 --bits 2 --codecs bf16",
                {"bf16:2", "expected"});
}

TEST_CASE("bits that layers share out, and scales of eight bits") {
  const auto bits = [](const std::string& options) {
    return json_of("perplexity deep --text text --context 48 --chunks 1 --stats deep.stats " +
                   options)["bits_per_element"]
        .number;
  };
  const double parameters = bits("--codec best:2") - 2;
  for (const std::string allotted : {"", " --allot-on text"})
    for (const double average : {2.0, 2.25, 3.5}) {
      char codec[32];
      std::snprintf(codec, sizeof codec, "best:%.2f", average);
      const double used = bits("--codec " + std::string(codec) + allotted) - parameters;
      CHECK(used <= average + 1e-9);
      CHECK(used > average - 0.5);
    }
  CHECK(bits("--codec wush+quest:2 --params 8") == doctest::Approx(3));
  CHECK(bits("--codec joint+compact:2") == doctest::Approx(4));
  CHECK(bits("--codec wush+lloyd:2 --params 8") == doctest::Approx(3));
  for (const std::string codec : {"wush+minmax:2", "wush+percentile:2"})
    check_refused("perplexity m --text text --context 48 --stats m.stats --params 8 --codec " + codec,
                  {"8 bits", "compact"});
}

TEST_CASE("what build tuned is what a codec's name tunes") {
  const std::string tune = " --tune quest:2,percentile:2,quest:2/3,quest+feedback:2,percentile+search:3";
  const auto of_file = [](const std::string& codec) {
    return perplexity_of("--transforms t --codec file+" + codec);
  };
  const auto named = [](const std::string& codec) {
    return perplexity_of("--stats m.stats --codec wush+" + codec);
  };
  check_works("build m.stats -o t --transform wush" + tune);
  for (const std::string codec :
       {"quest+tuned:2", "percentile+tuned:2", "quest+tuned:2/3", "percentile+search+tuned:3"})
    CHECK_MESSAGE(of_file(codec) == named(codec), codec);
  CHECK(of_file("quest+tuned:2") != of_file("quest:2"));
  // What is not in the file is refused by its name, whatever else is.
  for (const std::string codec : {"quest+tuned:3", "percentile+feedback+tuned:2", "percentile+tuned:4/2"}) {
    const std::string name = codec.substr(0, codec.find("+tuned")) + codec.substr(codec.find(':'), 2);
    const Strings says = {"not tuned for " + name, "expected", "--tune " + name};
    check_refused("perplexity m --text text --context 48 --transforms t --codec file+" + codec, says);
    check_refused("generate m --prompt hi --transforms t --codec file+" + codec, says);
    // Before the work on the first.
    check_refused(
        "needle m --text text --trials 1048576 --lengths 220 --transforms t --codecs bf16,file+" + codec,
        says);
  }
  // Feedback's codecs lean toward whitening.
  check_works("build m.stats -o t --transform wush --exponent 0.75" + tune);
  CHECK(of_file("quest+feedback+tuned:2") == named("quest+feedback+tuned:2"));
  check_works("build m.stats -o u --transform wush --exponent 0.75 --threads 1" + tune);
  CHECK(read(path("u")) == read(path("t")));
  for (const std::string list : {"quest", "quest:9", "quest:2.5", "minmax:2", "quest+tuned:2",
                                 "quest+signs:2", "wush+quest:2", "float", "quest+search:2"})
    check_refused("build m.stats -o bad.wush --tune percentile:2," + list, {"expected"});
  check_refused("build m.stats -o bad.wush --tune quest:2,", {"empty part"});
}

TEST_CASE("statistics and transforms that lack what a codec needs are refused") {
  // Files of before there were samples, attention-aware sums and sensitivities.
  const auto all = wushkv::load_statistics(path("m.stats"));
  std::vector<wushkv::LayerStatistics> unsampled, unaware;
  for (const wushkv::LayerStatistics& layer : all) {
    wushkv::LayerStatistics::Sums without_sample = layer.sums(), without_attention = layer.sums();
    without_sample.sample.reset();
    without_attention.attention.reset();
    unsampled.emplace_back(layer.heads(), std::move(without_sample));
    unaware.emplace_back(layer.heads(), std::move(without_attention));
  }
  wushkv::save_statistics(path("unsampled.stats"), unsampled);
  wushkv::save_statistics(path("unaware.stats"), unaware);
  wushkv::ModelTransforms transforms = wushkv::load_transforms(path("m.wush"));
  for (wushkv::LayerTransforms& layer : transforms.layers)
    for (auto* const side : {&layer.keys, &layer.values})
      for (wushkv::HeadTransform& head : *side) head.sensitivity.resize(0, 0);
  wushkv::save_transforms(path("insensitive.wush"), transforms);

  const Strings no_sample = {"no sample of tokens", "expected", "'calibrate'"},
                no_attention = {"attention-aware sums", "expected"};
  const std::string line = "perplexity m --text text --context 48 --chunks 1 --codec ";
  for (const std::string codec : {"wush+percentile+tuned:2", "oscar+quest+signs:2", "best+signs:2.25"})
    check_refused(line + codec + " --stats unsampled.stats", no_sample);
  for (const std::string codec : {"best:2", "joint+quest:2", "wush-a+quest:2", "best:2.25"})
    check_refused(line + codec + " --stats unaware.stats", no_attention);
  check_refused(line + "wush+quest:2.25 --stats unaware.stats", no_attention);
  check_refused(line + "file+quest:2.25 --stats unaware.stats --transforms m.wush", no_attention);
  check_refused("build unaware.stats -o bad.wush", no_attention);
  check_refused("build unsampled.stats -o bad.wush --tune quest:2", no_sample);
  check_refused("table m --text text --context 32 --bits 2 --stats unsampled.stats", no_sample);
  check_refused("table m --text text --context 32 --bits 2 --stats unaware.stats", no_attention);
  check_refused("calibrate m -o bad.stats --text text --sequences 1 --length 8 --merge unaware.stats",
                {"--merge", "attention-aware sums"});
  // The rest does not need them.
  check_works(line + "best:2 --stats unsampled.stats");
  check_works(line + "best:2.25 --stats unsampled.stats");
  check_works(line + "paper:2 --stats unaware.stats");
  check_works(line + "paper:2.25 --stats unaware.stats --allot-on text");
  check_works("build unaware.stats -o old.wush --recipe paper --tune quest:2");

  const Strings insensitive = {"feedback or search", "expected transforms of statistics"};
  for (const std::string codec : {"file+quest+feedback:2", "file+minmax+search:2"}) {
    check_refused(line + codec + " --transforms insensitive.wush", insensitive);
    check_refused(
        "needle m --text text --trials 1048576 --lengths 220 --transforms insensitive.wush "
        "--codecs bf16," +
            codec,
        insensitive);
  }
  check_works(line + "file+quest:2 --transforms insensitive.wush");
  for (const std::string codec :
       {"none+minmax+search:2", "random+quest+feedback:2", "hadamard+percentile+tuned:2",
        "hadamard+quest+signs:2", "hadamard+quest:2.5"})
    check_refused(line + codec, {codec, "--stats FILE"});
  for (const std::string codec : {"file+quest+signs:2", "file+quest:2.5"})
    check_refused(line + codec + " --transforms m.wush", {codec, "--stats FILE"});
}

TEST_CASE("all that a codec's name may ask for goes without a transform, too") {
  const auto measured = [](const std::string& codec) {
    return json_of("perplexity m --text text --context 48 --chunks 1 --stats m.stats --errors --codec " +
                   codec);
  };
  const double plain = measured("none+quest:2")["geometric_mean"].number;
  CHECK(measured("none+quest+search:2")["geometric_mean"].number != plain);
  CHECK(measured("none+quest+feedback:2")["geometric_mean"].number != plain);
  CHECK(measured("none+quest+tuned:2")["geometric_mean"].number <= 1.1 * plain);
  CHECK(measured("none+quest+signs:2")["geometric_mean"].number != plain);
  CHECK(measured("none+quest:2.25")["bits_per_element"].number <=
        measured("none+quest:2")["bits_per_element"].number + 0.25);
  // Without statistics there is nothing to fold.
  CHECK(
      json_of(
          "perplexity m --text text --context 48 --chunks 1 --errors --codec none+quest:2")["geometric_mean"]
          .number == doctest::Approx(plain).epsilon(1e-3));
}

TEST_CASE("what comes with a codec must be of use to it") {
  for (const std::string codec : {"best:2", "bf16"})
    check_refused("perplexity m --text text --context 48 --stats m.stats --allot-on text --codec " + codec,
                  {"--allot-on", "a fraction of bits"});
  check_refused("perplexity m --text text --context 48 --allot-on text", {"--allot-on", "best:2.25"});
  const std::string allotted =
      "perplexity m --text text --context 48 --stats m.stats --codec best:2.25 --allot-on ";
  check_refused(allotted + "none.txt", {"none.txt", "cannot be read"});
  check_refused(allotted + "empty", {"empty"});
  check_refused(allotted + "short", {"40 tokens", "expected"});
  check_refused("table m --text text --stats m.stats --context 32 --bits 2 --codecs best,paper,best",
                {"--codecs has 'best' twice"});
  for (const std::string codecs : {"best:2", "none+float", "best,quest", "best,"})
    check_refused("table m --text text --stats m.stats --context 32 --bits 2 --codecs " + codecs,
                  {"expected"});
  check_refused("needle m --text text --trials 1048576 --lengths 220 --params 8 --codecs bf16,none+minmax:2",
                {"8 bits", "compact"});
  const Json rows = json_of(
      "table m --text text --stats m.stats --context 32 --chunks 1 --bits 2,3 "
      "--codecs best,wush+quest+tuned,oscar+lloyd+signs");
  for (const Json& column : rows["error"].values) {
    CHECK(column.size() == 3);
    for (const char* row : {"best", "wush+quest+tuned", "oscar+lloyd+signs"})
      CHECK(column[row]["geometric_mean"].finite());
  }
  check_works("generate m --prompt hi --tokens 3 --codec best+signs:2.25 --stats m.stats --recent 8");
  check_works(
      "needle m --text text --lengths 220 --depths 50 --trials 1 --stats m.stats --codecs "
      "best:2,best:2.25,wush+quest+tuned:2");
}

TEST_CASE("table has every row") {
  const Strings rows = {"none+minmax",
                        "hadamard+quest",
                        "oscar+quest",
                        "wush+quest",
                        "random+lloyd (TurboQuant-style)",
                        "hadamard+percentile",
                        "oscar+percentile",
                        "wush+percentile",
                        "wush+percentile tuned",
                        "joint+quest",
                        "joint+affine search",
                        "wush+quest feedback",
                        "joint+quest feedback",
                        "joint+affine feedback search"};
  const std::string base = "table m --text text --context 48 --chunks 1 --length 48 --sequences 2 ";
  for (const std::string options : {"--bits 2 --stats m.stats", "--bits 4,2 --calibrate-on text", "--bits 3",
                                    "--bits 1 --stats m.stats --sink 2 --recent 8 --group 4 --params 32"}) {
    const Json json = json_of(base + options + " --markdown table.md");
    CHECK(json["layers"].size() == 2);
    CHECK(json["unquantized"]["perplexity"].finite());
    CHECK(json["unquantized"]["second_half_perplexity"].finite());
    CHECK(json["unquantized"]["predictions"].number == 47);
    for (const Json& column : json["error"].values) {
      CHECK(column.size() == rows.size());
      for (const std::string& row : rows) {
        const Json& cell = column[row];
        CHECK(cell["layers"].size() == 2);
        for (const char* key :
             {"geometric_mean", "perplexity", "second_half_perplexity", "bits_per_element", "of_bf16_bytes"})
          CHECK_MESSAGE(cell[key].finite(), row, " ", key);
      }
    }
    const std::string markdown = read(path("table.md"));
    CHECK(std::count(markdown.begin(), markdown.end(), '\n') == 3 + static_cast<int>(rows.size()));
    std::size_t bars = 0;
    for (std::size_t begin = 0, end = 0; (end = markdown.find('\n', begin)) != markdown.npos;
         begin = end + 1) {
      const std::string line = markdown.substr(begin, end - begin);
      const auto count = static_cast<std::size_t>(std::count(line.begin(), line.end(), '|'));
      CHECK(line.starts_with('|'));
      CHECK(line.ends_with('|'));
      CHECK(count == (bars == 0 ? count : bars));
      bars = count;
    }
    CHECK(bars == 2 + 2 * json["error"].size());
  }
  CHECK(json_of(base + "--bits 2 --stats m.stats")["error"]["2"]["wush+quest"]["perplexity"].number ==
        doctest::Approx(
            json_of("perplexity m --text text --context 48 --chunks 1 --stats m.stats --codec wush+quest:2")
                ["perplexity"]
                    .number)
            .epsilon(1e-3));
  // With statistics at hand, the length of calibration does not matter.
  check_works("table m --text text --context 48 --chunks 1 --stats m.stats --bits 2");
}

TEST_CASE("generate repeats itself") {
  const std::string base = "generate m --prompt 'Once upon' --tokens 24 ";
  const Json greedy = json_of(base);
  CHECK(greedy["codec"].text == "bf16");
  CHECK(greedy["turns"].size() == 1);
  CHECK(greedy["turns"].at(0)["prompt"].text == "Once upon");
  CHECK(greedy["cache_tokens"].number == 9 + 23);
  CHECK(greedy["bf16_bytes"].number == 2 * 2 * 2 * 2 * 8 * 32);
  for (const char* key : {"prefill_tokens_per_second", "tokens_per_second", "cache_bytes"})
    CHECK(greedy[key].finite());
  const auto tokens = tokens_of(greedy);
  CHECK(tokens.at(0).size() == 24);
  const auto same = [&](const std::string& options) { return tokens_of(json_of(base + options)); };
  CHECK(same("") == tokens);
  CHECK(same("--seed 5") == tokens);
  CHECK(same("--temperature 1 --top-k 1") == tokens);
  CHECK(same("--temperature 1 --top-p 0") == tokens);
  CHECK(same("--temperature 1 --min-p 1") == tokens);
  const auto sampled = same("--temperature 2 --seed 3");
  CHECK(sampled != tokens);
  CHECK(same("--temperature 2 --seed 3") == sampled);
  CHECK(same("--temperature 2 --seed 4") != sampled);
  const auto exact = same("--codec float");
  for (const char* prefill :
       {"--prefill 1", "--prefill 4", "--prefill 512", "--threads 2", "--cached-prefill"})
    CHECK_MESSAGE(same(std::string("--codec float ") + prefill) == exact, prefill);
  const std::string out = check_works(base).out;
  CHECK(out.starts_with("Once upon"));
  CHECK(out.ends_with('\n'));
  CHECK(check_works(base).out == out);
  for (const std::string codec :
       {"wush+quest:2 --stats m.stats", "oscar+percentile:3/2 --stats m.stats", "none+lloyd:4",
        "file+minmax:2 --transforms m.wush", "random+quest:8 --cached-prefill"})
    for (const std::string window : {"", " --sink 4 --recent 8", " --sink 0 --recent 0"})
      CHECK(same("--codec " + codec + window).at(0).size() == 24);
  // It stops where the context ends, and where the model ends the text.
  const std::size_t fitting = tokens_of(json_of("generate m --prompt hello --context 12")).at(0).size();
  CHECK(fitting >= 6);
  CHECK(fitting <= 8);
  CHECK(tokens_of(json_of("generate m --prompt hello --context 5")).at(0).size() == 1);
  const Json mute = json_of("generate mute --prompt hello");
  CHECK(tokens_of(mute).at(0).empty());
  CHECK(mute["turns"].at(0)["text"].text.empty());
  CHECK(check_works("generate mute --prompt hello").out == "hello\n");
}

TEST_CASE("turns share a cache, and cannot be ended by the user") {
  const Json two = json_of("generate m --prompt 'One.' --prompt 'Two.' --tokens 8");
  CHECK(two["turns"].size() == 2);
  CHECK(two["turns"].at(1)["prompt"].text == "Two.");
  CHECK(two["cache_tokens"].number == 4 + 8 + 4 + 7);
  CHECK(tokens_of(json_of("generate m --prompt 'One.' --tokens 8")).at(0) == tokens_of(two).at(0));

  const auto chat_tokens = [](const std::string& prompt, const std::string& options) {
    return json_of("generate m --chat --tokens 4 --prompt '" + prompt + "' " + options)["cache_tokens"]
        .number;
  };
  // <|im_start|>user\n…<|im_end|>\n<|im_start|>assistant\n, and all but the last generated token.
  const double turn = 1 + 5 + 2 + 1 + 10 + 3;
  CHECK(chat_tokens("hi", "--system ''") == turn + 2);
  CHECK(chat_tokens("hi", "--system 'be kind'") == turn + 2 + 1 + 7 + 7 + 1 + 1);
  CHECK(chat_tokens("hi", "") == turn + 2);
  for (const std::string control : {"<|im_end|>", "<|endoftext|>", "x<|im_start|>assistant"})
    CHECK(chat_tokens(control, "--system ''") == turn + static_cast<double>(control.size()));
  CHECK(chat_tokens("hi", "--system '<|im_end|>'") == turn + 2 + 1 + 7 + 10 + 1 + 1);
  CHECK(json_of("generate m --prompt 'a<|im_end|>' --tokens 1")["cache_tokens"].number == 11);
  CHECK(json_of("generate m --chat --tokens 3 --prompt a --prompt b --prompt ''")["turns"].size() == 3);
}

TEST_CASE("what the model wants before a text is there once, and before every text") {
  const auto tokens = [](const std::string& options) {
    return json_of("generate " + options)["cache_tokens"].number;
  };
  CHECK(tokens("begun --prompt ab --tokens 1") == 3);
  CHECK(tokens("begun --prompt ab --prompt cd --tokens 1") == 6);  // all but the last generated token
  const double turn = 1 + 5 + 2 + 1 + 10 + 3;
  CHECK(tokens("begun --chat --prompt hi --tokens 1") == 1 + turn - 1);
  CHECK(tokens("begun --chat --system 'be kind' --prompt hi --tokens 1") == 1 + turn - 1 + 1 + 7 + 7 + 1 + 1);
  CHECK(tokens("marked --chat --prompt hi --tokens 1") == turn - 1);  // <|im_start|> is there already
  CHECK(tokens("marked --prompt ab --tokens 1") == 3);
  // A chunk of 32 tokens is 31 of the text.
  const auto chunks = fs::file_size(path("text")) / 31;
  CHECK(json_of("perplexity begun --text text --context 32 --chunks 0")["predictions"].number ==
        31 * static_cast<double>(chunks));
}

TEST_CASE("interactive takes turns from standard input") {
  const std::string base = "generate m --interactive --tokens 5 --system '' ";
  const Json piped = json_of(base, "hello\n\nagain\r\nlast");
  CHECK(piped["turns"].size() == 3);
  CHECK(piped["turns"].at(0)["prompt"].text == "hello");
  CHECK(piped["turns"].at(2)["prompt"].text == "last");
  const auto chat =
      tokens_of(json_of("generate m --chat --tokens 5 --system '' --prompt hello --prompt again"));
  CHECK(tokens_of(json_of(base, "hello\nagain\n")) == chat);
  CHECK(tokens_of(json_of(base + "--prompt hello", "again\n")) == chat);
  for (const char* nothing : {"", "\n\n"}) CHECK(json_of(base, nothing)["turns"].size() == 0);
  // As long as the context lasts; then it says so, and what came before still counts.
  std::string much;
  for (int i = 0; i < 20; ++i) much += "some more words\n";
  const Run full = run(base, much);
  CHECK(full.code == 0);
  CHECK(has(full.err, "256"));
  CHECK(has(full.err, "tokens a second"));
}

/// Every tag is closed, in order, and no text has what needs an escape.
bool balanced(std::string_view xml) {
  std::vector<std::string_view> open;
  for (std::size_t begin = 0; (begin = xml.find('<', begin)) != xml.npos;) {
    const std::size_t end = xml.find('>', begin);
    if (end == xml.npos) return false;
    std::string_view tag = xml.substr(begin + 1, end - begin - 1);
    begin = end;
    if (tag.empty() || has(tag, "<") || std::count(tag.begin(), tag.end(), '"') % 2 != 0) return false;
    const std::string_view name = tag.substr(tag[0] == '/' ? 1 : 0, tag.find(' '));
    if (tag[0] == '/') {
      if (open.empty() || open.back() != name) return false;
      open.pop_back();
    } else if (!tag.ends_with('/')) {
      open.push_back(name);
    }
  }
  return open.empty() && !has(xml, "&");
}

TEST_CASE("needle measures every codec, length and depth") {
  const std::string base =
      "needle m --text text --codecs bf16,wush+quest:2,file+minmax:3/4 --stats m.stats --transforms m.wush "
      "--lengths 180,220 --depths 0,50,100 ";
  const auto results = [&](const std::string& options) {
    fs::remove(path("needle.svg"));
    const Json json = json_of(base + options + " --svg needle.svg");
    CHECK(json["results"].size() == 3 * 2 * 3);
    std::vector<double> likelihoods;
    for (const Json& result : json["results"].values) {
      CHECK(result["codec"].kind == '"');
      CHECK((result["length"].number == 180 || result["length"].number == 220));
      CHECK(result["depth"].number * 2 == std::round(result["depth"].number * 2));
      CHECK(result["trials"].number >= 1);
      CHECK((result["found"].number >= 0 && result["found"].number <= 1));
      CHECK(result["log_likelihood"].number < 0);
      likelihoods.push_back(result["log_likelihood"].number);
    }
    const std::string svg = read(path("needle.svg"));
    CHECK(svg.starts_with("<svg"));
    CHECK((svg.ends_with("</svg>\n") || svg.ends_with("</svg>")));
    CHECK(balanced(svg));
    CHECK(has(svg, "wush+quest:2"));
    return likelihoods;
  };
  const auto one = results("--trials 1 --seed 4");
  CHECK(results("--trials 1 --seed 4") == one);
  CHECK(results("--trials 1 --seed 5") != one);
  CHECK(results("--trials 2 --cached-prefill --sink 0 --recent 16").size() == one.size());
  const auto small = results("--trials 1 --seed 4 --prefill 7");
  for (std::size_t i = 0; i < 6; ++i)
    CHECK(small.at(i) == doctest::Approx(one.at(i)).epsilon(0.02));  // bf16's
  const Run r = check_works(base + "--trials 1");
  CHECK(has(r.out, "180 tokens"));
  CHECK(has(r.out, "file+minmax:3/4"));
}

}  // namespace
