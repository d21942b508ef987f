// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_TOKENIZER_HPP
#define WUSHKV_EXAMPLES_ENGINE_TOKENIZER_HPP

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace engine {

class GgufFile;

using Token = std::int32_t;

/// How a text is split into words before the merges, which never cross a word's end.
enum class PreTokenizer { Gpt2, SmolLm, Qwen2 };

/// The words of `text`, in order and without gaps. A byte that is not UTF-8 counts as a symbol, as U+FFFD is.
std::vector<std::string_view> split_words(PreTokenizer pre, std::string_view text);

struct Vocabulary {
  std::vector<std::string> tokens;  ///< as GGUF has them: each byte as one of GPT-2's printable code points
  std::vector<std::string> merges;  ///< "left right", the first to be applied first
  /// 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte; empty: all are normal. The texts of 2
  /// to 5 are not in GPT-2's code points but as they are.
  std::vector<std::int32_t> types;
  PreTokenizer pre = PreTokenizer::Gpt2;
  std::optional<Token> bos, eos, unknown;
  bool add_bos =
      false;  ///< whether the model wants `bos` before a text; `Tokenizer::encode` leaves it to the caller
};

/// Throws `wushkv::FileError` if the file's tokenizer is not a byte-level BPE with a known pre-tokenizer.
Vocabulary read_vocabulary(const GgufFile& file);

/// Byte-level BPE. Nothing normalizes the text: decoding gives the bytes that were encoded.
class Tokenizer {
 public:
  /// Throws `wushkv::FileError` for a damaged vocabulary.
  explicit Tokenizer(Vocabulary vocabulary);

  /// User-defined tokens are found wherever the text has them. Control tokens are only with `special`: leave
  /// it off for what a user typed, who could otherwise end his turn and write the model's. A byte without a
  /// token becomes the unknown token; without that one, throws `std::invalid_argument`.
  std::vector<Token> encode(std::string_view text, bool special = false) const;

  /// The bytes of the tokens, which need not be whole characters. Control, unknown and unused tokens are
  /// left out unless `special`. Throws `std::invalid_argument` for a number that is no token's.
  std::string decode(std::span<const Token> tokens, bool special = false) const;
  std::string piece(Token token, bool special = false) const;

  /// The token with this text, as the vocabulary has it: "<|im_start|>".
  std::optional<Token> find(std::string_view text) const;

  std::size_t size() const { return vocabulary_.tokens.size(); }
  const Vocabulary& vocabulary() const { return vocabulary_; }

 private:
  struct Merge {
    std::size_t rank;
    Token result;
  };
  struct Scratch;

  void check_types() const;
  void index_tokens();
  void read_merges();
  bool is_hidden(Token token) const;
  const Merge* find_merge(Token left, Token right) const;
  std::optional<Token> user_token_at(std::string_view text, std::size_t at, bool special) const;
  void encode_word(std::string_view word, Scratch& scratch, std::vector<Token>& out) const;

  Vocabulary vocabulary_;
  std::vector<std::string> pieces_;  // each token's bytes
  std::unordered_map<std::string, Token> by_text_;
  std::array<std::optional<Token>, 256> byte_tokens_;
  std::unordered_map<std::uint64_t, Merge> merges_;  // by both tokens
  std::array<std::vector<Token>, 256>
      matched_in_text_;  // control and user-defined, by first byte, longest first
};

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_TOKENIZER_HPP
