// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_CODEC_CHOICE_HPP
#define WUSHKV_EXAMPLES_ENGINE_CODEC_CHOICE_HPP

#include <string>

#include "engine/kv_cache.hpp"
#include "wushkv/calibrate/construction.hpp"

namespace engine {

/// A cache's codec by name: `float`, `bf16`, or `TRANSFORM+QUANTIZER:BITS` with a construction's name
/// (`wushkv::Construction`, or `file` for transforms from a file) and a quantizer's, and one number of bits
/// or two, for keys and values: `wush+quest:2`, `oscar+percentile:3/2`; without bits after `+float` and
/// `+bf16`.
struct CodecChoice {
  std::string name;
  QuantizerKind quantizer = QuantizerKind::Float;
  int key_bits = 0, value_bits = 0;
  bool from_file = false;
  wushkv::Construction construction = wushkv::Construction::None;
};

/// Throws `std::invalid_argument`, with what is expected, for a name that is none.
CodecChoice parse_codec(const std::string& name);

/// Whether the transforms of a construction depend on data.
bool needs_statistics(wushkv::Construction construction);

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_CODEC_CHOICE_HPP
