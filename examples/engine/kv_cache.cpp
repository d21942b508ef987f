// SPDX-License-Identifier: Apache-2.0
#include "engine/kv_cache.hpp"

#include <array>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "engine/codec_cache.hpp"
#include "wushkv/core/error.hpp"
#include "wushkv/quantize/affine.hpp"
#include "wushkv/quantize/lloyd_max.hpp"
#include "wushkv/quantize/pass_through.hpp"
#include "wushkv/quantize/quest.hpp"

namespace engine {
namespace {

constexpr std::array<std::pair<std::string_view, QuantizerKind>, 6> quantizer_names = {{
    {"float", QuantizerKind::Float},
    {"bf16", QuantizerKind::BFloat16},
    {"quest", QuantizerKind::Quest},
    {"percentile", QuantizerKind::Percentile},
    {"minmax", QuantizerKind::MinMax},
    {"lloyd", QuantizerKind::LloydMax},
}};

/// What a cache is made for, and how.
struct Order {
  const wushkv::AttentionHeads& heads;
  Index layers;
  const std::vector<wushkv::LayerTransforms>& transforms;
  const CacheSettings& settings;

  template <class Quantizer>
  std::unique_ptr<KvCache> make(const Quantizer& keys, const Quantizer& values) const {
    return make_codec_cache(heads, layers, transforms, settings, keys, values);
  }
};

/// All types of caches are made in this file: Eigen compiles slowly, and the second type costs a tenth of the
/// first.
template <class Params>
std::unique_ptr<KvCache> make_quantized(const Order& order) {
  using Quest = wushkv::Quest<float, Eigen::Dynamic, Params>;
  using Affine = wushkv::Affine<float, Eigen::Dynamic, Params>;
  using LloydMax = wushkv::LloydMax<float, Eigen::Dynamic, Params>;
  const int keys = order.settings.key_bits, values = order.settings.value_bits;
  switch (order.settings.quantizer) {
    case QuantizerKind::Quest:
      return order.make(Quest(keys), Quest(values));
    case QuantizerKind::LloydMax:
      return order.make(LloydMax(keys), LloydMax(values));
    case QuantizerKind::Percentile:
      return order.make(Affine::percentile(wushkv::oscar_key_percentile, keys),
                        Affine::percentile(wushkv::oscar_value_percentile, values));
    default:
      return order.make(Affine::min_max(keys), Affine::min_max(values));
  }
}

}  // namespace

QuantizerKind quantizer_from_string(const std::string& name) {
  std::string names;
  for (const auto& [known, kind] : quantizer_names) {
    if (known == name) return kind;
    names += (names.empty() ? "" : ", ") + std::string(known);
  }
  throw std::invalid_argument("wushkv-lm: quantizer '" + name + "' is unknown, expected one of " + names);
}

void check_transforms(const wushkv::AttentionHeads& heads, Index layers,
                      const std::vector<wushkv::LayerTransforms>& transforms) {
  using wushkv::detail::invalid_argument;
  if (transforms.empty()) return;
  const auto heads_of = [](const std::vector<wushkv::HeadTransform>& side) {
    return static_cast<Index>(side.size());
  };
  for (const wushkv::LayerTransforms& layer : transforms) {
    const bool fits = heads_of(layer.keys) == heads.kv_heads && heads_of(layer.values) == heads.kv_heads &&
                      static_cast<Index>(transforms.size()) == layers &&
                      layer.keys.front().linear.dim() == heads.key_dim &&
                      layer.values.front().linear.dim() == heads.value_dim;
    if (!fits)
      invalid_argument("transforms are of ", transforms.size(), " layers of ", layer.keys.size(),
                       " KV heads of ", layer.keys.empty() ? 0 : layer.keys.front().linear.dim(), "/",
                       layer.values.empty() ? 0 : layer.values.front().linear.dim(),
                       ", expected the model's ", layers, " layers of ", heads.kv_heads, " KV heads of ",
                       heads.key_dim, "/", heads.value_dim);
  }
}

std::unique_ptr<KvCache> make_cache(const wushkv::AttentionHeads& heads, Index layers,
                                    const std::vector<wushkv::LayerTransforms>& transforms,
                                    const CacheSettings& settings) {
  check_transforms(heads, layers, transforms);
  constexpr Index most = Index{1} << 31;
  if (settings.sequences < 1 || settings.sequences > most || settings.capacity < 1 ||
      settings.capacity > most)
    wushkv::detail::invalid_argument("cache of ", settings.sequences, " sequences of ", settings.capacity,
                                     " tokens asked for, expected 1 to ", most, " of each");
  const Order order{heads, layers, transforms, settings};
  if (settings.quantizer == QuantizerKind::Float) {
    const wushkv::PassThrough<float, float> exact;
    return order.make(exact, exact);
  }
  if (settings.quantizer == QuantizerKind::BFloat16) {
    const wushkv::PassThrough<float> rounded;
    return order.make(rounded, rounded);
  }
  return settings.wide_params ? make_quantized<float>(order) : make_quantized<Eigen::half>(order);
}

}  // namespace engine
