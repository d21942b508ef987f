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

/// The widths that an average may be shared out in: from one below it to two above.
std::vector<int> widths_around(double average_bits);

/// What each layer's keys and values lose at the `widths_around` the choice's average, by the additive-noise
/// model and the attention-aware sums. Quick, and good for a first guess: it knows nothing of how the errors
/// of many tokens add up in a softmax, and 2.25 bits shared out by it lose as much as a mixture of layers at
/// 2 and at 3 (`TransformSource::set_allotment_text` measures instead).
std::vector<wushkv::LayerLosses> predicted_losses(const std::vector<wushkv::LayerTransforms>& transforms,
                                                  const std::vector<wushkv::LayerStatistics>& statistics,
                                                  const CodecChoice& choice, Index group_size);

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_TUNING_HPP
