// SPDX-License-Identifier: Apache-2.0
#include "engine/json.hpp"

#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "engine/unicode.hpp"
#include "wushkv/core/error.hpp"

namespace engine {
namespace {

std::string quote(std::string_view text) {
  std::string out = "\"";
  for (std::size_t at = 0; at < text.size();) {
    const CodePoint c = code_point_at(text, at);
    if (c.value == '"' || c.value == '\\') {
      out += '\\';
      out += text[at];
    } else if (c.value < 0x20) {
      constexpr char digits[] = "0123456789abcdef";
      out += "\\u00";
      out += digits[c.value >> 4];
      out += digits[c.value & 15];
    } else {
      out += to_utf8(c.value);  // U+FFFD for a byte that is none: a model may write such
    }
    at += c.size;
  }
  return out + '"';
}

}  // namespace

Json::Json(double number) {
  char text[32];
  // JSON has no infinity and no NaN.
  text_ =
      std::isfinite(number) ? std::string(text, std::to_chars(text, text + sizeof text, number).ptr) : "null";
}

Json::Json(std::string_view text) : text_(quote(text)) {}

std::string Json::dump() const {
  std::string out;
  write(out, 0);
  return out + "\n";
}

void Json::write(std::string& out, std::size_t indent) const {
  out += text_;
  if (text_ != "{" && text_ != "[") return;
  const bool object = text_ == "{";
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (i > 0) out += ',';
    if (object) out.append(1, '\n').append(indent + 1, ' ').append(quote(members_[i].first)).append(": ");
    if (!object && i > 0) out += ' ';
    members_[i].second.write(out, indent + 1);
  }
  if (object && !members_.empty()) out.append(1, '\n').append(indent, ' ');
  out += object ? '}' : ']';
}

void write_json(const std::string& path, const Json& value) {
  if (!path.empty()) write_text(path, value.dump());
}

void check_writable(const std::string& path) {
  const bool there = std::filesystem::exists(path);
  const bool opens = static_cast<bool>(std::ofstream(path, std::ios::app));
  if (!opens) wushkv::detail::file_error(path, " cannot be opened for writing");
  if (!there)
    std::filesystem::remove(std::filesystem::canonical(path));  // what a link points to, not the link
}

std::string read_text(const std::string& path) {
  std::error_code ignored;
  std::ifstream in(path, std::ios::binary);
  if (!in || std::filesystem::is_directory(path, ignored))
    wushkv::detail::file_error(path, " cannot be read");
  std::ostringstream text;
  // An empty file sets the target's fail bit, which is no failure.
  if (in.peek() != std::ifstream::traits_type::eof()) text << in.rdbuf();
  if (in.bad()) wushkv::detail::file_error(path, " cannot be read");
  return text.str();
}

void write_text(const std::string& path, std::string_view text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  if (!out.flush()) wushkv::detail::file_error(path, " cannot be written");
}

}  // namespace engine
