// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "wushkv/wushkv.hpp"

int main() {
  using namespace wushkv;
  const Codec codec(Hadamard<float>(64), Quest<float, 4>());
  const Batch<float> x = Batch<float>::Ones(2, 64);
  const double error = reconstruction_error(codec, x).relative();
  std::printf("wushkv %d.%d.%d: %g\n", WUSHKV_VERSION_MAJOR, WUSHKV_VERSION_MINOR, WUSHKV_VERSION_PATCH,
              error);
  return error < 1 ? 0 : 1;
}
