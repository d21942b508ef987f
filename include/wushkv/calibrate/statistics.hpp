// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_STATISTICS_HPP
#define WUSHKV_CALIBRATE_STATISTICS_HPP

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "wushkv/calibrate/attention_statistics.hpp"
#include "wushkv/calibrate/token_sample.hpp"
#include "wushkv/core/attention_options.hpp"
#include "wushkv/core/heads.hpp"
#include "wushkv/core/types.hpp"

namespace wushkv {

/// The sums of one KV head, in double (design.md, section 2).
struct HeadStatistics {
  SquareMatrix<double> key_gram;       ///< `M_K = sum k kᵀ`, `[key_dim, key_dim]`
  SquareMatrix<double> key_hessian;    ///< `H_K = 2 sum_g sum q qᵀ`, `[key_dim, key_dim]`
  SquareMatrix<double> value_gram;     ///< `M_V = sum v vᵀ`, `[value_dim, value_dim]`
  SquareMatrix<double> value_hessian;  ///< `H_V = 2 sum_g W_O,g W_O,gᵀ`, `[value_dim, value_dim]`
  SquareMatrix<double> value_sigma;    ///< OSCAR's `sum u v vᵀ`, `[value_dim, value_dim]`
};

/// What calibration keeps of one attention layer, fed sequence by sequence: enough to build every transform
/// at any bit width. Sums only, so that sequences, runs and data-parallel ranks merge exactly; a
/// tensor-parallel rank slices out its KV heads. Key and query mean after normalization and after RoPE.
/// Attention-aware sums (`gather_attention`) and a sample of the tokens (`keep_sample`) are gathered on
/// demand.
class LayerStatistics {
 public:
  /// Throws `std::invalid_argument` for counts or dimensions below 1 and query heads no multiple of the KV
  /// heads.
  explicit LayerStatistics(const AttentionHeads& heads) : shape_(heads), sample_(heads) {
    detail::check_heads(heads);
    const auto zero = [](Index d) -> SquareMatrix<double> { return SquareMatrix<double>::Zero(d, d); };
    const Index dk = heads.key_dim, dv = heads.value_dim;
    heads_.assign(static_cast<std::size_t>(heads.kv_heads),
                  {zero(dk), zero(dk), zero(dv), zero(dv), zero(dv)});
    key_sigma_ = zero(dk);
    value_sigma_ = zero(dv);
  }

  /// Sets `H_V` from the output projection, `[query_heads * value_dim, model]`: a token's output is
  /// `y = sum_h W_O,hᵀ o_h` (pass `W.transpose()` for a weight kept as `[model, query_heads * value_dim]`).
  /// Throws `std::invalid_argument` for a wrong shape, a value that is not finite or, once attention has been
  /// gathered, another projection than before.
  template <class W>
  void set_output_projection(const Eigen::MatrixBase<W>& w_o) {
    detail::check_shape("set_output_projection: w_o", w_o, shape_.query_heads * shape_.value_dim, w_o.cols());
    if (w_o.cols() == 0)
      detail::invalid_argument("set_output_projection: w_o has 0 columns, expected the model dimension");
    detail::check_finite("set_output_projection: w_o", w_o);
    std::vector<SquareMatrix<double>> grams = detail::projection_grams(shape_, w_o.template cast<double>());
    std::vector<SquareMatrix<double>> hessians(
        heads_.size(), SquareMatrix<double>::Zero(shape_.value_dim, shape_.value_dim));
    for (std::size_t g = 0; g < grams.size(); ++g)
      hessians[g / static_cast<std::size_t>(shape_.queries_per_kv_head())] += 2 * grams[g];
    if (attention_ && attention_->tokens() > 0)
      for (std::size_t h = 0; h < heads_.size(); ++h)
        if (!same_projection(heads_[h].value_hessian, hessians[h]))
          detail::invalid_argument("set_output_projection: w_o differs from before for KV head ", h,
                                   ", expected the weights that attention was gathered with");
    for (std::size_t h = 0; h < heads_.size(); ++h) heads_[h].value_hessian = std::move(hessians[h]);
    output_grams_ = std::move(grams);
    has_output_projection_ = true;
  }

  /// From now on gathers the attention-aware sums of `AttentionStatistics` as well, for which `add` needs the
  /// output projection. Throws `std::invalid_argument` for options out of range, and if tokens were added
  /// already.
  void gather_attention(const AttentionOptions& options = {}) {
    check_no_tokens("gather_attention");
    attention_ = AttentionStatistics(shape_, options);
  }

