// SPDX-License-Identifier: Apache-2.0
//
// One long sequence split over threads: each attends to a part of the tokens, and the partial states are
// merged. The library starts no threads itself, so an engine decides how to split; states could as well come
// from other machines.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "wushkv/wushkv.hpp"

using namespace wushkv;

int main() {
  const AttentionHeads heads{.query_heads = 8, .kv_heads = 2, .key_dim = 128, .value_dim = 128};
  using Key = Codec<Hadamard<float>, Quest<float, 2, Eigen::half>>;
  const std::vector<Key> codecs(2, Key(Hadamard<float>(128), Quest<float, 2, Eigen::half>()));
  PagePool pool(PagedCache<Key, Key>::page_bytes(codecs, codecs), 64);
  PagedCache<Key, Key> cache(pool, codecs, codecs);
  const Attention<Key, Key> attention(heads, codecs, codecs);  // const calls are safe together

  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  const auto random = [&](Index rows, Index cols) {
    return Batch<float>(
        Batch<float>::NullaryExpr(rows, cols, [&](Index, Index) { return normal(generator); }));
  };
  const SequenceId sequence = cache.create();
  const Index tokens = 4096;
  const Batch<float> k = random(tokens, 2 * 128), v = random(tokens, 2 * 128);
  cache.append(sequence, k, v);
  const Batch<float> q = 3 * random(1, 8 * 128);  // logits about as spread as a model's
  const SequenceView view = cache.view(sequence);

  // Reads are safe together; each thread has a state and a workspace of its own.
  const auto attend = [&](Index parts) {
    std::vector<Attention<Key, Key>::State> states(static_cast<std::size_t>(parts));
    std::vector<std::jthread> threads;  // an engine keeps its threads, states and workspaces
    for (Index part = 0; part < parts; ++part)
      threads.emplace_back([&, part] {
        Attention<Key, Key>::Workspace workspace;
        auto& state = states[static_cast<std::size_t>(part)];
        attention.reset(state, 1);
        attention.accumulate(view, q, tokens - 1, tokens * part / parts, tokens * (part + 1) / parts, state,
                             workspace);
      });
    threads.clear();  // joins
    for (std::size_t part = 1; part < states.size(); ++part) states[0].merge(states[part]);
    Batch<float> out(1, 8 * 128);
    Attention<Key, Key>::Workspace workspace;
    attention.finish(states[0], out, workspace);
    return out;
  };

  const Batch<float> whole = attend(1);
  double largest = 0;
  for (const Index parts : {1, 2, 4, 8}) {
    const auto start = std::chrono::steady_clock::now();
    const Batch<float> out = attend(parts);
    const double ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    const double difference = (out - whole).cwiseAbs().maxCoeff() / whole.cwiseAbs().maxCoeff();
    std::printf("%td parts: %6.1f ms, differs from one part by %.1e of the largest output\n", parts, ms,
                difference);
    largest = std::max(largest, difference);
  }
  return largest < 2e-6 ? 0 : 1;
}
