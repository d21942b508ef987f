// SPDX-License-Identifier: Apache-2.0
#include "engine/codec_choice.hpp"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "engine/arguments.hpp"
#include "wushkv/recipe/recipes.hpp"

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
      "float, bf16, best:BITS, paper:BITS or TRANSFORM+QUANTIZER[+feedback][+search][+tuned][+signs]:BITS "
      "with 1 to 8 bits, such as wush+quest:2, oscar+percentile:3/2 or best:2.25";
  CodecChoice choice;
  choice.name = name;
  if (name == "float" || name == "bf16") {
    choice.quantizer = quantizer_from_string(name);
    return choice;
  }
  const std::size_t colon = std::min(name.find(':'), name.size());
  std::string parts = name.substr(0, colon);
  for (const auto& [recipe, meaning] :
       {std::pair{wushkv::BestRecipe<float>::name, "joint+minmax+feedback+search"},
        std::pair{wushkv::PaperRecipe<float>::name, "wush+percentile"}})
    if (parts == recipe || parts.starts_with(std::string(recipe) + "+"))
      parts.replace(0, recipe.size(), meaning);
  std::size_t plus = parts.find('+');
  if (plus == std::string::npos)
    throw std::invalid_argument("wushkv-lm: codec '" + name + "' is unknown, expected " + expected);
  const std::string transform = parts.substr(0, plus);
  choice.from_file = transform == "file";
  if (!choice.from_file) choice.construction = wushkv::construction_from_string(transform);
  for (bool first = true; plus != std::string::npos; first = false) {
    const std::size_t next = parts.find('+', plus + 1);
    const std::string part = parts.substr(plus + 1, next == std::string::npos ? next : next - plus - 1);
    bool* const flag = part == "feedback" ? &choice.rounding.feedback
                       : part == "search" ? &choice.rounding.search
                       : part == "tuned"  ? &choice.tuned
                       : part == "signs"  ? &choice.signs
                                          : nullptr;
    if (first)
      choice.quantizer = quantizer_from_string(part);
    else if (flag == nullptr || *flag || !choice.quantizes())
      throw std::invalid_argument("wushkv-lm: codec '" + name + "' has '" + part +
                                  "', which it cannot, expected " + expected);
    else
      *flag = true;
    plus = next;
  }
  if (choice.quantizes()) {
    const std::string_view bits = std::string_view(name).substr(std::min(colon + 1, name.size()));
    const std::size_t slash = bits.find('/');
    if (bits.find('.') != std::string_view::npos)
      choice.average_bits = std::min(real_number(bits).value_or(0), 9.0);  // 9, and more, is refused below
    choice.key_bits =
        choice.average_bits > 0 ? static_cast<int>(choice.average_bits) : parse_bits(bits.substr(0, slash));
    choice.value_bits =
        slash == std::string_view::npos ? choice.key_bits : parse_bits(bits.substr(slash + 1));
  }
  const bool wrong = choice.key_bits < 1 || choice.value_bits < 1 || choice.average_bits > 8;
  if (choice.quantizes() ? wrong : colon != name.size())
    throw std::invalid_argument("wushkv-lm: codec '" + name + "' has the wrong bits, expected " + expected);
  if (choice.tuned && choice.quantizer != QuantizerKind::Quest &&
      choice.quantizer != QuantizerKind::Percentile)
    throw std::invalid_argument("wushkv-lm: codec '" + name +
                                "' is tuned, expected quest or percentile, which have a parameter");
  if (choice.tuned && choice.signs && choice.from_file)
    throw std::invalid_argument("wushkv-lm: codec '" + name +
                                "' chooses signs, for which its file is not tuned, expected one of them");
  if (choice.tuned && choice.average_bits > 0)
    throw std::invalid_argument("wushkv-lm: codec '" + name +
                                "' is tuned for a fraction of bits, expected one width");
  if (choice.quantizer == QuantizerKind::Quest && choice.tuned && choice.rounding.search)
    throw std::invalid_argument("wushkv-lm: codec '" + name +
                                "' is tuned and searches, expected one of them: both set the step");
  return choice;
}

bool needs_statistics(wushkv::Construction construction) {
  using wushkv::Construction;
  return construction != Construction::None && construction != Construction::Hadamard &&
         construction != Construction::Random;
}

}  // namespace engine
