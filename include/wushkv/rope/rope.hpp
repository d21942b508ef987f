// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_ROPE_ROPE_HPP
#define WUSHKV_ROPE_ROPE_HPP

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <limits>
#include <ranges>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "wushkv/core/check.hpp"
#include "wushkv/core/error.hpp"
#include "wushkv/core/types.hpp"
#include "wushkv/rope/scaling.hpp"

namespace wushkv {

/// Which coordinates form pair i of the rotary dimension d: `(i, i + d/2)` as in GPT-NeoX and Llama's
/// published weights for transformers, or `(2i, 2i + 1)` as in RoFormer.
enum class RopePairs { Half, Interleaved };

/// Positions, one a token: anything contiguous that holds integers (`std::span<const std::int32_t>`,
/// `std::vector<Index>`, …).
template <class Range>
concept PositionRange = std::ranges::contiguous_range<const Range> && std::ranges::sized_range<const Range> &&
    std::integral<std::ranges::range_value_t<const Range>>;

namespace detail {

/// The number of heads side by side in a row of `width` coordinates.
inline Index count_heads(std::string_view name, Index width, Index head_dim) {
  if (width <= 0 || width % head_dim != 0) [[unlikely]]
    invalid_argument(name, " has ", width,
                     " coordinates a token, expected a positive multiple of the head dimension ", head_dim);
  return width / head_dim;
}

}  // namespace detail

/// Rotary position embeddings (RoFormer, arXiv 2104.09864, equation 34): pair i of a token at position p is
/// rotated by the angle `p · inv_freq[i]` and multiplied with the attention factor; coordinates from
/// `rotary_dim()` on pass through (partial rotary, GPT-NeoX, arXiv 2204.06745).
///
/// Sines and cosines are computed once, in double, for positions 0 to `max_position() - 1`, and rounded once
/// to `Scalar`: `max_position · rotary_dim` scalars, so share one object between layers. Immutable after
/// construction; all calls are safe at the same time, and allocate nothing.
///
/// A batch is `[tokens, heads · head_dim]`, one token a row, heads side by side, any distance between rows; a
/// single token is a column `[heads · head_dim]`. Positions are given per token, in any order. `out` may be
/// `x` itself but must not overlap it otherwise. Errors (`std::invalid_argument`, nothing written): a width
/// that is no multiple of `head_dim()`, `out` of another shape than `x`, not one position a token, a position
/// outside the table, a value that is not finite.
template <class Scalar>
class Rope {
  static_assert(std::is_same_v<Scalar, float> || std::is_same_v<Scalar, double>,
                "wushkv::Rope computes in float or double");

 public:
  using Column = Eigen::Ref<Vector<Scalar>>;
  using ConstColumn = Eigen::Ref<const Vector<Scalar>>;

  /// Rotates the first `2 · frequencies.inv_freq.size()` coordinates of each head. Frequencies come from
  /// `rope_frequencies` or from the engine. Errors: `std::invalid_argument` if there is no frequency, if
  /// twice their number exceeds `head_dim`, if one is not finite, if the attention factor is not positive or
  /// its square or inverse square leave the scalar's range, if `max_position` is not positive or the table is
  /// too large to address.
  Rope(Index head_dim, Index max_position, RopeFrequencies frequencies, RopePairs pairs = RopePairs::Half)
      : head_dim_(head_dim), pairs_(pairs), frequencies_(std::move(frequencies)) {
    check_settings(max_position);
    undo_gain_ = static_cast<Scalar>(undo_gain());
    fill_table(max_position);
  }

  Index head_dim() const { return head_dim_; }
  Index rotary_dim() const { return 2 * pair_count(); }
  /// The table's length: positions are less than this.
  Index max_position() const { return table_.rows(); }
  RopePairs pairs() const { return pairs_; }
  const RopeFrequencies& frequencies() const { return frequencies_; }

