// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_PASS_THROUGH_HPP
#define WUSHKV_QUANTIZE_PASS_THROUGH_HPP

#include <bit>
#include <cstdint>
#include <string>
#include <type_traits>

#include "wushkv/quantize/concept.hpp"
#include "wushkv/quantize/storage.hpp"

namespace wushkv {

/// Keeps every value as it is, rounded to `Stored`: the 16-bit cache that the others are measured against,
/// and with `float` the exact one. No parameters. Values past the largest of `Stored` become that.
template <class ScalarType, ParameterStorage Stored = Eigen::bfloat16>
class PassThrough {
 public:
  using Scalar = ScalarType;
  struct Params {};
  using Code = std::conditional_t<sizeof(Stored) == 2, std::uint16_t,
                                  std::conditional_t<sizeof(Stored) == 4, std::uint32_t, std::uint64_t>>;

  static constexpr int bits() { return 8 * static_cast<int>(sizeof(Stored)); }

  /// What `decode` depends on besides the bits (`codec/identity.hpp`).
  static std::string identity() { return "pass-through/" + std::string(detail::storage_name<Stored>); }

  Params fit(const GroupView<Scalar>&) const { return {}; }
  Code encode(Scalar x, const Params&) const { return std::bit_cast<Code>(saturate_cast<Stored>(x)); }
  Scalar decode(Code code, const Params&) const { return static_cast<Scalar>(std::bit_cast<Stored>(code)); }
};

}  // namespace wushkv

#endif  // WUSHKV_QUANTIZE_PASS_THROUGH_HPP
