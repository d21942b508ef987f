// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_IO_LAYER_COUNT_HPP
#define WUSHKV_IO_LAYER_COUNT_HPP

#include <charconv>
#include <string>
#include <string_view>

#include "wushkv/io/safetensors.hpp"

namespace wushkv::detail {

/// The number of layers a file of this library says it has.
inline Index layer_count(const SafetensorsView& file, std::string_view format) {
  const auto found = file.metadata().find("format");
  if (found == file.metadata().end() || found->second != format)
    file_error("safetensors: metadata 'format' is ",
               found == file.metadata().end() ? std::string("missing") : "'" + found->second + "'",
               ", expected '", format, "'");
  const auto layers = file.metadata().find("layers");
  Index count = 0;
  if (layers != file.metadata().end()) {
    const std::string& text = layers->second;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
    if (error != std::errc() || end != text.data() + text.size()) count = 0;
  }
  if (count < 1 || count > 1000000)
    file_error("safetensors: metadata 'layers' is not a number of layers, expected 1 or more");
  return count;
}

}  // namespace wushkv::detail

#endif  // WUSHKV_IO_LAYER_COUNT_HPP
