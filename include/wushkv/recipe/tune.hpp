// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_RECIPE_TUNE_HPP
#define WUSHKV_RECIPE_TUNE_HPP

#include <array>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "wushkv/calibrate/layer_transforms.hpp"
#include "wushkv/calibrate/token_sample.hpp"
#include "wushkv/codec/codec.hpp"
#include "wushkv/transform/hadamard.hpp"

namespace wushkv {

/// Tokens of one head's keys, or values, that a codec is tuned on.
struct TuningTokens {
  Batch<double> x;         ///< `[tokens, dim]`
  Vector<double> weights;  ///< `[tokens]`, `tr H_t`: what a token's error counts
};

/// A head's keys in a sample. Throws `std::invalid_argument` for a KV head that is not there.
inline TuningTokens tuning_keys(const TokenSample& sample, Index kv_head) {
  detail::check_head_range(sample.heads(), kv_head, 1);
  const Index d = sample.heads().key_dim;
  return {sample.keys().middleCols(kv_head * d, d).cast<double>(),
          sample.key_weights().col(kv_head).cast<double>()};
}
/// A head's values in a sample; as `tuning_keys`.
inline TuningTokens tuning_values(const TokenSample& sample, Index kv_head) {
  detail::check_head_range(sample.heads(), kv_head, 1);
  const Index d = sample.heads().value_dim;
  return {sample.values().middleCols(kv_head * d, d).cast<double>(),
          sample.value_weights().col(kv_head).cast<double>()};
}

/// What a codec loses on tokens, `sum w_t eᵀ A e / sum w_t`, e the error in stored coordinates and A the
/// head's sensitivity (`HeadTransform::sensitivity`): an estimate of `sum_t eᵀ H_t e` from a token's weight
/// and the head's Hessian. Throws `std::invalid_argument` for shapes that do not fit the codec, no token, and
/// weights that are negative, not finite or all zero.
template <HeadCodec C>
double tuning_loss(const C& codec, const SquareMatrix<double>& sensitivity, const TuningTokens& tokens) {
  const Index d = static_cast<Index>(codec.head_dim());
  detail::check_shape("tuning_loss: sensitivity", sensitivity, d, d);
  detail::check_finite("tuning_loss: sensitivity", sensitivity);
  detail::check_shape("tuning_loss: x", tokens.x, tokens.x.rows(), d);
  detail::check_shape("tuning_loss: weights", tokens.weights, tokens.x.rows(), 1);
  detail::check_finite("tuning_loss: weights", tokens.weights);
  if (tokens.x.rows() == 0 || tokens.weights.minCoeff() < 0 || !(tokens.weights.maxCoeff() > 0))
    detail::invalid_argument("tuning_loss: ", tokens.x.rows(),
                             " tokens came, expected some, with weights of at least 0 and not all 0");
  using Scalar = typename C::Scalar;
  const Batch<Scalar> x = tokens.x.template cast<Scalar>(), returned = codec.reconstruct(x);
  const Batch<double> error =
      (codec.transform().forward(x) - codec.transform().forward(returned)).template cast<double>();
  const Vector<double> weights = tokens.weights / tokens.weights.maxCoeff();
  return (error * sensitivity).cwiseProduct(error).rowwise().sum().dot(weights) / weights.sum();
}

/// Candidates for `tune`: clip ratios of a percentile-clipped quantizer, factors of QuEST's alpha.
inline constexpr std::array<double, 16> percentile_candidates = {.60, .65, .70, .74, .78, .80, .82, .84,
                                                                 .86, .88, .90, .92, .94, .96, .98, 1};
inline constexpr std::array<double, 15> quest_candidates = {.60,  .70, .75,  .80, .85,  .90, .95, 1,
                                                            1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4};

/// A parameter of a quantizer, such as the clip ratio, and what the head loses with it.
struct Tuned {
  double parameter = 0, loss = 0;
};

/// Of `candidates`, the parameter under which heads lose least together: `codec_of(head, parameter)` makes
/// the codec of head i of `heads`, whose tokens are `tokens[i]`. One head tunes it by head, all heads of a
/// layer by layer, which a small sample bears better. Throws `std::invalid_argument` for no candidate, heads
/// without sensitivity or not as many as `tokens`, and what `tuning_loss` refuses.
template <class CodecOf>
Tuned tune(std::span<const double> candidates, std::span<const HeadTransform> heads,
           std::span<const TuningTokens> tokens, CodecOf codec_of) {
  if (candidates.empty()) detail::invalid_argument("tune: 0 candidates, expected at least one");
  if (heads.empty() || heads.size() != tokens.size())
    detail::invalid_argument("tune: ", heads.size(), " heads and tokens of ", tokens.size(),
                             ", expected as many, at least one");
  Tuned best;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    Tuned tried{candidates[i], 0};
    for (std::size_t h = 0; h < heads.size(); ++h)
      tried.loss += tuning_loss(codec_of(heads[h], candidates[i]), heads[h].sensitivity, tokens[h]);
    if (i == 0 || tried.loss < best.loss) best = tried;
  }
  return best;
}

