// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_LLOYD_MAX_HPP
#define WUSHKV_QUANTIZE_LLOYD_MAX_HPP

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <string>

#include "wushkv/quantize/bits.hpp"
#include "wushkv/quantize/concept.hpp"
#include "wushkv/quantize/root_mean_square.hpp"
#include "wushkv/quantize/storage.hpp"

namespace wushkv {

/// The `2^bits` levels, ascending, that minimize the mean squared error of a unit normal, and the `2^bits -
/// 1` boundaries halfway between them.
struct LloydMaxTable {
  std::array<double, 256> level{};
  std::array<double, 255> boundary{};
};

namespace detail {

inline double normal_density(double x) { return std::exp(-x * x / 2) / std::sqrt(2 * std::numbers::pi); }

/// P(X > x) of a unit normal, accurate in the tail.
inline double normal_tail(double x) { return std::erfc(x / std::numbers::sqrt2) / 2; }

/// Mean of a unit normal within (a, b), 0 <= a < b <= infinity, and its derivatives by a and b.
struct Centroid {
  Centroid(double a, double b) {
    const double at_a = normal_density(a), at_b = normal_density(b), mass = normal_tail(a) - normal_tail(b);
    mean = (at_a - at_b) / mass;
    by_a = at_a * (mean - a) / mass;
    by_b = at_b > 0 ? at_b * (b - mean) / mass : 0;
  }
  double mean, by_a, by_b;
};

/// The fixed point of Lloyd's iteration (level = centroid of its cell, boundary = midpoint of its levels).
/// Plain iteration creeps at many levels (10^5 rounds at 8 bits), so its equations, whose Jacobian is
/// tridiagonal, are solved by Newton's method; the normal's log-concavity makes the solution unique. Only the
/// positive half is solved for.
inline LloydMaxTable lloyd_max_table(int bits) {
  const int n = 1 << (bits - 1);
  std::array<double, 129> c{}, update{}, upper{};  // level i stands at c[i], i = 1 … n
  // Start at the high-rate limit: point density proportional to the cube root of the normal's, a normal of
  // variance 3.
  for (int i = 1; i <= n; ++i) {
    double low = 0, high = 20;
    const double tail = (1 - (i - 0.5) / n) / 2;
    for (int k = 0; k < 60; ++k) {
      const double middle = (low + high) / 2;
      (normal_tail(middle) > tail ? low : high) = middle;
    }
    c[static_cast<std::size_t>(i)] = std::numbers::sqrt3 * low;
  }
  const auto boundary = [&](int i) {
    const auto at = static_cast<std::size_t>(i);
    return i == 0 ? 0.0 : i == n ? std::numeric_limits<double>::infinity() : (c[at] + c[at + 1]) / 2;
  };
  for (int round = 0; round < 50; ++round) {
    double change = 0;
    for (int i = 1; i <= n; ++i) {  // forward elimination of (J | F)
      const auto at = static_cast<std::size_t>(i);
      const Centroid cell(boundary(i - 1), boundary(i));
      const double below = i > 1 ? -cell.by_a / 2 : 0, above = i < n ? -cell.by_b / 2 : 0;
      const double pivot = 1 + below + above - below * upper[at - 1];
      upper[at] = above / pivot;
      update[at] = (c[at] - cell.mean - below * update[at - 1]) / pivot;
    }
    double next = 0;
    for (int i = n; i >= 1; --i) {
      const auto at = static_cast<std::size_t>(i);
      next = update[at] - upper[at] * next;
      c[at] -= next;
      change = std::max(change, std::abs(next));
    }
    if (change < 1e-14) break;
  }
  LloydMaxTable table;
  for (int i = 0; i < n; ++i) {
    table.level[static_cast<std::size_t>(n + i)] = c[static_cast<std::size_t>(i + 1)];
    table.level[static_cast<std::size_t>(n - 1 - i)] = -c[static_cast<std::size_t>(i + 1)];
  }
  for (std::size_t i = 0; i + 1 < static_cast<std::size_t>(2 * n); ++i)
    table.boundary[i] = (table.level[i] + table.level[i + 1]) / 2;
  return table;
}

}  // namespace detail

/// Levels of the unit normal at 1 to 8 bits, computed once, at first use. Throws `std::invalid_argument`
/// outside 1 to 8.
inline const LloydMaxTable& lloyd_max_levels(int bits) {
  static const std::array<LloydMaxTable, 8> tables = [] {
    std::array<LloydMaxTable, 8> all;
    for (int b = 1; b <= 8; ++b) all[static_cast<std::size_t>(b - 1)] = detail::lloyd_max_table(b);
    return all;
  }();
  if (bits < 1 || bits > 8) detail::invalid_argument("lloyd_max_levels: bits is ", bits, ", expected 1 to 8");
  return tables[static_cast<std::size_t>(bits - 1)];
}

/// Lloyd-Max levels of the unit normal times the group's root mean square (TurboQuant-style, arXiv
/// 2504.19874). One parameter a group, the root mean square, kept as `Storage`.
template <class ScalarType, int Bits = Dynamic, ScaleStorage Storage = ScalarType>
class LloydMax : public BitWidth<Bits> {
 public:
  using Scalar = ScalarType;
  struct Params {
    Storage rms;
  };

  /// Throws `std::invalid_argument` for a width outside 1 to 8.
  explicit LloydMax(int bits = Bits) : BitWidth<Bits>(bits), table_(&lloyd_max_levels(this->bits())) {}

  /// What `decode` depends on besides the bits (`codec/identity.hpp`).
  static std::string identity() { return "lloyd-max/" + std::string(detail::storage_name<Storage>); }

  /// The root mean square of a group of any length, times `factor`, as stored.
  Params fit(const GroupView<Scalar>& group, double factor = 1) const {
    // The outermost level must be finite too, also after the storage type has rounded up.
    const double outermost = table_->level[static_cast<std::size_t>((1 << this->bits()) - 1)];
    const double limit =
        0.99 * static_cast<double>(std::numeric_limits<Scalar>::max()) / std::max(outermost, 1.0);
    const double rms = factor * detail::root_mean_square<Scalar>(group);
    Params params{saturate_cast<Storage>(std::min(rms, limit))};
    // One that rounds to nothing: the least there is, unless even its innermost level is past the group's
    // values.
    const Storage least = std::numeric_limits<Storage>::denorm_min();
    const double innermost = table_->level[static_cast<std::size_t>(1 << (this->bits() - 1))];
    if (static_cast<double>(params.rms) == 0 && innermost * static_cast<double>(least) <= rms)
      params.rms = least;
    return params;
  }

  std::uint8_t encode(Scalar x, const Params& params) const {
    const double rms = static_cast<double>(params.rms);
    if (rms == 0) return static_cast<std::uint8_t>(1 << (this->bits() - 1));
    const auto begin = table_->boundary.begin(), end = begin + ((1 << this->bits()) - 1);
    return static_cast<std::uint8_t>(std::lower_bound(begin, end, static_cast<double>(x) / rms) - begin);
  }

  Scalar decode(std::uint8_t code, const Params& params) const {
    return static_cast<Scalar>(table_->level[code] * static_cast<double>(params.rms));
  }

 private:
  const LloydMaxTable* table_;
};

}  // namespace wushkv

#endif  // WUSHKV_QUANTIZE_LLOYD_MAX_HPP