  /// Rotates a batch in place, row i to `positions[i]`.
  template <PositionRange Positions>
  void apply(Rows<Scalar> x, const Positions& positions) const {
    run_batch<false>(x, positions, x);
  }
  /// `out` = the rotated batch `x`.
  template <PositionRange Positions>
  void apply_to(const ConstRows<Scalar>& x, const Positions& positions, Rows<Scalar> out) const {
    run_batch<false>(x, positions, out);
  }
  /// Rotates one token in place.
  void apply(Column x, Index position) const { run_token<false>(x, position, x); }
  /// `out` = the rotated token `x`.
  void apply_to(const ConstColumn& x, Index position, Column out) const {
    run_token<false>(x, position, out);
  }

  /// The inverse of `apply` at the same positions: rotates back and divides by the attention factor.
  template <PositionRange Positions>
  void inverse(Rows<Scalar> x, const Positions& positions) const {
    run_batch<true>(x, positions, x);
  }
  template <PositionRange Positions>
  void inverse_to(const ConstRows<Scalar>& x, const Positions& positions, Rows<Scalar> out) const {
    run_batch<true>(x, positions, out);
  }
  void inverse(Column x, Index position) const { run_token<true>(x, position, x); }
  void inverse_to(const ConstColumn& x, Index position, Column out) const {
    run_token<true>(x, position, out);
  }

  /// The kernel under `apply`: `y` = the head `x` (`head_dim()` scalars each) rotated to `position`. Checks
  /// nothing.
  void rotate_head(const Scalar* x, Index position, Scalar* y) const { turn_head<false>(x, position, y); }

  /// Throws `std::invalid_argument` unless `position` is in the table.
  void check_position(Index position) const {
    if (position < 0 || position >= max_position()) [[unlikely]]
      detail::invalid_argument("rope: position is ", position, ", expected 0 to ", max_position() - 1,
                               " (the RoPE table's length less one)");
  }

  /// Throws `std::invalid_argument` unless there are `tokens` positions and all of them are in the table.
  template <PositionRange Positions>
  void check_positions(const Positions& positions, Index tokens) const {
    const auto count = static_cast<Index>(std::ranges::size(positions));
    if (count != tokens) [[unlikely]]
      detail::invalid_argument("rope: positions has ", count, " entries, expected one for each of ", tokens,
                               " tokens");
    for (const auto position : positions) check_position(static_cast<Index>(position));
  }

 private:
  using Limits = std::numeric_limits<Scalar>;

  /// The table carries the attention factor once, the inverse has to carry one over it.
  double undo_gain() const { return 1 / (frequencies_.attention_factor * frequencies_.attention_factor); }
  Index pair_count() const { return static_cast<Index>(frequencies_.inv_freq.size()); }

  void check_settings(Index max_position) const {
    const std::vector<double>& inv_freq = frequencies_.inv_freq;
    if (inv_freq.empty()) [[unlikely]]
      detail::invalid_argument("rope: inv_freq is empty, expected one frequency for each pair");
    if (rotary_dim() > head_dim_) [[unlikely]]
      detail::invalid_argument("rope: inv_freq has ", pair_count(),
                               " entries, expected at most half the head dimension ", head_dim_);
    for (const double f : inv_freq)  // an infinite angle has no cosine
      if (!is_finite(f * static_cast<double>(max_position))) [[unlikely]]
        detail::invalid_argument("rope: inv_freq has the value ", f,
                                 ", expected finite angles up to max_position");
    detail::check_rope_setting("rope: attention_factor", frequencies_.attention_factor);
    const double undo = undo_gain();
    if (!is_finite(undo) || undo < Limits::min() || undo > Limits::max()) [[unlikely]]
      detail::invalid_argument("rope: attention_factor is ", frequencies_.attention_factor,
                               ", expected one whose square and inverse square the scalar can hold");
    if (max_position <= 0 || max_position > std::numeric_limits<Index>::max() / rotary_dim()) [[unlikely]]
      detail::invalid_argument("rope: max_position is ", max_position,
                               ", expected a positive length whose table of ", rotary_dim(),
                               " scalars a position can be addressed");
  }