/// `head` with other signs of the eigenvectors that its Hadamard transform mixes: each block `T = Had X`
/// becomes `Had S X`, S diagonal of ±1, `signs` having one a coordinate. Energy and sensitivity stay as they
/// are on average, which coordinate gets how much of a spike does not (design.md, *WUSH*); nothing is tuned
/// for it any more. Throws `std::invalid_argument` for another number of signs, or one that is not 1 or -1.
inline HeadTransform with_signs(const HeadTransform& head, const Vector<double>& signs) {
  const Index dim = head.linear.dim();
  detail::check_shape("with_signs: signs", signs, dim, 1);
  if (!(signs.array().abs() == 1).all())
    detail::invalid_argument("with_signs: a sign is neither 1 nor -1, expected one of them");
  std::vector<Dense<double>> blocks;
  SquareMatrix<double> mix = SquareMatrix<double>::Zero(dim, dim);  // Had S Hadᵀ, by block
  Index at = 0;
  for (const Dense<double>& block : head.linear.blocks()) {
    const Index d = static_cast<Index>(block.dim());
    const SquareMatrix<double> had = to_matrix(Hadamard<double>(d));
    const SquareMatrix<double> of_block = had * signs.segment(at, d).asDiagonal() * had.transpose();
    blocks.emplace_back(MatrixPair{of_block * block.matrix(), block.inverse_matrix() * of_block.transpose()},
                        std::numeric_limits<double>::infinity());  // checked when the block was made
    mix.block(at, at, d, d) = of_block;
    at += d;
  }
  SquareMatrix<double> sensitivity;
  if (head.has_sensitivity()) {
    const SquareMatrix<double> a = mix * head.sensitivity * mix.transpose();
    sensitivity = (a + a.transpose()) / 2;
  }
  return {BlockTransform(std::move(blocks)), head.mean, std::move(sensitivity)};
}

/// Tries `trials` random choices of signs besides the convention's, and keeps the one with which
/// `codec_of(head)` loses least on `tokens`. The same seed tries the same signs with every compiler. Throws
/// as `tuning_loss` and `with_signs`.
template <class CodecOf>
HeadTransform choose_signs(const HeadTransform& head, const TuningTokens& tokens, CodecOf codec_of,
                           int trials, std::uint64_t seed = 0) {
  HeadTransform best = head;
  double least = tuning_loss(codec_of(head), head.sensitivity, tokens);
  std::mt19937_64 generator(seed);
  for (int trial = 0; trial < trials; ++trial) {
    Vector<double> signs(head.linear.dim());
    for (double& sign : signs) sign = (generator() >> 63) != 0 ? 1 : -1;
    HeadTransform tried = with_signs(head, signs);
    const double loss = tuning_loss(codec_of(tried), tried.sensitivity, tokens);
    if (loss < least) {
      least = loss;
      best = std::move(tried);
    }
  }
  return best;
}

}  // namespace wushkv

#endif  // WUSHKV_RECIPE_TUNE_HPP
