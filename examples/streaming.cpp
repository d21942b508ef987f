// SPDX-License-Identifier: Apache-2.0
//
// An engine's life with the cache: prefill, decode token by token, fork for speculative drafts, roll back,
// and save a prefix. Prints the memory it takes and the error against attention over the exact keys and
// values.
#include <algorithm>
#include <cstdio>
#include <sstream>
#include <vector>

#include "wushkv/wushkv.hpp"

#ifndef WUSHKV_EXAMPLE_DATA  // set by the build
#define WUSHKV_EXAMPLE_DATA "examples/data"
#endif

using namespace wushkv;

namespace {

const AttentionHeads heads{.query_heads = 9, .kv_heads = 3, .key_dim = 64, .value_dim = 64};

using Key = Codec<Dense<float>, Quest<float, 2, Eigen::half>>;
using Value = Codec<Dense<float>, Affine<float, 2, Eigen::half>>;

}  // namespace

int main() {
  // Real queries, keys and values of a layer of SmolLM2-135M, heads side by side.
  const SafetensorsFile file(WUSHKV_EXAMPLE_DATA "/smollm2-activations.safetensors");
  const auto read = [&](const char* name) { return file.token_matrix<float>(name); };
  LayerStatistics statistics(heads);
  statistics.set_output_projection(file.matrix<float>("12.w_o", {9, 64, 576}));
  statistics.add(read("12.calibration.q"), read("12.calibration.k"), read("12.calibration.v"));
  const LayerTransforms transforms = build_transforms(statistics);
  std::vector<Key> keys;
  std::vector<Value> values;
  for (std::size_t h = 0; h < 3; ++h) {
    keys.emplace_back(transforms.keys[h].linear.blocks()[0].cast<float>(), Quest<float, 2, Eigen::half>());
    values.emplace_back(transforms.values[h].linear.blocks()[0].cast<float>(),
                        Affine<float, 2, Eigen::half>::percentile(oscar_value_percentile));
  }

  // One pool for all layers; here there is one layer. Small windows, so that most of this short text is
  // quantized.
  const CacheOptions options{.page_tokens = 16, .sink = 8, .recent = 32, .flush = 8};
  PagePool pool(PagedCache<Key, Value>::page_bytes(keys, values, options), 64);
  PagedCache<Key, Value> cache(pool, keys, values, options);
  const Attention<Key, Value> attend(heads, keys, values);
  Attention<Key, Value>::Workspace workspace;

  const Batch<float> q = read("12.evaluation.q"), k = read("12.evaluation.k"), v = read("12.evaluation.v");
  const Batch<double> exact = attention(heads, q, k, v);  // the reference, over exact keys and values
  Batch<float> output(q.rows(), heads.query_heads * heads.value_dim);

  // Prefill the prompt in chunks: exact attention among a chunk's tokens, the cache for what came before.
  const SequenceId sequence = cache.create();
  const Index prompt = 128, chunk = 64;
  for (Index at = 0; at < prompt; at += chunk) {
    const Index count = std::min(chunk, prompt - at);
    const auto rows = [&](const Batch<float>& x) { return x.middleRows(at, count); };
    attend.prefill(cache.view(sequence), rows(q), rows(k), rows(v), output.middleRows(at, count), workspace);
    cache.append(sequence, rows(k), rows(v));
  }

  // Keep the prompt's state for another conversation.
  std::stringstream saved;
  save_sequence(cache, sequence, saved);

  // Decode: append a token's key and value, then attend with its query.
  Vector<float> out(output.cols());
  for (Index t = prompt; t < q.rows(); ++t) {
    cache.append(sequence, k.row(t), v.row(t));
    attend.decode(cache.view(sequence), q.row(t).transpose(), out, workspace);
    output.row(t) = out.transpose();
  }

  // A draft goes its own way from here; its pages are shared until it writes. Half of it turns out wrong and
  // is rolled back.
  const SequenceId draft = cache.fork(sequence);
  cache.append(draft, k.topRows(8), v.topRows(8));
  cache.truncate(draft, cache.length(draft) - 4);
  const SequenceId restored = load_sequence(cache, saved);

  const PagePool::Statistics pages = pool.statistics();
  std::printf("sequence   %3td tokens: %td sink, %td quantized, %td recent\n", cache.length(sequence),
              cache.sink(sequence).tokens, cache.quantized(sequence), cache.recent(sequence).tokens);
  std::printf("draft      %3td tokens after fork, 8 more and a rollback of 4\n", cache.length(draft));
  std::printf("restored   %3td tokens from a snapshot of %zu bytes\n", cache.length(restored),
              saved.str().size());
  std::printf("pages      %zu of %zu in use, %zu shared, %zu bytes each\n", pages.used, pages.pages,
              pages.shared, pages.used_bytes / pages.used);
  std::printf("quantized  %.0f bytes a token, %.3f of BF16\n", cache.bytes_per_token(), cache.compression());
  for (const SequenceId done : {sequence, draft, restored})
    cache.release(done);  // their pages go back to the pool

  const Index decoded = q.rows() - prompt;
  const double error = squared_error(exact.bottomRows(decoded), output.bottomRows(decoded)).relative();
  std::printf("error      %.4f of attention's output, squared, over the %td decoded tokens\n", error,
              decoded);
  return error < 0.2 ? 0 : 1;
}