  /// A row holds the pairs' cosines, then their sines, so that one token reads one run of memory.
  void fill_table(Index max_position) {
    const Index count = pair_count();
    table_.resize(max_position, 2 * count);
    for (Index position = 0; position < max_position; ++position) {
      Scalar* row = &table_(position, 0);
      for (Index i = 0; i < count; ++i) {
        const double angle =
            static_cast<double>(position) * frequencies_.inv_freq[static_cast<std::size_t>(i)];
        row[i] = static_cast<Scalar>(std::cos(angle) * frequencies_.attention_factor);
        row[count + i] = static_cast<Scalar>(std::sin(angle) * frequencies_.attention_factor);
      }
    }
  }

  template <bool Inverse, class X, PositionRange Positions>
  void run_batch(const X& x, const Positions& positions, Rows<Scalar>& out) const {
    const Index heads = detail::count_heads("rope: x", x.cols(), head_dim_);
    detail::check_shape("rope: out", out, x.rows(), x.cols());
    check_positions(positions, x.rows());
    detail::check_finite("rope: x", x);
    const auto* position = std::ranges::data(positions);
    for (Index token = 0; token < x.rows(); ++token)
      turn_row<Inverse>(x.data() + token * x.outerStride(), heads, static_cast<Index>(position[token]),
                        out.data() + token * out.outerStride());
  }

  template <bool Inverse, class X>
  void run_token(const X& x, Index position, Column& out) const {
    const Index heads = detail::count_heads("rope: x", x.size(), head_dim_);
    detail::check_shape("rope: out", out, x.rows(), 1);
    check_position(position);
    detail::check_finite("rope: x", x);
    turn_row<Inverse>(x.data(), heads, position, out.data());
  }

  template <bool Inverse>
  void turn_row(const Scalar* x, Index heads, Index position, Scalar* y) const {
    for (Index head = 0; head < heads; ++head)
      turn_head<Inverse>(x + head * head_dim_, position, y + head * head_dim_);
  }

  template <bool Inverse>
  void turn_head(const Scalar* x, Index position, Scalar* y) const {
    const Scalar* row = table_.data() + position * table_.cols();
    if (pairs_ == RopePairs::Half)
      turn_pairs<Inverse, 1>(x, pair_count(), row, y);
    else
      turn_pairs<Inverse, 2>(x, 1, row, y);
    if (x != y) std::copy(x + rotary_dim(), x + head_dim_, y + rotary_dim());
  }

  /// Pair i is `(x[i · Step], x[i · Step + gap])`.
  template <bool Inverse, int Step>
  void turn_pairs(const Scalar* x, Index gap, const Scalar* row, Scalar* y) const {
    constexpr int width = 8;
    const Index count = pair_count();
    Index i = 0;
    for (; i + width <= count; i += width)
      turn_run<Inverse, Step, width>(x + i * Step, gap, row + i, y + i * Step);
    for (; i < count; ++i) turn_run<Inverse, Step, 1>(x + i * Step, gap, row + i, y + i * Step);
  }

  /// Copies its operands before it writes, so that `y` may be `x`.
  template <bool Inverse, int Step, int Width>
  void turn_run(const Scalar* x, Index gap, const Scalar* row, Scalar* y) const {
    using Run = Eigen::Array<Scalar, Width, 1>;
    using Stride = Eigen::InnerStride<Step>;
    const Run first = Eigen::Map<const Run, 0, Stride>(x);
    const Run second = Eigen::Map<const Run, 0, Stride>(x + gap);
    const Eigen::Map<const Run> cosine(row);
    const Eigen::Map<const Run> sine(row + pair_count());
    Eigen::Map<Run, 0, Stride> first_out(y);
    Eigen::Map<Run, 0, Stride> second_out(y + gap);
    if constexpr (Inverse) {
      first_out = (first * cosine + second * sine) * undo_gain_;
      second_out = (second * cosine - first * sine) * undo_gain_;
    } else {
      first_out = first * cosine - second * sine;
      second_out = second * cosine + first * sine;
    }
  }

  Index head_dim_;
  RopePairs pairs_;
  RopeFrequencies frequencies_;
  Scalar undo_gain_ = 1;
  Batch<Scalar> table_;
};

}  // namespace wushkv

#endif  // WUSHKV_ROPE_ROPE_HPP
