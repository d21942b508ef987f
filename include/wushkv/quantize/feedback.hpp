// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_FEEDBACK_HPP
#define WUSHKV_QUANTIZE_FEEDBACK_HPP

#include <array>
#include <span>
#include <utility>

#include "wushkv/quantize/rounding.hpp"
#include "wushkv/quantize/sequential.hpp"

namespace wushkv {

/// What QuEST's step is widened by under feedback rounding, whose input is wider (design.md, *Quantizers*).
inline constexpr double feedback_widening = 1.15;

/// What rounds by a sensitivity: `Derived` says in which ways each token is tried (`trials`). A token's codes
/// do not depend on how many others are encoded with it.
template <class Derived, class ScalarType>
class SensitiveRounding {
 public:
  using Scalar = ScalarType;

  explicit SensitiveRounding(Sensitivity<Scalar> sensitivity) : sensitivity_(std::move(sensitivity)) {}

  const Sensitivity<Scalar>& sensitivity() const { return sensitivity_; }
  Index dim() const { return sensitivity_.dim(); }

  template <Quantizer Q>
  requires std::same_as<typename Q::Scalar, Scalar>
  void encode(const Q& quantizer, std::span<const Scalar> y, Index group_size, std::span<code_t<Q>> codes,
              std::span<typename Q::Params> params) const {
    encode_batch(quantizer, y, 1, group_size, codes, params);
  }

  /// The same for `tokens` tokens, one after the other in each span: what runs across them.
  template <Quantizer Q>
  requires std::same_as<typename Q::Scalar, Scalar>
  void encode_batch(const Q& quantizer, std::span<const Scalar> y, Index tokens, Index group_size,
                    std::span<code_t<Q>> codes, std::span<typename Q::Params> params) const {
    const detail::SequentialRounding<Q> rounding(sensitivity_, static_cast<const Derived&>(*this).trials(),
                                                 quantizer, group_size);
    rounding.encode(y.data(), tokens, codes.data(), params.data());
  }

 private:
  Sensitivity<Scalar> sensitivity_;
};

namespace detail {

inline constexpr std::array<double, 1> unscaled = {1};

}  // namespace detail

/// Rounds coordinate after coordinate, each after adding what the errors before it make its best value:
/// `code_j = encode(y_j + sum_{i<j} F_ij e_i)`, so that of `eᵀ A e` only `sum D_j r_j²` is left, r_j the
/// rounding error of step j alone (design.md, *Feedback rounding*; LDLQ for weights, Babai's nearest plane).
/// Groups keep their own steps, feedback crosses them. Any quantizer will do; storage and decoding do not
/// change. It is not always better than nearest rounding: `BestOf` is never worse.
template <class Scalar>
class Feedback : public SensitiveRounding<Feedback<Scalar>, Scalar> {
 public:
  using SensitiveRounding<Feedback, Scalar>::SensitiveRounding;
  static detail::RoundingTrials trials() { return {detail::unscaled, true, false}; }
};

/// Each value to its own nearest level, as `Nearest`; it knows the loss, so that a step search can use it.
template <class Scalar>
class SensitiveNearest : public SensitiveRounding<SensitiveNearest<Scalar>, Scalar> {
 public:
  using SensitiveRounding<SensitiveNearest, Scalar>::SensitiveRounding;
  static detail::RoundingTrials trials() { return {detail::unscaled, false, true}; }
};

/// The better of feedback and nearest rounding by `eᵀ A e`, token by token.
template <class Scalar>
class BestOf : public SensitiveRounding<BestOf<Scalar>, Scalar> {
 public:
  using SensitiveRounding<BestOf, Scalar>::SensitiveRounding;
  static detail::RoundingTrials trials() { return {detail::unscaled, true, true}; }
};

}  // namespace wushkv

#endif  // WUSHKV_QUANTIZE_FEEDBACK_HPP
