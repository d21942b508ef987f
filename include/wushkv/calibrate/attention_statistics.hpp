// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_ATTENTION_STATISTICS_HPP
#define WUSHKV_CALIBRATE_ATTENTION_STATISTICS_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "wushkv/core/attention_options.hpp"
#include "wushkv/core/check.hpp"
#include "wushkv/core/heads.hpp"
#include "wushkv/core/types.hpp"

namespace wushkv {

namespace detail {

/// `W_O,g W_O,gᵀ` of every query head, from `[query_heads * value_dim, model]`.
inline std::vector<SquareMatrix<double>> projection_grams(const AttentionHeads& heads,
                                                          const Batch<double>& w_o) {
  std::vector<SquareMatrix<double>> grams;
  for (Index g = 0; g < heads.query_heads; ++g) {
    const auto w = w_o.middleRows(g * heads.value_dim, heads.value_dim);
    grams.emplace_back(w * w.transpose());
  }
  return grams;
}

inline void check_head_range(const AttentionHeads& heads, Index first, Index count) {
  if (first < 0 || count < 1 || first > heads.kv_heads - count)
    invalid_argument("slice: ", count, " KV heads from ", first, " asked for, expected a range within 0 to ",
                     heads.kv_heads - 1);
}

/// A layer of `count` of the KV heads, with their query heads.
inline AttentionHeads sliced(AttentionHeads heads, Index count) {
  heads.query_heads = count * heads.queries_per_kv_head();
  heads.kv_heads = count;
  return heads;
}

}  // namespace detail

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

/// The weights `w_t = tr H_t` of one sequence's tokens, as keys and as values, `[tokens, kv_heads]`.
struct TokenWeights {
  Batch<double> keys, values;
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
  /// so memory grows with `block * tokens`. `token_weights`, if given, receives the tokens' own weights.
  /// Throws `std::invalid_argument` for wrong shapes, no tokens, values that are not finite or whose sums
  /// overflow; nothing has changed then.
  template <class Q, class K, class V, class W>
  void add(const Eigen::MatrixBase<Q>& q, const Eigen::MatrixBase<K>& k, const Eigen::MatrixBase<V>& v,
           const Eigen::MatrixBase<W>& w_o, Index block = 64, TokenWeights* token_weights = nullptr) {
    const Batch<double> queries = q.template cast<double>(), keys = k.template cast<double>(),
                        values = v.template cast<double>(), weights = w_o.template cast<double>();
    detail::check_sequence("AttentionStatistics", shape_, queries, keys, values);
    detail::check_shape("AttentionStatistics: w_o", weights, shape_.query_heads * shape_.value_dim,
                        weights.cols());
    detail::check_finite("AttentionStatistics: w_o", weights);
    add_sequence(queries, keys, values, detail::projection_grams(shape_, weights), block, token_weights);
  }

