// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CORE_HEADS_HPP
#define WUSHKV_CORE_HEADS_HPP

#include "wushkv/core/check.hpp"

namespace wushkv {

/// The heads of an attention layer: `query_heads / kv_heads` neighbouring query heads share a KV head (GQA).
/// A batch of queries is `[tokens, query_heads * key_dim]`, of keys `[tokens, kv_heads * key_dim]`, of values
/// `[tokens, kv_heads * value_dim]`, heads side by side.
struct AttentionHeads {
  Index query_heads = 0;
  Index kv_heads = 0;
  Index key_dim = 0;
  Index value_dim = 0;

  /// G: neighbouring query heads that share a KV head.
  Index queries_per_kv_head() const { return query_heads / kv_heads; }
  friend bool operator==(const AttentionHeads&, const AttentionHeads&) = default;
};

namespace detail {

inline void check_heads(const AttentionHeads& heads) {
  if (heads.query_heads < 1 || heads.kv_heads < 1 || heads.query_heads % heads.kv_heads != 0)
    invalid_argument("heads: ", heads.query_heads, " query heads and ", heads.kv_heads,
                     " KV heads, expected a positive multiple of a positive number");
  if (heads.key_dim < 1 || heads.value_dim < 1)
    invalid_argument("heads: key_dim is ", heads.key_dim, " and value_dim ", heads.value_dim,
                     ", expected at least 1");
}

/// One sequence's keys, values and, of the same tokens, queries.
template <class Q, class K, class V>
void check_sequence_shapes(std::string_view who, const AttentionHeads& heads, const Eigen::MatrixBase<Q>& q,
                           const Eigen::MatrixBase<K>& k, const Eigen::MatrixBase<V>& v) {
  if (q.rows() == 0) invalid_argument(who, ": q has 0 tokens, expected at least one");
  check_shape(concat(who, ": q"), q, q.rows(), heads.query_heads * heads.key_dim);
  check_shape(concat(who, ": k"), k, q.rows(), heads.kv_heads * heads.key_dim);
  check_shape(concat(who, ": v"), v, q.rows(), heads.kv_heads * heads.value_dim);
}

template <class Q, class K, class V>
void check_sequence(std::string_view who, const AttentionHeads& heads, const Eigen::MatrixBase<Q>& q,
                    const Eigen::MatrixBase<K>& k, const Eigen::MatrixBase<V>& v) {
  check_sequence_shapes(who, heads, q, k, v);
  check_finite(concat(who, ": q"), q);
  check_finite(concat(who, ": k"), k);
  check_finite(concat(who, ": v"), v);
}

}  // namespace detail
}  // namespace wushkv

#endif  // WUSHKV_CORE_HEADS_HPP
