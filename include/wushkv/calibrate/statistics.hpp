// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_STATISTICS_HPP
#define WUSHKV_CALIBRATE_STATISTICS_HPP

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

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
class LayerStatistics {
 public:
  /// Throws `std::invalid_argument` for counts or dimensions below 1 and query heads no multiple of the KV
  /// heads.
  explicit LayerStatistics(const AttentionHeads& heads) : shape_(heads) {
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
  /// Throws `std::invalid_argument` for a wrong shape or a value that is not finite.
  template <class W>
  void set_output_projection(const Eigen::MatrixBase<W>& w_o) {
    detail::check_shape("set_output_projection: w_o", w_o, shape_.query_heads * shape_.value_dim, w_o.cols());
    if (w_o.cols() == 0)
      detail::invalid_argument("set_output_projection: w_o has 0 columns, expected the model dimension");
    detail::check_finite("set_output_projection: w_o", w_o);
    const Batch<double> w = w_o.template cast<double>();
    const Index rows = shape_.value_dim;
    for (Index h = 0; h < shape_.kv_heads; ++h) {
      SquareMatrix<double>& hessian = heads_[static_cast<std::size_t>(h)].value_hessian;
      hessian.setZero();
      for (Index g = h * shape_.queries_per_kv_head(); g < (h + 1) * shape_.queries_per_kv_head(); ++g)
        hessian.noalias() += 2 * w.middleRows(g * rows, rows) * w.middleRows(g * rows, rows).transpose();
    }
    has_output_projection_ = true;
  }

  /// Adds one sequence: `q` `[tokens, query_heads * key_dim]`, `k` `[tokens, kv_heads * key_dim]`, `v`
  /// `[tokens, kv_heads * value_dim]`, any scalar that converts to double, any strides. `mask`, if given, has
  /// one entry a token, zero for padding, which is left out, whatever it holds. Throws
  /// `std::invalid_argument` for a wrong shape, a value that is not finite, no token at all, or values so
  /// large that their squares overflow; the statistics are unchanged then.
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
    LayerStatistics next = *this;
    for (Index h = 0; h < shape_.kv_heads; ++h) next.add_head(h, queries, keys, values);
    if (!next.finite())
      detail::invalid_argument("LayerStatistics: the sums overflow, expected smaller values");
    next.tokens_ += queries.rows();
    ++next.sequences_;
    *this = std::move(next);
  }

  /// Adds another run's or rank's sums over the same heads. Throws `std::invalid_argument` if the heads
  /// differ, or both have an output projection and these differ.
  void merge(const LayerStatistics& other) {
    if (other.shape_ != shape_)
      detail::invalid_argument("merge: other has ", describe(other.shape_), ", expected ", describe(shape_));
    if (has_output_projection_ && other.has_output_projection_)
      for (std::size_t h = 0; h < heads_.size(); ++h)
        if (!heads_[h].value_hessian.isApprox(other.heads_[h].value_hessian, 1e-9))
          detail::invalid_argument("merge: other has another output projection for KV head ", h,
                                   ", expected the same weights");
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
    if (first < 0 || count < 1 || first > shape_.kv_heads - count)
      detail::invalid_argument("slice: ", count, " KV heads from ", first,
                               " asked for, expected a range within 0 to ", shape_.kv_heads - 1);
    LayerStatistics part = *this;
    part.shape_.kv_heads = count;
    part.shape_.query_heads = count * shape_.queries_per_kv_head();
    part.heads_.assign(heads_.begin() + first, heads_.begin() + first + count);
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

  /// Every sum, as a file holds them (`io/statistics.hpp`).
  struct Sums {
    std::vector<HeadStatistics> heads;
    SquareMatrix<double> key_sigma, value_sigma;
    std::int64_t tokens = 0, sequences = 0;
    bool has_output_projection = false;
  };
  Sums sums() const {
    return {heads_, key_sigma_, value_sigma_, tokens_, sequences_, has_output_projection_};
  }

  /// Restores what `sums` gave. Throws `std::invalid_argument` for matrices of other shapes, values that are
  /// not finite or negative counts.
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
    heads_ = std::move(sums.heads);
    key_sigma_ = std::move(sums.key_sigma);
    value_sigma_ = std::move(sums.value_sigma);
    tokens_ = sums.tokens;
    sequences_ = sums.sequences;
    has_output_projection_ = sums.has_output_projection;
  }

 private:
  static std::string describe(const AttentionHeads& heads) {
    return detail::concat(heads.query_heads, " query and ", heads.kv_heads, " KV heads of ", heads.key_dim,
                          "/", heads.value_dim);
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
};

}  // namespace wushkv

#endif  // WUSHKV_CALIBRATE_STATISTICS_HPP
