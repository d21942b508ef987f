// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CACHE_LAYOUT_HPP
#define WUSHKV_CACHE_LAYOUT_HPP

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "wushkv/core/types.hpp"
#include "wushkv/quantize/packing.hpp"

namespace wushkv {

/// What one token of one head takes in a page, on one side (keys or values).
struct TokenShape {
  Index dim = 0;          ///< codes
  int bits = 0;           ///< bits of a code
  Index groups = 0;       ///< parameter records
  Index param_bytes = 0;  ///< bytes of a record; 0 where a quantizer has none
};

/// Where a token's codes and parameters lie within a page (design.md, section 3). A page holds, for each head
/// and side, rows of codes and rows of parameters; a row belongs to `lanes` tokens: token `slot` is lane
/// `slot % lanes` of row `slot / lanes`, and rows lie a stride apart that the page view gives. A layout is a
/// type with static members only:
///
///     static constexpr std::string_view name;
///     static constexpr Index lanes;
///     static Index code_row_bytes(const TokenShape&);                                  // bytes of a row of
///     codes template <class Code> static void store_codes(std::byte* row, const TokenShape&, Index lane,
///     const Code* codes); template <class Code> static void load_codes(const std::byte* row, const
///     TokenShape&, Index lane, Code* codes);
///
/// A row of parameters is `groups x lanes` records.
template <class L>
concept PageLayout = requires(std::byte* row, const std::byte* from, const TokenShape& shape, Index lane,
                              std::uint8_t* codes, const std::uint8_t* given) {
  { L::name } -> std::convertible_to<std::string_view>;
  { L::lanes } -> std::convertible_to<Index>;
  { L::code_row_bytes(shape) } -> std::same_as<Index>;
  L::store_codes(row, shape, lane, given);
  L::load_codes(from, shape, lane, codes);
};

namespace detail {

template <class Code>
Code low_bits(int bits) {
  return static_cast<Code>(
      bits >= static_cast<int>(8 * sizeof(Code)) ? ~Code{0} : static_cast<Code>((Code{1} << bits) - 1));
}

inline Index param_row_bytes(const TokenShape& shape, Index lanes) {
  return lanes * shape.groups * shape.param_bytes;
}

/// Copies a token's parameter records (`groups * param_bytes` bytes) into or out of its lane of a row.
inline void store_params(std::byte* row, const TokenShape& shape, Index lanes, Index lane,
                         const std::byte* params) {
  if (shape.param_bytes == 0) return;
  for (Index g = 0; g < shape.groups; ++g)
    std::memcpy(row + (g * lanes + lane) * shape.param_bytes, params + g * shape.param_bytes,
                static_cast<std::size_t>(shape.param_bytes));
}
inline void load_params(const std::byte* row, const TokenShape& shape, Index lanes, Index lane,
                        std::byte* params) {
  if (shape.param_bytes == 0) return;
  for (Index g = 0; g < shape.groups; ++g)
    std::memcpy(params + g * shape.param_bytes, row + (g * lanes + lane) * shape.param_bytes,
                static_cast<std::size_t>(shape.param_bytes));
}

}  // namespace detail

/// A token after the other. 2-bit codes are quartered as in OSCAR's pages (`pack_quartered`; where 4 divides
/// the dimension), the others packed densely, low bits first; whole bytes stay as they are.
struct TokenMajor {
  static constexpr std::string_view name = "token-major";
  static constexpr Index lanes = 1;

  static Index code_row_bytes(const TokenShape& shape) { return (shape.dim * shape.bits + 7) / 8; }

  template <class Code>
  static void store_codes(std::byte* row, const TokenShape& shape, Index, const Code* codes) {
    const auto count = static_cast<std::size_t>(shape.dim);
    if (shape.bits == static_cast<int>(8 * sizeof(Code))) {
      std::memcpy(row, codes, count * sizeof(Code));
    } else if constexpr (sizeof(Code) == 1) {
      const std::span<std::uint8_t> bytes(reinterpret_cast<std::uint8_t*>(row),
                                          static_cast<std::size_t>(code_row_bytes(shape)));
      if (quartered(shape))
        pack_quartered({codes, count}, bytes);
      else
        pack({codes, count}, shape.bits, bytes);
    } else {
      std::memset(row, 0, static_cast<std::size_t>(code_row_bytes(shape)));
      for (std::size_t bit = 0; bit < count * static_cast<std::size_t>(shape.bits); ++bit) {
        const auto value = static_cast<unsigned>(codes[bit / static_cast<std::size_t>(shape.bits)] >>
                                                     (bit % static_cast<std::size_t>(shape.bits)) &
                                                 1);
        row[bit / 8] |= static_cast<std::byte>(value << (bit % 8));
      }
    }
  }

