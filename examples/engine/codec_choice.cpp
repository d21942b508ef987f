// SPDX-License-Identifier: Apache-2.0
#include "engine/codec_choice.hpp"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string_view>

#include "engine/arguments.hpp"

namespace engine {
namespace {

/// 1 to 8, and 0 for anything else.
int parse_bits(std::string_view text) {
  const std::int64_t bits = whole_number(text).value_or(0);
  return bits >= 1 && bits <= 8 ? static_cast<int>(bits) : 0;
}

}  // namespace

CodecChoice parse_codec(const std::string& name) {
  const std::string expected =
      "float, bf16 or TRANSFORM+QUANTIZER:BITS with 1 to 8 bits, such as wush+quest:2 or "
      "oscar+percentile:3/2";
  CodecChoice choice;
  choice.name = name;
  if (name == "float" || name == "bf16") {
    choice.quantizer = quantizer_from_string(name);
    return choice;
  }
  const std::size_t plus = name.find('+'), colon = std::min(name.find(':'), name.size());
  if (plus == std::string::npos || plus > colon)
    throw std::invalid_argument("wushkv-lm: codec '" + name + "' is unknown, expected " + expected);
  const std::string transform = name.substr(0, plus);
  choice.from_file = transform == "file";
  if (!choice.from_file) choice.construction = wushkv::construction_from_string(transform);
  choice.quantizer = quantizer_from_string(name.substr(plus + 1, colon - plus - 1));
  const bool quantized =
      choice.quantizer != QuantizerKind::Float && choice.quantizer != QuantizerKind::BFloat16;
  if (quantized) {
    const std::string_view bits = std::string_view(name).substr(std::min(colon + 1, name.size()));
    const std::size_t slash = bits.find('/');
    choice.key_bits = parse_bits(bits.substr(0, slash));
    choice.value_bits =
        slash == std::string_view::npos ? choice.key_bits : parse_bits(bits.substr(slash + 1));
  }
  if (quantized ? choice.key_bits == 0 || choice.value_bits == 0 : colon != name.size())
    throw std::invalid_argument("wushkv-lm: codec '" + name + "' has the wrong bits, expected " + expected);
  return choice;
}

bool needs_statistics(wushkv::Construction construction) {
  using wushkv::Construction;
  return construction != Construction::None && construction != Construction::Hadamard &&
         construction != Construction::Random;
}

}  // namespace engine