  /// From now on keeps a sample of at most `tokens` tokens, none if 0; see `TokenSample`. Runs or ranks whose
  /// samples will merge give the number of their first sequence. Throws `std::invalid_argument` for negative
  /// numbers, and if tokens were added already.
  void keep_sample(Index tokens, std::int64_t first_sequence = 0) {
    check_no_tokens("keep_sample");
    sample_ = TokenSample(shape_, tokens, first_sequence);
  }

  /// Adds one sequence: `q` `[tokens, query_heads * key_dim]`, `k` `[tokens, kv_heads * key_dim]`, `v`
  /// `[tokens, kv_heads * value_dim]`, any scalar that converts to double, any strides. `mask`, if given, has
  /// one entry a token, zero for padding, which is left out, whatever it holds. Throws
  /// `std::invalid_argument` for a wrong shape, a value that is not finite, no token at all, values so large
  /// that their squares, or in a sample they themselves in float, overflow, and where attention is gathered
  /// without an output projection (which has to be set again after loading); the statistics are unchanged
  /// then.
  template <class Q, class K, class V>
  void add(const Eigen::MatrixBase<Q>& q, const Eigen::MatrixBase<K>& k, const Eigen::MatrixBase<V>& v,
           std::span<const std::uint8_t> mask = {}) {
    detail::check_sequence_shapes("LayerStatistics", shape_, q, k, v);
    if (!mask.empty() && static_cast<Index>(mask.size()) != q.rows())
      detail::invalid_argument("LayerStatistics: mask has ", mask.size(), " entries, expected one a token, ",
                               q.rows());
    const Batch<double> queries = kept(q, mask), keys = kept(k, mask), values = kept(v, mask);
    if (queries.rows() == 0)
      detail::invalid_argument("LayerStatistics: mask leaves 0 tokens, expected at least one");
    detail::check_finite("LayerStatistics: q", queries);
    detail::check_finite("LayerStatistics: k", keys);
    detail::check_finite("LayerStatistics: v", values);
    if (attention_ && output_grams_.empty())
      detail::invalid_argument(
          "LayerStatistics: the output projection is not known, expected set_output_projection before "
          "sequences whose attention is gathered");
    LayerStatistics next = *this;
    for (Index h = 0; h < shape_.kv_heads; ++h) next.add_head(h, queries, keys, values);
    if (!next.finite())
      detail::invalid_argument("LayerStatistics: the sums overflow, expected smaller values");
    TokenWeights weights;
    if (attention_)
      next.attention_->add_from_grams(queries, keys, values, output_grams_, 64, &weights);
    else
      weights.keys = weights.values = Batch<double>::Ones(queries.rows(), shape_.kv_heads);
    if (sample_.capacity() > 0) next.sample_.add(sequences_, keys, values, weights);
    next.tokens_ += queries.rows();
    ++next.sequences_;
    *this = std::move(next);
  }

  /// Adds another run's or rank's sums over the same heads. Statistics of no tokens take over what the other
  /// gathers; a sample stays only where both have one, at the smaller capacity. Throws
  /// `std::invalid_argument` if the heads differ, if both have an output projection and these differ, or if
  /// only one gathers attention or its options differ; nothing has changed then.
  void merge(const LayerStatistics& other) {
    if (other.shape_ != shape_)
      detail::invalid_argument("merge: other has ", describe(other.shape_), ", expected ", describe(shape_));
    if (has_output_projection_ && other.has_output_projection_)
      for (std::size_t h = 0; h < heads_.size(); ++h)
        if (!same_projection(heads_[h].value_hessian, other.heads_[h].value_hessian))
          detail::invalid_argument("merge: other has another output projection for KV head ", h,
                                   ", expected the same weights");
    merge_attention(other);
    merge_sample(other);
    if (output_grams_.empty()) output_grams_ = other.output_grams_;
    for (std::size_t h = 0; h < heads_.size(); ++h) {
      heads_[h].key_gram += other.heads_[h].key_gram;
      heads_[h].key_hessian += other.heads_[h].key_hessian;
      heads_[h].value_gram += other.heads_[h].value_gram;
      heads_[h].value_sigma += other.heads_[h].value_sigma;
      if (!has_output_projection_) heads_[h].value_hessian = other.heads_[h].value_hessian;
    }
    has_output_projection_ = has_output_projection_ || other.has_output_projection_;
    key_sigma_ += other.key_sigma_;
    value_sigma_ += other.value_sigma_;
    tokens_ += other.tokens_;
    sequences_ += other.sequences_;
  }

