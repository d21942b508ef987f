// SPDX-License-Identifier: Apache-2.0
#include "engine/tokenizer.hpp"

#include <algorithm>
#include <queue>
#include <utility>

#include "engine/gguf.hpp"
#include "engine/unicode.hpp"
#include "wushkv/core/error.hpp"

namespace engine {
namespace {

using wushkv::detail::file_error;
using wushkv::detail::invalid_argument;

// ---- Words: the pre-tokenizers' regular expressions, by hand ----------------------------------------------

bool is_symbol(char32_t c) { return !is_space(c) && !is_letter(c) && !is_number(c); }
bool is_newline(char32_t c) { return c == '\r' || c == '\n'; }

/// Where the run of code points that `accepts` takes ends, if it starts at `at`.
template <class Accepts>
std::size_t run_end(std::string_view text, std::size_t at, Accepts accepts) {
  while (at < text.size()) {
    const CodePoint c = code_point_at(text, at);
    if (!accepts(c.value)) break;
    at += c.size;
  }
  return at;
}

// 's|'t|'re|'ve|'m|'ll|'d
std::size_t contraction_end(std::string_view text, std::size_t at) {
  for (const std::string_view ending : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"})
    if (text.substr(at).starts_with(ending)) return at + ending.size();
  return at;
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d): the long s is an s without regard to case, and the only such letter not in
// ASCII.
std::size_t contraction_end_of_any_case(std::string_view text, std::size_t at) {
  constexpr std::string_view long_s = "'\xC5\xBF";
  if (text.substr(at).starts_with(long_s)) return at + long_s.size();
  std::string lower(text.substr(at, 3));
  for (char& c : lower)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return at + contraction_end(lower, 0);
}

// \s+(?!\S)|\s+, of a text that has a space at `at`: the last space of several is left to the word after
// them.
std::size_t spaces_end(std::string_view text, std::size_t at) {
  std::size_t last = at, end = at;
  while (end < text.size()) {
    const CodePoint c = code_point_at(text, end);
    if (!is_space(c.value)) return last > at ? last : end;
    last = end;
    end += c.size;
  }
  return end;
}

// '(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
std::size_t gpt2_word_end(std::string_view text, std::size_t at) {
  if (const std::size_t end = contraction_end(text, at); end > at) return end;
  const std::size_t begin = text[at] == ' ' ? at + 1 : at;
  if (const std::size_t end = run_end(text, begin, is_letter); end > begin) return end;
  if (const std::size_t end = run_end(text, begin, is_number); end > begin) return end;
  if (const std::size_t end = run_end(text, begin, is_symbol); end > begin) return end;
  return spaces_end(text, at);
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+
// |\s+(?!\S)|\s+
std::size_t qwen2_word_end(std::string_view text, std::size_t at) {
  if (const std::size_t end = contraction_end_of_any_case(text, at); end > at) return end;
  const CodePoint first = code_point_at(text, at);
  const std::size_t second = at + first.size;
  if (is_letter(first.value)) return run_end(text, second, is_letter);
  if (is_number(first.value)) return second;
  if (!is_newline(first.value))
    if (const std::size_t end = run_end(text, second, is_letter); end > second) return end;
  const std::size_t begin = text[at] == ' ' ? at + 1 : at;
  if (const std::size_t end = run_end(text, begin, is_symbol); end > begin)
    return run_end(text, end, is_newline);
  const std::string_view spaces = text.substr(at, run_end(text, at, is_space) - at);
  if (const std::size_t newline = spaces.find_last_of("\r\n"); newline != spaces.npos)
    return at + newline + 1;
  return spaces_end(text, at);
}

template <class WordEnd>
void append_words(std::string_view text, WordEnd word_end, std::vector<std::string_view>& words) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = word_end(text, at);
    words.push_back(text.substr(at, end - at));
    at = end;
  }
}

// ---- Bytes as GPT-2's code points: printable ones as they are, the others from U+0100 on
// -------------------

std::array<char32_t, 256> make_byte_code_points() {
  std::array<char32_t, 256> codes{};
  char32_t next = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    codes[byte] = printable ? byte : next++;
  }
  return codes;
}

/// The bytes that a token's text stands for. A text with any other code point stands for itself.
std::string bytes_of(const std::string& text, const std::unordered_map<char32_t, char>& byte_of) {
  std::string bytes;
  for (std::size_t at = 0; at < text.size();) {
    const CodePoint c = code_point_at(text, at);
    const auto byte = byte_of.find(c.value);
    if (byte == byte_of.end()) return text;
    bytes += byte->second;
    at += c.size;
  }
  return bytes;
}

std::uint64_t pair_key(Token left, Token right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
         static_cast<std::uint32_t>(right);
}

/// A file's text for a message: short, and of one line whatever is in it.
std::string show(std::string_view text) {
  std::string out = "'";
  for (const char c : text.substr(0, 60)) out += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
  return out + (text.size() > 60 ? "...'" : "'");
}

enum TokenType : std::int32_t { Normal = 1, Unknown, Control, UserDefined, Unused, Byte };

}  // namespace

