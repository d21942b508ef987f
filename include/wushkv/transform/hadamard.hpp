// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TRANSFORM_HADAMARD_HPP
#define WUSHKV_TRANSFORM_HADAMARD_HPP

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "wushkv/transform/base.hpp"

namespace wushkv {

/// The order in which a Hadamard transform's rows stand.
enum class HadamardOrder {
  Natural,  ///< Sylvester's, `H_2n = [H_n H_n; H_n -H_n]`
  Walsh     ///< by number of sign changes, for powers of two
};

namespace detail {

constexpr bool is_prime(Index n) {
  if (n < 2) return false;
  for (Index f = 2; f * f <= n; ++f)
    if (n % f == 0) return false;
  return true;
}

/// The largest order of a transform, far past any head, and of a Paley factor, which is applied as a dense
/// matrix.
inline constexpr Index max_hadamard_order = Index{1} << 16, max_paley_order = 256;

/// The low `bits` bits of `i` in reverse order.
constexpr Index reversed_bits(Index i, int bits) {
  Index reversed = 0;
  for (int b = 0; b < bits; ++b) reversed |= ((i >> b) & 1) << (bits - 1 - b);
  return reversed;
}

constexpr bool is_paley_one(Index order) { return order % 4 == 0 && is_prime(order - 1); }
constexpr bool is_paley_two(Index order) {
  return order % 4 == 0 && (order / 2 - 1) % 4 == 1 && is_prime(order / 2 - 1);
}

/// The order of the Paley matrix in `order = 2^k * base`: 1 for powers of two, 0 if no construction is known
/// here.
constexpr Index hadamard_base(Index order) {
  if (order < 1 || order > max_hadamard_order) return 0;
  if (std::has_single_bit(static_cast<std::uint64_t>(order))) return 1;
  for (Index base = order >> std::countr_zero(static_cast<std::uint64_t>(order));
       base <= std::min(order, max_paley_order); base *= 2)
    if (is_paley_one(base) || is_paley_two(base)) return base;
  return 0;
}

/// Quadratic character modulo the odd prime `q`: 0 for 0, 1 for squares, -1 otherwise.
inline std::vector<int> quadratic_character(Index q) {
  std::vector<int> chi(static_cast<std::size_t>(q), -1);
  chi[0] = 0;
  for (Index x = 1; x < q; ++x) chi[static_cast<std::size_t>(x * x % q)] = 1;
  return chi;
}

/// Paley's first construction, order `q + 1`, `q` a prime and 3 modulo 4: `I + S`, `S` skew.
inline SquareMatrix<double> paley_one(Index order) {
  const Index q = order - 1;
  const std::vector<int> chi = quadratic_character(q);
  SquareMatrix<double> h = SquareMatrix<double>::Identity(order, order);
  h.row(0).setOnes();
  h.col(0).tail(q).setConstant(-1);
  for (Index i = 0; i < q; ++i)
    for (Index j = 0; j < q; ++j) h(i + 1, j + 1) += chi[static_cast<std::size_t>((i - j + q) % q)];
  return h;
}

/// Paley's second construction, order `2 (q + 1)`, `q` a prime and 1 modulo 4: each entry of the symmetric
/// conference matrix becomes a 2 x 2 block.
inline SquareMatrix<double> paley_two(Index order) {
  const Index q = order / 2 - 1;
  const std::vector<int> chi = quadratic_character(q);
  const Eigen::Matrix2d zero{{1, -1}, {-1, -1}}, one{{1, 1}, {1, -1}};
  SquareMatrix<double> h(order, order);
  for (Index i = 0; i <= q; ++i)
    for (Index j = 0; j <= q; ++j) {
      const int c = i == j ? 0 : i == 0 || j == 0 ? 1 : chi[static_cast<std::size_t>((i - j + q) % q)];
      h.block<2, 2>(2 * i, 2 * j) = c == 0 ? zero : Eigen::Matrix2d(c * one);
    }
  return h;
}

[[noreturn]] inline void unsupported_hadamard(Index order) {
  Index below = 0, above = 0;  // 0: none
  if (order < 1) {
    above = 1;
  } else if (order > max_hadamard_order) {
    below = max_hadamard_order;
  } else {
    for (below = order - 1; hadamard_base(below) == 0;) --below;
    for (above = order + 1; above <= max_hadamard_order && hadamard_base(above) == 0;) ++above;
    if (above > max_hadamard_order) above = 0;
  }
  invalid_argument("Hadamard: order ", order, " is not supported, the nearest are ",
                   below > 0 ? concat(below) : "", below > 0 && above > 0 ? " and " : "",
                   above > 0 ? concat(above) : "",
                   " (powers of two, and Paley orders such as 12, 20, 28, 36, 44 times them)");
}

}  // namespace detail

/// Whether `Hadamard` exists at this order.
constexpr bool hadamard_supported(Index order) { return detail::hadamard_base(order) != 0; }

/// The orthonormal Hadamard transform, `H Hᵀ = I`: Sylvester's for powers of two; for `2^k m`, the Kronecker
/// product of Sylvester's of order `2^k` and Paley's of order `m` (12, 20, 28, 36, 44, …), which covers the
/// head dimensions 80, 96, 112, 192. Applied by butterflies, `d log2 d` additions (`d (m + log2(d / m))` for
/// the others).
template <class ScalarType, int Dim = Dynamic>
class Hadamard : public OrthogonalBase<Hadamard<ScalarType, Dim>, ScalarType, Dim> {
  using Base = TransformBase<Hadamard, ScalarType, Dim>;

