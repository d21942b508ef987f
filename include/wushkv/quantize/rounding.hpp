// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_ROUNDING_HPP
#define WUSHKV_QUANTIZE_ROUNDING_HPP

#include <concepts>
#include <span>

#include "wushkv/quantize/concept.hpp"

namespace wushkv {

/// How a transformed vector becomes codes and parameters (design.md, section 3). A type needs no base class,
/// only
///
///     void encode(const Q& quantizer, std::span<const Scalar> y, Index group_size,
///                 std::span<code_t<Q>> codes, std::span<typename Q::Params> params) const;
///
/// for `y` and `codes` of one token (`head_dim` values) and one `params` a group, in order; `group_size`
/// divides the length. All are valid and finite when it is called; it must
/// allocate nothing and throw nothing. `encode_batch`, with the number of tokens after `y`, may do the same
/// for several tokens, one after the other in each span, if that is faster; a `dim()` is held to the codec's.
template <class R, class Q>
concept Rounding = Quantizer<Q> &&
    requires(const R& rounding, const Q& quantizer, std::span<const typename Q::Scalar> y, Index group_size,
             std::span<code_t<Q>> codes, std::span<typename Q::Params> params) {
  { rounding.encode(quantizer, y, group_size, codes, params) } -> std::same_as<void>;
};

/// A rounding that takes many tokens at once.
template <class R, class Q>
concept BatchRounding = Rounding<R, Q> &&
    requires(const R& rounding, const Q& quantizer, std::span<const typename Q::Scalar> y, Index size,
             std::span<code_t<Q>> codes, std::span<typename Q::Params> params) {
  { rounding.encode_batch(quantizer, y, size, size, codes, params) } -> std::same_as<void>;
};

/// Each value to its own nearest level.
struct Nearest {
  template <Quantizer Q>
  void encode(const Q& quantizer, std::span<const typename Q::Scalar> y, Index group_size,
              std::span<code_t<Q>> codes, std::span<typename Q::Params> params) const {
    const auto size = static_cast<std::size_t>(group_size);
    for (std::size_t group = 0; group < params.size(); ++group) {
      const std::size_t begin = group * size;
      const Eigen::Map<const Vector<typename Q::Scalar>> values(y.data() + begin, group_size);
      params[group] = quantizer.fit(GroupView<typename Q::Scalar>(values));
      for (std::size_t i = begin; i < begin + size; ++i) codes[i] = quantizer.encode(y[i], params[group]);
    }
  }
};

}  // namespace wushkv

#endif  // WUSHKV_QUANTIZE_ROUNDING_HPP
