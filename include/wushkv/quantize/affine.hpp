// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_AFFINE_HPP
#define WUSHKV_QUANTIZE_AFFINE_HPP

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "wushkv/core/check.hpp"
#include "wushkv/core/scratch.hpp"
#include "wushkv/quantize/bits.hpp"
#include "wushkv/quantize/concept.hpp"
#include "wushkv/quantize/root_mean_square.hpp"
#include "wushkv/quantize/storage.hpp"
#include "wushkv/quantize/uniform.hpp"

namespace wushkv {

/// The clip ratios OSCAR uses for keys and values (design.md, *Quantizers*).
inline constexpr double oscar_key_percentile = .96, oscar_value_percentile = .92;

/// Uniform levels over a group's range, `scale = (max - min) / (2^b - 1)`, `zero = -min / scale`,
/// `code = clamp(floor(x / scale + zero + 1/2), 0, 2^b - 1)`, `value = (code - zero) scale`; the range is the
/// group's own (min-max), clipped at a percentile of its magnitudes (OSCAR), or shrunk by a factor
/// (design.md, *Quantizers*). Two parameters a group, kept as `Storage`.
///
/// A group whose range is small beside its offset needs a zero point that the storage cannot hold: there
/// `fit` tries other scales and zeros and keeps those with the least squared error; a constant group decodes
/// to its value as `Storage` rounds it, or nearer.
template <class ScalarType, int Bits = Dynamic, ParameterStorage Storage = ScalarType>
class Affine : public BitWidth<Bits> {
 public:
  using Scalar = ScalarType;
  /// The scale may be negative, and is then the value of a constant group (code 1, zero 0).
  struct Params {
    Storage scale, zero;
  };

  /// Levels over `range` times the group's extremes. Throws `std::invalid_argument` for a width outside 1 to
  /// 8 or a factor outside (0, 1].
  static Affine shrunk(double range, int bits = Bits) { return Affine(bits, 0, range); }
  /// Levels from the group's least to its greatest value.
  static Affine min_max(int bits = Bits) { return Affine(bits, 0, 1); }
  /// Values are clamped to ±tau first, `tau` entry `min(floor(kappa n), n - 1)` of the n sorted magnitudes.
  /// Throws `std::invalid_argument` for a width outside 1 to 8 or `kappa` outside [0, 1]; 0 switches clipping
  /// off.
  static Affine percentile(double kappa, int bits = Bits) { return Affine(bits, kappa, 1); }

  /// What `decode` depends on besides the bits (`codec/identity.hpp`).
  static std::string identity() { return "affine/" + std::string(detail::storage_name<Storage>); }

  double kappa() const { return kappa_; }
  double range() const { return range_; }

  /// Scale and zero for a group of any length, for `factor` times the range they would cover, as stored.
  /// Groups above 512 values allocate when `kappa` is set.
  Params fit(const GroupView<Scalar>& group, double factor = 1) const {
    detail::check_group<Scalar>(group);
    Scalar low = group.minCoeff(), high = group.maxCoeff();
    if (kappa_ > 0) {
      const Scalar tau = clip(group);
      low = std::clamp(low, -tau, tau);
      high = std::clamp(high, -tau, tau);
    }
    low = saturate_cast<Scalar>(static_cast<Scalar>(factor * range_) * low);
    high = saturate_cast<Scalar>(static_cast<Scalar>(factor * range_) * high);
    const Params plain = over(low, high);
    // With fewer than three digits to spare, the zero point's rounding costs more than that of the values;
    // and a scale that the storage cuts short leaves the range's end where the zero point did not expect it.
    const Scalar limit =
        static_cast<Scalar>(std::ldexp(1.0, std::min(detail::storage_digits<Storage>, scalar_digits) - 3));
    const Scalar scale = static_cast<Scalar>(plain.scale);
    const bool cut_short = static_cast<double>(scale) >= detail::storage_max<Storage>();
    const bool denormal =
        static_cast<double>(scale) < static_cast<double>(std::numeric_limits<Storage>::min());
    if (scale > Scalar(0) && !cut_short && !denormal && std::abs(static_cast<Scalar>(plain.zero)) <= limit)
        [[likely]]
      return plain;
    return best_of_others(group, low, high, plain);
  }

  UniformLevels<Scalar> levels(const Params& params) const {
    return detail::affine_levels(static_cast<Scalar>(params.scale), static_cast<Scalar>(params.zero),
                                 this->bits());
  }

  std::uint8_t encode(Scalar x, const Params& params) const {
    return static_cast<std::uint8_t>(levels(params).code(x));
  }

  Scalar decode(std::uint8_t code, const Params& params) const {
    return (static_cast<Scalar>(code) - static_cast<Scalar>(params.zero)) * static_cast<Scalar>(params.scale);
  }

 private:
  static constexpr int scalar_digits = detail::storage_digits<Scalar>;

  Affine(int bits, double kappa, double range) : BitWidth<Bits>(bits), kappa_(kappa), range_(range) {
    if (!(kappa >= 0 && kappa <= 1))
      detail::invalid_argument("Affine: kappa is ", kappa, ", expected 0 to 1");
    if (!(range > 0 && range <= 1))
      detail::invalid_argument("Affine: range is ", range, ", expected more than 0 and at most 1");
  }

