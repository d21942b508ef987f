// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_BUILD_OPTIONS_HPP
#define WUSHKV_CALIBRATE_BUILD_OPTIONS_HPP

#include <cstdint>

#include "wushkv/calibrate/construction.hpp"
#include "wushkv/core/types.hpp"

namespace wushkv {

// What transforms are built by, apart from what builds them: recipes name options, and an engine that
// includes recipes need not compile eigenvalues.

/// The exponent that goes with feedback rounding: its noise is shaped, so the transform may lean toward
/// whitening the cache (design.md, *Feedback rounding*).
inline constexpr double feedback_exponent = 0.75;

/// How WUSH is built (arXiv 2609.38121; design.md, *WUSH*).
struct WushOptions {
  /// gamma: `M` and `H` each get `gamma tr/d` on the diagonal.
  double damping = 1e-2;
  /// p of `Lambda^{-p/2}`: 1/2 is WUSH, 1 whitens the cache, 0.75 goes with feedback rounding.
  double exponent = 0.5;
  /// The number of tokens that `M` sums over: c is then chosen so that what the cache stores has unit mean
  /// square on them. 0 leaves c = 1.
  double tokens = 0;
};

/// How `build_transforms` builds a layer's transforms.
struct BuildOptions {
  Construction construction = Construction::Wush;
  /// Coordinates that share a scale, 0 for the whole head. Hadamard, RotateKV and WUSH are block diagonal by
  /// it (RotateKV up to its permutation); the others mix the whole head.
  Index key_group_size = 0, value_group_size = 0;
  /// The damping and the exponent of the WUSH constructions; the damping is every construction's for its
  /// sensitivity.
  double damping = WushOptions{}.damping, exponent = WushOptions{}.exponent;
  /// Above 0, the noise factor kappa of a quantizer (`noise_factor`): each head then gets the exponent with
  /// which feedback rounding is predicted to lose least (`choose_exponent`), in place of `exponent`. For
  /// groups of a whole head only.
  double choose_exponent_for = 0;
  /// Scale the WUSH constructions so that what the cache stores has unit mean square on the calibration
  /// tokens (`Joint`: unit mean square weighted by `tr H_t`); else c = 1.
  bool unit_mean_square = true;
  /// Of the random rotation, which all heads share.
  std::uint64_t seed = 0;
  /// The widths that the transforms are meant for, 0 if not known. None depends on them; files record them.
  int key_bits = 0, value_bits = 0;
};

}  // namespace wushkv

#endif  // WUSHKV_CALIBRATE_BUILD_OPTIONS_HPP