 public:
  using Scalar = ScalarType;

  /// Throws `std::invalid_argument` for an order with no construction (the message names the nearest that
  /// have one) and for Walsh order where `dim` is no power of two.
  explicit Hadamard(Index dim = Dim, HadamardOrder order = HadamardOrder::Natural)
      : dim_(dim), order_(order) {
    if (Dim != Dynamic && dim != Dim)
      detail::invalid_argument("Hadamard: dim is ", dim, ", expected the fixed dimension ", Dim);
    const Index base = detail::hadamard_base(dim);
    if (base == 0) detail::unsupported_hadamard(dim);
    if (base > 1)
      base_ = (detail::is_paley_one(base) ? detail::paley_one(base) : detail::paley_two(base))
                  .template cast<Scalar>();
    if (order == HadamardOrder::Walsh) {
      if (base != 1)
        detail::invalid_argument("Hadamard: Walsh order at dimension ", dim, ", expected a power of two");
      natural_row_.resize(static_cast<std::size_t>(dim));
      const int bits = std::countr_zero(static_cast<std::uint64_t>(dim));
      for (Index i = 0; i < dim; ++i) {  // sequency i stands at the bit-reversed Gray code of i
        const Index gray = i ^ (i >> 1);
        natural_row_[static_cast<std::size_t>(i)] = detail::reversed_bits(gray, bits);
      }
    }
  }

  Index dim() const { return dim_; }
  HadamardOrder order() const { return order_; }

  void forward_rows(const typename Base::In& x, typename Base::Out y) const { apply<false>(x, y); }
  void inverse_rows(const typename Base::In& y, typename Base::Out x) const { apply<true>(y, x); }

 private:
  template <bool Transposed>
  void apply(const typename Base::In& x, typename Base::Out& y) const {
    const Scalar norm = static_cast<Scalar>(1 / std::sqrt(static_cast<double>(dim_)));
    const Index base = base_.size() == 0 ? 1 : base_.rows();
    for (Index t = 0; t < x.rows(); ++t) {
      const Scalar* const in = x.row(t).data();
      Scalar* const out = y.row(t).data();
      if (order_ == HadamardOrder::Walsh) {
        // The Walsh matrix is symmetric and a row permutation P of the symmetric H: P H x = H Pᵀ x, in place.
        for (Index i = 0; i < dim_; ++i) out[natural_row_[static_cast<std::size_t>(i)]] = norm * in[i];
      } else if (base == 1) {
        for (Index i = 0; i < dim_; ++i) out[i] = norm * in[i];
      } else {
        const Eigen::Map<const Batch<Scalar>> blocks(in, dim_ / base, base);
        Eigen::Map<Batch<Scalar>> result(out, dim_ / base, base);
        if constexpr (Transposed)
          result.noalias() = norm * blocks.lazyProduct(base_);
        else
          result.noalias() = norm * blocks.lazyProduct(base_.transpose());
      }
      for (Index half = base; half < dim_; half *= 2) butterflies(out, half);
    }
  }

  void butterflies(Scalar* const row, const Index half) const {
    for (Index start = 0; start < dim_; start += 2 * half)
      for (Index i = start; i < start + half; ++i) {
        const Scalar a = row[i], b = row[i + half];
        row[i] = a + b;
        row[i + half] = a - b;
      }
  }

  Index dim_;
  HadamardOrder order_;
  SquareMatrix<Scalar> base_;       // Paley's factor, entries ±1; empty for powers of two
  std::vector<Index> natural_row_;  // Walsh order: the natural row of each sequency
};

}  // namespace wushkv

#endif  // WUSHKV_TRANSFORM_HADAMARD_HPP
