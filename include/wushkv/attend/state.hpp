// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_ATTEND_STATE_HPP
#define WUSHKV_ATTEND_STATE_HPP

#include <algorithm>
#include <cmath>
#include <concepts>
#include <limits>
#include <span>
#include <vector>

#include "wushkv/core/check.hpp"

namespace wushkv {
namespace detail {

/// What becomes of a row's softmax when a logit without a value joins it.
template <class Scalar>
struct ExtraLogit {
  /// `sum` is 0 for a row without weight, whose `max` is not looked at.
  ExtraLogit(Scalar row_max, Scalar row_sum, Scalar logit) {
    const bool empty = row_sum == Scalar(0);
    max = empty ? logit : std::max(row_max, logit);
    rescale = empty ? Scalar(0) : std::exp(row_max - max);
    sum = rescale * row_sum + std::exp(logit - max);
  }
  Scalar max, sum;
  Scalar rescale;  ///< factor of what the row had before
};

}  // namespace detail

/// Partial softmax states, so that attention over a long sequence can be split over threads or machines and
/// put together again (design.md, section 3): for each row the largest logit `max` (m), `sum` = Σ exp(z_t −
/// m) and `accumulator` = Σ exp(z_t − m) v_t, values in the stored basis. A row is a query and a query head,
/// row `query * query_heads + head`. A row that has seen nothing yet has max = −inf, sum = 0 and an
/// accumulator of zeros.
template <class ScalarType>
requires std::same_as<ScalarType, float> || std::same_as<ScalarType, double>
class AttentionState {
 public:
  using Scalar = ScalarType;

  AttentionState() = default;
  /// As `reset`.
  AttentionState(Index rows, Index value_dim) { reset(rows, value_dim); }

  /// Forgets everything and takes a shape; one no larger than a shape seen before allocates nothing. Throws
  /// `std::invalid_argument` for a negative size.
  void reset(Index rows, Index value_dim) {
    if (rows < 0 || value_dim < 0)
      detail::invalid_argument("AttentionState: ", rows, " rows of ", value_dim,
                               " values, expected no negative size");
    rows_ = rows;
    value_dim_ = value_dim;
    max_.assign(static_cast<std::size_t>(rows), -std::numeric_limits<Scalar>::infinity());
    sum_.assign(static_cast<std::size_t>(rows), Scalar(0));
    accumulator_.assign(static_cast<std::size_t>(rows * value_dim), Scalar(0));
  }

  Index rows() const { return rows_; }
  Index value_dim() const { return value_dim_; }

  /// `[rows]`, `[rows]` and `[rows, value_dim]`; writable, so that a state can come over a wire.
  Eigen::Map<const Vector<Scalar>> max() const { return {max_.data(), rows_}; }
  Eigen::Map<const Vector<Scalar>> sum() const { return {sum_.data(), rows_}; }
  Eigen::Map<const Batch<Scalar>> accumulator() const { return {accumulator_.data(), rows_, value_dim_}; }
  Eigen::Map<Vector<Scalar>> max() { return {max_.data(), rows_}; }
  Eigen::Map<Vector<Scalar>> sum() { return {sum_.data(), rows_}; }
  Eigen::Map<Batch<Scalar>> accumulator() { return {accumulator_.data(), rows_, value_dim_}; }

  /// Adds what `other` has seen, of the same queries and other tokens. Associative and, up to rounding, in
  /// any order. Throws `std::invalid_argument` if the shapes differ; nothing is changed then.
  void merge(const AttentionState& other) {
    if (other.rows_ != rows_ || other.value_dim_ != value_dim_)
      detail::invalid_argument("AttentionState: other has ", other.rows_, " rows of ", other.value_dim_,
                               " values, expected ", rows_, " of ", value_dim_);
    for (Index row = 0; row < rows_; ++row) merge_row(other, row);
  }

  /// Adds one logit without a value to every row: `logits` has one a query head, as attention sinks have, and
  /// row r takes entry `r % query_heads`. A state that goes to `Attention::finish` needs none: that adds
  /// them. Throws `std::invalid_argument` if the rows are no multiple of their number, or one is not finite;
  /// nothing is changed then.
  void add_logits(std::span<const Scalar> logits) {
    const auto heads = static_cast<Index>(logits.size());
    if (heads == 0 || rows_ % heads != 0)
      detail::invalid_argument("AttentionState: ", heads, " logits came for ", rows_,
                               " rows, expected one a query head");
    if (!all_finite(logits.data(), heads))
      detail::invalid_argument("AttentionState: logits has a value that is not finite (", heads, ")");
    for (Index row = 0; row < rows_; ++row) {
      const auto at = static_cast<std::size_t>(row);
      const detail::ExtraLogit<Scalar> joined(max_[at], sum_[at],
                                              logits[static_cast<std::size_t>(row % heads)]);
      max_[at] = joined.max;
      sum_[at] = joined.sum;
      accumulator().row(row) *= joined.rescale;
    }
  }

 private:
  // Rows without weight are told by their sum, not by an infinity, which -ffast-math may take for anything.
  void merge_row(const AttentionState& other, Index row) {
    const auto at = static_cast<std::size_t>(row);
    if (other.sum_[at] == Scalar(0)) return;
    const bool empty = sum_[at] == Scalar(0);
    const Scalar top = empty ? other.max_[at] : std::max(max_[at], other.max_[at]);
    const Scalar mine = empty ? Scalar(0) : std::exp(max_[at] - top), its = std::exp(other.max_[at] - top);
    max_[at] = top;
    sum_[at] = mine * sum_[at] + its * other.sum_[at];
    accumulator().row(row) = mine * accumulator().row(row) + its * other.accumulator().row(row);
  }

  Index rows_ = 0, value_dim_ = 0;
  std::vector<Scalar> max_, sum_, accumulator_;
};

}  // namespace wushkv

#endif  // WUSHKV_ATTEND_STATE_HPP
