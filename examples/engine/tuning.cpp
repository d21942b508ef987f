// SPDX-License-Identifier: Apache-2.0
#include "engine/tuning.hpp"

#include <algorithm>
#include <span>

#include "engine/head_codec.hpp"
#include "wushkv/calibrate/statistics.hpp"
#include "wushkv/measure/loss_bound.hpp"
#include "wushkv/recipe/tune.hpp"

namespace engine {
namespace {

/// Calls `use` with what makes the quantizer from settings.
template <class Use>
void with_quantizer(QuantizerKind kind, Use use) {
  switch (kind) {
    case QuantizerKind::Quest:
      return use([](const QuantizerSettings& s) { return quest_quantizer<float>(s); });
    case QuantizerKind::LloydMax:
      return use([](const QuantizerSettings& s) { return lloyd_quantizer<float>(s); });
    case QuantizerKind::Compact:
      return use([](const QuantizerSettings& s) { return compact_quantizer(s); });
    default:
      return use([](const QuantizerSettings& s) { return affine_quantizer<float>(s); });
  }
}

void check_sample(const std::vector<wushkv::LayerStatistics>& statistics) {
  for (const wushkv::LayerStatistics& layer : statistics)
    if (layer.sample().size() == 0)
      wushkv::detail::invalid_argument(
          "the statistics have no sample of tokens, expected those of a 'calibrate' that keeps one");
}

using Tokens = std::vector<wushkv::TuningTokens>;

/// One side of a layer: its heads, and their tokens in the sample.
struct Side {
  std::vector<wushkv::HeadTransform>& heads;
  Tokens tokens;
  QuantizerSettings settings;
};

/// Calls `visit` for keys and values of each layer, a layer a thread.
template <class Visit>
void for_each_side(std::vector<wushkv::LayerTransforms>& transforms,
                   const std::vector<wushkv::LayerStatistics>& statistics, const CodecChoice& choice,
                   Threads& threads, Visit visit) {
  check_sample(statistics);
  threads.for_each(static_cast<std::int64_t>(transforms.size()), [&](std::int64_t layer, int) {
    const auto l = static_cast<std::size_t>(layer);
    Tokens keys, values;
    for (Index h = 0; h < statistics[l].heads().kv_heads; ++h) {
      keys.push_back(tuning_keys(statistics[l].sample(), h));
      values.push_back(tuning_values(statistics[l].sample(), h));
    }
    visit(Side{
        transforms[l].keys, std::move(keys), {choice.quantizer, choice.key_bits, true, 0, choice.rounding}});
    visit(Side{transforms[l].values,
               std::move(values),
               {choice.quantizer, choice.value_bits, false, 0, choice.rounding}});
  });
}

/// What an error of variance 1 in each stored coordinate, for a stored mean square of 1, costs one side: the
/// additive-noise model's loss for kappa = 1, from the attention-aware sums, whatever the transform was built
/// from.
double unit_loss(const std::vector<wushkv::HeadTransform>& heads,
                 const wushkv::AttentionStatistics& attention, bool is_key, bool feedback, Index group_size) {
  double sum = 0;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const wushkv::WeightedSums& sums =
        is_key ? attention.keys(static_cast<Index>(h)) : attention.values(static_cast<Index>(h));
    if (!(sums.weight > 0)) continue;
    // Second moments about the codec's own mean.
    const wushkv::Vector<double> off = sums.mean() - heads[h].mean;
    const wushkv::SquareMatrix<double> centered = sums.centered_gram() / sums.weight + off * off.transpose();
    const wushkv::SquareMatrix<double> gram = (centered + centered.transpose()) / 2;
    sum += feedback ? predicted_feedback_loss(heads[h].linear, gram, sums.hessian, 1, group_size)
                    : predicted_loss(heads[h].linear, gram, sums.hessian, 1, group_size);
  }
  return sum;
}

/// Of the quantizer at each width, on normal groups.
std::vector<double> noise_factors(const CodecChoice& choice, bool is_key, Index group_size) {
  std::vector<double> factors;
  with_quantizer(choice.quantizer, [&](auto quantizer_of) {
    for (const int bits : widths_around(choice.average_bits))
      factors.push_back(
          noise_factor(quantizer_of(QuantizerSettings{choice.quantizer, bits, is_key, 0, choice.rounding}),
                       group_size, Index{1} << 18));
  });
  return factors;
}

}  // namespace

