// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_DEQUANTIZE_HPP
#define WUSHKV_EXAMPLES_ENGINE_DEQUANTIZE_HPP

#include "engine/gguf.hpp"
#include "wushkv/core/types.hpp"

namespace engine {

/// The tensor's weights, `[rows, cols]`. Reads F32, F16, BF16, Q4_0, Q4_1, Q8_0 and Q6_K; another type, or a
/// weight that is not finite, throws `wushkv::FileError`.
wushkv::Batch<float> dequantize(const GgufTensor& tensor);

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_DEQUANTIZE_HPP
