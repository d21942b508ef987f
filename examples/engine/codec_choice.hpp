// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_CODEC_CHOICE_HPP
#define WUSHKV_EXAMPLES_ENGINE_CODEC_CHOICE_HPP

#include <string>

#include "engine/kv_cache.hpp"
#include "wushkv/calibrate/construction.hpp"

namespace engine {

/// A cache's codec by name: `float`, `bf16`, or `TRANSFORM+QUANTIZER[+FLAG…]:BITS` with a construction's name
/// (`wushkv::Construction`, or `file` for transforms from a file), a quantizer's, and what else is done:
/// `feedback` and `search` (roundings), `tuned` (the quantizer's clip ratio or step, layer by layer) and
/// `signs` (of the eigenvectors, chosen by head). Bits are one number, two for keys and values, or a
/// fraction, an average that layers share out by what they lose: `wush+quest:2`, `oscar+percentile:3/2`,
/// `joint+minmax+feedback+search:2.25`; without bits after `+float` and `+bf16`. Recipes have names:
/// `paper:BITS` is `wush+percentile`, `best:BITS` `joint+minmax+feedback+search`.
struct CodecChoice {
  std::string name;
  QuantizerKind quantizer = QuantizerKind::Float;
  int key_bits = 0, value_bits = 0;
  double average_bits = 0;  ///< where layers differ, else 0
  bool from_file = false;
  wushkv::Construction construction = wushkv::Construction::None;
  RoundingChoice rounding{};
  bool tuned = false, signs = false;

  bool quantizes() const { return quantizer != QuantizerKind::Float && quantizer != QuantizerKind::BFloat16; }
};

/// Throws `std::invalid_argument`, with what is expected, for a name that is none.
CodecChoice parse_codec(const std::string& name);

/// Whether the transforms of a construction depend on data.
bool needs_statistics(wushkv::Construction construction);

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_CODEC_CHOICE_HPP
