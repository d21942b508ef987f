// SPDX-License-Identifier: Apache-2.0
// Compiled with -fno-exceptions -fno-rtti: a failed check calls the handler, with the sentence that would be
// thrown.
#include <cstdio>
#include <cstdlib>
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
  set_failure_handler(&expect_hadamard);
  const Hadamard<float> unsupported(52);
  std::fprintf(stderr, "the handler was not called for order %d\n", static_cast<int>(unsupported.dim()));
  return 3;
}
