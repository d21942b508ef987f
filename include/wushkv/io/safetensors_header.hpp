// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_IO_SAFETENSORS_HEADER_HPP
#define WUSHKV_IO_SAFETENSORS_HEADER_HPP

/// The JSON header of a safetensors file: how it is read, and the strings of it that are written. Internal:
/// include safetensors.hpp.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "wushkv/core/error.hpp"
#include "wushkv/core/types.hpp"
#include "wushkv/io/tensor.hpp"

namespace wushkv::detail::safetensors {

inline constexpr std::uint64_t max_header_bytes = 100'000'000;  // the reference implementation's limit
inline constexpr std::string_view metadata_key = "__metadata__";

constexpr unsigned char to_byte(char c) { return static_cast<unsigned char>(c); }
constexpr bool is_continuation(char c) { return (to_byte(c) & 0xC0U) == 0x80U; }

/// The number of bytes of the UTF-8 sequence that `text` (not empty) begins with, 0 if it is not a valid one.
/// The second byte's range is what excludes overlong forms, surrogates and code points above U+10FFFF
/// (Unicode, table 3-7).
constexpr std::size_t utf8_length(std::string_view text) {
  const unsigned char lead = to_byte(text[0]);
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return 0;
  const std::size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (text.size() < length) return 0;
  const unsigned char low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned char high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (to_byte(text[1]) < low || to_byte(text[1]) > high) return 0;
  for (std::size_t i = 2; i < length; ++i)
    if (!is_continuation(text[i])) return 0;
  return length;
}

constexpr bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

/// Appends a Unicode scalar value, that is, no surrogate and nothing above U+10FFFF.
inline void append_utf8(std::string& out, std::uint32_t code) {
  const auto push = [&out](std::uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  const auto push_tail = [&](std::uint32_t shift) { push(0x80U | ((code >> shift) & 0x3FU)); };
  if (code < 0x80U) {
    push(code);
  } else if (code < 0x800U) {
    push(0xC0U | (code >> 6U));
    push_tail(0);
  } else if (code < 0x10000U) {
    push(0xE0U | (code >> 12U));
    push_tail(6);
    push_tail(0);
  } else {
    push(0xF0U | (code >> 18U));
    push_tail(12);
    push_tail(6);
    push_tail(0);
  }
}

inline std::string hex_byte(char c) {
  constexpr std::string_view digits = "0123456789abcdef";
  return {digits[to_byte(c) >> 4U], digits[to_byte(c) & 0xFU]};
}

/// Appends `text` as a JSON string, quotes included.
inline void append_json_string(std::string& out, std::string_view text) {
  out.push_back('"');
  for (const char c : text) {
    if (c == '"' || c == '\\')
      out.append({'\\', c});
    else if (to_byte(c) < 0x20 || c == 0x7F)
      out.append("\\u00").append(hex_byte(c));
    else
      out.push_back(c);
  }
  out.push_back('"');
}

/// A name as a message shows it: escaped, and cut short, because a header may hold a name of megabytes.
inline std::string show_name(std::string_view name) {
  constexpr std::size_t longest = 80;
  std::string out;
  if (name.size() <= longest) {
    append_json_string(out, name);
    return out;
  }
  std::size_t end = longest;
  while (end > 0 && is_continuation(name[end])) --end;
  append_json_string(out, name.substr(0, end));
  return out += "...";
}

inline std::string tensor_label(std::string_view name) { return concat("tensor ", show_name(name)); }

/// Where the bytes came from (a path, or nothing), so that a message can tell.
class Source {
 public:
  Source() = default;
  explicit Source(std::string_view path) : prefix_(concat("safetensors: ", path, ": ")) {}

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    file_error(prefix_, parts...);
  }

 private:
  std::string prefix_ = "safetensors: ";
};

inline std::optional<DType> find_dtype(std::string_view name) {
  using enum DType;
  for (const DType dtype : {F64, F32, F16, BF16, U8, I64})
    if (dtype_name(dtype) == name) return dtype;
  return std::nullopt;
}

/// What the header says of one tensor, not yet compared with the data.
struct HeaderEntry {
  DType dtype{};
  TensorShape shape;
  Index begin = 0;
  Index end = 0;
};

struct Header {
  std::map<std::string, HeaderEntry, std::less<>> tensors;
  TensorMetadata metadata;
};

/// Reads the header's JSON, and only JSON of a header's form: objects nest two deep, so nothing recurses. The
/// text must outlive the parser.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const Source& source) : text_(text), source_(source) {}

