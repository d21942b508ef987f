// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_CONSTRUCTION_HPP
#define WUSHKV_CALIBRATE_CONSTRUCTION_HPP

#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "wushkv/core/error.hpp"

namespace wushkv {

/// The transforms that calibration can build (design.md, section 2).
enum class Construction { None, Hadamard, Random, Pca, RotateKv, Oscar, OscarPerHead, Wush, WushA, Joint };

namespace detail {

inline constexpr std::array<std::pair<Construction, std::string_view>, 10> construction_names = {{
    {Construction::None, "none"},
    {Construction::Hadamard, "hadamard"},
    {Construction::Random, "random"},
    {Construction::Pca, "pca"},
    {Construction::RotateKv, "rotate-kv"},
    {Construction::Oscar, "oscar"},
    {Construction::OscarPerHead, "oscar-per-head"},
    {Construction::Wush, "wush"},
    {Construction::WushA, "wush-a"},
    {Construction::Joint, "joint"},
}};

}  // namespace detail

/// The name of a construction on command lines and in files.
inline std::string_view to_string(Construction construction) {
  for (const auto& [value, name] : detail::construction_names)
    if (value == construction) return name;
  detail::invalid_argument("Construction: ", static_cast<int>(construction), " is none of the enumerators");
}

namespace detail {

/// Built from a Gram and a Hessian, with damping and an exponent.
constexpr bool is_wush(Construction construction) {
  return construction == Construction::Wush || construction == Construction::WushA ||
         construction == Construction::Joint;
}
/// Needs attention-aware sums.
constexpr bool is_attention_aware(Construction construction) {
  return construction == Construction::WushA || construction == Construction::Joint;
}

}  // namespace detail

/// Undoes `to_string`. Throws `std::invalid_argument`, with the names there are, for another name.
inline Construction construction_from_string(std::string_view wanted) {
  std::string names;
  for (const auto& [value, name] : detail::construction_names) {
    if (name == wanted) return value;
    names += names.empty() ? "" : ", ";
    names += name;
  }
  detail::invalid_argument("Construction: '", wanted, "' is unknown, expected one of ", names);
}

}  // namespace wushkv

#endif  // WUSHKV_CALIBRATE_CONSTRUCTION_HPP
