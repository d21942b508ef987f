// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_STEP_SEARCH_HPP
#define WUSHKV_QUANTIZE_STEP_SEARCH_HPP

#include <array>
#include <span>
#include <vector>

#include "wushkv/quantize/feedback.hpp"

namespace wushkv {

/// Factors to try: of a group's range for affine levels, of QuEST's step (design.md, *Quantizers*).
inline constexpr std::array<double, 5> affine_range_factors = {.55, .65, .75, .85, 1};
inline constexpr std::array<double, 5> quest_step_factors = {.8, .95, 1.1, 1.25, 1.45};

/// Tries several step sizes a group with the rounding `R` (`Feedback`, `SensitiveNearest`, `BestOf`) and
/// keeps the one with the least `eᵀ A e`, group after group (design.md, *Feedback rounding*). The quantizer
/// must be a `ScalableQuantizer`.
template <class R>
class StepSearch : public SensitiveRounding<StepSearch<R>, typename R::Scalar> {
  using Base = SensitiveRounding<StepSearch, typename R::Scalar>;

 public:
  using typename Base::Scalar;

  /// Throws `std::invalid_argument` for no factor, more than 16, or one that is not positive and below 100.
  StepSearch(const R& rounding, std::span<const double> factors)
      : Base(rounding.sensitivity()), factors_(factors.begin(), factors.end()), trials_(rounding.trials()) {
    if (factors_.empty() || factors_.size() > 16)
      detail::invalid_argument("StepSearch: factors has ", factors_.size(), " entries, expected 1 to 16");
    for (const double factor : factors_)
      if (!(factor > 0 && factor < 100))
        detail::invalid_argument("StepSearch: a factor is ", factor, ", expected more than 0 and below 100");
  }

  const std::vector<double>& factors() const { return factors_; }
  detail::RoundingTrials trials() const { return {factors_, trials_.feedback, trials_.nearest}; }

  template <ScalableQuantizer Q>
  requires std::same_as<typename Q::Scalar, Scalar>
  void encode(const Q& quantizer, std::span<const Scalar> y, Index group_size, std::span<code_t<Q>> codes,
              std::span<typename Q::Params> params) const {
    Base::encode(quantizer, y, group_size, codes, params);
  }
  template <ScalableQuantizer Q>
  requires std::same_as<typename Q::Scalar, Scalar>
  void encode_batch(const Q& quantizer, std::span<const Scalar> y, Index tokens, Index group_size,
                    std::span<code_t<Q>> codes, std::span<typename Q::Params> params) const {
    Base::encode_batch(quantizer, y, tokens, group_size, codes, params);
  }

 private:
  std::vector<double> factors_;
  detail::RoundingTrials trials_;  // of R, without its factors
};

}  // namespace wushkv

#endif  // WUSHKV_QUANTIZE_STEP_SEARCH_HPP