  /// The same from `W_O,g W_O,gᵀ`, `[value_dim, value_dim]`, one a query head: all that the sums need of the
  /// output projection. Throws as `add`.
  template <class Q, class K, class V>
  void add_from_grams(const Eigen::MatrixBase<Q>& q, const Eigen::MatrixBase<K>& k,
                      const Eigen::MatrixBase<V>& v, const std::vector<SquareMatrix<double>>& grams,
                      Index block = 64, TokenWeights* token_weights = nullptr) {
    const Batch<double> queries = q.template cast<double>(), keys = k.template cast<double>(),
                        values = v.template cast<double>();
    detail::check_sequence("AttentionStatistics", shape_, queries, keys, values);
    if (static_cast<Index>(grams.size()) != shape_.query_heads)
      detail::invalid_argument("AttentionStatistics: ", grams.size(), " grams, expected one a query head, ",
                               shape_.query_heads);
    for (const SquareMatrix<double>& gram : grams) {
      detail::check_shape("AttentionStatistics: grams", gram, shape_.value_dim, shape_.value_dim);
      detail::check_finite("AttentionStatistics: grams", gram);
    }
    add_sequence(queries, keys, values, grams, block, token_weights);
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

  /// The sums of KV heads `first … first + count - 1`. Throws `std::invalid_argument` for a range that is
  /// empty or outside.
  AttentionStatistics slice(Index first, Index count) const {
    detail::check_head_range(shape_, first, count);
    AttentionStatistics part = *this;
    part.shape_ = detail::sliced(shape_, count);
    part.keys_.assign(keys_.begin() + first, keys_.begin() + first + count);
    part.values_.assign(values_.begin() + first, values_.begin() + first + count);
    return part;
  }

  const AttentionHeads& heads() const { return shape_; }
  const AttentionOptions& options() const { return options_; }
  const WeightedSums& keys(Index kv_head) const { return keys_[checked(kv_head)]; }
  const WeightedSums& values(Index kv_head) const { return values_[checked(kv_head)]; }
  std::int64_t tokens() const { return tokens_; }
  std::int64_t sequences() const { return sequences_; }

  /// Every sum, as a file holds them (`io/statistics.hpp`), one entry a KV head.
  struct Sums {
    std::vector<WeightedSums> keys, values;
    std::int64_t tokens = 0, sequences = 0;
  };
  Sums sums() const { return {keys_, values_, tokens_, sequences_}; }

  /// Restores what `sums` gave. Throws `std::invalid_argument` for sums of other shapes, values that are not
  /// finite, negative weights or counts.
  AttentionStatistics(const AttentionHeads& heads, const AttentionOptions& options, Sums sums)
      : AttentionStatistics(heads, options) {
    check_side("keys", sums.keys, heads.kv_heads, heads.key_dim);
    check_side("values", sums.values, heads.kv_heads, heads.value_dim);
    if (sums.sequences < 0 || sums.tokens < sums.sequences)
      detail::invalid_argument("AttentionStatistics: sums of ", sums.tokens, " tokens in ", sums.sequences,
                               " sequences, expected at least one token each");
    keys_ = std::move(sums.keys);
    values_ = std::move(sums.values);
    tokens_ = sums.tokens;
    sequences_ = sums.sequences;
  }

 private:
  static void check_side(std::string_view side, const std::vector<WeightedSums>& heads, Index kv_heads,
                         Index d) {
    if (static_cast<Index>(heads.size()) != kv_heads)
      detail::invalid_argument("AttentionStatistics: sums of ", heads.size(), " KV heads' ", side,
                               ", expected ", kv_heads);
    const auto check = [&](const char* name, const auto& a, Index cols) {
      const std::string label = detail::concat("AttentionStatistics: ", name, " of ", side);
      detail::check_shape(label, a, d, cols);
      detail::check_finite(label, a);
    };
    for (const WeightedSums& head : heads) {
      check("hessian", head.hessian, d);
      check("weighted_gram", head.weighted_gram, d);
      check("weighted_sum", head.weighted_sum, 1);
      if (!(head.weight >= 0 && is_finite(head.weight)))
        detail::invalid_argument("AttentionStatistics: weight of ", side, " is ", head.weight,
                                 ", expected 0 or a positive number");
    }
  }

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

  void add_sequence(const Batch<double>& queries, const Batch<double>& keys, const Batch<double>& values,
                    const std::vector<SquareMatrix<double>>& grams, Index block,
                    TokenWeights* token_weights) {
    if (block < 1)
      detail::invalid_argument("AttentionStatistics: block is ", block, ", expected at least one query");
    AttentionStatistics next(*this);
    TokenWeights weights{Batch<double>::Zero(queries.rows(), shape_.kv_heads),
                         Batch<double>::Zero(queries.rows(), shape_.kv_heads)};
    for (Index h = 0; h < shape_.kv_heads; ++h)
      next.add_head(h, queries, keys, values, grams, block, weights);
    for (const std::vector<WeightedSums>* side : {&next.keys_, &next.values_})
      for (const WeightedSums& sums : *side)
        if (!all_finite(sums.hessian) || !all_finite(sums.weighted_gram) || !all_finite(sums.weighted_sum))
          detail::invalid_argument("AttentionStatistics: the sums overflow, expected smaller values");
    next.tokens_ += queries.rows();
    ++next.sequences_;
    *this = std::move(next);
    if (token_weights != nullptr) *token_weights = std::move(weights);
  }

  void add_head(Index h, const Batch<double>& queries, const Batch<double>& keys, const Batch<double>& values,
                const std::vector<SquareMatrix<double>>& grams, Index block, TokenWeights& weights) {
    const Index dk = shape_.key_dim, dv = shape_.value_dim, n = queries.rows();
    const Batch<double> k = keys.middleCols(h * dk, dk), v = values.middleCols(h * dv, dv);
    WeightedSums &key_sums = keys_[static_cast<std::size_t>(h)],
                 &value_sums = values_[static_cast<std::size_t>(h)];
    Vector<double> key_weights = Vector<double>::Zero(n), value_weights = Vector<double>::Zero(n);
    for (Index g = h * shape_.queries_per_kv_head(); g < (h + 1) * shape_.queries_per_kv_head(); ++g) {
      const SquareMatrix<double>& gram = grams[static_cast<std::size_t>(g)];
      const Batch<double> gram_v = v * gram;
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
    weights.keys.col(h) = key_weights;
    weights.values.col(h) = value_weights;
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
