// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_ROUNDING_HPP
#define WUSHKV_EXAMPLES_ENGINE_ROUNDING_HPP

#include <span>
#include <type_traits>
#include <utility>
#include <variant>

#include "wushkv/quantize/step_search.hpp"

namespace engine {

/// One of the library's roundings, chosen at run time: an engine that has settled for one uses that itself.
class AnyRounding {
 public:
  using Choice = std::variant<wushkv::Nearest, wushkv::StepSearch<wushkv::SensitiveNearest<float>>,
                              wushkv::Feedback<float>, wushkv::StepSearch<wushkv::Feedback<float>>>;

  AnyRounding() = default;
  explicit AnyRounding(Choice choice) : choice_(std::move(choice)) {}

  template <wushkv::Quantizer Q>
  void encode(const Q& quantizer, std::span<const float> y, wushkv::Index group_size,
              std::span<wushkv::code_t<Q>> codes, std::span<typename Q::Params> params) const {
    encode_batch(quantizer, y, 1, group_size, codes, params);
  }

  template <wushkv::Quantizer Q>
  void encode_batch(const Q& quantizer, std::span<const float> y, wushkv::Index tokens,
                    wushkv::Index group_size, std::span<wushkv::code_t<Q>> codes,
                    std::span<typename Q::Params> params) const {
    std::visit(
        [&](const auto& rounding) {
          using R = std::remove_cvref_t<decltype(rounding)>;
          if constexpr (wushkv::BatchRounding<R, Q>) {
            rounding.encode_batch(quantizer, y, tokens, group_size, codes, params);
          } else {
            // Nearest takes a token at a time, and so does a quantizer that has no step to search.
            const std::size_t count = static_cast<std::size_t>(tokens), dim = y.size() / count,
                              groups = params.size() / count;
            for (std::size_t t = 0; t < count; ++t)
              wushkv::Nearest().encode(quantizer, y.subspan(t * dim, dim), group_size,
                                       codes.subspan(t * dim, dim), params.subspan(t * groups, groups));
          }
        },
        choice_);
  }

 private:
  Choice choice_;
};

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_ROUNDING_HPP
