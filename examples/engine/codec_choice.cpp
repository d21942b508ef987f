// SPDX-License-Identifier: Apache-2.0
#include "engine/codec_choice.hpp"

#include <charconv>
#include <stdexcept>
#include <string_view>

namespace engine {
namespace {

int parse_bits(std::string_view text) {
  int bits = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bits);
  return error == std::errc() && end == text.data() + text.size() && bits >= 1 && bits <= 8 ? bits : 0;
}

}  // namespace

CodecChoice parse_codec(const std::string& name) {
  CodecChoice choice;
  choice.name = name;
  if (name == "float" || name == "bf16") {
    choice.quantizer = quantizer_from_string(name);
    return choice;
  }
  const std::size_t plus = name.find('+'), colon = name.find(':');
  const std::string_view bits =
      colon == std::string::npos ? std::string_view() : std::string_view(name).substr(colon + 1);
  const std::size_t slash = bits.find('/');
  choice.key_bits = parse_bits(bits.substr(0, slash));
  choice.value_bits = slash == std::string_view::npos ? choice.key_bits : parse_bits(bits.substr(slash + 1));
  if (plus == std::string::npos || colon == std::string::npos || plus > colon || choice.key_bits == 0 ||
      choice.value_bits == 0)
    throw std::invalid_argument(
        "wushkv-lm: codec '" + name +
        "' is unknown, expected float, bf16 or TRANSFORM+QUANTIZER:BITS with 1 to 8 bits, "
        "such as wush+quest:2 or oscar+percentile:3/2");
  const std::string transform = name.substr(0, plus);
  choice.from_file = transform == "file";
  if (!choice.from_file) choice.construction = wushkv::construction_from_string(transform);
  choice.quantizer = quantizer_from_string(name.substr(plus + 1, colon - plus - 1));
  return choice;
}

bool needs_statistics(wushkv::Construction construction) {
  using wushkv::Construction;
  return construction != Construction::None && construction != Construction::Hadamard &&
         construction != Construction::Random;
}

}  // namespace engine
