// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_BUILD_HPP
#define WUSHKV_CALIBRATE_BUILD_HPP

#include <string_view>
#include <utility>
#include <vector>

#include "wushkv/calibrate/build_options.hpp"
#include "wushkv/calibrate/construction.hpp"
#include "wushkv/calibrate/layer_transforms.hpp"
#include "wushkv/calibrate/loss_spectrum.hpp"
#include "wushkv/calibrate/predict.hpp"
#include "wushkv/calibrate/rotations.hpp"
#include "wushkv/calibrate/statistics.hpp"
#include "wushkv/calibrate/wush.hpp"
#include "wushkv/transform/identity.hpp"

namespace wushkv {

namespace detail {

/// A transform's matrix as blocks of `group` coordinates, or one block if the transform mixes groups.
inline BlockTransform as_blocks(const MatrixPair& pair, Index group) {
  const Index dim = pair.forward.rows();
  SquareMatrix<double> rest = pair.forward;
  for (Index at = 0; at < dim; at += group) rest.block(at, at, group, group).setZero();
  if (!rest.isZero(0)) return BlockTransform(Dense<double>(pair), 1);
  std::vector<Dense<double>> blocks;
  for (Index at = 0; at < dim; at += group)
    blocks.emplace_back(
        MatrixPair{pair.forward.block(at, at, group, group), pair.inverse.block(at, at, group, group)});
  return BlockTransform(std::move(blocks));
}

/// `A = T^-T (H + damping tr(H)/d I) T^-1`; for a zero H that of no preference, H = I.
template <Transform T>
SquareMatrix<double> loss_matrix(const T& transform, const SquareMatrix<double>& hessian, double damping) {
  const Damped h = damped(hessian, damping);
  const Batch<double> half = transform.adjoint_inverse(Batch<double>(h.scale * h.matrix));  // H T^-1
  const Batch<double> a = transform.adjoint_inverse(Batch<double>(half.transpose()));
  return (a + a.transpose()) / 2;
}

template <Transform T>
BlockTransform orthogonal_blocks(const T& transform, Index group) {
  const SquareMatrix<double> t = to_matrix(transform);
  return as_blocks({t, t.transpose()}, group);
}

/// What one head's transform is built from.
struct HeadSums {
  SquareMatrix<double> gram, hessian;
  const SquareMatrix<double>&head_sigma, &layer_sigma;
  double tokens;            ///< what `gram` sums over: tokens, or their weights
  Vector<double> mean;      ///< what the codec takes off
  bool has_hessian = true;  ///< or there is no sensitivity
};

/// A weighted Gram about its mean. Where tokens differ by less than rounding leaves of their squares, the
/// difference can come out indefinite: what is below rounding counts as nothing.
inline SquareMatrix<double> checked_centered_gram(const WeightedSums& sums) {
  // What a large mean leaves of rounding is not symmetric.
  const SquareMatrix<double> raw = sums.centered_gram(), gram = (raw + raw.transpose()) / 2;
  const Spectrum s = spectrum("build_transforms: weighted Gram", gram);
  if (s.values[0] >= 0) return gram;
  const double rounding = 1e-14 * sums.weighted_gram.trace();
  const Vector<double> values = (s.values.array() > rounding).select(s.values, 0.0);
  return s.vectors * values.asDiagonal() * s.vectors.transpose();
}

/// With the Hessian and, for joint statistics, the Gram and the mean replaced; left alone for none.
inline HeadSums attention_aware_sums(HeadSums sums, const WeightedSums* weighted, bool joint) {
  if (weighted == nullptr) return sums;
  sums.hessian = weighted->hessian;
  sums.has_hessian = true;
  if (joint) {
    sums.gram = checked_centered_gram(*weighted);
    sums.mean = weighted->mean();
    sums.tokens = weighted->weight;
  }
  return sums;
}

inline BlockTransform build_head(const HeadSums& sums, Index group, const BuildOptions& options) {
  const Index d = sums.gram.rows();
  switch (options.construction) {
    case Construction::None:
      return orthogonal_blocks(Identity<double>(d), group);
    case Construction::Hadamard:
      return orthogonal_blocks(group_hadamard<double>(d, group), group);
    case Construction::Random:
      return orthogonal_blocks(random_rotation<double>(d, options.seed), d);
    case Construction::Pca:
      return orthogonal_blocks(pca<double>(sums.gram), d);
    case Construction::RotateKv:
      return orthogonal_blocks(rotate_kv<double>(sums.gram, group), group);
    case Construction::Oscar:
      return orthogonal_blocks(oscar<double>(sums.layer_sigma), d);
    case Construction::OscarPerHead:
      return orthogonal_blocks(oscar<double>(sums.head_sigma), d);
    case Construction::Wush:
    case Construction::WushA:
    case Construction::Joint: {
      const double exponent =
          options.choose_exponent_for > 0
              ? choose_exponent(loss_spectrum(damped(sums.gram, options.damping).matrix,
                                              damped(sums.hessian, options.damping).matrix),
                                options.choose_exponent_for, ErrorFeedback::On)
              : options.exponent;
      const WushOptions wush_options{options.damping, exponent, options.unit_mean_square ? sums.tokens : 0};
      return wush_blocks<double>(sums.gram, sums.hessian, group, wush_options);
    }
  }
  invalid_argument("build_transforms: construction ", static_cast<int>(options.construction),
                   " is none of the enumerators");
}

/// The same for every head of a side: built once.
inline bool is_shared(Construction construction) {
  return construction == Construction::None || construction == Construction::Hadamard ||
         construction == Construction::Random || construction == Construction::Oscar;
}

template <class SumsOf>
std::vector<HeadTransform> build_side(Index kv_heads, SumsOf sums_of, Index group,
                                      const BuildOptions& options) {
  std::vector<HeadTransform> result;
  for (Index h = 0; h < kv_heads; ++h) {
    const HeadSums sums = sums_of(h);
    BlockTransform transform =
        h > 0 && is_shared(options.construction) ? result.front().linear : build_head(sums, group, options);
    SquareMatrix<double> sensitivity;
    if (sums.has_hessian) sensitivity = loss_matrix(transform, sums.hessian, options.damping);
    result.emplace_back(std::move(transform), sums.mean, std::move(sensitivity));
  }
  return result;
}

inline Index checked_group(std::string_view name, Index group, Index dim) {
  if (group == 0) return dim;
  if (group < 1 || dim % group != 0)
    invalid_argument("build_transforms: ", name, " is ", group,
                     ", expected 0 or a divisor of the head dimension ", dim);
  return group;
}

}  // namespace detail

/// Builds one transform a KV head for a layer's keys and values from its statistics; none of them depends on
/// the bit width. Each comes with its mean (zero but for `Joint`) and, if tokens were added and for values
/// the output projection is known, with its sensitivity over the whole head: from the attention-aware Hessian
/// for `WushA` and `Joint`, else from the plain one.
///
/// Throws `std::invalid_argument` for a group that does not divide a head, a dimension at which the
/// construction does not exist, options out of range, statistics that it needs and are not there (no tokens;
/// for WUSH, no output projection; for `WushA` and `Joint`, no attention-aware sums), and for `Joint` under a
/// soft cap, in which a key shift does not cancel.
inline LayerTransforms build_transforms(const LayerStatistics& statistics, const BuildOptions& options = {}) {
  const AttentionHeads& heads = statistics.heads();
  const Index key_group_size = detail::checked_group("key_group_size", options.key_group_size, heads.key_dim);
  const Index value_group_size =
      detail::checked_group("value_group_size", options.value_group_size, heads.value_dim);
  detail::check_wush_options({options.damping, options.exponent});
  if (!(options.choose_exponent_for >= 0 && options.choose_exponent_for <= 1))
    detail::invalid_argument("build_transforms: choose_exponent_for is ", options.choose_exponent_for,
                             ", expected 0 or a noise factor up to 1");
  if (options.choose_exponent_for > 0 &&
      (key_group_size != heads.key_dim || value_group_size != heads.value_dim))
    detail::invalid_argument("build_transforms: choose_exponent_for came with groups of ", key_group_size,
                             " and ", value_group_size,
                             ", expected whole heads, which the prediction is for");
  const bool data_free = options.construction == Construction::None ||
                         options.construction == Construction::Hadamard ||
                         options.construction == Construction::Random;
  if (!data_free && statistics.tokens() == 0)
    detail::invalid_argument("build_transforms: statistics of 0 tokens, expected at least one for ",
                             to_string(options.construction));
  if (options.construction == Construction::Wush && !statistics.has_output_projection())
    detail::invalid_argument(
        "build_transforms: statistics without an output projection, expected set_output_projection before "
        "WUSH");
  const bool joint = options.construction == Construction::Joint,
             attention_aware = detail::is_attention_aware(options.construction);
  const AttentionStatistics* const attention = statistics.attention() ? &*statistics.attention() : nullptr;
  if (attention_aware && attention == nullptr)
    detail::invalid_argument(
        "build_transforms: statistics without attention-aware sums, expected gather_attention before the "
        "sequences for ",
        to_string(options.construction));
  if (joint && attention->options().soft_cap > 0)
    detail::invalid_argument("build_transforms: joint came with a soft cap of ",
                             attention->options().soft_cap,
                             ", in which a key shift does not cancel, expected no soft cap or wush-a");
  const double tokens = static_cast<double>(statistics.tokens());
  // H_K is twice OSCAR's sum over the head: the same eigenvectors.
  const auto key_sums = [&](Index h) -> detail::HeadSums {
    const HeadStatistics& head = statistics.head(h);
    const Vector<double> zero = Vector<double>::Zero(heads.key_dim);
    return detail::attention_aware_sums({head.key_gram, head.key_hessian, head.key_hessian,
                                         statistics.key_sigma(), tokens, zero, statistics.tokens() > 0},
                                        attention_aware ? &attention->keys(h) : nullptr, joint);
  };
  const auto value_sums = [&](Index h) -> detail::HeadSums {
    const HeadStatistics& head = statistics.head(h);
    const Vector<double> zero = Vector<double>::Zero(heads.value_dim);
    return detail::attention_aware_sums(
        {head.value_gram, head.value_hessian, head.value_sigma, statistics.value_sigma(), tokens, zero,
         statistics.tokens() > 0 && statistics.has_output_projection()},
        attention_aware ? &attention->values(h) : nullptr, joint);
  };
  return {detail::build_side(heads.kv_heads, key_sums, key_group_size, options),
          detail::build_side(heads.kv_heads, value_sums, value_group_size, options)};
}

}  // namespace wushkv

#endif  // WUSHKV_CALIBRATE_BUILD_HPP
