// SPDX-License-Identifier: Apache-2.0
#include "engine/unicode.hpp"

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

namespace engine {
namespace {

struct CodePointRange {
  char32_t first, last;
};

#include "engine/unicode_tables.inc"

bool contains(std::span<const CodePointRange> ranges, char32_t code) {
  const auto after =
      std::upper_bound(ranges.begin(), ranges.end(), code,
                       [](char32_t c, const CodePointRange& range) { return c < range.first; });
  return after != ranges.begin() && code <= std::prev(after)->last;
}

}  // namespace

// Most text is ASCII: it is not searched for.
bool is_letter(char32_t code) {
  return code < 0x80 ? (code >= 'a' && code <= 'z') || (code >= 'A' && code <= 'Z') : contains(letters, code);
}

bool is_number(char32_t code) { return code < 0x80 ? code >= '0' && code <= '9' : contains(numbers, code); }

bool is_space(char32_t code) {
  return code < 0x80 ? code == ' ' || (code >= '\t' && code <= '\r') : contains(spaces, code);
}

CodePoint code_point_at(std::string_view text, std::size_t at) {
  using Status = CodePoint::Status;
  const auto failure = [](Status status) { return CodePoint{0xFFFD, 1, status}; };
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[at + i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {lead, 1, Status::Valid};
  if (lead < 0xC2 || lead > 0xF4) return failure(Status::Invalid);
  const std::size_t size = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  char32_t value = lead & (0x7FU >> size);
  for (std::size_t i = 1; i < size; ++i) {
    if (at + i == text.size()) return failure(Status::Cut);
    // The second byte's range is what rules out overlong forms, surrogates and code points > U+10FFFF.
    const bool second = i == 1;
    const unsigned char low = second && lead == 0xE0 ? 0xA0 : second && lead == 0xF0 ? 0x90 : 0x80;
    const unsigned char high = second && lead == 0xED ? 0x9F : second && lead == 0xF4 ? 0x8F : 0xBF;
    if (byte(i) < low || byte(i) > high) return failure(Status::Invalid);
    value = value << 6 | (byte(i) & 0x3FU);
  }
  return {value, size, Status::Valid};
}

std::string to_utf8(char32_t code) {
  if (code < 0x80) return {static_cast<char>(code)};
  std::string out;
  const int continuations = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  const char32_t lead = continuations == 1 ? 0xC0 : continuations == 2 ? 0xE0 : 0xF0;
  out += static_cast<char>(lead | code >> (6 * continuations));
  for (int i = continuations - 1; i >= 0; --i) out += static_cast<char>(0x80 | (code >> (6 * i) & 0x3F));
  return out;
}

std::string Utf8Stream::push(std::string_view bytes) {
  waiting_ += bytes;
  std::size_t whole = 0;
  while (whole < waiting_.size()) {
    const CodePoint c = code_point_at(waiting_, whole);
    if (c.status == CodePoint::Status::Cut) break;
    whole += c.size;
  }
  std::string out = waiting_.substr(0, whole);
  waiting_.erase(0, whole);
  return out;
}

std::string Utf8Stream::finish() { return std::exchange(waiting_, std::string()); }

}  // namespace engine