std::vector<std::string_view> split_words(PreTokenizer pre, std::string_view text) {
  std::vector<std::string_view> words;
  switch (pre) {
    case PreTokenizer::Gpt2:
      append_words(text, gpt2_word_end, words);
      break;
    case PreTokenizer::SmolLm:  // each digit by itself, and what is between them is split as if it were all
      for (std::size_t at = 0; at < text.size();) {
        const std::size_t digit = run_end(text, at, [](char32_t c) { return !is_number(c); });
        append_words(text.substr(at, digit - at), gpt2_word_end, words);
        if (digit == text.size()) break;
        at = digit + code_point_at(text, digit).size;
        words.push_back(text.substr(digit, at - digit));
      }
      break;
    case PreTokenizer::Qwen2:
      append_words(text, qwen2_word_end, words);
      break;
  }
  return words;
}

// ---- Vocabulary -------------------------------------------------------------------------------------------

Vocabulary read_vocabulary(const GgufFile& file) {
  const std::string_view model = file.string("tokenizer.ggml.model");
  if (model != "gpt2")
    file_error("tokenizer: tokenizer.ggml.model is ", show(model), ", expected 'gpt2' (byte-level BPE)");

  Vocabulary vocabulary;
  const std::string_view pre = file.string_or("tokenizer.ggml.pre", "gpt-2");
  if (pre == "gpt-2" || pre == "phi-2")
    vocabulary.pre = PreTokenizer::Gpt2;
  else if (pre == "smollm" || pre == "starcoder")
    vocabulary.pre = PreTokenizer::SmolLm;
  else if (pre == "qwen2" || pre == "deepseek-r1-qwen")
    vocabulary.pre = PreTokenizer::Qwen2;
  else
    file_error("tokenizer: tokenizer.ggml.pre is ", show(pre),
               ", expected 'gpt-2', 'phi-2', 'smollm', 'starcoder', 'qwen2' or 'deepseek-r1-qwen'");

  for (const std::string_view token : file.strings("tokenizer.ggml.tokens"))
    vocabulary.tokens.emplace_back(token);
  for (const std::string_view merge : file.strings("tokenizer.ggml.merges"))
    vocabulary.merges.emplace_back(merge);

  const auto as_int32 = [](std::string_view key, auto value) {
    if (!std::in_range<std::int32_t>(value))
      file_error("tokenizer: ", key, " has ", value, ", expected numbers of 32 bits");
    return static_cast<std::int32_t>(value);
  };
  constexpr std::string_view types = "tokenizer.ggml.token_type";
  if (file.contains(types))
    for (const std::int64_t type : file.integers(types)) vocabulary.types.push_back(as_int32(types, type));
  const auto token = [&](std::string_view key) {
    return file.contains(key) ? std::optional<Token>(as_int32(key, file.integer(key))) : std::nullopt;
  };
  vocabulary.bos = token("tokenizer.ggml.bos_token_id");
  vocabulary.eos = token("tokenizer.ggml.eos_token_id");
  vocabulary.unknown = token("tokenizer.ggml.unknown_token_id");
  vocabulary.add_bos = file.boolean_or("tokenizer.ggml.add_bos_token", false);
  return vocabulary;
}

Tokenizer::Tokenizer(Vocabulary vocabulary) : vocabulary_(std::move(vocabulary)) {
  check_types();
  index_tokens();
  read_merges();
}

