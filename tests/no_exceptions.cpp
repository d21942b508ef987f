// SPDX-License-Identifier: Apache-2.0
// Compiled with -fno-exceptions -fno-rtti: a failed check calls the handler, with the sentence that would be
// thrown.
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string_view>

#include "wushkv/wushkv.hpp"

static_assert(WUSHKV_HAS_EXCEPTIONS == 0);

namespace {

void expect_hadamard(const char* message) {
  const bool right =
      std::string_view(message).find("Hadamard: order 52 is not supported") != std::string_view::npos;
  std::fprintf(stderr, "%s\n", message);
  std::exit(right ? 0 : 1);
}

}  // namespace

int main() {
  using namespace wushkv;
  const Codec codec(Hadamard<float>(64), Quest<float, 2>());
  const Batch<float> x = Batch<float>::Ones(3, 64);
  if (!codec.reconstruct(x).allFinite()) return 2;
  // The cache's calls that return a status need no exceptions at all.
  using C = Codec<Hadamard<float>, Quest<float, 2>>;
  const std::vector<C> codecs(1, codec);
  const CacheOptions options{.page_tokens = 16, .sink = 0, .recent = 0, .flush = 1};
  PagePool pool(PagedCache<C, C>::page_bytes(codecs, codecs, options), 1);
  PagedCache<C, C> cache(pool, codecs, codecs, options);
  const SequenceId id = cache.create();
  if (!cache.try_append(id, x, x)) return 4;
  if (cache.try_append(id, Batch<float>(20, 64).setOnes(), Batch<float>(20, 64).setOnes()).code() !=
      CacheStatus::Code::PoolExhausted)
    return 5;
  const Attention<C, C> attention({1, 1, 64, 64}, codecs, codecs);
  Attention<C, C>::Workspace workspace;
  Vector<float> out(64);
  attention.decode(cache.view(id), x.row(0).transpose(), out, workspace);
  std::stringstream stream;
  SequenceId restored;
  if (!try_save_sequence(cache, id, stream) || !cache.try_release_before(id, 2)) return 7;
  std::stringstream damaged(stream.str().substr(0, 100));
  if (try_load_sequence(cache, damaged, restored).code() != CacheStatus::Code::File) return 8;
  if (try_load_sequence(cache, stream, restored).code() != CacheStatus::Code::PoolExhausted) return 9;
  if (!out.allFinite() || !cache.try_truncate(id, 1) || !cache.try_release(id)) return 6;
  set_failure_handler(&expect_hadamard);
  const Hadamard<float> unsupported(52);
  std::fprintf(stderr, "the handler was not called for order %d\n", static_cast<int>(unsupported.dim()));
  return 3;
}
