// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_MEASURE_ERRORS_HPP
#define WUSHKV_MEASURE_ERRORS_HPP

#include <limits>

#include "wushkv/measure/attention.hpp"
#include "wushkv/measure/relative_error.hpp"

namespace wushkv {

/// The error of `approximation` against `exact`, of one shape and any scalars. Throws `std::invalid_argument`
/// for another shape or values that are not finite.
template <class Exact, class Approximation>
SquaredError squared_error(const Eigen::MatrixBase<Exact>& exact,
                           const Eigen::MatrixBase<Approximation>& approximation) {
  detail::check_shape("squared_error: approximation", approximation, exact.rows(), exact.cols());
  const Batch<double> x = exact.template cast<double>(), y = approximation.template cast<double>();
  detail::check_finite("squared_error: exact", x);
  detail::check_finite("squared_error: approximation", y);
  return {(x - y).squaredNorm(), x.squaredNorm()};
}

/// The error of a codec on a batch `[tokens, head_dim]` that goes through it and back.
template <class Codec, class X>
SquaredError reconstruction_error(const Codec& codec, const Eigen::MatrixBase<X>& x) {
  const Batch<typename Codec::Scalar> data = x;  // once: an expression may be dear, or random
  return squared_error(data, codec.reconstruct(data));
}

/// What an attention module's output loses when `k` and `v` come back from the cache as `cached_k` and
/// `cached_v`: `sum |Y' - Y|² / sum |Y|²` by `relative()`, `Y = O W_O` over one sequence. Shapes as for
/// `attention`; `w_o` is
/// `[query_heads * value_dim, model]`. Throws `std::invalid_argument` for wrong shapes and values that are
/// not finite.
template <class Q, class K, class V, class CachedK, class CachedV, class W>
SquaredError module_error(const AttentionHeads& heads, const Eigen::MatrixBase<Q>& q,
                          const Eigen::MatrixBase<K>& k, const Eigen::MatrixBase<V>& v,
                          const Eigen::MatrixBase<CachedK>& cached_k,
                          const Eigen::MatrixBase<CachedV>& cached_v, const Eigen::MatrixBase<W>& w_o,
                          const AttentionOptions& options = {}) {
  detail::check_heads(heads);
  detail::check_shape("module_error: w_o", w_o, heads.query_heads * heads.value_dim, w_o.cols());
  detail::check_finite("module_error: w_o", w_o);
  const Batch<double> w = w_o.template cast<double>(), queries = q.template cast<double>();
  const Batch<double> exact = attention(heads, queries, k, v, options) * w;
  return squared_error(exact, attention(heads, queries, cached_k, cached_v, options) * w);
}

/// Mean over queries and heads of the Kullback-Leibler divergence, in nats, of the attention weights under
/// `cached_k` from those under `k`. Shapes and errors as for `attention_weights`.
template <class Q, class K, class CachedK>
double attention_kl(const AttentionHeads& heads, const Eigen::MatrixBase<Q>& q, const Eigen::MatrixBase<K>& k,
                    const Eigen::MatrixBase<CachedK>& cached_k, const AttentionOptions& options = {}) {
  detail::check_heads(heads);
  const Batch<double> queries = q.template cast<double>(), keys = k.template cast<double>(),
                      cached = cached_k.template cast<double>();
  double sum = 0;
  for (Index h = 0; h < heads.query_heads; ++h) {
    const Batch<double> p = attention_weights(heads, queries, keys, h, options),
                        r = attention_weights(heads, queries, cached, h, options);
    // Weights too small for a double count as the smallest, so that a query is never infinitely wrong.
    const double tiny = std::numeric_limits<double>::min();
    sum += (p.array() > 0).select(p.array() * (p.array().max(tiny) / r.array().max(tiny)).log(), 0.0).sum();
  }
  return sum / static_cast<double>(heads.query_heads * q.rows());
}

}  // namespace wushkv

#endif  // WUSHKV_MEASURE_ERRORS_HPP
