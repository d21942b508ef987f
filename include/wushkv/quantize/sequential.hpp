// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_SEQUENTIAL_HPP
#define WUSHKV_QUANTIZE_SEQUENTIAL_HPP

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>

#include "wushkv/core/scratch.hpp"
#include "wushkv/quantize/sensitivity.hpp"
#include "wushkv/quantize/storage.hpp"
#include "wushkv/quantize/uniform.hpp"

namespace wushkv::detail {

/// In which ways a token is tried: with each factor of its step, with feedback, to the nearest level, or
/// both.
struct RoundingTrials {
  std::span<const double> factors;
  bool feedback = true, nearest = false;
};

/// Rounds tokens one coordinate at a time, many lanes at once. A lane is one trial of one token, so the
/// trials of a single token and those of many go through the same instructions and give the same codes. In
/// every lane coordinate j hears `s = sum_{i<j} F_ij e_i`; with feedback `y + s` is rounded, without it `y`;
/// either way `r = e_j + s` adds `D_j r²` to `eᵀ A e` (`Sensitivity`).
///
/// The best factor is kept at each group's end, where its loss is known but for what later groups make good;
/// the better of feedback and nearest at the head's end, so that it is never worse than either.
template <class Q>
class SequentialRounding {
  using Scalar = typename Q::Scalar;
  using Code = code_t<Q>;
  using Params = typename Q::Params;
  // Lanes that go together: an AVX-512 register of floats.
  static constexpr Index pack = 16;
  // What a block of tokens keeps on the stack: 32 KB of errors in float, twice that in double; more lanes
  // than 128 gain nothing.
  static constexpr Index most_values = 8192, most_lanes = 128;
  static constexpr Index most_params =
      std::max<Index>(pack, most_values / static_cast<Index>(sizeof(Params)));
  // Of a lane: the levels of its group, what of `s` it rounds with, its loss so far, and the unit of that.
  enum State { Divisor, Shift, Origin, Step, FeedsBack, Loss, Unit, states };

 public:
  SequentialRounding(const Sensitivity<Scalar>& sensitivity, const RoundingTrials& trials, const Q& quantizer,
                     Index group_size)
      : a_(sensitivity),
        quantizer_(quantizer),
        factors_(trials.factors),
        first_mode_feeds_back_(trials.feedback),
        modes_(trials.feedback && trials.nearest ? 2 : 1),
        dim_(sensitivity.dim()),
        group_size_(group_size) {}

  /// `y` and `codes` are `[tokens, dim]`, `params` `[tokens, dim / group_size]`, all contiguous. Allocates
  /// nothing if the trials of one token fit the stack: 32 of them at dimension 256, 16 at 512.
  void encode(const Scalar* y, Index tokens, Code* codes, Params* params) const {
    if (tokens == 0) return;
    const Index groups = dim_ / group_size_;
    const Index room = std::min({most_lanes, most_values / dim_, most_params / groups}) / pack * pack;
    const Index most = std::max<Index>(1, room / trials());  // tokens of a block
    const Index blocks = (tokens + most - 1) / most, most_even = (tokens + blocks - 1) / blocks;
    const Index lanes = padded(most_even * trials());
    Scratch<Scalar, most_values> errors(dim_ * lanes);
    Scratch<Code, most_values> lane_codes(dim_ * lanes);
    Scratch<Params, most_params> lane_params(groups * lanes);
    Scratch<Scalar, states * most_lanes> lane_states(states * lanes);
    for (Index begin = 0; begin < tokens; begin += most_even) {
      const Index count = std::min(most_even, tokens - begin);
      const Block block{y + begin * dim_,         count,
                        padded(count * trials()), errors.data(),
                        lane_codes.data(),        lane_params.data(),
                        lane_states.data()};
      start(block);
      for (Index group = 0; group < groups; ++group) {
        fit(block, group);
        for (Index j = group * group_size_; j < (group + 1) * group_size_; ++j) round(block, j, group);
        keep_best_factor(block, group);
      }
      write_best_mode(block, codes + begin * dim_, params + begin * groups);
    }
  }

 private:
  using Pack = Eigen::Array<Scalar, static_cast<int>(pack), 1>;

