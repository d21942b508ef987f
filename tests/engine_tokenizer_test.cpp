// SPDX-License-Identifier: Apache-2.0
#include "engine/tokenizer.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/gguf.hpp"
#include "engine/unicode.hpp"
#include "gguf_writer.hpp"
#include "support.hpp"
#include "wushkv/core/error.hpp"

namespace {

using engine::code_point_at;
using engine::CodePoint;
using engine::PreTokenizer;
using engine::to_utf8;
using engine::Token;
using engine::Tokenizer;
using engine::Utf8Stream;
using engine::Vocabulary;
using test::GgufWriter;
using test::message_of;
using test::Random;
using wushkv::FileError;

using Tokens = std::vector<Token>;
using Words = std::vector<std::string>;
using Status = CodePoint::Status;

constexpr char32_t code_points = 0x110000;
constexpr PreTokenizer all_pre_tokenizers[] = {PreTokenizer::Gpt2, PreTokenizer::SmolLm, PreTokenizer::Qwen2};

bool is_surrogate(char32_t c) { return c >= 0xD800 && c <= 0xDFFF; }

Words words(PreTokenizer pre, std::string_view text) {
  const std::vector<std::string_view> views = engine::split_words(pre, text);
  return {views.begin(), views.end()};
}

/// Every byte as token byte - 0x00 to 0xFF in order - and nothing else.
Vocabulary byte_vocabulary() {
  Vocabulary vocabulary;
  for (int byte = 0; byte < 256; ++byte) {
    int code = byte;
    if (byte <= 0x20)
      code = 0x100 + byte;  // the first 33 that do not print, then 34 from 7F to A0, then AD
    else if (byte >= 0x7F && byte <= 0xA0)
      code = 0x121 + byte - 0x7F;
    else if (byte == 0xAD)
      code = 0x143;
    vocabulary.tokens.push_back(to_utf8(static_cast<char32_t>(code)));
  }
  return vocabulary;
}

/// Adds a token that two others make.
void add_merge(Vocabulary& vocabulary, const std::string& left, const std::string& right) {
  vocabulary.tokens.push_back(left + right);
  vocabulary.merges.push_back(left + " " + right);
}

Token add_token(Vocabulary& vocabulary, const std::string& text, std::int32_t type) {
  vocabulary.types.resize(vocabulary.tokens.size(), 1);
  vocabulary.tokens.push_back(text);
  vocabulary.types.push_back(type);
  return static_cast<Token>(vocabulary.tokens.size() - 1);
}

Tokens bytes_as_tokens(std::string_view text) {
  Tokens out;
  for (const char c : text) out.push_back(static_cast<unsigned char>(c));
  return out;
}

std::string random_bytes(Random& random, std::int64_t size) {
  std::string out;
  for (std::int64_t i = 0; i < size; ++i) out += static_cast<char>(random.integer(0, 255));
  return out;
}

/// Pieces that the pre-tokenizers treat differently, in a random order.
std::string random_text(Random& random) {
  std::string out;
  for (std::int64_t left = random.integer(0, 30); left > 0; --left)
    out += random.pick<std::string>({" ",
                                     "  ",
                                     "\n",
                                     "\r\n",
                                     "\t",
                                     "\u00A0",
                                     "\u3000",
                                     "a",
                                     "Word",
                                     "\u65E5",
                                     "\u0301",
                                     "1",
                                     "42",
                                     "\u00BD",
                                     "'s",
                                     "'LL",
                                     "'\u017F",
                                     "'",
                                     "!",
                                     "...",
                                     "\U0001F642",
                                     "\x80",
                                     "\xF0\x9F",
                                     "\xC3",
                                     std::string(1, '\0'),
                                     to_utf8(static_cast<char32_t>(random.integer(0, 0xD7FF)))});
  return out;
}

// ---- Unicode ----------------------------------------------------------------------------------------------

TEST_CASE("classes of code points have the sizes that Unicode 16.0 gives them, and share nothing") {
  int letters = 0, numbers = 0, spaces = 0, shared = 0;
  for (char32_t c = 0; c < code_points; ++c) {
    const bool letter = engine::is_letter(c), number = engine::is_number(c), space = engine::is_space(c);
    letters += letter;
    numbers += number;
    spaces += space;
    shared += letter + number + space > 1;
  }
  CHECK(letters == 141028);
  CHECK(numbers == 1911);
  CHECK(spaces == 25);
  CHECK(shared == 0);
  for (const char32_t outside : {0x110000U, 0xFFFFFFFFU}) {
    CHECK_FALSE(engine::is_letter(outside));
    CHECK_FALSE(engine::is_number(outside));
    CHECK_FALSE(engine::is_space(outside));
  }
}

TEST_CASE("classes begin and end where they should") {
  struct Block {
    char32_t first, last;
  };
  // Nothing before the first or after the last is in the class.
  for (const Block& letters : {Block{'A', 'Z'}, Block{'a', 'z'}, Block{0xAA, 0xAA}, Block{0xB5, 0xB5},
                               Block{0xBA, 0xBA}, Block{0xC0, 0xD6}, Block{0xD8, 0xF6}, Block{0x3400, 0x4DBF},
                               Block{0xAC00, 0xD7A3}, Block{0x20000, 0x2A6DF}, Block{0x31350, 0x323AF}}) {
    CAPTURE(static_cast<std::uint32_t>(letters.first));
    for (char32_t c = letters.first; c <= letters.last; ++c) REQUIRE(engine::is_letter(c));
    CHECK_FALSE(engine::is_letter(letters.first - 1));
    CHECK_FALSE(engine::is_letter(letters.last + 1));
  }
  for (const Block& numbers :
       {Block{'0', '9'}, Block{0xB2, 0xB3}, Block{0xB9, 0xB9}, Block{0xBC, 0xBE}, Block{0x660, 0x669},
        Block{0x2150, 0x2182}, Block{0x3007, 0x3007}, Block{0x1D7CE, 0x1D7FF}, Block{0x1FBF0, 0x1FBF9}}) {
    CAPTURE(static_cast<std::uint32_t>(numbers.first));
    for (char32_t c = numbers.first; c <= numbers.last; ++c) REQUIRE(engine::is_number(c));
    CHECK_FALSE(engine::is_number(numbers.first - 1));
    CHECK_FALSE(engine::is_number(numbers.last + 1));
  }
  std::set<char32_t> spaces;
  for (char32_t c = 0; c < code_points; ++c)
    if (engine::is_space(c)) spaces.insert(c);
  CHECK(spaces == std::set<char32_t>{0x09,   0x0A,   0x0B,   0x0C,   0x0D,   0x20,   0x85,   0xA0,   0x1680,
                                     0x2000, 0x2001, 0x2002, 0x2003, 0x2004, 0x2005, 0x2006, 0x2007, 0x2008,
                                     0x2009, 0x200A, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000});
  // Marks, symbols, controls, private use, surrogates, noncharacters.
  for (const char32_t c : {0x00U, 0x1CU, 0x300U, 0x903U, 0x20E3U, 0x200BU, 0x200DU, 0xD800U, 0xE000U, 0xFEFFU,
                           0xFFFDU, 0xFFFFU, 0x1F642U, 0x10FFFFU}) {
    CAPTURE(static_cast<std::uint32_t>(c));
    CHECK_FALSE(engine::is_letter(c));
    CHECK_FALSE(engine::is_number(c));
    CHECK_FALSE(engine::is_space(c));
  }
}

TEST_CASE("every code point comes back from UTF-8, and every cut of it is told from an error") {
  for (char32_t c = 0; c < code_points; ++c) {
    if (is_surrogate(c)) continue;
    const std::string text = to_utf8(c);
    const CodePoint read = code_point_at(text, 0);
    REQUIRE(read.value == c);
    REQUIRE(read.size == text.size());
    REQUIRE(read.status == Status::Valid);
    for (std::size_t size = 1; size < text.size(); ++size) {
      const CodePoint cut = code_point_at(std::string_view(text).substr(0, size), 0);
      REQUIRE(cut.value == 0xFFFD);
      REQUIRE(cut.size == 1);
      REQUIRE(cut.status == Status::Cut);
    }
  }
  CHECK(to_utf8(0x7F) == "\x7F");
  CHECK(to_utf8(0x80) == "\xC2\x80");
  CHECK(to_utf8(0x7FF) == "\xDF\xBF");
  CHECK(to_utf8(0x800) == "\xE0\xA0\x80");
  CHECK(to_utf8(0xFFFF) == "\xEF\xBF\xBF");
  CHECK(to_utf8(0x10000) == "\xF0\x90\x80\x80");
  CHECK(to_utf8(0x10FFFF) == "\xF4\x8F\xBF\xBF");
}

TEST_CASE("bytes that are no UTF-8 are passed over one at a time") {
  for (const std::string_view text :
       {"\x80", "\xBF", "\xC0\x80", "\xC1\xBF", "\xE0\x80\x80", "\xE0\x9F\xBF", "\xED\xA0\x80",
        "\xED\xBF\xBF", "\xF0\x80\x80\x80", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80",
        "\xFF", "\xFE", "\xC3(", "\xE2\x82(", "\xE2(", "\xF0\x9F\x99(", "\xC3\xC3\xA9"}) {
    const CodePoint c = code_point_at(text, 0);
    CHECK(c.value == 0xFFFD);
    CHECK(c.size == 1);
    CHECK(c.status == Status::Invalid);
  }
  // Which two bytes may begin a character, counted: those of two bytes, of three and of four.
  std::map<std::size_t, int> sizes;
  for (int first = 0x80; first < 256; ++first)
    for (int second = 0; second < 256; ++second) {
      const std::string text = {static_cast<char>(first), static_cast<char>(second), '\x80', '\x80'};
      ++sizes[code_point_at(text, 0).size];
    }
  CHECK(sizes[2] == 30 * 64);
  CHECK(sizes[3] == 32 + 14 * 64 + 32);
  CHECK(sizes[4] == 48 + 3 * 64 + 16);
  CHECK(sizes[1] == 128 * 256 - sizes[2] - sizes[3] - sizes[4]);
}

TEST_CASE("a stream gives whole characters, whatever the pieces") {
  const std::string text = "a\u00E9\u65E5\U0001F642z";
  for (std::size_t step = 1; step <= text.size(); ++step) {
    CAPTURE(step);
    Utf8Stream stream;
    std::string all;
    for (std::size_t at = 0; at < text.size(); at += step) {
      const std::string out = stream.push(text.substr(at, step));
      for (std::size_t i = 0; i < out.size();) {
        const CodePoint c = code_point_at(out, i);
        CHECK(c.status == Status::Valid);
        i += c.size;
      }
      all += out;
    }
    CHECK(all == text);
    CHECK(stream.finish().empty());
  }

  Utf8Stream stream;
  CHECK(stream.push("") == "");
  CHECK(stream.push("x\xF0\x9F") == "x");
  CHECK(stream.push("\x99") == "");
  CHECK(stream.finish() == "\xF0\x9F\x99");
  CHECK(stream.finish() == "");
  CHECK(stream.push("\xE2\x82") == "");
  CHECK(stream.push("y") == "\xE2\x82y");                // it can no longer become a character
  CHECK(stream.push("\x80\xED\xA0") == "\x80\xED\xA0");  // nor could these

  Random random(5);
  for (int trial = 0; trial < 500; ++trial) {
    Utf8Stream pieces;
    std::string in, out;
    for (int i = 0; i < 10; ++i) {
      const std::string piece = random_bytes(random, random.integer(0, 5));
      in += piece;
      out += pieces.push(piece);
      REQUIRE(in.size() - out.size() <= 3);
    }
    CHECK(out + pieces.finish() == in);
  }
}

// ---- Pre-tokenizers ---------------------------------------------------------------------------------------

TEST_CASE("GPT-2's words") {
  const auto split = [](std::string_view text) { return words(PreTokenizer::Gpt2, text); };
  CHECK(split("") == Words{});
  CHECK(split("Hello world") == Words{"Hello", " world"});
  CHECK(split("I'm you're it's we've he'd she'll don't") ==
        Words{"I", "'m", " you", "'re", " it", "'s", " we", "'ve", " he", "'d", " she", "'ll", " don", "'t"});
  CHECK(split("IT'S") == Words{"IT", "'", "S"});
  CHECK(split("'sound '") == Words{"'s", "ound", " '"});
  CHECK(split(" 's") == Words{" '", "s"});
  CHECK(split("''s") == Words{"''", "s"});
  CHECK(split("x'\u017F") == Words{"x", "'", "\u017F"});
  CHECK(split("a  b   c") == Words{"a", " ", " b", "  ", " c"});
  CHECK(split("a   ") == Words{"a", "   "});
  CHECK(split("   a") == Words{"  ", " a"});
  CHECK(split(" ") == Words{" "});
  CHECK(split("a \n b\n\nc\r\n") == Words{"a", " \n", " b", "\n", "\n", "c", "\r\n"});
  CHECK(split("a\tb\t\tc") == Words{"a", "\t", "b", "\t", "\t", "c"});
  CHECK(split("abc123x 42!") == Words{"abc", "123", "x", " 42", "!"});
  CHECK(split("x\u00BD\u00B2\u2167") == Words{"x", "\u00BD\u00B2\u2167"});
  CHECK(split("a.b, (c)") == Words{"a", ".", "b", ",", " (", "c", ")"});
  CHECK(split("\u65E5\u672C \u4E2D\u3002") == Words{"\u65E5\u672C", " \u4E2D", "\u3002"});
  CHECK(split("hi\U0001F642\U0001F642 \U0001F642") == Words{"hi", "\U0001F642\U0001F642", " \U0001F642"});
  CHECK(split("e\u0301a") == Words{"e", "\u0301", "a"});  // a combining mark is no letter
  CHECK(split("a\u00A0b") == Words{"a", "\u00A0", "b"});  // only U+0020 goes with the word after it
  CHECK(split("a\u00A0 b") == Words{"a", "\u00A0", " b"});
  CHECK(split("a \u00A0b") == Words{"a", " ", "\u00A0", "b"});
  CHECK(split("\u3000\u3000x\u3000") == Words{"\u3000", "\u3000", "x", "\u3000"});
  CHECK(split("a\u200Bb") == Words{"a", "\u200B", "b"});
  CHECK(split("a\x80\xFF"
              "b \xC3") == Words{"a", "\x80\xFF", "b", " \xC3"});
  CHECK(split(std::string_view("a\0 \0", 4)) == Words{"a", std::string(1, '\0'), std::string(" \0", 2)});
}

TEST_CASE("SmolLM's words: each digit by itself, and what is between digits knows of no text around it") {
  const auto split = [](std::string_view text) { return words(PreTokenizer::SmolLm, text); };
  CHECK(split("") == Words{});
  CHECK(split("12") == Words{"1", "2"});
  CHECK(split("a12 3") == Words{"a", "1", "2", " ", "3"});
  CHECK(split("a  1") == Words{"a", "  ", "1"});  // the look-ahead does not see the 1
  CHECK(split("a  b") == Words{"a", " ", " b"});
  CHECK(split("1  b") == Words{"1", " ", " b"});
  CHECK(split("x \u00BD\u0663\u2167y") == Words{"x", " ", "\u00BD", "\u0663", "\u2167", "y"});
  CHECK(split("1's it's\n\n2") == Words{"1", "'s", " it", "'s", "\n\n", "2"});
  CHECK(split("In 1999, x\xFF"
              "7") == Words{"In", " ", "1", "9", "9", "9", ",", " x", "\xFF", "7"});
}

TEST_CASE("Qwen2's words") {
  const auto split = [](std::string_view text) { return words(PreTokenizer::Qwen2, text); };
  CHECK(split("") == Words{});
  CHECK(split("Hello world") == Words{"Hello", " world"});
  CHECK(split("IT'S we'Ll I'M x'\u017F you'rE") ==
        Words{"IT", "'S", " we", "'Ll", " I", "'M", " x", "'\u017F", " you", "'rE"});
  CHECK(split("'sound '\u017Fo 'x'") == Words{"'s", "ound", " '", "\u017Fo", " '", "x", "'"});
  CHECK(split("'\u017Found") == Words{"'\u017F", "ound"});
  CHECK(split("'xyz") == Words{"'xyz"});
  CHECK(split("(foo) x.y") == Words{"(foo", ")", " x", ".y"});
  CHECK(split("a\tb") == Words{"a", "\tb"});
  CHECK(split("a\t\tb  c") == Words{"a", "\t", "\tb", " ", " c"});
  CHECK(split("a123 4") == Words{"a", "1", "2", "3", " ", "4"});
  CHECK(split("1a \u00BDb") == Words{"1", "a", " ", "\u00BD", "b"});
  CHECK(split("!!\n\nx") == Words{"!!\n\n", "x"});
  CHECK(split(" !!\r\n y") == Words{" !!\r\n", " y"});
  CHECK(split("a \n\n b") == Words{"a", " \n\n", " b"});
  CHECK(split("a  \n  b") == Words{"a", "  \n", " ", " b"});
  CHECK(split("a\n \n\t1") == Words{"a", "\n \n", "\t", "1"});
  CHECK(split("a\n  ") == Words{"a", "\n", "  "});
  CHECK(split("\nx\r\n") == Words{"\n", "x", "\r\n"});
  CHECK(split("\u2028x\u2028\n") == Words{"\u2028x", "\u2028\n"});
  CHECK(split("?   ") == Words{"?", "   "});
  CHECK(split("\u65E5\u672C\u3002\u4E2D") == Words{"\u65E5\u672C", "\u3002\u4E2D"});
  CHECK(split("\U0001F642x\U0001F642\U0001F642y") == Words{"\U0001F642x", "\U0001F642\U0001F642", "y"});
  CHECK(split("e\u0301a\u0301\u0301b") == Words{"e", "\u0301a", "\u0301\u0301", "b"});
  CHECK(split("a\u00A0b\u3000c\u3000\u3000") == Words{"a", "\u00A0b", "\u3000c", "\u3000\u3000"});
  CHECK(split("\xFF"
              "a\xFF\xFE"
              "a'\xC5") == Words{"\xFF"
                                 "a",
                                 "\xFF\xFE", "a", "'\xC5"});
}

TEST_CASE("words leave nothing out") {
  Random random(11);
  for (const PreTokenizer pre : all_pre_tokenizers)
    for (int trial = 0; trial < 1000; ++trial) {
      const std::string text = trial % 2 == 0 ? random_text(random) : random_bytes(random, 20);
      std::string all;
      for (const std::string& word : words(pre, text)) {
        REQUIRE_FALSE(word.empty());
        all += word;
      }
      REQUIRE(all == text);
    }
}

// ---- Merges -----------------------------------------------------------------------------------------------

TEST_CASE("merges are applied in their order, from the left") {
  Vocabulary vocabulary;
  vocabulary.tokens = {"a", "b", "c", "\u0120"};  // the last is a space
  add_merge(vocabulary, "b", "c");                // 4
  add_merge(vocabulary, "a", "b");                // 5
  add_merge(vocabulary, "a", "a");                // 6
  add_merge(vocabulary, "aa", "aa");              // 7
  add_merge(vocabulary, "a", "bc");               // 8
  add_merge(vocabulary, "\u0120", "abc");         // 9
  const Tokenizer tokenizer(vocabulary);
  CHECK(tokenizer.size() == 10);
  CHECK(tokenizer.encode("") == Tokens{});
  CHECK(tokenizer.encode("abc") == Tokens{8});  // b c comes before a b
  CHECK(tokenizer.encode("abb") == Tokens{5, 1});
  CHECK(tokenizer.encode("aaa") == Tokens{6, 0});
  CHECK(tokenizer.encode("aaaaaaa") == Tokens{7, 6, 0});
  CHECK(tokenizer.encode("aab") == Tokens{0, 5});
  CHECK(tokenizer.encode(" abc abc") == Tokens{9, 9});
  CHECK(tokenizer.encode("abc  abc") == Tokens{8, 3, 9});  // no merge over a word's end
  CHECK(tokenizer.decode(Tokens{9, 7, 3}) == " abcaaaa ");
  CHECK(tokenizer.piece(9) == " abc");
}

TEST_CASE("a token that no merge makes is not used for text") {
  Vocabulary vocabulary;
  vocabulary.tokens = {"a", "b", "ab"};
  CHECK(Tokenizer(vocabulary).encode("ab") == Tokens{0, 1});
}

TEST_CASE("of two merges of the same pair the first counts") {
  Vocabulary vocabulary;
  vocabulary.tokens = {"a", "b", "c"};
  add_merge(vocabulary, "a", "b");
  add_merge(vocabulary, "b", "c");
  vocabulary.merges.push_back("a b");
  CHECK(Tokenizer(vocabulary).encode("abc") == Tokens{3, 2});
}

TEST_CASE("random merges give what merging the best pair over and over gives") {
  Random random(3);
  for (int trial = 0; trial < 60; ++trial) {
    Vocabulary vocabulary;
    vocabulary.tokens = {"a", "b", "c"};
    while (vocabulary.merges.size() < 25) {
      const auto any = [&] {
        return vocabulary.tokens[static_cast<std::size_t>(
            random.integer(0, static_cast<wushkv::Index>(vocabulary.tokens.size()) - 1))];
      };
      const std::string left = any(), right = any();
      if (std::count(vocabulary.tokens.begin(), vocabulary.tokens.end(), left + right) == 0)
        add_merge(vocabulary, left, right);
    }
    const Tokenizer tokenizer(vocabulary);
    for (int sample = 0; sample < 20; ++sample) {
      std::string text;
      for (std::int64_t left = random.integer(0, 60); left > 0; --left)
        text += random.pick({'a', 'a', 'b', 'c'});
      Words expected;
      for (const char c : text) expected.emplace_back(1, c);
      for (bool merged = true; merged;) {
        merged = false;
        for (const std::string& merge : vocabulary.merges) {
          for (std::size_t i = 0; i + 1 < expected.size() && !merged; ++i)
            if (expected[i] + " " + expected[i + 1] == merge) {
              expected[i] += expected[i + 1];
              expected.erase(expected.begin() + static_cast<std::ptrdiff_t>(i) + 1);
              merged = true;
            }
          if (merged) break;
        }
      }
      Words actual;
      for (const Token token : tokenizer.encode(text)) actual.push_back(tokenizer.piece(token));
      REQUIRE(actual == expected);
    }
  }
}

TEST_CASE("a word of a million bytes takes no quadratic time") {
  Vocabulary vocabulary;
  vocabulary.tokens = {"a", "b"};
  for (std::string half = "a"; half.size() < 64; half += half) add_merge(vocabulary, half, half);
  const Tokenizer tokenizer(vocabulary);
  constexpr std::size_t size = 1000000;
  const Tokens tokens = tokenizer.encode(std::string(size, 'a'));
  CHECK(tokens.size() == size / 64);
  CHECK(std::all_of(tokens.begin(), tokens.end(), [](Token token) { return token == 7; }));
  CHECK(tokenizer.encode(std::string(size, 'b')) == Tokens(size, 1));
  CHECK(tokenizer.decode(tokens) == std::string(size, 'a'));
}

// ---- Bytes ------------------------------------------------------------------------------------------------

TEST_CASE("all bytes have the code points that GPT-2 gives them") {
  const Tokenizer tokenizer(byte_vocabulary());
  CHECK(tokenizer.vocabulary().tokens[' '] == "\u0120");
  CHECK(tokenizer.vocabulary().tokens['\n'] == "\u010A");
  for (Token byte = 0; byte < 256; ++byte) {
    const std::string text(1, static_cast<char>(byte));
    for (const PreTokenizer pre : all_pre_tokenizers) {
      Vocabulary vocabulary = byte_vocabulary();
      vocabulary.pre = pre;
      CHECK(Tokenizer(vocabulary).encode(text) == Tokens{byte});
    }
    CHECK(tokenizer.piece(byte) == text);
  }
}

TEST_CASE("whatever was encoded is decoded") {
  Random random(7);
  for (const PreTokenizer pre : all_pre_tokenizers) {
    Vocabulary vocabulary = byte_vocabulary();
    vocabulary.pre = pre;
    add_merge(vocabulary, "a", "a");
    add_merge(vocabulary, "\u0120", "a");
    add_merge(vocabulary, "\u00C3", "\u00A9");
    const Tokenizer tokenizer(vocabulary);
    for (int trial = 0; trial < 500; ++trial) {
      const std::string text =
          trial % 2 == 0 ? random_text(random) : random_bytes(random, random.integer(0, 100));
      REQUIRE(tokenizer.decode(tokenizer.encode(text)) == text);
    }
    const std::string all = random_bytes(random, 20000);
    CHECK(tokenizer.decode(tokenizer.encode(all)) == all);
    CHECK(Tokenizer(byte_vocabulary()).encode(all) == bytes_as_tokens(all));
  }
}

TEST_CASE("a byte without a token becomes the unknown token, or is refused by its number") {
  Vocabulary vocabulary;
  vocabulary.tokens = {"a", "b", "<unk>"};
  CHECK_REFUSED(Tokenizer(vocabulary).encode("ab\xF1"), "byte 241");
  CHECK_REFUSED(Tokenizer(vocabulary).encode("a b"), "byte 32");
  vocabulary.types = {1, 1, 2};
  vocabulary.unknown = 2;
  const Tokenizer tokenizer(vocabulary);
  CHECK(tokenizer.encode("a\xF1\xF1z") == Tokens{0, 2, 2, 2});
  CHECK(tokenizer.decode(Tokens{0, 2, 1}) == "ab");
  CHECK(tokenizer.decode(Tokens{0, 2, 1}, true) == "a<unk>b");
}

TEST_CASE("a number that is no token's is refused") {
  const Tokenizer tokenizer(byte_vocabulary());
  CHECK_REFUSED(tokenizer.piece(256), "token is 256, expected one of the vocabulary's 256");
  CHECK_REFUSED(tokenizer.piece(-1), "token is -1");
  CHECK_REFUSED(tokenizer.decode(Tokens{1, 300}), "token is 300");
}

// ---- Special tokens ---------------------------------------------------------------------------------------

TEST_CASE("control tokens are taken from a text only when asked for, user-defined ones always") {
  Vocabulary vocabulary = byte_vocabulary();
  add_merge(vocabulary, "<", "s");  // 256
  const Token begin = add_token(vocabulary, "<s>", 3);
  const Token longer = add_token(vocabulary, "<s>x", 3);
  const Token tag = add_token(vocabulary, "[a b]", 4);  // with a space, as it is
  const Token sun = add_token(vocabulary, "\u65E5", 4);
  const Token unused = add_token(vocabulary, "[PAD]", 5);
  const Tokenizer tokenizer(vocabulary);

  CHECK(tokenizer.encode("<s>", true) == Tokens{begin});
  CHECK(tokenizer.encode("<s>") == Tokens{'<', 's', '>'});  // "<s>" is three words: the merge is not used
  CHECK(tokenizer.encode("y<s>xy<s><s", true) == Tokens{'y', longer, 'y', begin, '<', 's'});
  CHECK(tokenizer.encode("<<s>", true) == Tokens{'<', begin});
  CHECK(tokenizer.encode("x <s> y", true) == Tokens{'x', ' ', begin, ' ', 'y'});
  CHECK(tokenizer.encode("[a b][a b", true) == Tokens{tag, '[', 'a', ' ', 'b'});
  CHECK(tokenizer.encode("\u65E5[a b]<s>") == Tokens{sun, tag, '<', 's', '>'});
  CHECK(tokenizer.encode("[PAD]", true) == bytes_as_tokens("[PAD]"));

  const Tokens tokens{begin, 'h', tag, unused, sun, longer};
  CHECK(tokenizer.decode(tokens) == "h[a b]\u65E5");
  CHECK(tokenizer.decode(tokens, true) == "<s>h[a b][PAD]\u65E5<s>x");
  CHECK(tokenizer.piece(begin) == "");
  CHECK(tokenizer.piece(begin, true) == "<s>");

  CHECK(tokenizer.find("<s>") == begin);
  CHECK(tokenizer.find("[a b]") == tag);
  CHECK(tokenizer.find("<|im_start|>") == std::nullopt);
  CHECK(tokenizer.find("") == std::nullopt);
}

TEST_CASE("no plain text merges into a control token") {
  Vocabulary vocabulary;
  vocabulary.tokens = {"a", "b", "ab"};
  vocabulary.merges = {"a b"};
  vocabulary.types = {1, 1, 3};
  CHECK(Tokenizer(vocabulary).encode("ab") == Tokens{0, 1});
  CHECK(Tokenizer(vocabulary).encode("ab", true) == Tokens{2});
}

TEST_CASE("a user-defined token is its text, also where that is the code point of a byte") {
  Vocabulary vocabulary;
  vocabulary.tokens = {"a", "\u00E9"};
  vocabulary.types = {1, 4};
  const Tokenizer tokenizer(vocabulary);
  CHECK(tokenizer.encode("a\u00E9") == Tokens{0, 1});
  CHECK(tokenizer.decode(Tokens{0, 1}) == "a\u00E9");
  CHECK_REFUSED(tokenizer.encode("a\xE9"), "byte 233");
}

TEST_CASE("spaces at the end of the text before a special token are at an end") {
  Vocabulary vocabulary = byte_vocabulary();
  add_merge(vocabulary, "\u0120", "\u0120");
  const Token end = add_token(vocabulary, "<e>", 3);
  const Tokenizer tokenizer(vocabulary);
  CHECK(tokenizer.encode("a  <e>", true) == Tokens{'a', 256, end});
  CHECK(tokenizer.encode("a  <") == Tokens{'a', ' ', ' ', '<'});
}

TEST_CASE("a token with code points that stand for no byte is its own text; an empty one is found nowhere") {
  Vocabulary vocabulary = byte_vocabulary();
  vocabulary.tokens.push_back("\u65E5 x");
  vocabulary.tokens.push_back("\xFF");
  const Token empty = add_token(vocabulary, "", 4);
  const Tokenizer tokenizer(vocabulary);
  CHECK(tokenizer.piece(256) == "\u65E5 x");
  CHECK(tokenizer.piece(257) == "\xFF");
  CHECK(tokenizer.piece(empty) == "");
  CHECK(tokenizer.encode("ab", true) == Tokens{'a', 'b'});
}

TEST_CASE("copies and moved tokenizers work by themselves") {
  Vocabulary vocabulary = byte_vocabulary();
  const Token end = add_token(vocabulary, "<e>", 3);
  std::optional<Tokenizer> first(vocabulary);
  const Tokenizer copy(*first);
  const Tokenizer moved(std::move(*first));
  first.reset();
  for (const Tokenizer* tokenizer : {&copy, &moved}) {
    CHECK(tokenizer->encode("a<e>", true) == Tokens{'a', end});
    CHECK(tokenizer->find("<e>") == end);
  }
}

// ---- Damaged vocabularies ---------------------------------------------------------------------------------

template <class Damage>
std::string refusal(Damage damage) {
  Vocabulary vocabulary;
  vocabulary.tokens = {"a", "b", "ab"};
  vocabulary.merges = {"a b"};
  damage(vocabulary);
  return message_of<FileError>([&] { Tokenizer tokenizer(vocabulary); });
}

TEST_CASE("damaged vocabularies are refused with what is wrong") {
  CHECK(refusal([](Vocabulary&) {}) == "");
  CHECK(refusal([](Vocabulary& v) { v.tokens.push_back("b"); }) ==
        "tokenizer: tokens 1 and 3 are both 'b', expected different texts");
  CHECK(refusal([](Vocabulary& v) {
          v.tokens = {"x\ny", "x\ny"};
        }) == "tokenizer: tokens 0 and 1 are both 'x?y', expected different texts");
  CHECK(refusal([](Vocabulary& v) { v.tokens.resize(5, std::string(1000, 'x')); }) ==
        "tokenizer: tokens 3 and 4 are both '" + std::string(60, 'x') + "...', expected different texts");
  for (const char* merge : {"ab", "", " ", "a ", " b"})
    CHECK(refusal([&](Vocabulary& v) { v.merges.push_back(merge); }) ==
          "tokenizer: merge 1 is '" + std::string(merge) + "', expected two tokens with a space between");
  CHECK(refusal([](Vocabulary& v) { v.merges = {"c b"}; }) ==
        "tokenizer: merge 0 is 'c b', expected 'c' to be a token");
  CHECK(refusal([](Vocabulary& v) { v.merges = {"a c"}; }) ==
        "tokenizer: merge 0 is 'a c', expected 'c' to be a token");
  CHECK(refusal([](Vocabulary& v) { v.merges = {"a b a"}; }) ==
        "tokenizer: merge 0 is 'a b a', expected 'b a' to be a token");
  CHECK(refusal([](Vocabulary& v) { v.merges = {"b a"}; }) ==
        "tokenizer: merge 0 is 'b a', expected 'ba' to be a token");
  CHECK(refusal([](Vocabulary& v) {
          v.types = {1, 1};
        }) == "tokenizer: the vocabulary has 2 token types for 3 tokens, expected one a token");
  CHECK(refusal([](Vocabulary& v) {
          v.types = {1, 0, 1};
        }) == "tokenizer: token 1 is of type 0, expected 1 to 6");
  CHECK(refusal([](Vocabulary& v) {
          v.types = {1, 1, 7};
        }) == "tokenizer: token 2 is of type 7, expected 1 to 6");
  CHECK(refusal([](Vocabulary& v) { v.types = {1, 6, 5}; }) == "");
  CHECK(refusal([](Vocabulary& v) { v.bos = 3; }) ==
        "tokenizer: the bos token is 3, expected one of the vocabulary's 3");
  CHECK(refusal([](Vocabulary& v) { v.eos = -1; }) ==
        "tokenizer: the eos token is -1, expected one of the vocabulary's 3");
  CHECK(refusal([](Vocabulary& v) { v.unknown = 1000; }) ==
        "tokenizer: the unknown token is 1000, expected one of the vocabulary's 3");
  CHECK(refusal([](Vocabulary& v) { v = Vocabulary(); }) == "");
  CHECK(Tokenizer(Vocabulary()).encode("") == Tokens{});
}

// ---- Vocabularies from files ------------------------------------------------------------------------------

Vocabulary read(const GgufWriter& file) {
  const std::vector<std::byte> bytes = file.bytes();
  return engine::read_vocabulary(engine::GgufFile(std::span(bytes)));
}

GgufWriter small_file() {
  GgufWriter file;
  file.add("tokenizer.ggml.model", "gpt2");
  file.add("tokenizer.ggml.tokens", Words{"a", "b", "ab", "<e>"});
  file.add("tokenizer.ggml.merges", Words{"a b"});
  return file;
}

TEST_CASE("a vocabulary is read from a file's keys") {
  GgufWriter file = small_file();
  const Vocabulary plain = read(file);
  CHECK(plain.tokens == Words{"a", "b", "ab", "<e>"});
  CHECK(plain.merges == Words{"a b"});
  CHECK(plain.types.empty());
  CHECK(plain.pre == PreTokenizer::Gpt2);
  CHECK(plain.bos == std::nullopt);
  CHECK(plain.eos == std::nullopt);
  CHECK(plain.unknown == std::nullopt);
  CHECK_FALSE(plain.add_bos);

  file.add("tokenizer.ggml.pre", "smollm");
  file.add("tokenizer.ggml.token_type", std::vector<std::int32_t>{1, 1, 1, 3});
  file.add("tokenizer.ggml.bos_token_id", std::uint32_t{3});
  file.add("tokenizer.ggml.eos_token_id", std::uint32_t{2});
  file.add("tokenizer.ggml.unknown_token_id", std::uint32_t{1});
  file.add("tokenizer.ggml.add_bos_token", true);
  const Vocabulary full = read(file);
  CHECK(full.types == std::vector<std::int32_t>{1, 1, 1, 3});
  CHECK(full.pre == PreTokenizer::SmolLm);
  CHECK(full.bos == 3);
  CHECK(full.eos == 2);
  CHECK(full.unknown == 1);
  CHECK(full.add_bos);
  CHECK(Tokenizer(full).encode("ab<e>", true) == Tokens{2, 3});
}

TEST_CASE("the known pre-tokenizers, and others by name") {
  const auto pre_of = [](const std::string& pre) {
    GgufWriter file = small_file();
    file.add("tokenizer.ggml.pre", pre);
    return read(file).pre;
  };
  CHECK(pre_of("gpt-2") == PreTokenizer::Gpt2);
  CHECK(pre_of("smollm") == PreTokenizer::SmolLm);
  CHECK(pre_of("qwen2") == PreTokenizer::Qwen2);
  const std::string message = message_of<FileError>([&] { pre_of("llama-bpe"); });
  CHECK(message.find("tokenizer.ggml.pre is 'llama-bpe', expected 'gpt-2'") != message.npos);
  CHECK(message.find("'qwen2'") != message.npos);
}

TEST_CASE("files of another tokenizer or with keys that do not fit are refused") {
  const auto refused = [](const GgufWriter& file) { return message_of<FileError>([&] { read(file); }); };
  GgufWriter other;
  other.add("tokenizer.ggml.model", "llama");
  CHECK(refused(other) == "tokenizer: tokenizer.ggml.model is 'llama', expected 'gpt2' (byte-level BPE)");
  CHECK(refused(GgufWriter()).find("tokenizer.ggml.model") != std::string::npos);
  GgufWriter without_tokens;
  without_tokens.add("tokenizer.ggml.model", "gpt2");
  CHECK(refused(without_tokens).find("tokenizer.ggml.tokens") != std::string::npos);
  GgufWriter large = small_file();
  large.add("tokenizer.ggml.bos_token_id", std::uint32_t{0xFFFFFFFF});
  CHECK(refused(large) ==
        "tokenizer: tokenizer.ggml.bos_token_id has 4294967295, expected numbers of 32 bits");
  GgufWriter type = small_file();
  type.add_numbers("tokenizer.ggml.token_type", 11, std::vector<std::int64_t>{1, 1, 1, -3000000000});
  CHECK(refused(type) == "tokenizer: tokenizer.ggml.token_type has -3000000000, expected numbers of 32 bits");
}

}  // namespace