  /// The statistics of KV heads `first … first + count - 1` and their query heads. OSCAR's sums over the
  /// layer stay those of all heads, so that every rank builds the same shared rotation. Throws
  /// `std::invalid_argument` for a range that is empty or outside.
  LayerStatistics slice(Index first, Index count) const {
    detail::check_head_range(shape_, first, count);
    LayerStatistics part = *this;
    part.shape_ = detail::sliced(shape_, count);
    part.heads_.assign(heads_.begin() + first, heads_.begin() + first + count);
    if (!output_grams_.empty()) {
      const auto begin = output_grams_.begin() + first * shape_.queries_per_kv_head();
      part.output_grams_.assign(begin, begin + part.shape_.query_heads);
    }
    if (attention_) part.attention_ = attention_->slice(first, count);
    part.sample_ = sample_.slice(first, count);
    return part;
  }

  const AttentionHeads& heads() const { return shape_; }
  const HeadStatistics& head(Index kv_head) const {
    if (kv_head < 0 || kv_head >= shape_.kv_heads)
      detail::invalid_argument("LayerStatistics: KV head ", kv_head, " asked for, expected 0 to ",
                               shape_.kv_heads - 1);
    return heads_[static_cast<std::size_t>(kv_head)];
  }
  /// OSCAR's `Sigma_K = sum_h Q_hᵀ Q_h` over the layer's query heads, `[key_dim, key_dim]`.
  const SquareMatrix<double>& key_sigma() const { return key_sigma_; }
  /// OSCAR's `Sigma_V = sum_h V_hᵀ diag(u_h) V_h` over the layer's KV heads, `[value_dim, value_dim]`.
  const SquareMatrix<double>& value_sigma() const { return value_sigma_; }
  /// Tokens and sequences added so far, padding not counted.
  std::int64_t tokens() const { return tokens_; }
  std::int64_t sequences() const { return sequences_; }
  bool has_output_projection() const { return has_output_projection_; }
  /// The attention-aware sums; none unless `gather_attention` switched them on.
  const std::optional<AttentionStatistics>& attention() const { return attention_; }
  /// The sample of tokens; of capacity 0 unless `keep_sample` gave it one.
  const TokenSample& sample() const { return sample_; }

  /// Every sum, as a file holds them (`io/statistics.hpp`).
  struct Sums {
    std::vector<HeadStatistics> heads;
    SquareMatrix<double> key_sigma, value_sigma;
    std::int64_t tokens = 0, sequences = 0;
    bool has_output_projection = false;
    std::optional<AttentionStatistics> attention{};
    std::optional<TokenSample> sample{};
  };
  Sums sums() const {
    return {heads_,     key_sigma_, value_sigma_, tokens_, sequences_, has_output_projection_,
            attention_, sample_};
  }

  /// Restores what `sums` gave. Throws `std::invalid_argument` for matrices of other shapes, values that are
  /// not finite, negative counts, and attention or a sample of other heads or tokens.
  LayerStatistics(const AttentionHeads& heads, Sums sums) : LayerStatistics(heads) {
    if (static_cast<Index>(sums.heads.size()) != heads.kv_heads)
      detail::invalid_argument("LayerStatistics: sums of ", sums.heads.size(), " KV heads, expected ",
                               heads.kv_heads);
    const auto check = [](const char* name, const SquareMatrix<double>& a, Index d) {
      detail::check_shape(name, a, d, d);
      detail::check_finite(name, a);
    };
    for (const HeadStatistics& head : sums.heads) {
      check("LayerStatistics: key_gram", head.key_gram, heads.key_dim);
      check("LayerStatistics: key_hessian", head.key_hessian, heads.key_dim);
      check("LayerStatistics: value_gram", head.value_gram, heads.value_dim);
      check("LayerStatistics: value_hessian", head.value_hessian, heads.value_dim);
      check("LayerStatistics: value_sigma", head.value_sigma, heads.value_dim);
    }
    check("LayerStatistics: key_sigma", sums.key_sigma, heads.key_dim);
    check("LayerStatistics: value_sigma", sums.value_sigma, heads.value_dim);
    if (sums.tokens < 0 || sums.sequences < 0 || sums.sequences > sums.tokens)
      detail::invalid_argument("LayerStatistics: sums of ", sums.tokens, " tokens in ", sums.sequences,
                               " sequences, expected at least one token each");
    if (sums.attention && (sums.attention->heads() != heads || sums.attention->tokens() != sums.tokens ||
                           sums.attention->sequences() != sums.sequences))
      detail::invalid_argument("LayerStatistics: attention is of ", sums.attention->tokens(), " tokens in ",
                               sums.attention->sequences(), " sequences of ",
                               describe(sums.attention->heads()), ", expected ", sums.tokens, " in ",
                               sums.sequences, " of ", describe(heads));
    if (sums.sample && (sums.sample->heads() != heads || sums.sample->size() > sums.tokens))
      detail::invalid_argument("LayerStatistics: sample is of ", sums.sample->size(), " tokens of ",
                               describe(sums.sample->heads()), ", expected at most ", sums.tokens, " of ",
                               describe(heads));
    heads_ = std::move(sums.heads);
    key_sigma_ = std::move(sums.key_sigma);
    value_sigma_ = std::move(sums.value_sigma);
    tokens_ = sums.tokens;
    sequences_ = sums.sequences;
    has_output_projection_ = sums.has_output_projection;
    attention_ = std::move(sums.attention);
    if (sums.sample) sample_ = std::move(*sums.sample);
  }