void Tokenizer::check_types() const {
  const std::vector<std::int32_t>& types = vocabulary_.types;
  if (!types.empty() && types.size() != size())
    file_error("tokenizer: the vocabulary has ", types.size(), " token types for ", size(),
               " tokens, expected one a token");
  for (std::size_t i = 0; i < types.size(); ++i)
    if (types[i] < Normal || types[i] > Byte)
      file_error("tokenizer: token ", i, " is of type ", types[i], ", expected 1 to 6");
  const auto check = [&](std::string_view name, std::optional<Token> token) {
    if (token && (*token < 0 || static_cast<std::size_t>(*token) >= size()))
      file_error("tokenizer: the ", name, " token is ", *token, ", expected one of the vocabulary's ",
                 size());
  };
  check("bos", vocabulary_.bos);
  check("eos", vocabulary_.eos);
  check("unknown", vocabulary_.unknown);
}

void Tokenizer::index_tokens() {
  const std::array<char32_t, 256> codes = make_byte_code_points();
  std::unordered_map<char32_t, char> byte_of;
  for (std::size_t byte = 0; byte < 256; ++byte) byte_of.emplace(codes[byte], static_cast<char>(byte));

  for (std::size_t i = 0; i < size(); ++i) {
    const std::string& text = vocabulary_.tokens[i];
    const Token token = static_cast<Token>(i);
    if (const auto [before, added] = by_text_.emplace(text, token); !added)
      file_error("tokenizer: tokens ", before->second, " and ", i, " are both ", show(text),
                 ", expected different texts");
    const std::int32_t type = vocabulary_.types.empty() ? Normal : vocabulary_.types[i];
    pieces_.push_back(type == Normal || type == Byte ? bytes_of(text, byte_of) : text);
    if ((type == Control || type == UserDefined) && !text.empty())
      matched_in_text_[static_cast<unsigned char>(text[0])].push_back(token);
  }
  for (std::vector<Token>& tokens : matched_in_text_)
    std::sort(tokens.begin(), tokens.end(), [this](Token a, Token b) {
      return pieces_[static_cast<std::size_t>(a)].size() > pieces_[static_cast<std::size_t>(b)].size();
    });
  for (std::size_t byte = 0; byte < 256; ++byte) {
    const std::optional<Token> token = find(to_utf8(codes[byte]));
    // A user-defined token may have a byte's code point for its text, and not mean the byte.
    if (token && piece(*token) == std::string(1, static_cast<char>(byte))) byte_tokens_[byte] = token;
  }
}

void Tokenizer::read_merges() {
  for (std::size_t rank = 0; rank < vocabulary_.merges.size(); ++rank) {
    const std::string& merge = vocabulary_.merges[rank];
    const std::size_t space = merge.find(' ');
    if (space == merge.npos || space == 0 || space + 1 == merge.size())
      file_error("tokenizer: merge ", rank, " is ", show(merge),
                 ", expected two tokens with a space between");
    const auto token = [&](const std::string& text) {
      const std::optional<Token> found = find(text);
      if (!found)
        file_error("tokenizer: merge ", rank, " is ", show(merge), ", expected ", show(text),
                   " to be a token");
      return *found;
    };
    const std::string left = merge.substr(0, space), right = merge.substr(space + 1);
    const Token first = token(left), second = token(right), result = token(left + right);
    // Text that nobody marked as special must not merge into a control token.
    if (!is_hidden(result)) merges_.try_emplace(pair_key(first, second), Merge{rank, result});
  }
}

std::optional<Token> Tokenizer::find(std::string_view text) const {
  const auto found = by_text_.find(std::string(text));
  return found != by_text_.end() ? std::optional(found->second) : std::nullopt;
}

bool Tokenizer::is_hidden(Token token) const {
  if (vocabulary_.types.empty()) return false;
  const std::int32_t type = vocabulary_.types[static_cast<std::size_t>(token)];
  return type == Control || type == Unknown || type == Unused;
}

// ---- Text to tokens ---------------------------------------------------------------------------------------

struct Tokenizer::Scratch {
  static constexpr Token merged_away = -1;

