// SPDX-License-Identifier: Apache-2.0
// What rounding costs a prefill: 1,024 tokens appended to an empty sequence and attended to, SmolLM2's shape
// (9 query and 3 KV heads of 64), 2 bits, every token quantized. `append` leaves attention out. Compare rows
// of one run only.
#include <benchmark/benchmark.h>

#include "wushkv/attend/attend.hpp"
#include "wushkv/cache/paged_cache.hpp"
#include "wushkv/quantize/affine.hpp"
#include "wushkv/quantize/step_search.hpp"
#include "wushkv/transform/centered.hpp"
#include "wushkv/transform/dense.hpp"

using namespace wushkv;

namespace {

constexpr AttentionHeads heads{.query_heads = 9, .kv_heads = 3, .key_dim = 64, .value_dim = 64};
constexpr Index tokens = 1024;

using Quantizer2 = Affine<float, Dynamic, Eigen::half>;
template <class R>
using HeadCodecOf = Codec<Centered<Dense<float>>, Quantizer2, R>;

template <class R>
std::vector<HeadCodecOf<R>> codecs(const R& rounding) {
  const SquareMatrix<double> t =
      SquareMatrix<double>::Identity(64, 64) + SquareMatrix<double>::Random(64, 64) / 16;
  const HeadCodecOf<R> codec(Centered(Dense<float>(t), Vector<float>(Vector<float>::Random(64))),
                             Quantizer2::min_max(2), 0, rounding);
  return {3, codec};
}

Feedback<float> feedback() {
  const SquareMatrix<double> b = SquareMatrix<double>::Random(64, 64);
  return Feedback<float>(
      Sensitivity<float>(SquareMatrix<double>(b * b.transpose() + SquareMatrix<double>::Identity(64, 64))));
}

template <class R>
void prefill(benchmark::State& state, const R& rounding, bool attend) {
  using C = HeadCodecOf<R>;
  const std::vector<C> keys = codecs(rounding), values = codecs(rounding);
  const CacheOptions options{.sink = 0, .recent = 0, .flush = 1};
  PagePool pool(PagedCache<C, C>::page_bytes(keys, values, options), tokens / options.page_tokens);
  PagedCache<C, C> cache(pool, keys, values, options);
  const Attention<C, C> attention(heads, keys, values);
  typename Attention<C, C>::Workspace workspace;
  const Batch<float> q = Batch<float>::Random(tokens, heads.query_heads * heads.key_dim),
                     k = Batch<float>::Random(tokens, heads.kv_heads * heads.key_dim),
                     v = Batch<float>::Random(tokens, heads.kv_heads * heads.value_dim);
  Batch<float> out(tokens, heads.query_heads * heads.value_dim);
  const SequenceId id = cache.create();
  for (auto _ : state) {
    cache.truncate(id, 0);
    cache.append(id, k, v);
    if (attend) attention.prefill(cache.view(id), q, out, workspace);
    benchmark::DoNotOptimize(out.data());
    benchmark::ClobberMemory();
  }
}

void nearest(benchmark::State& state, bool attend) { prefill(state, Nearest(), attend); }
void feedback_only(benchmark::State& state, bool attend) { prefill(state, feedback(), attend); }
void feedback_search(benchmark::State& state, bool attend) {
  prefill(state, StepSearch(feedback(), affine_range_factors), attend);
}

}  // namespace

BENCHMARK_CAPTURE(nearest, prefill, true);
BENCHMARK_CAPTURE(feedback_only, prefill, true);
BENCHMARK_CAPTURE(feedback_search, prefill, true);
BENCHMARK_CAPTURE(nearest, append, false);
BENCHMARK_CAPTURE(feedback_only, append, false);
BENCHMARK_CAPTURE(feedback_search, append, false);
