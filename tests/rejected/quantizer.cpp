// SPDX-License-Identifier: Apache-2.0
// Compiled by one_error.cmake: a quantizer whose codes are signed must be refused with one error.
#include <cstdint>

#include "wushkv/codec/codec.hpp"
#include "wushkv/transform/identity.hpp"

struct Sign {
  using Scalar = float;
  struct Params {
    float magnitude;
  };
#ifdef WUSHKV_RIGHT_TYPE
  using Code = std::uint8_t;
#else
  using Code = int;
#endif
  static int bits() { return 1; }
  Params fit(const wushkv::GroupView<float>& group) const { return {group.cwiseAbs().mean()}; }
  Code encode(float x, const Params&) const { return x < 0 ? 0 : 1; }
  float decode(Code code, const Params& params) const {
    return code == 0 ? -params.magnitude : params.magnitude;
  }
};

int main() { const wushkv::Codec codec(wushkv::Identity<float>(8), Sign()); }
