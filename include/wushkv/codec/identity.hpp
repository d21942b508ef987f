// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CODEC_IDENTITY_HPP
#define WUSHKV_CODEC_IDENTITY_HPP

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "wushkv/codec/codec.hpp"
#include "wushkv/transform/concept.hpp"

namespace wushkv {

/// FNV-1a of 64 bits over what is added: tells different things apart and catches damage; no defence against
/// an attacker.
class Fingerprint {
 public:
  void add(std::span<const std::byte> bytes) {
    for (const std::byte byte : bytes) {
      state_ ^= std::to_integer<std::uint64_t>(byte);
      state_ *= 0x100000001b3U;
    }
  }
  void add(std::string_view text) {
    add(static_cast<std::uint64_t>(text.size()));
    add(std::as_bytes(std::span(text.data(), text.size())));
  }
  void add(std::uint64_t value) { add(std::as_bytes(std::span(&value, 1))); }
  std::uint64_t value() const { return state_; }

 private:
  std::uint64_t state_ = 0xcbf29ce484222325U;
};

namespace detail {

template <class Scalar>
void add_values(Fingerprint& fingerprint, const Scalar* values, Index count) {
  for (Index i = 0; i < count; ++i) {
    const double value = static_cast<double>(values[i]) + 0.0;  // -0 and 0 are one
    fingerprint.add(std::as_bytes(std::span(&value, 1)));
  }
}

/// What decoding depends on. A quantizer may say who it is (`std::string_view identity() const`, with
/// everything that changes `decode`); for one that does not, its codes of a fixed group stand in, which a
/// rounding of another build may change.
template <class Q>
void add_quantizer(Fingerprint& fingerprint, const Q& quantizer) {
  using Scalar = typename Q::Scalar;
  fingerprint.add(static_cast<std::uint64_t>(quantizer.bits()));
  fingerprint.add(static_cast<std::uint64_t>(param_bits_v<Q>));
  fingerprint.add(static_cast<std::uint64_t>(sizeof(code_t<Q>)));
  if constexpr (requires {
                  { quantizer.identity() } -> std::convertible_to<std::string_view>;
                }) {
    fingerprint.add(std::string_view(quantizer.identity()));
  } else {
    Vector<Scalar> group(16);
    for (Index i = 0; i < group.size(); ++i)
      group[i] = static_cast<Scalar>(std::sin(1.0 + static_cast<double>(i)));
    const auto params = quantizer.fit(GroupView<Scalar>(group));
    for (Scalar& x : group) x = static_cast<Scalar>(quantizer.decode(quantizer.encode(x, params), params));
    add_values(fingerprint, group.data(), group.size());
  }
}

}  // namespace detail

/// A number that two codecs share only if one decodes what the other encoded, and takes the same queries:
/// dimension, group, bits, quantizer, and the transform's matrix (and mean) bit for bit. Rounding is left
/// out: it decides which codes are written, not what they mean.
template <class T, class Q, class R, int GroupSize>
std::uint64_t codec_identity(const Codec<T, Q, R, GroupSize>& codec) {
  using Scalar = typename T::Scalar;
  Fingerprint fingerprint;
  fingerprint.add("wushkv codec 1");
  fingerprint.add(static_cast<std::uint64_t>(codec.head_dim()));
  fingerprint.add(static_cast<std::uint64_t>(codec.group_size()));
  detail::add_quantizer(fingerprint, codec.quantizer());
  const Index dim = codec.head_dim();
  const Batch<Scalar> basis = Batch<Scalar>::Identity(dim, dim), origin = Batch<Scalar>::Zero(1, dim);
  const Batch<Scalar> matrix = codec.transform().forward(basis), shift = codec.transform().forward(origin);
  detail::add_values(fingerprint, matrix.data(), matrix.size());
  detail::add_values(fingerprint, shift.data(), shift.size());
  return fingerprint.value();
}

}  // namespace wushkv

#endif  // WUSHKV_CODEC_IDENTITY_HPP
