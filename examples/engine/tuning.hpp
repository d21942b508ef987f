// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_TUNING_HPP
#define WUSHKV_EXAMPLES_ENGINE_TUNING_HPP

#include <vector>

#include "engine/codec_choice.hpp"
#include "engine/threads.hpp"
#include "wushkv/calibrate/layer_transforms.hpp"

namespace wushkv {
class LayerStatistics;
}

namespace engine {

// What statistics settle beside the transforms. `transforms` and `statistics` have an entry a layer; each
// throws `std::invalid_argument` for statistics that have no sample, or no sums that it needs.

/// Tunes the choice's quantizer, layer by layer, on the sample (`HeadTransform::tuned`).
void tune_layers(std::vector<wushkv::LayerTransforms>& transforms,
                 const std::vector<wushkv::LayerStatistics>& statistics, const CodecChoice& choice,
                 Index group_size, Threads& threads);

/// Chooses the eigenvectors' signs of every head for the choice's codec, of `trials` on the sample.
void choose_all_signs(std::vector<wushkv::LayerTransforms>& transforms,
                      const std::vector<wushkv::LayerStatistics>& statistics, const CodecChoice& choice,
                      Index group_size, int trials, Threads& threads);

/// Shares out the choice's average bits by the losses that the additive-noise model predicts.
std::vector<LayerBits> allot_bits(const std::vector<wushkv::LayerTransforms>& transforms,
                                  const std::vector<wushkv::LayerStatistics>& statistics,
                                  const CodecChoice& choice, Index group_size);

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_TUNING_HPP
