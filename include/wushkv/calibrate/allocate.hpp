// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_ALLOCATE_HPP
#define WUSHKV_CALIBRATE_ALLOCATE_HPP

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "wushkv/core/check.hpp"

namespace wushkv {

/// What one side of a layer, its keys or its values, loses at each width that may be chosen.
struct SideLosses {
  /// One a width, in the widths' order: predicted (`predicted_loss`) or measured (`measured_loss`), summed
  /// over heads. Keys and values of a layer must be in one unit; layers need not.
  std::vector<double> by_width;
  /// Values cached a token: KV heads times head dimension.
  Index elements = 0;
};

struct LayerLosses {
  SideLosses keys, values;
};

struct LayerBits {
  int keys = 0, values = 0;
  friend bool operator==(const LayerBits&, const LayerBits&) = default;
};

struct BitAllocation {
  std::vector<LayerBits> layers;
  /// Bits of a code, averaged over the elements of all layers; parameters, which do not depend on it, apart.
  double average_bits = 0;
  /// `sum_layers log(loss_K + loss_V)`: what is least.
  double log_loss = 0;
};

namespace detail {

/// Widths for the layers so far, by what they cost: the last layer's, and the place of the rest in the front
/// before.
struct AllocationPoint {
  double bits, log_loss;
  LayerBits layer;
  std::size_t rest;
};

/// Leaves what nothing cheaper equals, ascending in bits and strictly descending in loss. More than `limit`
/// points are thinned to about the best of each of as many equal steps up to `most` bits.
inline void keep_front(std::vector<AllocationPoint>& points, std::size_t limit, double most) {
  std::sort(points.begin(), points.end(), [](const AllocationPoint& a, const AllocationPoint& b) {
    return a.bits != b.bits ? a.bits < b.bits : a.log_loss < b.log_loss;
  });
  std::vector<AllocationPoint> front;
  for (const AllocationPoint& point : points)
    if (front.empty() || point.log_loss < front.back().log_loss) front.push_back(point);
  if (front.size() > limit) {
    std::vector<AllocationPoint> thinned{front.front()};  // the cheapest stays: a budget may allow no other
    double step = -1;
    for (const AllocationPoint& point : front) {
      const double at = std::ceil(point.bits / most * static_cast<double>(limit));
      if (at == step && thinned.size() > 1)
        thinned.back() = point;
      else if (point.bits > thinned.front().bits)
        thinned.push_back(point);
      step = at;
    }
    front = std::move(thinned);
  }
  points = std::move(front);
}

/// `log(a + b)`, where the sum may be out of a double's range.
inline double log_of_sum(double a, double b) {
  const double more = std::max(a, b);
  return std::log(more) + std::log1p(std::min(a, b) / more);
}

inline void check_losses(std::string_view name, std::size_t layer, const SideLosses& side,
                         std::size_t widths) {
  if (side.by_width.size() != widths)
    invalid_argument("allocate_bits: ", name, " of layer ", layer, " have ", side.by_width.size(),
                     " losses, expected one a width, ", widths);
  for (const double loss : side.by_width)
    if (!(loss >= 0 && is_finite(loss)))
      invalid_argument("allocate_bits: ", name, " of layer ", layer, " have a loss ", loss,
                       ", expected finite numbers of at least 0");
  if (side.elements < 1)
    invalid_argument("allocate_bits: ", name, " of layer ", layer, " have ", side.elements,
                     " elements, expected at least one");
}

}  // namespace detail

/// Bits for the keys and the values of each layer, from `widths` (ascending, within 1 to 8), at most
/// `average_bits` a cached element on average over all layers, that make `sum_layers log(loss_K + loss_V)`
/// least: the geometric mean of the layers' errors, so that a layer's scale drops out.
///
/// A Lagrange multiplier with a greedy rest finds only what lies on the convex hull, or near it, and does not
/// always get better with a larger budget; layers have few sizes, so the whole front of bits and loss is
/// short (Bellman's dynamic program, dominated choices dropped as in Nemhauser and Ullmann, 1969) and gives
/// the optimum for every budget. Only past 16,384 points, which takes layers of very different sizes, is it
/// thinned, to steps of 1/16,384 of the greatest width's bits.
///
/// Throws `std::invalid_argument` for no layer, widths that are none or not ascending within 1 to 8, losses
/// that are negative, not finite, not one a width or zero for keys and values at once, elements below 1, and
/// a budget that is not finite or below the least width.
inline BitAllocation allocate_bits(std::span<const LayerLosses> layers, double average_bits,
                                   std::span<const int> widths) {
  if (layers.empty()) detail::invalid_argument("allocate_bits: 0 layers, expected at least one");
  if (widths.empty()) detail::invalid_argument("allocate_bits: 0 widths, expected at least one");
  for (std::size_t i = 0; i < widths.size(); ++i)
    if (widths[i] < 1 || widths[i] > 8 || (i > 0 && widths[i] <= widths[i - 1]))
      detail::invalid_argument("allocate_bits: widths has ", widths[i], " at place ", i,
                               ", expected ascending numbers within 1 to 8");
  if (!(average_bits >= widths.front() && is_finite(average_bits)))
    detail::invalid_argument("allocate_bits: average_bits is ", average_bits,
                             ", expected a finite number of at least the least width, ", widths.front());
  double elements = 0;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const auto& [keys, values] = layers[l];
    detail::check_losses("keys", l, keys, widths.size());
    detail::check_losses("values", l, values, widths.size());
    if (!(*std::min_element(keys.by_width.begin(), keys.by_width.end()) +
              *std::min_element(values.by_width.begin(), values.by_width.end()) >
          0))
      detail::invalid_argument("allocate_bits: layer ", l,
                               " has a loss of 0 for keys and values at once, expected a positive sum");
    elements += static_cast<double>(keys.elements) + static_cast<double>(values.elements);
  }