void tune_layers(std::vector<wushkv::LayerTransforms>& transforms,
                 const std::vector<wushkv::LayerStatistics>& statistics, const CodecChoice& choice,
                 Index group_size, Threads& threads) {
  for_each_side(transforms, statistics, choice, threads, [&](const Side& side) {
    with_quantizer(choice.quantizer, [&](auto quantizer_of) {
      const std::span<const double> candidates = choice.quantizer == QuantizerKind::Quest
                                                     ? std::span<const double>(wushkv::quest_candidates)
                                                     : wushkv::percentile_candidates;
      const wushkv::Tuned tuned =
          tune(candidates, side.heads, side.tokens, [&](const wushkv::HeadTransform& head, double parameter) {
            QuantizerSettings settings = side.settings;
            settings.parameter = parameter;
            return head_codec(&head, head.linear.dim(), quantizer_of(settings), settings, group_size);
          });
      for (wushkv::HeadTransform& head : side.heads) head.tuned[tuned_name(side.settings)] = tuned.parameter;
    });
  });
}

void choose_all_signs(std::vector<wushkv::LayerTransforms>& transforms,
                      const std::vector<wushkv::LayerStatistics>& statistics, const CodecChoice& choice,
                      Index group_size, int trials, Threads& threads) {
  for_each_side(transforms, statistics, choice, threads, [&](const Side& side) {
    with_quantizer(choice.quantizer, [&](auto quantizer_of) {
      for (std::size_t h = 0; h < side.heads.size(); ++h)
        side.heads[h] = choose_signs(
            side.heads[h], side.tokens[h],
            [&](const wushkv::HeadTransform& head) {
              return head_codec(&head, head.linear.dim(), quantizer_of(side.settings), side.settings,
                                group_size);
            },
            trials);
    });
  });
}

std::vector<int> widths_around(double average_bits) {
  std::vector<int> widths;
  const int middle = static_cast<int>(average_bits);
  for (int bits = std::max(1, middle - 1); bits <= std::min(8, middle + 2); ++bits) widths.push_back(bits);
  return widths;
}

std::vector<wushkv::LayerLosses> predicted_losses(const std::vector<wushkv::LayerTransforms>& transforms,
                                                  const std::vector<wushkv::LayerStatistics>& statistics,
                                                  const CodecChoice& choice, Index group_size) {
  const wushkv::AttentionHeads& heads = statistics.front().heads();
  const std::vector<double> key_factors =
                                noise_factors(choice, true, group_size > 0 ? group_size : heads.key_dim),
                            value_factors =
                                noise_factors(choice, false, group_size > 0 ? group_size : heads.value_dim);
  std::vector<wushkv::LayerLosses> losses;
  for (std::size_t l = 0; l < transforms.size(); ++l) {
    if (!statistics[l].attention())
      wushkv::detail::invalid_argument(
          "the statistics have no attention-aware sums, expected those of a 'calibrate' that gathers them");
    const wushkv::AttentionStatistics& attention = *statistics[l].attention();
    const double keys = unit_loss(transforms[l].keys, attention, true, choice.rounding.feedback, group_size),
                 values =
                     unit_loss(transforms[l].values, attention, false, choice.rounding.feedback, group_size);
    wushkv::LayerLosses layer{{{}, heads.kv_heads * heads.key_dim}, {{}, heads.kv_heads * heads.value_dim}};
    for (const double factor : key_factors) layer.keys.by_width.push_back(factor * keys);
    for (const double factor : value_factors) layer.values.by_width.push_back(factor * values);
    losses.push_back(std::move(layer));
  }
  return losses;
}

}  // namespace engine