 private:
  static std::string describe(const AttentionHeads& heads) {
    return detail::concat(heads.query_heads, " query and ", heads.kv_heads, " KV heads of ", heads.key_dim,
                          "/", heads.value_dim);
  }

  static bool same_projection(const SquareMatrix<double>& hessian, const SquareMatrix<double>& other) {
    return hessian.isApprox(other, 1e-9);
  }

  void check_no_tokens(const char* call) const {
    if (tokens_ > 0)
      detail::invalid_argument(call, ": ", tokens_,
                               " tokens were added already, expected the call before them");
  }

  /// Throws before anything has changed.
  void merge_attention(const LayerStatistics& other) {
    if (attention_ && other.attention_)
      attention_->merge(*other.attention_);
    else if (tokens_ > 0 && other.tokens_ > 0 && attention_.has_value() != other.attention_.has_value())
      detail::invalid_argument("merge: ", attention_ ? "other lacks" : "only other has",
                               " attention-aware sums, expected gather_attention for both or neither");
    else if (tokens_ == 0 && (other.tokens_ > 0 || !attention_))
      attention_ = other.attention_;
  }

  void merge_sample(const LayerStatistics& other) {
    if (tokens_ == 0 && (other.tokens_ > 0 || sample_.capacity() == 0))
      sample_ = other.sample_;
    else if (other.tokens_ > 0)
      sample_.merge(other.sample_);
  }

  template <class X>
  static Batch<double> kept(const Eigen::MatrixBase<X>& x, std::span<const std::uint8_t> mask) {
    Batch<double> rows = x.template cast<double>();
    if (mask.empty()) return rows;
    Index count = 0;
    for (Index t = 0; t < rows.rows(); ++t)
      if (mask[static_cast<std::size_t>(t)] != 0) rows.row(count++) = rows.row(t);
    rows.conservativeResize(count, Eigen::NoChange);
    return rows;
  }

  bool finite() const {
    bool all = all_finite(key_sigma_) && all_finite(value_sigma_);
    for (const HeadStatistics& head : heads_)
      all = all && all_finite(head.key_gram) && all_finite(head.key_hessian) && all_finite(head.value_gram) &&
            all_finite(head.value_hessian) && all_finite(head.value_sigma);
    return all;
  }

  void add_head(Index h, const Batch<double>& queries, const Batch<double>& keys,
                const Batch<double>& values) {
    const Index dk = shape_.key_dim, dv = shape_.value_dim, n = queries.rows();
    HeadStatistics& head = heads_[static_cast<std::size_t>(h)];
    const auto k = keys.middleCols(h * dk, dk);
    const auto v = values.middleCols(h * dv, dv);
    SquareMatrix<double> qq = SquareMatrix<double>::Zero(dk, dk);
    for (Index g = h * shape_.queries_per_kv_head(); g < (h + 1) * shape_.queries_per_kv_head(); ++g)
      qq.noalias() += queries.middleCols(g * dk, dk).transpose() * queries.middleCols(g * dk, dk);
    // u_t = k_tᵀ (Qᵀ Q) k_t of this sequence, scaled to sum to n; without any preference, every token counts
    // alike.
    Vector<double> u = (k * qq).cwiseProduct(k).rowwise().sum();
    const double total = u.sum();
    if (total > 0)
      u *= static_cast<double>(n) / total;
    else
      u.setOnes();
    const SquareMatrix<double> weighted = v.transpose() * u.asDiagonal() * v;
    head.key_gram.noalias() += k.transpose() * k;
    head.key_hessian += 2 * qq;
    head.value_gram.noalias() += v.transpose() * v;
    head.value_sigma += weighted;
    key_sigma_ += qq;
    value_sigma_ += weighted;
  }

  AttentionHeads shape_;
  std::vector<HeadStatistics> heads_;
  SquareMatrix<double> key_sigma_, value_sigma_;
  std::int64_t tokens_ = 0, sequences_ = 0;
  bool has_output_projection_ = false;
  std::vector<SquareMatrix<double>> output_grams_;  // W_O,g W_O,gᵀ, one a query head; none after loading
  std::optional<AttentionStatistics> attention_;
  TokenSample sample_;
};

}  // namespace wushkv

#endif  // WUSHKV_CALIBRATE_STATISTICS_HPP
