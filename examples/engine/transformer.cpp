// SPDX-License-Identifier: Apache-2.0
#include "engine/transformer.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "wushkv/calibrate/fold.hpp"
#include "wushkv/core/error.hpp"
#include "wushkv/measure/errors.hpp"

namespace engine {
namespace {

/// `y = x / rms(x) * weight`, row by row.
void rms_norm(const Batch<float>& x, const Vector<float>& weight, double epsilon, Batch<float>& y) {
  y.resize(x.rows(), x.cols());
  for (Index i = 0; i < x.rows(); ++i) {
    // In double: squares of floats overflow from 1e19 on.
    const double squares = x.row(i).cast<double>().squaredNorm();
    const auto gain = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(x.cols()) + epsilon));
    y.row(i) = gain * x.row(i).cwiseProduct(weight.transpose());
  }
}

Index checked_context(const Model& model, Index context) {
  if (context < 1 || context > model.config.context)
    wushkv::detail::invalid_argument("context is ", context, " tokens, expected 1 to the model's ",
                                     model.config.context);
  return context;
}

}  // namespace

std::vector<FoldedWeights> fold(const Model& model, const std::vector<wushkv::LayerTransforms>& transforms) {
  check_transforms(model.config.heads, model.config.layers, transforms);
  std::vector<FoldedWeights> folded;
  for (std::size_t l = 0; l < transforms.size(); ++l) {
    FoldedWeights weights{model.layers[l].v, model.layers[l].o};
    Vector<double> v_bias = Vector<double>::Zero(weights.v.rows()),
                   o_bias = Vector<double>::Zero(weights.o.rows());
    wushkv::fold_values(centered(transforms[l].values), model.config.heads, weights.v, weights.o.transpose(),
                        v_bias, o_bias);
    const auto is_linear = [](const wushkv::HeadTransform& head) { return head.is_linear(); };
    if (!std::all_of(transforms[l].values.begin(), transforms[l].values.end(), is_linear)) {
      weights.v_bias = v_bias.transpose().cast<float>();
      weights.o_bias = o_bias.transpose().cast<float>();
    }
    folded.push_back(std::move(weights));
  }
  return folded;
}

Transformer::Transformer(const Model& model, Index context, Threads& threads)
    : model_(model),
      threads_(threads),
      rope_(model.config.heads.key_dim, checked_context(model, context), model.rope,
            model.config.rope_pairs) {}

const Batch<float>& Transformer::forward(std::span<const Token> tokens, Parts parts, const CachePath& path,
                                         const Observer& observer, std::span<Probe> probes) {
  check(tokens, parts, path);
  for (Probe& probe : probes) {
    check(tokens, parts, probe.path);
    for (const KvCache::Part& part : parts)
      if (probe.path.cache->length(part.sequence) != path.cache->length(part.sequence))
        wushkv::detail::invalid_argument("a probe's cache has ", probe.path.cache->length(part.sequence),
                                         " tokens, expected ", path.cache->length(part.sequence));
    probe.errors.resize(static_cast<std::size_t>(model_.config.layers));
  }
  positions_.clear();
  for (const KvCache::Part& part : parts)
    for (Index i = 0; i < part.tokens; ++i) positions_.push_back(path.cache->length(part.sequence) + i);

  const auto n = static_cast<Index>(tokens.size());
  x_.resize(n, model_.config.width);
  for (Index i = 0; i < n; ++i) x_.row(i) = model_.embedding.row(tokens[static_cast<std::size_t>(i)]);
  for (Index layer = 0; layer < model_.config.layers; ++layer) {
    const LayerWeights& w = model_.layers[static_cast<std::size_t>(layer)];
    rms_norm(x_, w.attention_norm, model_.config.norm_epsilon, normed_);
    attention(layer, parts, path, observer, probes);
    x_ += y_;
    rms_norm(x_, w.ffn_norm, model_.config.norm_epsilon, normed_);
    feed_forward(w);
    x_ += y_;
  }
  rms_norm(x_, model_.output_norm, model_.config.norm_epsilon, normed_);
  return normed_;
}

