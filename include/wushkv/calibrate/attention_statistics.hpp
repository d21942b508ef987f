// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_ATTENTION_STATISTICS_HPP
#define WUSHKV_CALIBRATE_ATTENTION_STATISTICS_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "wushkv/core/attention_options.hpp"
#include "wushkv/core/check.hpp"
#include "wushkv/core/heads.hpp"
#include "wushkv/core/types.hpp"

namespace wushkv {

/// Attention-aware sums over the tokens x of one KV head's keys, or values (design.md, *WUSH-A* and *Joint
/// statistics*), in double: `H_t` is a token's own Hessian, `w_t = tr H_t` its weight.
struct WeightedSums {
  SquareMatrix<double> hessian;        ///< `sum H_t`, `[dim, dim]`
  double weight = 0;                   ///< `sum w_t`
  Vector<double> weighted_sum;         ///< `sum w_t x_t`, `[dim]`
  SquareMatrix<double> weighted_gram;  ///< `sum w_t x_t x_tᵀ`, `[dim, dim]`

  /// `mu`, the weighted mean; zero where no token has a weight.
  Vector<double> mean() const {
    return weight > 0 ? Vector<double>(weighted_sum / weight) : Vector<double>::Zero(weighted_sum.size());
  }
  /// `M = sum w_t (x_t - mu)(x_t - mu)ᵀ`.
  SquareMatrix<double> centered_gram() const {
    const Vector<double> mu = mean();
    return weighted_gram - weight * mu * mu.transpose();
  }
};

/// What attention makes of each cached token, gathered from whole sequences: for query `i` with weights
/// `a_i`, output `o_i` and scale `s`, `H_K,t = 2 sum_g sum_i a_it² s² |W_O,gᵀ (v_t - o_i)|² q_i q_iᵀ` (times
/// `(1 - (z_it / cap)²)²` under a soft cap, z the capped logit) and `H_V,t = 2 sum_g sum_i a_it² W_O,g
/// W_O,gᵀ`; cross terms between tokens and between the heads of a group are left out. Only sums are kept, so
/// that sequences, runs and ranks merge exactly.
class AttentionStatistics {
 public:
  /// Throws `std::invalid_argument` for heads that make no layer and options out of range.
  explicit AttentionStatistics(const AttentionHeads& heads, const AttentionOptions& options = {})
      : shape_(heads), options_(options) {
    detail::check_heads(heads);
    scale_ = detail::attention_scale(heads, options);
    const auto none = [](Index d) -> WeightedSums {
      return {SquareMatrix<double>::Zero(d, d), 0, Vector<double>::Zero(d), SquareMatrix<double>::Zero(d, d)};
    };
    keys_.assign(static_cast<std::size_t>(heads.kv_heads), none(heads.key_dim));
    values_.assign(static_cast<std::size_t>(heads.kv_heads), none(heads.value_dim));
  }

  /// Adds one sequence, whole: a token's Hessian needs all later queries. `q`, `k` and `v` as for
  /// `LayerStatistics::add`, `w_o` `[query_heads * value_dim, model]`. Queries are taken `block` at a time,
  /// so memory grows with `block * tokens`. Throws `std::invalid_argument` for wrong shapes, no tokens,
  /// values that are not finite or whose sums overflow; nothing has changed then.
  template <class Q, class K, class V, class W>
  void add(const Eigen::MatrixBase<Q>& q, const Eigen::MatrixBase<K>& k, const Eigen::MatrixBase<V>& v,
           const Eigen::MatrixBase<W>& w_o, Index block = 64) {
    const Batch<double> queries = q.template cast<double>(), keys = k.template cast<double>(),
                        values = v.template cast<double>(), weights = w_o.template cast<double>();
    detail::check_sequence("AttentionStatistics", shape_, queries, keys, values);
    detail::check_shape("AttentionStatistics: w_o", weights, shape_.query_heads * shape_.value_dim,
                        weights.cols());
    detail::check_finite("AttentionStatistics: w_o", weights);
    if (block < 1)
      detail::invalid_argument("AttentionStatistics: block is ", block, ", expected at least one query");
    AttentionStatistics next(*this);
    for (Index h = 0; h < shape_.kv_heads; ++h) next.add_head(h, queries, keys, values, weights, block);
    for (const std::vector<WeightedSums>* side : {&next.keys_, &next.values_})
      for (const WeightedSums& sums : *side)
        if (!all_finite(sums.hessian) || !all_finite(sums.weighted_gram) || !all_finite(sums.weighted_sum))
          detail::invalid_argument("AttentionStatistics: the sums overflow, expected smaller values");
    next.tokens_ += queries.rows();
    ++next.sequences_;
    *this = std::move(next);
  }

  /// Adds another run's or rank's sums. Throws `std::invalid_argument` if heads or options differ.
  void merge(const AttentionStatistics& other) {
    if (other.shape_ != shape_ || other.options_ != options_)
      detail::invalid_argument("merge: other has other heads or attention options, expected the same");
    for (std::size_t h = 0; h < keys_.size(); ++h) {
      merge_sums(keys_[h], other.keys_[h]);
      merge_sums(values_[h], other.values_[h]);
    }
    tokens_ += other.tokens_;
    sequences_ += other.sequences_;
  }

