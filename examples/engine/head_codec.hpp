// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_HEAD_CODEC_HPP
#define WUSHKV_EXAMPLES_ENGINE_HEAD_CODEC_HPP

#include <span>
#include <utility>

#include "engine/kv_cache.hpp"
#include "engine/rounding.hpp"
#include "wushkv/core/error.hpp"
#include "wushkv/quantize/affine.hpp"
#include "wushkv/quantize/compact_affine.hpp"
#include "wushkv/quantize/lloyd_max.hpp"
#include "wushkv/quantize/quest.hpp"
#include "wushkv/recipe/recipes.hpp"

namespace engine {

// The quantizers by name, for what is chosen at run time.

template <class Scale>
auto quest_quantizer(const QuantizerSettings& settings) {
  // The step that feedback wants is wider, unless a search finds it.
  const bool widened = settings.rounding.feedback && !settings.rounding.search;
  const double usual = widened ? wushkv::feedback_widening : 1;
  return wushkv::Quest<float, Eigen::Dynamic, Scale>(settings.bits,
                                                     settings.parameter > 0 ? settings.parameter : usual);
}

template <class Scale>
auto lloyd_quantizer(const QuantizerSettings& settings) {
  return wushkv::LloydMax<float, Eigen::Dynamic, Scale>(settings.bits);
}

template <class Params>
auto affine_quantizer(const QuantizerSettings& settings) {
  using Affine = wushkv::Affine<float, Eigen::Dynamic, Params>;
  if (settings.kind != QuantizerKind::Percentile) return Affine::min_max(settings.bits);
  const double usual = settings.is_key ? wushkv::oscar_key_percentile : wushkv::oscar_value_percentile;
  return Affine::percentile(settings.parameter > 0 ? settings.parameter : usual, settings.bits);
}

inline auto compact_quantizer(const QuantizerSettings& settings) {
  return wushkv::CompactAffine<float>(settings.bits);
}

/// The rounding of a head that was chosen for all. Throws `std::invalid_argument` for one that needs the
/// head's sensitivity where that is not known.
inline AnyRounding rounding_of(const QuantizerSettings& settings, const wushkv::HeadTransform* head) {
  using namespace wushkv;
  const RoundingChoice& choice = settings.rounding;
  if (!choice.feedback && !choice.search) return {};
  if (head == nullptr || !head->has_sensitivity())
    detail::invalid_argument(
        "cache: a rounding with feedback or search came, expected transforms of statistics, which say what "
        "an "
        "error costs");
  Feedback<float> feedback(sensitivity_of<float>(*head));
  if (!choice.search) return AnyRounding(std::move(feedback));
  const bool scaled = settings.kind == QuantizerKind::Quest || settings.kind == QuantizerKind::LloydMax;
  const std::span<const double> factors =
      scaled ? std::span<const double>(quest_step_factors) : affine_range_factors;
  if (choice.feedback) return AnyRounding(StepSearch(feedback, factors));
  return AnyRounding(StepSearch(SensitiveNearest<float>(feedback.sensitivity()), factors));
}

/// What a head was tuned to. Throws `std::invalid_argument` for one that was not.
inline double tuned_parameter(const wushkv::HeadTransform* head, const QuantizerSettings& settings) {
  const std::string name = tuned_name(settings);
  if (head == nullptr || !head->tuned.contains(name))
    wushkv::detail::invalid_argument("cache: the transforms are not tuned for ", name,
                                     ", expected those of a 'build' with --tune ", name);
  return head->tuned.at(name);
}

template <class Quantizer>
using HeadCodec = wushkv::Codec<wushkv::Centered<wushkv::Dense<float>>, Quantizer, AnyRounding>;

/// The codec of one head, with no transform for a null one.
template <class Quantizer>
HeadCodec<Quantizer> head_codec(const wushkv::HeadTransform* head, Index dim, const Quantizer& quantizer,
                                const QuantizerSettings& settings, Index group_size) {
  AnyRounding rounding = rounding_of(settings, head);
  if (head != nullptr)
    return HeadCodec<Quantizer>(wushkv::dense_transform<float>(*head), quantizer, group_size,
                                std::move(rounding));
  return HeadCodec<Quantizer>({wushkv::Dense<float>(wushkv::SquareMatrix<double>::Identity(dim, dim)),
                               wushkv::Vector<float>::Zero(dim)},
                              quantizer, group_size, std::move(rounding));
}

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_HEAD_CODEC_HPP
