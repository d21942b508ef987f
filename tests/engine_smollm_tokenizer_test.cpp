// SPDX-License-Identifier: Apache-2.0
//
// The tokenizer of a real model: SmolLM2's, from the GGUF file, if it is there.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/gguf.hpp"
#include "engine/tokenizer.hpp"
#include "engine/unicode.hpp"
#include "engine_support.hpp"

namespace {

using engine::Token;
using engine::Tokenizer;
using test::Random;

using Tokens = std::vector<Token>;

/// Null, with a message, without the file.
const Tokenizer* smollm() {
  static const std::optional<Tokenizer> tokenizer = []() -> std::optional<Tokenizer> {
    const std::string path = test::model();
    if (path.empty()) return std::nullopt;
    return Tokenizer(engine::read_vocabulary(engine::GgufFile(std::filesystem::path(path))));
  }();
  return tokenizer ? &*tokenizer : nullptr;
}

/// SmolLM2 was made from text in which some bytes never came up: they have no token.
bool has_all_bytes(const Tokenizer& tokenizer, std::string_view text) {
  static const std::vector<bool> lacks = [&] {
    std::vector<bool> result(256);
    for (std::size_t byte = 0; byte < 256; ++byte)
      result[byte] = tokenizer.encode(std::string(1, static_cast<char>(byte))) ==
                     Tokens{tokenizer.vocabulary().unknown.value()};
    return result;
  }();
  for (const char c : text)
    if (lacks[static_cast<unsigned char>(c)]) return false;
  return true;
}

TEST_CASE("SmolLM2's vocabulary") {
  const Tokenizer* const tokenizer = smollm();
  if (tokenizer == nullptr) return;
  CHECK(tokenizer->size() == 49152);
  CHECK(tokenizer->vocabulary().pre == engine::PreTokenizer::SmolLm);
  CHECK(tokenizer->find("<|im_start|>") == 1);
  CHECK(tokenizer->find("<|im_end|>") == 2);
  int lacking = 0;
  for (int byte = 0; byte < 256; ++byte)
    lacking += !has_all_bytes(*tokenizer, std::string(1, static_cast<char>(byte)));
  CHECK(lacking == 21);
  CHECK_FALSE(has_all_bytes(*tokenizer, "\xC0"));
  CHECK_FALSE(has_all_bytes(*tokenizer, "\xF1"));
  CHECK(tokenizer->encode("<|im_start|>user\nIt's 2024!<|im_end|>\n", true) ==
        Tokens{1, 4093, 198, 1589, 506, 216, 34, 32, 34, 36, 17, 2, 198});
}

TEST_CASE("the tokens of WikiText-2 are those of the model's own tokenizer") {
  const Tokenizer* const tokenizer = smollm();
  const std::string path = test::shared("data/wikitext2-test.txt");
  if (tokenizer == nullptr) return;
  if (path.empty()) {
    MESSAGE("skipped: no data/wikitext2-test.txt");
    return;
  }
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const Tokens tokens = tokenizer->encode(text);
  CHECK(tokens.size() == 301948);
  const Tokens first{446, 6356, 389,  9226, 352,  446, 3717,  6356,  389,  9226, 352, 314,
                     354, 2321, 4771, 3297, 8552, 284, 16984, 17523, 1673, 909,  761, 253};
  REQUIRE(tokens.size() >= first.size());
  CHECK(Tokens(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(first.size())) == first);
  CHECK(tokenizer->decode(tokens) == text);

  std::size_t lines = 0;
  for (std::size_t at = 0; at < text.size(); ++lines) {
    const std::size_t end = std::min(text.find('\n', at), text.size() - 1) + 1;
    const std::string line = text.substr(at, end - at);
    REQUIRE(tokenizer->decode(tokenizer->encode(line)) == line);
    at = end;
  }
  CHECK(lines > 1000);
}

TEST_CASE("whatever has only bytes of the vocabulary comes back") {
  const Tokenizer* const tokenizer = smollm();
  if (tokenizer == nullptr) return;
  Random random(17);
  for (int trial = 0; trial < 2000; ++trial) {
    std::string text;
    for (std::int64_t left = random.integer(0, 50); left > 0; --left) {
      char32_t code = static_cast<char32_t>(random.integer(0, random.pick({0x7F, 0x7FF, 0xD7FF, 0x10FFFF})));
      if (code >= 0xD800 && code <= 0xDFFF) code = U' ';
      const std::string part =
          trial % 2 == 0 ? engine::to_utf8(code) : std::string(1, static_cast<char>(random.integer(0, 255)));
      if (has_all_bytes(*tokenizer, part)) text += part;
    }
    REQUIRE(tokenizer->decode(tokenizer->encode(text)) == text);
  }
}

}  // namespace