  const AttentionHeads& heads() const { return shape_; }
  const AttentionOptions& options() const { return options_; }
  const WeightedSums& keys(Index kv_head) const { return keys_[checked(kv_head)]; }
  const WeightedSums& values(Index kv_head) const { return values_[checked(kv_head)]; }
  std::int64_t tokens() const { return tokens_; }
  std::int64_t sequences() const { return sequences_; }

 private:
  std::size_t checked(Index kv_head) const {
    if (kv_head < 0 || kv_head >= shape_.kv_heads)
      detail::invalid_argument("AttentionStatistics: KV head ", kv_head, " asked for, expected 0 to ",
                               shape_.kv_heads - 1);
    return static_cast<std::size_t>(kv_head);
  }

  static void merge_sums(WeightedSums& sums, const WeightedSums& other) {
    sums.hessian += other.hessian;
    sums.weight += other.weight;
    sums.weighted_sum += other.weighted_sum;
    sums.weighted_gram += other.weighted_gram;
  }

  /// `sums += w_t (1, x_t, x_t x_tᵀ)` over the rows of `x`.
  template <class X>
  static void add_tokens(WeightedSums& sums, const X& x, const Vector<double>& weights) {
    sums.weight += weights.sum();
    sums.weighted_sum.noalias() += x.transpose() * weights;
    sums.weighted_gram.noalias() += x.transpose() * weights.asDiagonal() * x;
  }

  void add_head(Index h, const Batch<double>& queries, const Batch<double>& keys, const Batch<double>& values,
                const Batch<double>& w_o, Index block) {
    const Index dk = shape_.key_dim, dv = shape_.value_dim, n = queries.rows();
    const Batch<double> k = keys.middleCols(h * dk, dk), v = values.middleCols(h * dv, dv);
    WeightedSums &key_sums = keys_[static_cast<std::size_t>(h)],
                 &value_sums = values_[static_cast<std::size_t>(h)];
    Vector<double> key_weights = Vector<double>::Zero(n), value_weights = Vector<double>::Zero(n);
    for (Index g = h * shape_.queries_per_kv_head(); g < (h + 1) * shape_.queries_per_kv_head(); ++g) {
      const Batch<double> w = w_o.middleRows(g * dv, dv), gram = w * w.transpose(), gram_v = v * gram;
      const Vector<double> v_norms = gram_v.cwiseProduct(v).rowwise().sum();  // |W_Oᵀ v_t|²
      for (Index from = 0; from < n; from += block) {
        const Index rows = std::min(block, n - from);
        const Batch<double> q = queries.block(from, g * dk, rows, dk);
        const Index end = options_.causal ? from + rows : n;
        Batch<double> slopes;  // of the capped logits
        Batch<double> squares = weights_of(q, k.topRows(end), from, slopes);
        const Batch<double> o = squares * v.topRows(end);
        squares = squares.cwiseAbs2();
        // |W_Oᵀ (v_t - o_i)|², which rounding may leave a little below zero.
        Batch<double> moved = -2 * o * gram_v.topRows(end).transpose();
        moved.rowwise() += v_norms.head(end).transpose();
        moved.colwise() += Vector<double>((o * gram).cwiseProduct(o).rowwise().sum());
        Batch<double> c = (2 * scale_ * scale_) * squares.cwiseProduct(moved.cwiseMax(0.0));
        if (slopes.size() > 0) c = c.cwiseProduct(slopes.cwiseAbs2());
        const Vector<double> of_queries = c.rowwise().sum(), q_norms = q.rowwise().squaredNorm();
        key_sums.hessian.noalias() += q.transpose() * of_queries.asDiagonal() * q;
        value_sums.hessian += 2 * squares.sum() * gram;
        key_weights.head(end).noalias() += c.transpose() * q_norms;
        value_weights.head(end) += 2 * gram.trace() * squares.colwise().sum().transpose();
      }
    }
    add_tokens(key_sums, k, key_weights);
    add_tokens(value_sums, v, value_weights);
  }

  /// The attention weights of a block of queries, the first of them token `from`; with a soft cap also the
  /// slopes `1 - (z / cap)²`.
  template <class Keys>
  Batch<double> weights_of(const Batch<double>& q, const Keys& k, Index from, Batch<double>& slopes) const {
    Batch<double> weights = scale_ * (q * k.transpose());
    if (options_.soft_cap > 0) {
      weights = (weights.array() / options_.soft_cap).tanh();
      slopes = 1 - weights.array().square();
      weights *= options_.soft_cap;
    }
    detail::softmax_rows(weights, from, options_);
    return weights;
  }

  AttentionHeads shape_;
  AttentionOptions options_;
  double scale_ = 0;
  std::vector<WeightedSums> keys_, values_;
  std::int64_t tokens_ = 0, sequences_ = 0;
};

}  // namespace wushkv

#endif  // WUSHKV_CALIBRATE_ATTENTION_STATISTICS_HPP
