// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_RECIPE_RECIPES_HPP
#define WUSHKV_RECIPE_RECIPES_HPP

#include <limits>
#include <string_view>

#include "wushkv/calibrate/build_options.hpp"
#include "wushkv/calibrate/layer_transforms.hpp"
#include "wushkv/codec/codec.hpp"
#include "wushkv/quantize/affine.hpp"
#include "wushkv/quantize/step_search.hpp"

namespace wushkv {

/// `T (x - mu)` of a head with one matrix of the whole head, in the codec's scalar.
template <class Scalar>
Centered<Dense<Scalar>> dense_transform(const HeadTransform& head) {
  const SquareMatrix<double> forward = to_matrix(head.linear);
  SquareMatrix<double> inverse = SquareMatrix<double>::Zero(forward.rows(), forward.cols());
  Index at = 0;
  for (const Dense<double>& block : head.linear.blocks()) {
    const Index d = static_cast<Index>(block.dim());
    inverse.block(at, at, d, d) = block.inverse_matrix();
    at += d;
  }
  // The blocks were checked when they were made or read, by what their precision allows.
  return {Dense<Scalar>(MatrixPair{forward, inverse}, std::numeric_limits<double>::infinity()),
          head.mean.template cast<Scalar>()};
}

/// A head's sensitivity for roundings. Throws `std::invalid_argument` for a head that has none (built without
/// statistics, or read from a file that has none).
template <class Scalar>
Sensitivity<Scalar> sensitivity_of(const HeadTransform& head) {
  if (!head.has_sensitivity())
    detail::invalid_argument(
        "sensitivity_of: the head has no sensitivity, expected one that was built from statistics");
  return Sensitivity<Scalar>(head.sensitivity);
}

/// The paper's recipe: WUSH, levels between clip ratios that it took over from OSCAR, nearest rounding (arXiv
/// 2609.38121).
template <class Scalar, ParameterStorage Storage = Eigen::half>
struct PaperRecipe {
  static constexpr std::string_view name = "paper";
  using Codec = wushkv::Codec<Centered<Dense<Scalar>>, Affine<Scalar, Dynamic, Storage>>;

  static BuildOptions build_options() { return {.construction = Construction::Wush}; }
  static Codec key_codec(const HeadTransform& head, int bits, Index group_size = 0) {
    return codec(head, oscar_key_percentile, bits, group_size);
  }
  static Codec value_codec(const HeadTransform& head, int bits, Index group_size = 0) {
    return codec(head, oscar_value_percentile, bits, group_size);
  }

 private:
  static Codec codec(const HeadTransform& head, double kappa, int bits, Index group_size) {
    return Codec(dense_transform<Scalar>(head), Affine<Scalar, Dynamic, Storage>::percentile(kappa, bits),
                 group_size);
  }
};

/// The recipe to use: WUSH of joint statistics, leaning toward whitening, min-max levels of the best of five
/// ranges, feedback rounding (design.md, *Joint statistics* and *Feedback rounding*). Statistics need
/// `gather_attention`; keys are shifted, so it is not for attention with a soft cap or sink logits.
template <class Scalar, ParameterStorage Storage = Eigen::half>
struct BestRecipe {
  static constexpr std::string_view name = "best";
  using Codec =
      wushkv::Codec<Centered<Dense<Scalar>>, Affine<Scalar, Dynamic, Storage>, StepSearch<Feedback<Scalar>>>;

  static BuildOptions build_options() {
    return {.construction = Construction::Joint, .exponent = feedback_exponent};
  }
  static Codec key_codec(const HeadTransform& head, int bits, Index group_size = 0) {
    return Codec(dense_transform<Scalar>(head), Affine<Scalar, Dynamic, Storage>::min_max(bits), group_size,
                 StepSearch(Feedback<Scalar>(sensitivity_of<Scalar>(head)), affine_range_factors));
  }
  static Codec value_codec(const HeadTransform& head, int bits, Index group_size = 0) {
    return key_codec(head, bits, group_size);
  }
};

}  // namespace wushkv

#endif  // WUSHKV_RECIPE_RECIPES_HPP