  Header parse() {
    Header header;
    bool has_metadata = false;
    if (peek() != '{') unexpected("\"{\"");
    parse_object([&](std::string key) {
      if (key != metadata_key) return parse_tensor(header, std::move(key));
      if (std::exchange(has_metadata, true)) fail("the key \"__metadata__\" comes twice");
      parse_metadata(header.metadata);
    });
    while (peek() == ' ') ++at_;
    if (at_ != text_.size()) unexpected("nothing but spaces after the closing brace");
    return header;
  }

 private:
  static constexpr char end_mark = '\0';  // never a valid token, so the end of the text matches nothing

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    source_.fail(subject_, parts...);
  }

  [[noreturn]] void unexpected(std::string_view wanted) const {
    if (at_ == text_.size()) fail("the header ends at byte ", at_, ", expected ", wanted);
    const char c = text_[at_];
    const bool printable = to_byte(c) > 0x20 && to_byte(c) < 0x7F;
    const std::string shown = printable ? show_name({&c, 1}) : "0x" + hex_byte(c);
    fail("header byte ", at_, " is ", shown, ", expected ", wanted);
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : end_mark; }

  void skip_space() {
    while (peek() == ' ' || peek() == '\t' || peek() == '\n' || peek() == '\r') ++at_;
  }

  bool accept(char token) {
    skip_space();
    if (peek() != token) return false;
    ++at_;
    return true;
  }

  void expect(char token, std::string_view wanted) {
    if (!accept(token)) unexpected(wanted);
  }

  /// True after a comma, false after the closing token.
  bool another(char close, std::string_view wanted) {
    if (accept(',')) return true;
    expect(close, wanted);
    return false;
  }

  /// Calls `member(key)` for each member, which then reads the value.
  template <class Member>
  void parse_object(const Member& member) {
    expect('{', "\"{\"");
    if (accept('}')) return;
    do {
      std::string key = parse_string();
      expect(':', "\":\"");
      member(std::move(key));
    } while (another('}', "\",\" or \"}\""));
  }

  void parse_metadata(TensorMetadata& metadata) {
    subject_ = "__metadata__: ";
    parse_object([&](std::string key) {
      std::string value = parse_string();
      const auto [at, is_new] = metadata.try_emplace(std::move(key), std::move(value));
      if (!is_new) fail("the key ", show_name(at->first), " comes twice");
    });
    subject_.clear();
  }

  void parse_tensor(Header& header, std::string name) {
    if (name.empty()) fail("a tensor has an empty name, expected at least one character");
    const auto [at, is_new] = header.tensors.try_emplace(std::move(name));
    if (!is_new) fail(tensor_label(at->first), " comes twice");
    subject_ = tensor_label(at->first) + ": ";
    parse_fields(at->second);
    subject_.clear();
  }

  void parse_fields(HeaderEntry& entry) {
    constexpr std::array<std::string_view, 3> fields{"dtype", "shape", "data_offsets"};
    std::array<bool, 3> seen{};
    parse_object([&](const std::string& key) {
      const auto field = static_cast<std::size_t>(std::ranges::find(fields, key) - fields.begin());
      if (field == fields.size())
        fail("unknown field ", show_name(key), ", expected \"dtype\", \"shape\" and \"data_offsets\"");
      if (std::exchange(seen[field], true)) fail("the field ", show_name(key), " comes twice");
      if (field == 0)
        entry.dtype = parse_dtype();
      else if (field == 1)
        entry.shape = parse_shape();
      else
        parse_offsets(entry);
    });
    for (std::size_t field = 0; field < fields.size(); ++field)
      if (!seen[field]) fail("the field ", show_name(fields[field]), " is missing");
  }

  DType parse_dtype() {
    const std::string name = parse_string();
    const std::optional<DType> dtype = find_dtype(name);
    if (!dtype) fail("dtype is ", show_name(name), ", expected F64, F32, F16, BF16, U8 or I64");
    return *dtype;
  }

  TensorShape parse_shape() {
    std::array<Index, static_cast<std::size_t>(TensorShape::max_rank)> dims{};
    std::size_t rank = 0;
    expect('[', "\"[\"");
    if (!accept(']')) {
      do {
        if (rank == dims.size())
          fail("shape has more than ", TensorShape::max_rank, " dimensions, the most that are supported");
        dims[rank++] = parse_number();
      } while (another(']', "\",\" or \"]\""));
    }
    const std::span<const Index> used(dims.data(), rank);
    if (!checked_extent(used)) fail("the product of the dimensions above zero is larger than ", max_index);
    return TensorShape(used);
  }

  void parse_offsets(HeaderEntry& entry) {
    expect('[', "\"[\"");
    entry.begin = parse_number();
    expect(',', "\",\" between the two data_offsets");
    entry.end = parse_number();
    expect(']', "\"]\" after the two data_offsets");
  }

  Index parse_number() {
    skip_space();
    const std::size_t start = at_;
    const auto is_digit = [this] { return peek() >= '0' && peek() <= '9'; };
    if (!is_digit()) unexpected("an integer of at least 0");
    Index value = 0;
    for (; is_digit(); ++at_) {
      const Index digit = peek() - '0';
      if (value > (max_index - digit) / 10)
        fail("the number at header byte ", start, " is larger than ", max_index);
      value = 10 * value + digit;
    }
    if (text_[start] == '0' && at_ - start > 1) fail("the number at header byte ", start, " begins with a 0");
    if (peek() == '.' || peek() == 'e' || peek() == 'E')
      fail("the number at header byte ", start, " has a fraction or an exponent, expected an integer");
    return value;
  }

  std::string parse_string() {
    expect('"', "a string");
    std::string out;
    while (peek() != '"') {
      if (at_ == text_.size()) unexpected("the closing quote of a string");
      if (to_byte(text_[at_]) < 0x20) unexpected("no control character in a string");
      if (text_[at_] == '\\') {
        ++at_;
        parse_escape(out);
        continue;
      }
      const std::size_t length = utf8_length(text_.substr(at_));
      if (length == 0) unexpected("valid UTF-8");
      out.append(text_.substr(at_, length));
      at_ += length;
    }
    ++at_;
    return out;
  }

  void parse_escape(std::string& out) {
    constexpr std::string_view letters = "\"\\/bfnrt";
    constexpr std::string_view meanings = "\"\\/\b\f\n\r\t";
    if (peek() == 'u') {
      ++at_;
      append_utf8(out, parse_code_point());
      return;
    }
    const std::size_t which = letters.find(peek());
    if (which == std::string_view::npos) unexpected("one of \" \\ / b f n r t u after a backslash");
    out.push_back(meanings[which]);
    ++at_;
  }

  std::uint32_t parse_code_point() {
    const std::size_t start = at_;
    const auto is_low = [](std::uint32_t unit) { return unit >= 0xDC00U && unit <= 0xDFFFU; };
    const auto is_high = [](std::uint32_t unit) { return unit >= 0xD800U && unit <= 0xDBFFU; };
    const std::uint32_t first = parse_hex4();
    if (is_low(first)) fail("a lone low surrogate escape stands before header byte ", at_);
    if (!is_high(first)) return first;
    if (text_.substr(at_, 2) == "\\u") {
      at_ += 2;
      const std::uint32_t second = parse_hex4();
      if (is_low(second)) return 0x10000U + ((first - 0xD800U) << 10U) + (second - 0xDC00U);
    }
    fail("a high surrogate escape at header byte ", start, " has no low surrogate after it");
  }

  std::uint32_t parse_hex4() {
    std::uint32_t unit = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      constexpr std::string_view digits = "0123456789abcdef0123456789ABCDEF";
      const std::size_t digit = digits.find(peek());
      if (digit == std::string_view::npos) unexpected("four hexadecimal digits after \\u");
      unit = 16U * unit + static_cast<std::uint32_t>(digit % 16);
    }
    return unit;
  }

  std::string_view text_;
  const Source& source_;
  std::string subject_;  // what a message is about, with a colon; empty between the tensors
  std::size_t at_ = 0;
};

}  // namespace wushkv::detail::safetensors

#endif  // WUSHKV_IO_SAFETENSORS_HEADER_HPP
