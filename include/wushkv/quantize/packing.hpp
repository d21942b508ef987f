// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_PACKING_HPP
#define WUSHKV_QUANTIZE_PACKING_HPP

#include <cstdint>
#include <span>

#include "wushkv/core/error.hpp"
#include "wushkv/core/types.hpp"

namespace wushkv {

/// Bytes that `count` codes of `bits` bits take when packed densely.
constexpr std::size_t packed_bytes(std::size_t count, int bits) {
  const auto width = static_cast<std::size_t>(bits);
  return count / 8 * width + (count % 8 * width + 7) / 8;  // no overflow for any count that fits in memory
}

namespace detail {

inline void check_packing(std::size_t codes, std::size_t bytes, int bits) {
  if (bits < 1 || bits > 8) invalid_argument("packing: bits is ", bits, ", expected 1 to 8");
  if (bytes != packed_bytes(codes, bits))
    invalid_argument("packing: ", codes, " codes of ", bits, " bits came with ", bytes, " bytes, expected ",
                     packed_bytes(codes, bits));
}

inline void check_quartered(std::size_t codes, std::size_t bytes) {
  if (codes % 4 != 0)
    invalid_argument("packing: ", codes, " codes cannot be quartered, expected a multiple of 4");
  if (bytes != codes / 4)
    invalid_argument("packing: ", codes, " quartered codes came with ", bytes, " bytes, expected ",
                     codes / 4);
}

}  // namespace detail

/// Packs codes below `2^bits` (1 to 8) densely: code i takes bits `[i bits, (i + 1) bits)` of the byte
/// string, low bits first; bits past the last code are zero. `bytes` has `packed_bytes(codes.size(), bits)`
/// entries; bits of a code above `bits` are dropped. Throws `std::invalid_argument` for another size or
/// width.
inline void pack(std::span<const std::uint8_t> codes, int bits, std::span<std::uint8_t> bytes) {
  detail::check_packing(codes.size(), bytes.size(), bits);
  const std::uint32_t mask = (1U << bits) - 1;
  std::uint32_t pending = 0;  // bits not yet written, from the low end
  int held = 0;
  std::size_t at = 0;
  for (const std::uint8_t code : codes) {
    pending |= (code & mask) << held;
    held += bits;
    if (held >= 8) {
      bytes[at++] = static_cast<std::uint8_t>(pending & 0xffU);
      pending >>= 8;
      held -= 8;
    }
  }
  if (held > 0) bytes[at] = static_cast<std::uint8_t>(pending);
}

/// Undoes `pack`.
inline void unpack(std::span<const std::uint8_t> bytes, int bits, std::span<std::uint8_t> codes) {
  detail::check_packing(codes.size(), bytes.size(), bits);
  const std::uint32_t mask = (1U << bits) - 1;
  std::uint32_t pending = 0;
  int held = 0;
  std::size_t at = 0;
  for (std::uint8_t& code : codes) {
    if (held < bits) {
      pending |= static_cast<std::uint32_t>(bytes[at++]) << held;
      held += 8;
    }
    code = static_cast<std::uint8_t>(pending & mask);
    pending >>= bits;
    held -= bits;
  }
}

/// Packs `d` 2-bit codes as OSCAR's pages do: byte i holds dimensions i, i + d/4, i + d/2, i + 3d/4 from its
/// low bits up. Throws `std::invalid_argument` unless `d` is a multiple of 4 and `bytes` has `d / 4` entries.
inline void pack_quartered(std::span<const std::uint8_t> codes, std::span<std::uint8_t> bytes) {
  detail::check_quartered(codes.size(), bytes.size());
  const std::size_t quarter = bytes.size();
  for (std::size_t i = 0; i < quarter; ++i)
    bytes[i] =
        static_cast<std::uint8_t>((codes[i] & 3U) | (codes[i + quarter] & 3U) << 2 |
                                  (codes[i + 2 * quarter] & 3U) << 4 | (codes[i + 3 * quarter] & 3U) << 6);
}

/// Undoes `pack_quartered`.
inline void unpack_quartered(std::span<const std::uint8_t> bytes, std::span<std::uint8_t> codes) {
  detail::check_quartered(codes.size(), bytes.size());
  const std::size_t quarter = bytes.size();
  for (std::size_t i = 0; i < quarter; ++i)
    for (std::size_t part = 0; part < 4; ++part)
      codes[i + part * quarter] = static_cast<std::uint8_t>(bytes[i] >> (2 * part) & 3U);
}

}  // namespace wushkv

#endif  // WUSHKV_QUANTIZE_PACKING_HPP