Batch<float> Transformer::logits(const Eigen::Ref<const Batch<float>>& hidden) const {
  Batch<float> result;
  multiply(hidden, model_.output_weight(), result);
  // Weights can be finite and still overflow what they are multiplied with.
  if (!wushkv::all_finite(result)) throw std::runtime_error("wushkv-lm: the model's logits are not finite");
  return result;
}

void Transformer::check(std::span<const Token> tokens, Parts parts, const CachePath& path) const {
  using wushkv::detail::invalid_argument;
  for (const Token token : tokens)
    if (token < 0 || token >= model_.config.vocabulary)
      invalid_argument("token ", token, " came, expected 0 to ", model_.config.vocabulary - 1);
  Index rows = 0;
  const Index most = std::min(context(), path.cache->capacity());
  for (const KvCache::Part& part : parts) {
    const Index length = path.cache->length(part.sequence);
    if (part.tokens < 1 || part.tokens > most - length)
      invalid_argument(part.tokens, " new tokens came for a sequence of ", length,
                       ", expected at least one and at most ", most, " in all");
    rows += part.tokens;
  }
  if (rows != static_cast<Index>(tokens.size()) || rows == 0)
    invalid_argument(tokens.size(), " tokens came, expected the parts' ", rows, ", at least one");
}

/// `y = x Wᵀ`, cut along the outputs: each thread reads its share of the weights once.
void Transformer::multiply(const Batch<float>& x, const Batch<float>& weight, Batch<float>& y) const {
  const Index outputs = weight.rows();
  y.resize(x.rows(), outputs);
  const Index blocks = std::min<Index>(outputs, threads_.count());
  threads_.for_each(blocks, [&](std::int64_t block, int) {
    const Index begin = block * outputs / blocks, count = (block + 1) * outputs / blocks - begin;
    const auto rows = weight.middleRows(begin, count);
    if (x.rows() == 1)
      y.row(0).segment(begin, count).transpose().noalias() = rows * x.row(0).transpose();
    else
      y.middleCols(begin, count).noalias() = x * rows.transpose();
  });
}

/// Leaves the module's output, `attention(…) W_O`, in `y_`.
void Transformer::attention(Index layer, Parts parts, const CachePath& path, const Observer& observer,
                            std::span<Probe> probes) {
  const auto l = static_cast<std::size_t>(layer);
  const LayerWeights& w = model_.layers[l];
  multiply(normed_, w.q, q_);
  multiply(normed_, w.k, k_);
  if (w.q_norm) w.q_norm->apply(q_);
  if (w.k_norm) w.k_norm->apply(k_);
  rope_.apply(q_, positions_);
  rope_.apply(k_, positions_);

  // Values come transformed from the folded projection, and attention's output goes into the other one.
  const auto through = [&](const CachePath& cache, Batch<float>& v, Batch<float>& y) {
    const FoldedWeights* const folded =
        cache.folded != nullptr && !cache.folded->empty() ? &(*cache.folded)[l] : nullptr;
    multiply(normed_, folded != nullptr ? folded->v : w.v, v);
    if (folded != nullptr && folded->v_bias.size() > 0) v.rowwise() += folded->v_bias;
    attended_.resize(q_.rows(), w.o.cols());
    cache.cache->attend(layer, parts, q_, k_, v, attended_, threads_);
    multiply(attended_, folded != nullptr ? folded->o : w.o, y);
    if (folded != nullptr && folded->o_bias.size() > 0) y.rowwise() += folded->o_bias;
  };
  through(path, v_, y_);
  if (observer) observer(layer, q_, k_, v_);
  for (Probe& probe : probes) {
    through(probe.path, folded_v_, probe_y_);
    probe.errors[l] += wushkv::squared_error(y_, probe_y_);
  }
}

/// SwiGLU: `W_down (silu(W_gate x) * (W_up x))`, to `y_`.
void Transformer::feed_forward(const LayerWeights& w) {
  multiply(normed_, w.gate, gate_);
  multiply(normed_, w.up, up_);
  const Index rows = gate_.rows();
  threads_.for_each(rows, [&](std::int64_t row, int) {
    auto gate = gate_.row(row).array();
    gate = gate / (1 + (-gate).exp()) * up_.row(row).array();
  });
  multiply(gate_, w.down, y_);
}

}  // namespace engine
