// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_BUILD_HPP
#define WUSHKV_CALIBRATE_BUILD_HPP

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "wushkv/calibrate/construction.hpp"
#include "wushkv/calibrate/layer_transforms.hpp"
#include "wushkv/calibrate/rotations.hpp"
#include "wushkv/calibrate/statistics.hpp"
#include "wushkv/calibrate/wush.hpp"
#include "wushkv/transform/identity.hpp"

namespace wushkv {

struct BuildOptions {
  Construction construction = Construction::Wush;
  /// Coordinates that share a scale, 0 for the whole head. Hadamard, RotateKV and WUSH are block diagonal by
  /// it (RotateKV up to its permutation); the others mix the whole head.
  Index key_group_size = 0, value_group_size = 0;
  /// WUSH's damping and exponent.
  double damping = WushOptions{}.damping, exponent = WushOptions{}.exponent;
  /// Scale WUSH so that what the cache stores has unit mean square on the calibration tokens; else c = 1.
  bool unit_mean_square = true;
  /// Of the random rotation, which all heads share.
  std::uint64_t seed = 0;
  /// The widths that the transforms are meant for, 0 if not known. None depends on them; files record them.
  int key_bits = 0, value_bits = 0;
};

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

template <Transform T>
BlockTransform orthogonal_blocks(const T& transform, Index group) {
  const SquareMatrix<double> t = to_matrix(transform);
  return as_blocks({t, t.transpose()}, group);
}

struct HeadSums {
  const SquareMatrix<double>&gram, &hessian, &head_sigma, &layer_sigma;
};

inline BlockTransform build_head(const HeadSums& sums, Index group, const BuildOptions& options,
                                 double tokens) {
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
    case Construction::Wush: {
      const WushOptions wush_options{options.damping, options.exponent,
                                     options.unit_mean_square ? tokens : 0};
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
std::vector<BlockTransform> build_side(Index kv_heads, SumsOf sums_of, Index group,
                                       const BuildOptions& options, double tokens) {
  std::vector<BlockTransform> result;
  for (Index h = 0; h < kv_heads; ++h) {
    if (h > 0 && is_shared(options.construction))
      result.push_back(result.front());
    else
      result.push_back(build_head(sums_of(h), group, options, tokens));
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
/// the bit width. Throws `std::invalid_argument` for a group that does not divide a head, a dimension at
/// which the construction does not exist, and statistics that it needs and are not there (no tokens; for
/// WUSH, no output projection).
inline LayerTransforms build_transforms(const LayerStatistics& statistics, const BuildOptions& options = {}) {
  const AttentionHeads& heads = statistics.heads();
  const Index key_group_size = detail::checked_group("key_group_size", options.key_group_size, heads.key_dim);
  const Index value_group_size =
      detail::checked_group("value_group_size", options.value_group_size, heads.value_dim);
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
  const double tokens = static_cast<double>(statistics.tokens());
  const auto key_sums = [&](Index h) -> detail::HeadSums {
    const HeadStatistics& head =
        statistics.head(h);  // H_K is twice OSCAR's sum over the head: the same eigenvectors
    return {head.key_gram, head.key_hessian, head.key_hessian, statistics.key_sigma()};
  };
  const auto value_sums = [&](Index h) -> detail::HeadSums {
    const HeadStatistics& head = statistics.head(h);
    return {head.value_gram, head.value_hessian, head.value_sigma, statistics.value_sigma()};
  };
  return {detail::build_side(heads.kv_heads, key_sums, key_group_size, options, tokens),
          detail::build_side(heads.kv_heads, value_sums, value_group_size, options, tokens)};
}

}  // namespace wushkv

#endif  // WUSHKV_CALIBRATE_BUILD_HPP
