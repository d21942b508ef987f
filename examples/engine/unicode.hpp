// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_UNICODE_HPP
#define WUSHKV_EXAMPLES_ENGINE_UNICODE_HPP

#include <cstddef>
#include <string>
#include <string_view>

namespace engine {

bool is_letter(char32_t code);  ///< \p{L}
bool is_number(char32_t code);  ///< \p{N}
bool is_space(char32_t code);   ///< \s: the property White_Space

struct CodePoint {
  enum class Status {
    Valid,
    Invalid,  ///< a byte that is no part of a character (overlong forms, surrogates and > U+10FFFF included)
    Cut       ///< the text ends inside what could still become a character
  };
  char32_t value;    ///< U+FFFD unless valid
  std::size_t size;  ///< in bytes: 1 unless valid, so that wrong bytes are passed over one at a time
  Status status;
};

/// The code point that starts at byte `at < text.size()`.
CodePoint code_point_at(std::string_view text, std::size_t at);

/// A code point up to U+10FFFF as UTF-8.
std::string to_utf8(char32_t code);

/// Cuts a stream of bytes between characters, for text that is printed while tokens come in: a token may end
/// inside a character. All bytes come out, in order; those that are no part of a character are not held back.
class Utf8Stream {
 public:
  /// What is whole so far. At most three bytes wait for the rest of their character.
  std::string push(std::string_view bytes);
  /// The bytes that still wait.
  std::string finish();

 private:
  std::string waiting_;
};

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_UNICODE_HPP
