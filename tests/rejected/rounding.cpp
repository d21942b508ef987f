// SPDX-License-Identifier: Apache-2.0
// Compiled by one_error.cmake: a rounding that returns something must be refused with one error.
#include <span>

#include "wushkv/codec/codec.hpp"
#include "wushkv/quantize/quest.hpp"
#include "wushkv/transform/identity.hpp"

struct AllZero {
  template <class Q>
#ifdef WUSHKV_RIGHT_TYPE
  void
#else
  int
#endif
  encode(const Q& quantizer, std::span<const typename Q::Scalar>, wushkv::Index,
         std::span<wushkv::code_t<Q>> codes, std::span<typename Q::Params> params) const {
    for (auto& p : params) p = quantizer.fit(wushkv::Vector<typename Q::Scalar>::Zero(1));
    for (auto& code : codes) code = 0;
#ifndef WUSHKV_RIGHT_TYPE
    return 0;
#endif
  }
};

int main() { const wushkv::Codec codec(wushkv::Identity<float>(8), wushkv::Quest<float, 2>(), 8, AllZero()); }
