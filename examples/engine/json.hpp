// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_JSON_HPP
#define WUSHKV_EXAMPLES_ENGINE_JSON_HPP

#include <concepts>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace engine {

/// A JSON value that can be written: objects keep the order their members came in.
class Json {
 public:
  Json(double number);
  Json(std::string_view text);
  Json(const std::string& text) : Json(std::string_view(text)) {}
  Json(const char* text) : Json(std::string_view(text)) {}
  Json(bool truth) : text_(truth ? "true" : "false") {}
  template <std::integral Integer>
  Json(Integer number) : text_(std::to_string(number)) {}
  static Json object() { return Json('{'); }
  static Json array() { return Json('['); }
  template <class Range>
  static Json array_of(const Range& values) {
    Json result = array();
    for (const auto& value : values) result.push(value);
    return result;
  }

  Json& set(std::string_view key, Json value) {
    members_.emplace_back(key, std::move(value));
    return *this;
  }
  Json& push(Json value) { return set({}, std::move(value)); }
  std::string dump() const;

 private:
  explicit Json(char bracket) : text_(1, bracket) {}
  void write(std::string& out, std::size_t indent) const;

  std::string text_;  // of a plain value; an opening bracket for the others
  std::vector<std::pair<std::string, Json>> members_;
};

/// Writes a value to a file; nothing for an empty path. Throws `wushkv::FileError` if that fails.
void write_json(const std::string& path, const Json& value);

/// Throws `wushkv::FileError` if the file cannot be opened for writing: before the work, not after it.
void check_writable(const std::string& path);

/// The whole of a file. Throws `wushkv::FileError` if it cannot be read.
std::string read_text(const std::string& path);
/// Replaces a file. Throws `wushkv::FileError` if it cannot be written.
void write_text(const std::string& path, std::string_view text);

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_JSON_HPP
