// SPDX-License-Identifier: Apache-2.0
// The cost of a transform per vector, for one token and for a batch. Compare rows of one run only.
#include <benchmark/benchmark.h>

#include "wushkv/transform/dense.hpp"
#include "wushkv/transform/hadamard.hpp"
#include "wushkv/transform/kronecker.hpp"

using namespace wushkv;

namespace {

template <class T>
void run(benchmark::State& state, const T& transform) {
  const Index tokens = state.range(0), dim = transform.dim();
  const Batch<float> x = Batch<float>::Random(tokens, dim);
  Batch<float> y(tokens, dim);
  for (auto _ : state) {
    transform.forward_to(x, y);
    benchmark::DoNotOptimize(y.data());
    benchmark::ClobberMemory();
  }
  state.counters["time/vector"] =
      benchmark::Counter(static_cast<double>(tokens),
                         benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

template <int Dim>
void hadamard(benchmark::State& state) {
  run(state, Hadamard<float>(Dim));
}
template <int Dim>
void dense(benchmark::State& state) {
  run(state, Dense<float>(to_matrix(Hadamard<double>(Dim))));
}
template <int A, int B>
void kronecker(benchmark::State& state) {
  run(state, Kronecker<float>(Dense<float>(to_matrix(Hadamard<double>(A))),
                              Dense<float>(to_matrix(Hadamard<double>(B)))));
}

}  // namespace

BENCHMARK(hadamard<64>)->Arg(1)->Arg(256);
BENCHMARK(dense<64>)->Arg(1)->Arg(256);
BENCHMARK(kronecker<8, 8>)->Arg(1)->Arg(256);
BENCHMARK(hadamard<96>)->Arg(1)->Arg(256);
BENCHMARK(hadamard<128>)->Arg(1)->Arg(256);
BENCHMARK(dense<128>)->Arg(1)->Arg(256);
BENCHMARK(kronecker<8, 16>)->Arg(1)->Arg(256);
BENCHMARK(hadamard<256>)->Arg(1)->Arg(256);
BENCHMARK(dense<256>)->Arg(1)->Arg(256);
