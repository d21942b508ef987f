// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_TOKEN_SAMPLE_HPP
#define WUSHKV_CALIBRATE_TOKEN_SAMPLE_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "wushkv/calibrate/attention_statistics.hpp"
#include "wushkv/core/check.hpp"
#include "wushkv/core/heads.hpp"

namespace wushkv {

namespace detail {

/// The mixer of SplitMix64 (Steele, Lea and Flood): a bijection that scatters neighbouring numbers.
constexpr std::uint64_t splitmix64(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace detail

/// Up to `capacity` tokens of a layer, in float, to tune codecs on once the texts are gone. Those of the
/// smallest priority stay, and a priority is a hash of the sequence's number and the position in it: so
/// memory is bounded, results repeat, and two samples merge to the one that a single run over the sequences
/// of both would have (if they number them differently; equal priorities stand side by side, this sample's
/// first).
class TokenSample {
 public:
  /// Keeps nothing if `capacity` is 0. `first_sequence` is the number of this run's first sequence. Throws
  /// `std::invalid_argument` for heads that make no layer and negative numbers.
  explicit TokenSample(const AttentionHeads& heads, Index capacity = 0, std::int64_t first_sequence = 0)
      : shape_(heads), capacity_(capacity), first_sequence_(first_sequence) {
    detail::check_heads(heads);
    if (capacity < 0)
      detail::invalid_argument("TokenSample: capacity is ", capacity, ", expected 0 or a number of tokens");
    if (first_sequence < 0)
      detail::invalid_argument("TokenSample: first_sequence is ", first_sequence,
                               ", expected 0 or a positive number");
    rows_.resize(0, width());
  }

  /// Offers the tokens of one sequence, the run's `sequence`th: `keys` `[tokens, kv_heads * key_dim]`,
  /// `values` `[tokens, kv_heads * value_dim]`, `weights` `[tokens, kv_heads]`. Throws
  /// `std::invalid_argument` for wrong shapes and values that are not finite in float; nothing has changed
  /// then.
  void add(std::int64_t sequence, const Batch<double>& keys, const Batch<double>& values,
           const TokenWeights& weights) {
    const Index n = keys.rows();
    detail::check_shape("TokenSample: keys", keys, n, shape_.kv_heads * shape_.key_dim);
    detail::check_shape("TokenSample: values", values, n, shape_.kv_heads * shape_.value_dim);
    detail::check_shape("TokenSample: weights of keys", weights.keys, n, shape_.kv_heads);
    detail::check_shape("TokenSample: weights of values", weights.values, n, shape_.kv_heads);
    if (n == 0) return;
    Batch<float> rows(n, width());
    rows << keys.cast<float>(), values.cast<float>(), weights.keys.cast<float>(),
        weights.values.cast<float>();
    detail::check_finite("TokenSample: a key, value or weight in float", rows);
    if ((rows.rightCols(2 * shape_.kv_heads).array() < 0).any())
      detail::invalid_argument("TokenSample: a weight is negative, expected 0 or a positive number");
    const std::uint64_t base = detail::splitmix64(static_cast<std::uint64_t>(first_sequence_) +
                                                  static_cast<std::uint64_t>(sequence));
    std::vector<std::uint64_t> priorities;
    for (Index t = 0; t < n; ++t)
      priorities.push_back(detail::splitmix64(base + static_cast<std::uint64_t>(t)));
    take(priorities, rows);
  }

  /// The smallest of both, as many as the smaller capacity has room for. Runs that number their sequences
  /// alike have tokens at the same positions. Throws `std::invalid_argument` if
  /// the heads differ.
  void merge(const TokenSample& other) {
    if (other.shape_ != shape_)
      detail::invalid_argument("merge: other has a sample of other heads, expected the same");
    capacity_ = std::min(capacity_, other.capacity_);
    take(other.priorities_, other.rows_);
  }

  const AttentionHeads& heads() const { return shape_; }
  Index capacity() const { return capacity_; }
  std::int64_t first_sequence() const { return first_sequence_; }
  /// Tokens in the sample, in the order of their priorities.
  Index size() const { return rows_.rows(); }
  const std::vector<std::uint64_t>& priorities() const { return priorities_; }
  /// `[size, kv_heads * key_dim]` and `[size, kv_heads * value_dim]`.
  Batch<float> keys() const { return columns(0, shape_.kv_heads * shape_.key_dim); }
  Batch<float> values() const {
    return columns(shape_.kv_heads * shape_.key_dim, shape_.kv_heads * shape_.value_dim);
  }
  /// `tr H_K,t` and `tr H_V,t` of the tokens, `[size, kv_heads]`; ones where attention was not gathered.
  Batch<float> key_weights() const { return columns(width() - 2 * shape_.kv_heads, shape_.kv_heads); }
  Batch<float> value_weights() const { return columns(width() - shape_.kv_heads, shape_.kv_heads); }

  /// The same tokens of KV heads `first … first + count - 1` alone. Throws `std::invalid_argument` for a
  /// range that is empty or outside.
  TokenSample slice(Index first, Index count) const {
    detail::check_head_range(shape_, first, count);
    TokenSample part(detail::sliced(shape_, count), capacity_, first_sequence_);
    part.priorities_ = priorities_;
    part.rows_.resize(size(), part.width());
    if (size() == 0) return part;
    part.rows_ << keys().middleCols(first * shape_.key_dim, count * shape_.key_dim),
        values().middleCols(first * shape_.value_dim, count * shape_.value_dim),
        key_weights().middleCols(first, count), value_weights().middleCols(first, count);
    return part;
  }

  /// Everything kept, as a file holds it (`io/statistics.hpp`).
  struct Parts {
    std::vector<std::uint64_t> priorities;
    Batch<float> keys, values, key_weights, value_weights;
  };

  /// Restores a sample. Throws `std::invalid_argument` for matrices of other shapes, more tokens than the
  /// capacity, values that are not finite, negative weights or priorities that do not ascend.
  TokenSample(const AttentionHeads& heads, Index capacity, std::int64_t first_sequence, const Parts& parts)
      : TokenSample(heads, capacity, first_sequence) {
    const auto n = static_cast<Index>(parts.priorities.size());
    if (n > capacity)
      detail::invalid_argument("TokenSample: ", n, " tokens, expected at most the capacity, ", capacity);
    detail::check_shape("TokenSample: keys", parts.keys, n, heads.kv_heads * heads.key_dim);
    detail::check_shape("TokenSample: values", parts.values, n, heads.kv_heads * heads.value_dim);
    detail::check_shape("TokenSample: key_weights", parts.key_weights, n, heads.kv_heads);
    detail::check_shape("TokenSample: value_weights", parts.value_weights, n, heads.kv_heads);
    if (!std::is_sorted(parts.priorities.begin(), parts.priorities.end()))
      detail::invalid_argument("TokenSample: priorities do not ascend, expected the order of a sample");
    if (n == 0) return;
    rows_.resize(n, width());
    rows_ << parts.keys, parts.values, parts.key_weights, parts.value_weights;
    detail::check_finite("TokenSample: a key, value or weight", rows_);
    if ((rows_.rightCols(2 * heads.kv_heads).array() < 0).any())
      detail::invalid_argument("TokenSample: a weight is negative, expected 0 or a positive number");
    priorities_ = parts.priorities;
  }

 private:
  Batch<float> columns(Index from, Index count) const {
    if (size() == 0) return Batch<float>(0, count);  // no memory, of which there is no part
    return rows_.middleCols(from, count);
  }
  Index width() const { return shape_.kv_heads * (shape_.key_dim + shape_.value_dim + 2); }

  /// Merges in tokens, a row each.
  void take(const std::vector<std::uint64_t>& priorities, const Batch<float>& rows) {
    std::vector<std::pair<std::uint64_t, Index>> order;  // a row of `rows` counts from size() on
    for (const std::uint64_t priority : priorities_)
      order.emplace_back(priority, static_cast<Index>(order.size()));
    for (const std::uint64_t priority : priorities)
      order.emplace_back(priority, static_cast<Index>(order.size()));
    std::sort(order.begin(), order.end());
    order.resize(std::min(order.size(), static_cast<std::size_t>(capacity_)));
    Batch<float> kept(static_cast<Index>(order.size()), width());
    std::vector<std::uint64_t> kept_priorities;
    for (const auto& [priority, source] : order) {
      auto to = kept.row(static_cast<Index>(kept_priorities.size()));
      if (source < size())
        to = rows_.row(source);
      else
        to = rows.row(source - size());
      kept_priorities.push_back(priority);
    }
    rows_ = std::move(kept);
    priorities_ = std::move(kept_priorities);
  }

  AttentionHeads shape_;
  Index capacity_ = 0;
  std::int64_t first_sequence_ = 0;
  std::vector<std::uint64_t> priorities_;  // ascending
  Batch<float> rows_;                      // keys, values, weights of keys, weights of values
};

}  // namespace wushkv

#endif  // WUSHKV_CALIBRATE_TOKEN_SAMPLE_HPP