  /// Lanes in the order (mode, factor, token), padded to whole packs with lanes of zeros.
  struct Block {
    const Scalar* y;
    Index tokens, lanes;
    Scalar* errors;  ///< `[dim, lanes]`
    Code* codes;     ///< `[dim, lanes]`
    Params* params;  ///< `[groups, lanes]`
    Scalar* memory;  ///< `[states, lanes]`

    Scalar* of(State state) const { return memory + state * lanes; }
  };

  /// A loss that overflowed on its way to no number is the greatest.
  static bool less(Scalar a, Scalar b) { return a < b || (a == a && b != b); }
  /// Lanes of a token.
  Index trials() const { return modes_ * static_cast<Index>(factors_.size()); }
  static Index padded(Index lanes) { return (lanes + pack - 1) / pack * pack; }
  Index lane(const Block& block, Index mode, std::size_t factor, Index token) const {
    return (mode * static_cast<Index>(factors_.size()) + static_cast<Index>(factor)) * block.tokens + token;
  }
  template <class Visit>
  void for_each_lane(const Block& block, Visit visit) const {
    Index l = 0;
    for (Index mode = 0; mode < modes_; ++mode)
      for (const double factor : factors_)
        for (Index token = 0; token < block.tokens; ++token) visit(l++, mode, factor, token);
  }

  void start(const Block& block) const {
    std::fill_n(block.memory, states * block.lanes, Scalar(0));
    std::fill_n(block.of(Divisor), block.lanes, Scalar(1));
    for_each_lane(block, [&](Index l, Index mode, double, Index token) {
      const Eigen::Map<const Vector<Scalar>> y(block.y + token * dim_, dim_);
      const Scalar largest = y.cwiseAbs().maxCoeff();
      // A power of two, so that squares neither overflow nor vanish.
      constexpr int most = std::numeric_limits<Scalar>::max_exponent - 2;
      block.of(Unit)[l] =
          std::ldexp(Scalar(1), largest > 0 ? std::clamp(-std::ilogb(largest), -most, most) : 0);
      block.of(FeedsBack)[l] = (mode == 0) == first_mode_feeds_back_ ? Scalar(1) : Scalar(0);
    });
  }

  void fit(const Block& block, Index group) const {
    for_each_lane(block, [&](Index l, Index, double factor, Index token) {
      const Eigen::Map<const Vector<Scalar>> y(block.y + token * dim_ + group * group_size_, group_size_);
      Params& params = block.params[group * block.lanes + l];
      if constexpr (ScalableQuantizer<Q>)
        params = quantizer_.fit(GroupView<Scalar>(y), factor);
      else
        params = quantizer_.fit(GroupView<Scalar>(y));
      if constexpr (UniformQuantizer<Q>) {
        const UniformLevels<Scalar> levels = quantizer_.levels(params);
        block.of(Divisor)[l] = levels.divisor;
        block.of(Shift)[l] = levels.shift;
        block.of(Origin)[l] = levels.origin;
        block.of(Step)[l] = levels.step;
      }
    });
  }

  using ConstPack = Eigen::Map<const Pack>;

  /// What coordinate j hears of those before it. The terms are added in order; the sum stays in a register
  /// for eight of them.
  Pack hear(const Block& block, Index j, Index at) const {
    const Scalar* const f = a_.feedback().row(j).data();
    const auto e = [&](Index i) { return ConstPack(block.errors + i * block.lanes + at); };
    Pack heard = Pack::Zero();
    Index i = 0;
    for (; i + 8 <= j; i += 8)
      heard = heard + f[i] * e(i) + f[i + 1] * e(i + 1) + f[i + 2] * e(i + 2) + f[i + 3] * e(i + 3) +
              f[i + 4] * e(i + 4) + f[i + 5] * e(i + 5) + f[i + 6] * e(i + 6) + f[i + 7] * e(i + 7);
    for (; i < j; ++i) heard = heard + f[i] * e(i);
    return heard;
  }