  constexpr std::size_t limit = std::size_t{1} << 14;
  std::vector<std::vector<detail::AllocationPoint>> fronts{{{0, 0, {}, 0}}};
  for (const auto& [keys, values] : layers) {
    std::vector<detail::AllocationPoint> choices, next;
    for (std::size_t k = 0; k < widths.size(); ++k)
      for (std::size_t v = 0; v < widths.size(); ++v)
        choices.push_back({static_cast<double>(keys.elements) * widths[k] +
                               static_cast<double>(values.elements) * widths[v],
                           detail::log_of_sum(keys.by_width[k], values.by_width[v]),
                           {widths[k], widths[v]},
                           0});
    detail::keep_front(choices, limit, elements * widths.back());
    const std::vector<detail::AllocationPoint>& front = fronts.back();
    next.reserve(front.size() * choices.size());
    for (std::size_t i = 0; i < front.size(); ++i)
      for (const detail::AllocationPoint& choice : choices)
        next.push_back({front[i].bits + choice.bits, front[i].log_loss + choice.log_loss, choice.layer, i});
    detail::keep_front(next, limit, elements * widths.back());
    fronts.push_back(std::move(next));
  }

  // The front descends, so the last point within the budget is the best. 2.3 bits times 10 elements is below
  // 23 in doubles: the budget gets its own rounding on top.
  const double budget = average_bits * elements * (1 + 1e-12);
  const std::vector<detail::AllocationPoint>& all = fronts.back();
  std::size_t at = static_cast<std::size_t>(
      std::partition_point(all.begin(), all.end(),
                           [&](const detail::AllocationPoint& point) { return point.bits <= budget; }) -
      all.begin() - 1);
  BitAllocation result{std::vector<LayerBits>(layers.size()), all[at].bits / elements, all[at].log_loss};
  for (std::size_t l = layers.size(); l > 0; --l) {
    result.layers[l - 1] = fronts[l][at].layer;
    at = fronts[l][at].rest;
  }
  return result;
}

/// The same with every width from 1 to 8, so that `by_width[b - 1]` is the loss at b bits.
inline BitAllocation allocate_bits(std::span<const LayerLosses> layers, double average_bits) {
  static constexpr int all[] = {1, 2, 3, 4, 5, 6, 7, 8};
  return allocate_bits(layers, average_bits, all);
}

}  // namespace wushkv

#endif  // WUSHKV_CALIBRATE_ALLOCATE_HPP
