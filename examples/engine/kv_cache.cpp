// SPDX-License-Identifier: Apache-2.0
#include "engine/kv_cache.hpp"

#include <array>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "engine/codec_cache.hpp"
#include "wushkv/core/error.hpp"
#include "wushkv/quantize/pass_through.hpp"

namespace engine {
namespace {

constexpr std::array<std::pair<std::string_view, QuantizerKind>, 7> quantizer_names = {{
    {"float", QuantizerKind::Float},
    {"bf16", QuantizerKind::BFloat16},
    {"quest", QuantizerKind::Quest},
    {"percentile", QuantizerKind::Percentile},
    {"minmax", QuantizerKind::MinMax},
    {"lloyd", QuantizerKind::LloydMax},
    {"compact", QuantizerKind::Compact},
}};

/// What a cache is made for, and how.
struct Order {
  const wushkv::AttentionHeads& heads;
  Index layers;
  const std::vector<wushkv::LayerTransforms>& transforms;
  const CacheSettings& settings;

  /// `quantizer_of(settings)` makes the quantizer of a head's keys or values.
  template <class QuantizerOf>
  std::unique_ptr<KvCache> make(QuantizerOf quantizer_of) const {
    return make_codec_cache(heads, layers, transforms, settings, quantizer_of);
  }
};

/// All types of caches are made in this file: Eigen compiles slowly, and the second type costs a tenth of the
/// first.
std::unique_ptr<KvCache> make_quantized(const Order& order) {
  const auto make = [&](auto quantizer_of) { return order.make(quantizer_of); };
  const int param_bits = order.settings.param_bits;
  switch (order.settings.quantizer) {
    case QuantizerKind::Compact:
      return make([](const QuantizerSettings& s) { return compact_quantizer(s); });
    case QuantizerKind::Percentile:
    case QuantizerKind::MinMax:
      if (param_bits == 8)
        wushkv::detail::invalid_argument(
            "cache: scales and zeros of 8 bits asked for, expected 16 or 32 bits, or the quantizer compact");
      if (param_bits == 32)
        return make([](const QuantizerSettings& s) { return affine_quantizer<float>(s); });
      return make([](const QuantizerSettings& s) { return affine_quantizer<Eigen::half>(s); });
    case QuantizerKind::LloydMax:
      if (param_bits == 32) return make([](const QuantizerSettings& s) { return lloyd_quantizer<float>(s); });
      if (param_bits == 8)
        return make([](const QuantizerSettings& s) { return lloyd_quantizer<wushkv::Log8>(s); });
      return make([](const QuantizerSettings& s) { return lloyd_quantizer<Eigen::half>(s); });
    default:
      if (param_bits == 32) return make([](const QuantizerSettings& s) { return quest_quantizer<float>(s); });
      if (param_bits == 8)
        return make([](const QuantizerSettings& s) { return quest_quantizer<wushkv::Log8>(s); });
      return make([](const QuantizerSettings& s) { return quest_quantizer<Eigen::half>(s); });
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

std::string tuned_name(const QuantizerSettings& settings) {
  std::string name;
  for (const auto& [known, kind] : quantizer_names)
    if (kind == settings.kind) name = known;
  if (settings.rounding.feedback) name += "+feedback";
  if (settings.rounding.search) name += "+search";
  return name + ":" + std::to_string(settings.bits);
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
  if (!settings.layers.empty() && static_cast<Index>(settings.layers.size()) != layers)
    wushkv::detail::invalid_argument("cache: settings of ", settings.layers.size(),
                                     " layers came, expected none or the model's ", layers);
  const Order order{heads, layers, transforms, settings};
  if (settings.quantizer == QuantizerKind::Float) {
    return order.make([](const QuantizerSettings&) { return wushkv::PassThrough<float, float>(); });
  }
  if (settings.quantizer == QuantizerKind::BFloat16) {
    return order.make([](const QuantizerSettings&) { return wushkv::PassThrough<float>(); });
  }
  return make_quantized(order);
}

}  // namespace engine