  struct Symbol {
    Token token;
    std::size_t previous, next;  // the word's size at its end; before its start nobody asks
  };
  struct Candidate {
    std::size_t rank, at;
    Token left, right, result;

    bool operator<(const Candidate& other) const {  // the queue's top is the largest: lowest rank, leftmost
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };

  std::vector<Symbol> symbols;
  std::priority_queue<Candidate> candidates;
};

const Tokenizer::Merge* Tokenizer::find_merge(Token left, Token right) const {
  const auto found = merges_.find(pair_key(left, right));
  return found != merges_.end() ? &found->second : nullptr;
}

// The best pair of all is at the top of a queue, and its neighbours are found by links: n log n for a word of
// n bytes. Pairs are not taken out of the queue when one of their symbols is merged, but passed over later.
void Tokenizer::encode_word(std::string_view word, Scratch& scratch, std::vector<Token>& out) const {
  std::vector<Scratch::Symbol>& symbols = scratch.symbols;
  symbols.clear();
  for (const char c : word) {
    const std::optional<Token>& token = byte_tokens_[static_cast<unsigned char>(c)];
    if (!token && !vocabulary_.unknown)
      invalid_argument("tokenizer: the text has the byte ", static_cast<int>(static_cast<unsigned char>(c)),
                       ", expected only bytes of the vocabulary, which has no unknown token");
    symbols.push_back({token ? *token : *vocabulary_.unknown, symbols.size() - 1, symbols.size() + 1});
  }

  const std::size_t end = symbols.size();
  const auto add_candidate = [&](std::size_t at) {
    const std::size_t next = symbols[at].next;
    if (next == end) return;
    const Token left = symbols[at].token, right = symbols[next].token;
    if (const Merge* merge = find_merge(left, right))
      scratch.candidates.push({merge->rank, at, left, right, merge->result});
  };
  for (std::size_t i = 0; i < end; ++i) add_candidate(i);

  while (!scratch.candidates.empty()) {
    const Scratch::Candidate best = scratch.candidates.top();
    scratch.candidates.pop();
    Scratch::Symbol& left = symbols[best.at];
    if (left.token != best.left || left.next == end || symbols[left.next].token != best.right) continue;
    left.token = best.result;
    symbols[left.next].token = Scratch::merged_away;
    left.next = symbols[left.next].next;
    if (left.next != end) symbols[left.next].previous = best.at;
    if (best.at != 0) add_candidate(left.previous);
    add_candidate(best.at);
  }
  for (std::size_t i = 0; i < end; i = symbols[i].next) out.push_back(symbols[i].token);
}

std::optional<Token> Tokenizer::user_token_at(std::string_view text, std::size_t at, bool special) const {
  for (const Token token : matched_in_text_[static_cast<unsigned char>(text[at])])
    if ((special || !is_hidden(token)) &&
        text.substr(at).starts_with(vocabulary_.tokens[static_cast<std::size_t>(token)]))
      return token;
  return std::nullopt;
}

std::vector<Token> Tokenizer::encode(std::string_view text, bool special) const {
  std::vector<Token> out;
  Scratch scratch;
  const auto encode_words = [&](std::size_t begin, std::size_t end) {
    for (const std::string_view word : split_words(vocabulary_.pre, text.substr(begin, end - begin)))
      encode_word(word, scratch, out);
  };
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size();) {
    if (const std::optional<Token> token = user_token_at(text, at, special)) {
      encode_words(begin, at);
      out.push_back(*token);
      begin = at += vocabulary_.tokens[static_cast<std::size_t>(*token)].size();
    } else {
      ++at;
    }
  }
  encode_words(begin, text.size());
  return out;
}

// ---- Tokens to text ---------------------------------------------------------------------------------------

std::string Tokenizer::piece(Token token, bool special) const {
  if (token < 0 || static_cast<std::size_t>(token) >= size())
    invalid_argument("tokenizer: token is ", token, ", expected one of the vocabulary's ", size());
  return is_hidden(token) && !special ? std::string() : pieces_[static_cast<std::size_t>(token)];
}

std::string Tokenizer::decode(std::span<const Token> tokens, bool special) const {
  std::string out;
  for (const Token token : tokens) out += piece(token, special);
  return out;
}

}  // namespace engine
