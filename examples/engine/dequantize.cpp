// SPDX-License-Identifier: Apache-2.0
#include "engine/dequantize.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <span>

#include "wushkv/core/check.hpp"
#include "wushkv/core/error.hpp"

namespace engine {

namespace {

using wushkv::Batch;
using wushkv::Index;

// Blocks lie at any address, so values are copied out, never pointed at.
template <class T>
float number(const std::byte* at) {
  T value;
  std::memcpy(static_cast<void*>(&value), at, sizeof value);
  return static_cast<float>(value);
}

float half(const std::byte* at) { return number<Eigen::half>(at); }

int low_nibble(std::byte b) { return static_cast<int>(b & std::byte{15}); }
int high_nibble(std::byte b) { return static_cast<int>(b >> 4U); }

// Each of the following turns one block into its floats. A product of a block's scales and codes has no more
// than a float's 24 bits, so the order of the factors and fused multiply-adds change nothing.

/// 16 bytes of 4-bit codes: the low halves are the block's first 16 elements, the high ones its last.
template <class Weight>
void decode_nibbles(const std::byte* codes, float* out, const Weight& weight) {
  for (int i = 0; i < 16; ++i) {
    out[i] = weight(static_cast<float>(low_nibble(codes[i])));
    out[i + 16] = weight(static_cast<float>(high_nibble(codes[i])));
  }
}

/// Half scale, codes; the code 8 stands for zero.
void decode_q4_0(const std::byte* block, float* out) {
  const float scale = half(block);
  decode_nibbles(block + 2, out, [=](float code) { return scale * (code - 8.0F); });
}

/// Half scale, half minimum, codes.
void decode_q4_1(const std::byte* block, float* out) {
  const float scale = half(block), minimum = half(block + 2);
  decode_nibbles(block + 4, out, [=](float code) { return scale * code + minimum; });
}

/// Half scale, 32 signed bytes.
void decode_q8_0(const std::byte* block, float* out) {
  const float scale = half(block);
  for (int i = 0; i < 32; ++i) out[i] = number<std::int8_t>(block + 2 + i) * scale;
}

/// 128 bytes with the low 4 bits of each code, 64 with its high 2, a signed byte of scale for each 16
/// elements, and a half that scales those; the code 32 stands for zero. Of each 128 elements, the four runs
/// of 32 share bytes: their low bits 64 (runs 0 and 2 the first 32, low halves first), their high bits 32.
void decode_q6_k(const std::byte* block, float* out) {
  const std::byte *const low = block, *const high = block + 128, *const scales = block + 192;
  const float scale = half(block + 208);
  for (int part = 0; part < 2; ++part)
    for (int run = 0; run < 4; ++run)
      for (int i = 0; i < 32; ++i) {
        const std::byte lows = low[64 * part + 32 * (run % 2) + i];
        const auto highs = static_cast<unsigned>(high[32 * part + i]);
        const int top = static_cast<int>((highs >> static_cast<unsigned>(2 * run)) & 3U);
        const int code = (run < 2 ? low_nibble(lows) : high_nibble(lows)) + 16 * top;
        const int at = 128 * part + 32 * run + i;
        out[at] = scale * number<std::int8_t>(scales + at / 16) * static_cast<float>(code - 32);
      }
}

template <class T>
void decode_number(const std::byte* at, float* out) {
  *out = number<T>(at);
}

template <void (*decode)(const std::byte*, float*)>
void decode_blocks(const TensorType& type, std::span<const std::byte> data, float* out) {
  for (std::size_t at = 0; at < data.size(); at += type.bytes, out += type.block)
    decode(data.data() + at, out);
}

using Decoder = void (*)(const TensorType& type, std::span<const std::byte> data, float* out);

/// Null for a type that is not supported.
Decoder find_decoder(std::uint32_t type) {
  switch (type) {
    case type_f32:
      return decode_blocks<decode_number<float>>;
    case type_f16:
      return decode_blocks<decode_number<Eigen::half>>;
    case type_bf16:
      return decode_blocks<decode_number<Eigen::bfloat16>>;
    case type_q4_0:
      return decode_blocks<decode_q4_0>;
    case type_q4_1:
      return decode_blocks<decode_q4_1>;
    case type_q8_0:
      return decode_blocks<decode_q8_0>;
    case type_q6_k:
      return decode_blocks<decode_q6_k>;
    default:
      return nullptr;
  }
}

template <class... Parts>
[[noreturn]] void fail(const GgufTensor& tensor, const Parts&... parts) {
  wushkv::detail::file_error("gguf: tensor ", quote_name(tensor.name), ": ", parts...);
}

}  // namespace

Batch<float> dequantize(const GgufTensor& tensor) {
  const Decoder decode = find_decoder(tensor.type);
  if (decode == nullptr)
    fail(tensor, "the type is ", type_name(tensor.type), " (", tensor.type,
         "), expected F32, F16, BF16, Q4_0, Q4_1, Q8_0 or Q6_K");
  const TensorType& type = *find_type(tensor.type);
  const Index rows = tensor.rows(), cols = tensor.cols();
  // GgufFile has checked this of its tensors, but a tensor may also be put together by hand.
  const Index row_bytes = cols / type.block * type.bytes, bytes = std::ssize(tensor.data);
  if (row_bytes == 0 || cols % type.block != 0 || bytes % row_bytes != 0 || bytes / row_bytes != rows)
    fail(tensor, rows, " x ", cols, " elements of ", type.name, " do not take ", tensor.data.size(),
         " bytes");
  Batch<float> weights(rows, cols);
  decode(type, tensor.data, weights.data());
  if (!wushkv::all_finite(weights)) fail(tensor, "a weight is not finite");
  return weights;
}

}  // namespace engine