  Scalar clip(const GroupView<Scalar>& group) const {
    const Index n = group.size();
    const Index rank = std::min(static_cast<Index>(std::floor(kappa_ * static_cast<double>(n))), n - 1);
    detail::Scratch<Scalar> magnitudes(n);
    Scalar* const begin = magnitudes.data();
    for (Index i = 0; i < n; ++i) begin[i] = std::abs(group[i]);
    std::nth_element(begin, begin + rank, begin + n);
    return begin[rank];
  }

  Params over(Scalar low, Scalar high) const {
    const Scalar steps = static_cast<Scalar>((1 << this->bits()) - 1);
    const Scalar width = high - low;
    const Storage scale =
        saturate_cast<Storage>(is_finite(width) ? width / steps : high / steps - low / steps);
    const Scalar stored = static_cast<Scalar>(scale);
    const Params params{scale, stored > Scalar(0) ? saturate_cast<Storage>(-low / stored) : Storage(0)};
    const auto top = static_cast<std::uint8_t>((1 << this->bits()) - 1);
    if (is_finite(decode(0, params)) && is_finite(decode(top, params))) [[likely]]
      return params;
    // The group reaches to the largest numbers there are, and a rounding went past them.
    const Scalar inside = Scalar(1) - static_cast<Scalar>(std::ldexp(1.0, -6));
    return over(inside * low, inside * high);
  }

  /// For a range that `plain` does not serve: of a few forms, the one with the least error.
  Params best_of_others(const GroupView<Scalar>& group, Scalar low, Scalar high, const Params& plain) const {
    // One level at the middle, the rest unused: (1 - 0) scale; or the last one, where a rounding with
    // feedback that took others would leave the range of the scalar.
    const Scalar middle = low == high ? low : low + (high - low) / 2,
                 top = static_cast<Scalar>((1 << this->bits()) - 1);
    const bool huge = std::abs(middle) > std::numeric_limits<Scalar>::max() / (2 * top);
    Params best{saturate_cast<Storage>(huge ? Scalar(0.99) * middle / top : middle), Storage(0)};
    if (group.isZero(0)) return best;
    double least = squared_error(group, best);
    const auto consider = [&](Storage scale, Scalar zero) {
      const Params params{scale, saturate_cast<Storage>(zero)};
      const double error = squared_error(group, params);
      if (static_cast<Scalar>(scale) > Scalar(0) && error < least) {
        least = error;
        best = params;
      }
    };
    const Scalar steps = static_cast<Scalar>((1 << this->bits()) - 1),
                 scale = static_cast<Scalar>(plain.scale);
    // Past the scalar's own digits codes would no longer be told apart.
    if (std::abs(static_cast<Scalar>(plain.zero)) <= static_cast<Scalar>(std::ldexp(1.0, scalar_digits - 3)))
      consider(plain.scale, static_cast<Scalar>(plain.zero));
    if constexpr (detail::storage_digits<Storage> <= 11) consider_wider(low, high, consider);
    // The same levels, moved so that zero is one of them: the far end of a cut range is lost, not everything
    // else.
    if (scale > Scalar(0)) consider(plain.scale, std::round(std::clamp(-low / scale, Scalar(0), steps)));
    // The finest scale under which the zero point is a whole number that the storage holds exactly.
    const Scalar offset = std::max(std::abs(low), std::abs(high));
    const int digits = std::min(detail::storage_digits<Storage>, scalar_digits - 3);
    const Storage coarse = saturate_cast<Storage>(std::max(std::ldexp(offset, 1 - digits), scale));
    if (static_cast<Scalar>(coarse) > Scalar(0))
      consider(coarse, -std::round(low / static_cast<Scalar>(coarse)));
    return best;
  }

  /// With 16-bit parameters, of all scales up to 1.5 times the ideal one, the one under which scale times
  /// zero point, both rounded, comes nearest to the range's low end, for the width of its steps.
  template <class Consider>
  void consider_wider(Scalar low, Scalar high, Consider consider) const {
    constexpr int digits = detail::storage_digits<Storage>;
    const double from = static_cast<double>(low), steps = static_cast<double>((1 << this->bits()) - 1);
    const double ideal = (static_cast<double>(high) - from) / steps;
    const double base = std::max(ideal, static_cast<double>(std::numeric_limits<Storage>::denorm_min()));
    Storage best{};
    double least = std::numeric_limits<double>::infinity();
    for (int k = 0; k <= 1 << (digits - 2); ++k) {
      const Storage stored = saturate_cast<Storage>(base * (1 + std::ldexp(k, 1 - digits)));
      const double scale = static_cast<double>(stored);
      if (scale < ideal) continue;  // would clip the far end
      const double shift = from + static_cast<double>(saturate_cast<Storage>(-from / scale)) * scale;
      const double error = shift * shift + scale * scale / 12;
      if (error < least) {
        least = error;
        best = stored;
      }
    }
    if (static_cast<double>(best) > 0) consider(best, static_cast<Scalar>(-from / static_cast<double>(best)));
  }

  /// In units of the largest value, so that the squares neither overflow nor vanish.
  double squared_error(const GroupView<Scalar>& group, const Params& params) const {
    const double unit = static_cast<double>(group.cwiseAbs().maxCoeff());
    double sum = 0;
    for (Index i = 0; i < group.size(); ++i) {
      const double value = static_cast<double>(decode(encode(group[i], params), params));
      const double error = static_cast<double>(group[i]) / unit - value / unit;
      sum += error * error;
    }
    return sum;
  }

  double kappa_, range_;
};

}  // namespace wushkv

#endif  // WUSHKV_QUANTIZE_AFFINE_HPP
