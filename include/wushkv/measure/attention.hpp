// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_MEASURE_ATTENTION_HPP
#define WUSHKV_MEASURE_ATTENTION_HPP

#include "wushkv/core/attention_options.hpp"
#include "wushkv/core/heads.hpp"

namespace wushkv {

namespace detail {

/// The attention weights of one head over a whole sequence, `[tokens, tokens]`, a query a row.
template <class Q, class K>
Batch<double> attention_weights(const Q& q, const K& k, double scale, const AttentionOptions& options) {
  Batch<double> weights = scale * (q * k.transpose());
  if (options.soft_cap > 0) weights = options.soft_cap * (weights.array() / options.soft_cap).tanh();
  softmax_rows(weights, 0, options);
  return weights;
}

}  // namespace detail

/// The attention weights of query head `head` over one sequence, `[tokens, tokens]`, in double. `q` is
/// `[tokens, query_heads * key_dim]`, `k` `[tokens, kv_heads * key_dim]`. A straightforward reference: memory
/// grows with the square of the length. Throws `std::invalid_argument` for wrong shapes, values that are not
/// finite and options out of range.
template <class Q, class K>
Batch<double> attention_weights(const AttentionHeads& heads, const Eigen::MatrixBase<Q>& q,
                                const Eigen::MatrixBase<K>& k, Index head,
                                const AttentionOptions& options = {}) {
  detail::check_heads(heads);
  const double scale = detail::attention_scale(heads, options);
  detail::check_sequence("attention", {heads.query_heads, heads.kv_heads, heads.key_dim, heads.key_dim}, q, k,
                         k);
  if (head < 0 || head >= heads.query_heads)
    detail::invalid_argument("attention: head ", head, " asked for, expected 0 to ", heads.query_heads - 1);
  const Index d = heads.key_dim;
  return detail::attention_weights(
      q.middleCols(head * d, d).template cast<double>().eval(),
      k.middleCols(head / heads.queries_per_kv_head() * d, d).template cast<double>().eval(), scale, options);
}

/// Attention over one sequence in double, `[tokens, query_heads * value_dim]`: the exact reference that
/// errors are measured against. `v` is `[tokens, kv_heads * value_dim]`; the rest as for `attention_weights`.
template <class Q, class K, class V>
Batch<double> attention(const AttentionHeads& heads, const Eigen::MatrixBase<Q>& q,
                        const Eigen::MatrixBase<K>& k, const Eigen::MatrixBase<V>& v,
                        const AttentionOptions& options = {}) {
  detail::check_heads(heads);
  const double scale = detail::attention_scale(heads, options);
  const Batch<double> queries = q.template cast<double>(), keys = k.template cast<double>(),
                      values = v.template cast<double>();
  detail::check_sequence("attention", heads, queries, keys, values);
  const Index dk = heads.key_dim, dv = heads.value_dim;
  Batch<double> output(q.rows(), heads.query_heads * dv);
  for (Index h = 0; h < heads.query_heads; ++h) {
    const Index kv = h / heads.queries_per_kv_head();
    const Batch<double> weights = detail::attention_weights(queries.middleCols(h * dk, dk),
                                                            keys.middleCols(kv * dk, dk), scale, options);
    output.middleCols(h * dv, dv).noalias() = weights * values.middleCols(kv * dv, dv);
  }
  return output;
}

}  // namespace wushkv

#endif  // WUSHKV_MEASURE_ATTENTION_HPP