  void round(const Block& block, Index j, Index group) const {
    const Scalar weight = a_.weights()[j];
    for (Index at = 0; at < block.lanes; at += pack) {
      const Pack heard = hear(block, j, at), y = gather(block, j, at);
      const Pack value = quantize(block, j, group, at, y + ConstPack(block.of(FeedsBack) + at) * heard);
      const Pack error = y - value;
      Eigen::Map<Pack>(block.errors + j * block.lanes + at) = error;
      Eigen::Map<Pack>(block.of(Loss) + at) +=
          weight * ((error + heard) * ConstPack(block.of(Unit) + at)).square();
    }
  }

  Pack gather(const Block& block, Index j, Index at) const {
    Pack y = Pack::Zero();
    Index token = at % block.tokens;
    for (Index l = 0; l < used(block, at); ++l) {
      y[l] = block.y[token * dim_ + j];
      if (++token == block.tokens) token = 0;
    }
    return y;
  }

  /// The lanes of a pack that are no padding.
  Index used(const Block& block, Index at) const {
    return std::clamp<Index>(trials() * block.tokens - at, 0, pack);
  }

  /// Writes a pack's codes and returns what they stand for.
  Pack quantize(const Block& block, Index j, Index group, Index at, const Pack& target) const {
    Code* const codes = block.codes + j * block.lanes + at;
    Pack value = Pack::Zero();
    if constexpr (UniformQuantizer<Q>) {
      const UniformLevels<Scalar> shared = quantizer_.levels(block.params[group * block.lanes]);
      Pack code = shared.codes(target, ConstPack(block.of(Divisor) + at), ConstPack(block.of(Shift) + at));
      for (Index l = 0; l < pack; ++l) {
        code[l] = code[l] > 0 ? code[l] : Scalar(0);  // what overflowed on the way may be no number
        codes[l] = static_cast<Code>(static_cast<int>(code[l]));
      }
      value = (code - ConstPack(block.of(Origin) + at)) * ConstPack(block.of(Step) + at);
    } else {
      for (Index l = 0; l < used(block, at); ++l) {
        const Params& params = block.params[group * block.lanes + at + l];
        // Huge feedback may overflow; a quantizer takes finite values only.
        codes[l] =
            quantizer_.encode(saturate_cast<Scalar>(target[l] == target[l] ? target[l] : Scalar(0)), params);
        value[l] = quantizer_.decode(codes[l], params);
      }
    }
    return value;
  }

  /// Of each token's lanes of one mode, all go on with what the best one has so far.
  void keep_best_factor(const Block& block, Index group) const {
    if (factors_.size() == 1) return;
    for (Index mode = 0; mode < modes_; ++mode)
      for (Index token = 0; token < block.tokens; ++token) {
        Index best = lane(block, mode, 0, token);
        for (std::size_t f = 1; f < factors_.size(); ++f) {
          const Index l = lane(block, mode, f, token);
          if (less(block.of(Loss)[l], block.of(Loss)[best])) best = l;
        }
        for (std::size_t f = 0; f < factors_.size(); ++f) {
          const Index l = lane(block, mode, f, token);
          if (l == best) continue;
          block.of(Loss)[l] = block.of(Loss)[best];
          block.params[group * block.lanes + l] = block.params[group * block.lanes + best];
          for (Index j = group * group_size_; j < (group + 1) * group_size_; ++j) {
            block.errors[j * block.lanes + l] = block.errors[j * block.lanes + best];
            block.codes[j * block.lanes + l] = block.codes[j * block.lanes + best];
          }
        }
      }
  }

  void write_best_mode(const Block& block, Code* codes, Params* params) const {
    const Index groups = dim_ / group_size_;
    for (Index token = 0; token < block.tokens; ++token) {
      Index best = lane(block, 0, 0, token);
      if (modes_ > 1) {
        const Index other = lane(block, 1, 0, token);
        if (less(block.of(Loss)[other], block.of(Loss)[best])) best = other;
      }
      for (Index j = 0; j < dim_; ++j) codes[token * dim_ + j] = block.codes[j * block.lanes + best];
      for (Index g = 0; g < groups; ++g) params[token * groups + g] = block.params[g * block.lanes + best];
    }
  }

  const Sensitivity<Scalar>& a_;
  const Q& quantizer_;
  std::span<const double> factors_;
  bool first_mode_feeds_back_;
  Index modes_, dim_, group_size_;
};

}  // namespace wushkv::detail

#endif  // WUSHKV_QUANTIZE_SEQUENTIAL_HPP
