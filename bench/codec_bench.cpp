// SPDX-License-Identifier: Apache-2.0
// The cost of encoding and decoding per vector, by quantizer and bits, head dimension 128, one group. Compare
// rows of one run only.
#include <benchmark/benchmark.h>

#include "wushkv/codec/codec.hpp"
#include "wushkv/quantize/quantize.hpp"
#include "wushkv/transform/hadamard.hpp"

using namespace wushkv;

namespace {

constexpr Index tokens = 256, dim = 128;

void count(benchmark::State& state) {
  state.counters["time/vector"] =
      benchmark::Counter(static_cast<double>(tokens),
                         benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

template <class Q>
void encode(benchmark::State& state, Q quantizer) {
  const Codec codec(Hadamard<float>(dim), quantizer);
  const Batch<float> x = Batch<float>::Random(tokens, dim);
  for (auto _ : state) benchmark::DoNotOptimize(codec.encode(x));
  count(state);
}

template <class Q>
void decode(benchmark::State& state, Q quantizer) {
  const Codec codec(Hadamard<float>(dim), quantizer);
  const auto encoded = codec.encode(Batch<float>::Random(tokens, dim));
  for (auto _ : state) benchmark::DoNotOptimize(codec.decode(encoded));
  count(state);
}

using Half = Eigen::half;

}  // namespace

BENCHMARK_CAPTURE(encode, bf16, PassThrough<float>());
BENCHMARK_CAPTURE(encode, quest2, Quest<float, 2, Half>());
BENCHMARK_CAPTURE(encode, quest4, Quest<float, 4, Half>());
BENCHMARK_CAPTURE(encode, minmax2, Affine<float, 2, Half>::min_max());
BENCHMARK_CAPTURE(encode, percentile2, Affine<float, 2, Half>::percentile(oscar_key_percentile));
BENCHMARK_CAPTURE(encode, lloyd2, LloydMax<float, 2, Half>());
BENCHMARK_CAPTURE(decode, bf16, PassThrough<float>());
BENCHMARK_CAPTURE(decode, quest2, Quest<float, 2, Half>());
BENCHMARK_CAPTURE(decode, minmax2, Affine<float, 2, Half>::min_max());
BENCHMARK_CAPTURE(decode, lloyd2, LloydMax<float, 2, Half>());
