// SPDX-License-Identifier: Apache-2.0
#include "engine/evaluation.hpp"

#include <algorithm>
#include <cmath>
#include <memory>

#include "engine/sampler.hpp"
#include "wushkv/core/error.hpp"

namespace engine {
namespace {

std::span<const float> row_of(const Batch<float>& batch, Index row) {
  return {batch.row(row).data(), static_cast<std::size_t>(batch.cols())};
}

}  // namespace

double Likelihood::perplexity() const { return std::exp(all / static_cast<double>(predictions)); }
double Likelihood::late_perplexity() const { return std::exp(late / static_cast<double>(late_predictions)); }

Likelihood& Likelihood::operator+=(const Likelihood& other) {
  all += other.all;
  late += other.late;
  predictions += other.predictions;
  late_predictions += other.late_predictions;
  return *this;
}

Likelihood likelihood(Transformer& transformer, std::span<const Token> text, const CachePath& path,
                      Index batch, const std::function<void(Index tokens)>& progress) {
  constexpr Index logits_rows = 128;  // all of a text's logits would be larger than the model
  const auto length = static_cast<Index>(text.size());
  if (batch == 0) batch = length;
  path.cache->truncate(0, 0);
  Likelihood sum;
  for (Index begin = 0; begin < length; begin += batch) {
    const Index count = std::min(batch, length - begin);
    const KvCache::Part part{0, count};
    const Batch<float>& hidden = transformer.forward(
        text.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count)), {&part, 1}, path);
    const Index predictors = std::min(count, length - 1 - begin);
    for (Index row = 0; row < predictors; row += logits_rows) {
      const Index rows = std::min(logits_rows, predictors - row);
      const Batch<float> logits = transformer.logits(hidden.middleRows(row, rows));
      std::vector<double> loss(static_cast<std::size_t>(rows));
      transformer.threads().for_each(rows, [&](std::int64_t i, int) {
        loss[static_cast<std::size_t>(i)] =
            -log_probability(row_of(logits, i), text[static_cast<std::size_t>(begin + row + i + 1)]);
      });
      for (Index i = 0; i < rows; ++i) {
        const bool late = begin + row + i >= length / 2;
        sum.all += loss[static_cast<std::size_t>(i)];
        sum.predictions += 1;
        sum.late += late ? loss[static_cast<std::size_t>(i)] : 0;
        sum.late_predictions += late ? 1 : 0;
      }
    }
    if (progress) progress(count);
  }
  return sum;
}

void module_errors(Transformer& transformer, std::span<const Token> text, KvCache& exact,
                   std::span<Probe> probes, Index batch) {
  const auto length = static_cast<Index>(text.size());
  if (batch == 0) batch = length;
  exact.truncate(0, 0);
  for (Probe& probe : probes) probe.path.cache->truncate(0, 0);
  for (Index begin = 0; begin < length; begin += batch) {
    const KvCache::Part part{0, std::min(batch, length - begin)};
    transformer.forward(text.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(part.tokens)),
                        {&part, 1}, {&exact, nullptr}, {}, probes);
  }
}

std::vector<double> relative_errors(const Probe& probe) {
  std::vector<double> errors;
  for (const wushkv::SquaredError& error : probe.errors) errors.push_back(error.relative());
  return errors;
}

std::vector<std::vector<Token>> cut_texts(std::span<const Token> tokens, std::span<const Token> prefix,
                                          Index length, Index count) {
  const Index step = length - static_cast<Index>(prefix.size());
  const Index wanted = std::max<Index>(count, 1);
  if (step < 1 || static_cast<Index>(tokens.size()) / step < wanted)
    wushkv::detail::invalid_argument("the text has ", tokens.size(), " tokens, expected at least ",
                                     wanted * std::max<Index>(step, 1), " for ", wanted, " x ", length);
  if (count == 0) count = static_cast<Index>(tokens.size()) / step;
  std::vector<std::vector<Token>> texts;
  for (Index i = 0; i < count; ++i) {
    texts.emplace_back(prefix.begin(), prefix.end());
    texts.back().insert(texts.back().end(), tokens.begin() + i * step, tokens.begin() + (i + 1) * step);
  }
  return texts;
}

std::vector<std::vector<Token>> own_samples(Transformer& transformer, Token first, Index sequences,
                                            Index length, std::uint64_t seed,
                                            const std::function<void(Index step)>& progress) {
  const ModelConfig& config = transformer.model().config;
  CacheSettings settings;
  settings.sequences = sequences;
  settings.capacity = length;
  const std::unique_ptr<KvCache> cache = make_cache(config.heads, config.layers, {}, settings);
  std::vector<std::vector<Token>> samples(static_cast<std::size_t>(sequences), {first});
  std::vector<Sampler> samplers;
  std::vector<KvCache::Part> parts;
  for (Index s = 0; s < sequences; ++s) {
    // Far apart, so that the samples of one seed are not those of the next, shifted.
    samplers.emplace_back(SamplerOptions{
        .temperature = 1, .min_p = 0.02, .seed = seed * 1000003 + static_cast<std::uint64_t>(s)});
    parts.push_back({s, 1});
  }
  std::vector<Token> last(samples.size(), first);
  for (Index step = 1; step < length; ++step) {
    const Batch<float> logits = transformer.logits(transformer.forward(last, parts, {cache.get(), nullptr}));
    for (std::size_t s = 0; s < samples.size(); ++s) {
      last[s] = samplers[s].sample(row_of(logits, static_cast<Index>(s)));
      samples[s].push_back(last[s]);
    }
    if (progress) progress(1);
  }
  return samples;
}

}  // namespace engine