  template <class Code>
  static void load_codes(const std::byte* row, const TokenShape& shape, Index, Code* codes) {
    const auto count = static_cast<std::size_t>(shape.dim);
    if (shape.bits == static_cast<int>(8 * sizeof(Code))) {
      std::memcpy(codes, row, count * sizeof(Code));
    } else if constexpr (sizeof(Code) == 1) {
      const std::span<const std::uint8_t> bytes(reinterpret_cast<const std::uint8_t*>(row),
                                                static_cast<std::size_t>(code_row_bytes(shape)));
      if (quartered(shape))
        unpack_quartered(bytes, {codes, count});
      else
        unpack(bytes, shape.bits, {codes, count});
    } else {
      std::fill_n(codes, count, Code{0});
      for (std::size_t bit = 0; bit < count * static_cast<std::size_t>(shape.bits); ++bit) {
        const Code value = static_cast<Code>(std::to_integer<unsigned>(row[bit / 8]) >> (bit % 8) & 1U);
        codes[bit / static_cast<std::size_t>(shape.bits)] |=
            static_cast<Code>(value << (bit % static_cast<std::size_t>(shape.bits)));
      }
    }
  }

 private:
  static bool quartered(const TokenShape& shape) { return shape.bits == 2 && shape.dim % 4 == 0; }
};

/// Tokens interleaved so that a 32-bit lane of a SIMD register is a token: a row is a sequence of `Lanes`
/// words of 32 bits, word `lane` of each belonging to one token. A code is split into planes of 32, 16, 8, 4,
/// 2 and 1 bits from its low end (3 bits are a plane of 2 and one of 1), and the planes lie one after the
/// other. In a plane of p bits, word w of a token holds dimensions `(32 / p) w …`: dimension `(32 / p) w + 4
/// j + i` at byte i, bit `p j` for p <= 8, so that a shift and a mask leave four codes in the four bytes of
/// the lane, ready for a byte-wise dot product; and `(32 / p) w + i` at bit `p i` for p > 8. A plane's last
/// word is padded with zeros.
template <int Lanes = 16>
struct TokenInterleaved {
  static_assert(Lanes >= 1, "wushkv: a row belongs to at least one token");
  static constexpr std::string_view name = Lanes == 16  ? "token-interleaved-16"
                                           : Lanes == 8 ? "token-interleaved-8"
                                                        : "token-interleaved";
  static constexpr Index lanes = Lanes;

  static Index code_row_bytes(const TokenShape& shape) {
    Index words = 0;
    for_each_plane(shape.bits, [&](int, int plane) { words += plane_words(shape.dim, plane); });
    return 4 * lanes * words;
  }

  template <class Code>
  static void store_codes(std::byte* row, const TokenShape& shape, Index lane, const Code* codes) {
    for_each_plane(shape.bits, [&](int first, int plane) {
      const Index per_word = 32 / plane, words = plane_words(shape.dim, plane);
      for (Index w = 0; w < words; ++w) {
        std::uint32_t word = 0;
        const Index count = std::min(per_word, shape.dim - w * per_word);
        for (Index i = 0; i < count; ++i) {
          const auto part = static_cast<std::uint32_t>(codes[w * per_word + i] >> first &
                                                       detail::low_bits<std::uint64_t>(plane));
          word |= part << bit_of(i, plane);
        }
        std::memcpy(row + 4 * (w * lanes + lane), &word, 4);
      }
      row += 4 * lanes * words;
    });
  }

  template <class Code>
  static void load_codes(const std::byte* row, const TokenShape& shape, Index lane, Code* codes) {
    std::fill_n(codes, shape.dim, Code{0});
    for_each_plane(shape.bits, [&](int first, int plane) {
      const Index per_word = 32 / plane, words = plane_words(shape.dim, plane);
      for (Index w = 0; w < words; ++w) {
        std::uint32_t word = 0;
        std::memcpy(&word, row + 4 * (w * lanes + lane), 4);
        const Index count = std::min(per_word, shape.dim - w * per_word);
        for (Index i = 0; i < count; ++i) {
          const std::uint64_t part = word >> bit_of(i, plane) & detail::low_bits<std::uint32_t>(plane);
          codes[w * per_word + i] =
              static_cast<Code>(codes[w * per_word + i] | static_cast<Code>(part << first));
        }
      }
      row += 4 * lanes * words;
    });
  }

 private:
  static Index plane_words(Index dim, int plane) { return (dim * plane + 31) / 32; }
  static int bit_of(Index i, int plane) {
    return plane <= 8 ? static_cast<int>(8 * (i % 4) + plane * (i / 4)) : static_cast<int>(plane * i);
  }
  /// Calls `visit(first bit of the code, bits of the plane)`, widest plane first.
  template <class Visit>
  static void for_each_plane(int bits, Visit visit) {
    for (int first = 0; first < bits;) {
      int plane = 32;
      while (plane > bits - first) plane /= 2;
      visit(first, plane);
      first += plane;
    }
  }
};

static_assert(PageLayout<TokenMajor> && PageLayout<TokenInterleaved<>>);

}  // namespace wushkv

#endif  // WUSHKV_CACHE_LAYOUT_HPP
