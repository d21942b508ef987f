// SPDX-License-Identifier: Apache-2.0
#include "engine/json.hpp"

#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "wushkv/core/error.hpp"

namespace engine {
namespace {

std::string quote(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      constexpr char digits[] = "0123456789abcdef";
      out += "\\u00";
      out += digits[c >> 4];
      out += digits[c & 15];
    } else {
      out += c;
    }
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
  if (path.empty()) return;
  const bool there = std::filesystem::exists(path);
  const bool opens = static_cast<bool>(std::ofstream(path, std::ios::app));
  if (!opens) wushkv::detail::file_error(path, " cannot be opened for writing");
  if (!there) std::filesystem::remove(path);
}

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  if (!in.is_open() || in.bad() || !std::filesystem::is_regular_file(path))
    wushkv::detail::file_error(path, " cannot be read");
  return text;
}

void write_text(const std::string& path, std::string_view text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  if (!out.flush()) wushkv::detail::file_error(path, " cannot be written");
}

}  // namespace engine
