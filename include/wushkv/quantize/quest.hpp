// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_QUEST_HPP
#define WUSHKV_QUANTIZE_QUEST_HPP

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "wushkv/quantize/bits.hpp"
#include "wushkv/quantize/concept.hpp"
#include "wushkv/quantize/root_mean_square.hpp"
#include "wushkv/quantize/storage.hpp"
#include "wushkv/quantize/uniform.hpp"

namespace wushkv {

/// QuEST's clipping constants for 1 to 8 bits, in units of the root mean square: the range that minimizes the
/// expected squared error of a unit normal (QuEST, arXiv 2502.05003; design.md, *Quantizers*).
inline constexpr std::array<double, 8> quest_alpha = {
    .7978845587140913,  1.4935346200015913, 2.051068354131873,  2.513930578568423,
    2.9160938834961225, 3.276597282593217,  3.6010497188221655, 3.884938678807525};

/// QuEST INT-b: uniform mid-rise levels symmetric about zero, `step = 2 alpha_b rms / (2^b - 1)`,
/// `code = clamp(floor(x / step), -2^(b-1), 2^(b-1) - 1) + 2^(b-1)`, `value = (code - 2^(b-1) + 1/2) step`.
/// One parameter a group, the step, kept as `Storage`. An all-zero group has step 0 and decodes to zeros.
template <class ScalarType, int Bits = Dynamic, ScaleStorage Storage = ScalarType>
class Quest : public BitWidth<Bits> {
 public:
  using Scalar = ScalarType;
  struct Params {
    Storage step;
  };

  /// `widen` multiplies alpha; 1.15 suits feedback rounding. Throws `std::invalid_argument` for a width
  /// outside 1 to 8 or a factor that is not positive and finite.
  explicit Quest(int bits = Bits, double widen = 1) : BitWidth<Bits>(bits), widen_(widen) {
    if (!(widen > 0 && widen < 1e3))
      detail::invalid_argument("Quest: widen is ", widen, ", expected a positive factor below 1000");
  }

  /// What `decode` depends on besides the bits (`codec/identity.hpp`).
  static std::string identity() { return "quest/" + std::string(detail::storage_name<Storage>); }

  double widen() const { return widen_; }

  /// The step for a group of any length, `factor` times as wide as it would be, as stored.
  Params fit(const GroupView<Scalar>& group, double factor = 1) const {
    const double rms = detail::root_mean_square<Scalar>(group);
    const double alpha = factor * widen_ * quest_alpha[static_cast<std::size_t>(this->bits() - 1)];
    const double levels = static_cast<double>((1 << this->bits()) - 1);
    // The outermost values, levels / 2 steps out, must be finite too, also after the storage type has rounded
    // up.
    const double limit =
        0.99 * static_cast<double>(std::numeric_limits<Scalar>::max()) * std::min(1.0, 2 / levels);
    Params params{saturate_cast<Storage>(std::min(2 * alpha / levels * rms, limit))};
    // A step that rounds to nothing: the least one there is, unless even its innermost value is past the
    // group's.
    const Storage least = std::numeric_limits<Storage>::denorm_min();
    if (static_cast<double>(params.step) == 0 && static_cast<double>(least) / 2 <= rms) params.step = least;
    return params;
  }

  UniformLevels<Scalar> levels(const Params& params) const {
    const Scalar step = static_cast<Scalar>(params.step), half = static_cast<Scalar>(1 << (this->bits() - 1));
    return {.divisor = step == Scalar(0) ? std::numeric_limits<Scalar>::infinity() : step,
            .shift = 0,
            .first = -half,
            .top = 2 * half - 1,
            .origin = half - Scalar(0.5),
            .step = step};
  }

  std::uint8_t encode(Scalar x, const Params& params) const {
    return static_cast<std::uint8_t>(levels(params).code(x));
  }

  Scalar decode(std::uint8_t code, const Params& params) const {
    const Scalar half = static_cast<Scalar>(1 << (this->bits() - 1));
    return (static_cast<Scalar>(code) - half + Scalar(0.5)) * static_cast<Scalar>(params.step);
  }

 private:
  double widen_;
};

}  // namespace wushkv

#endif  // WUSHKV_QUANTIZE_QUEST_HPP
