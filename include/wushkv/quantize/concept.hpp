// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_CONCEPT_HPP
#define WUSHKV_QUANTIZE_CONCEPT_HPP

#include <concepts>
#include <type_traits>
#include <utility>

#include "wushkv/core/types.hpp"

namespace wushkv {

/// The values of one group, as the library hands them to `Quantizer::fit`.
template <class Scalar>
using GroupView = Eigen::Ref<const Vector<Scalar>>;

/// Turns the values of a group into codes under parameters of that group (design.md, section 3). A type needs
/// no base class, only
///
///     using Scalar = float;   // or double
///     struct Params { … };    // trivially copyable: it is stored as it is; may be empty
///     int bits() const;       // bits of a code; may be static
///     Params fit(const Eigen::Ref<const Vector<Scalar>>& group) const;
///     std::uint8_t encode(Scalar x, const Params&) const;  // any unsigned integer, below 2^bits
///     Scalar decode(std::uint8_t code, const Params&) const;
///
/// `fit` returns the parameters *as stored*, rounded to their storage type, so that `encode` sees what
/// `decode` will.
template <class Q>
concept Quantizer = requires(const Q& q, const GroupView<typename Q::Scalar>& group,
                             const typename Q::Scalar& x, const typename Q::Params& params) {
  requires std::same_as<typename Q::Scalar, float> || std::same_as<typename Q::Scalar, double>;
  requires std::is_trivially_copyable_v<typename Q::Params>;
  requires std::default_initializable<typename Q::Params>;
  { q.bits() } -> std::convertible_to<int>;
  { q.fit(group) } -> std::same_as<typename Q::Params>;
  { q.encode(x, params) } -> std::unsigned_integral;
  { q.decode(q.encode(x, params), params) } -> std::convertible_to<typename Q::Scalar>;
};

/// The integer a quantizer's codes come as.
template <Quantizer Q>
using code_t = decltype(std::declval<const Q&>().encode(std::declval<const typename Q::Scalar&>(),
                                                        std::declval<const typename Q::Params&>()));

/// Bits of storage that the parameters of one group take.
template <Quantizer Q>
inline constexpr int param_bits_v = std::is_empty_v<typename Q::Params>
                                        ? 0
                                        : 8 * static_cast<int>(sizeof(typename Q::Params));

}  // namespace wushkv

#endif  // WUSHKV_QUANTIZE_CONCEPT_HPP
