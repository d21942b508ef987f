// SPDX-License-Identifier: Apache-2.0
#include "wushkv/cache/layout.hpp"

#include <vector>

#include "support.hpp"

using namespace wushkv;

namespace {

struct Page {
  std::vector<std::byte> codes, params;
};

template <class Layout, class Code>
struct Slots {
  TokenShape shape;
  Index tokens;
  Page page{std::vector<std::byte>(
                static_cast<std::size_t>(Layout::code_row_bytes(shape) * (tokens / Layout::lanes)),
                std::byte{0xEE}),
            std::vector<std::byte>(static_cast<std::size_t>(detail::param_row_bytes(shape, Layout::lanes) *
                                                            (tokens / Layout::lanes)))};

  std::byte* code_row(Index slot) {
    return page.codes.data() + slot / Layout::lanes * Layout::code_row_bytes(shape);
  }
  std::byte* param_row(Index slot) {
    return page.params.data() + slot / Layout::lanes * detail::param_row_bytes(shape, Layout::lanes);
  }
  void store(Index slot, const std::vector<Code>& codes, const std::vector<std::byte>& params) {
    Layout::template store_codes<Code>(code_row(slot), shape, slot % Layout::lanes, codes.data());
    detail::store_params(param_row(slot), shape, Layout::lanes, slot % Layout::lanes, params.data());
  }
  void load(Index slot, std::vector<Code>& codes, std::vector<std::byte>& params) {
    Layout::template load_codes<Code>(code_row(slot), shape, slot % Layout::lanes, codes.data());
    detail::load_params(param_row(slot), shape, Layout::lanes, slot % Layout::lanes, params.data());
  }
};

// Written in any order, read back, and converted to the other layout and back: always the same codes and
// parameters.
template <class From, class To, class Code>
void check_round_trip(test::Random& random, Index dim, int bits, Index groups, Index param_bytes) {
  const TokenShape shape{dim, bits, groups, param_bytes};
  const Index tokens = 32;
  Slots<From, Code> from{shape, tokens};
  Slots<To, Code> to{shape, tokens};
  Slots<From, Code> again{shape, tokens};
  std::vector<std::vector<Code>> codes(static_cast<std::size_t>(tokens),
                                       std::vector<Code>(static_cast<std::size_t>(dim)));
  std::vector<std::vector<std::byte>> params(
      static_cast<std::size_t>(tokens),
      std::vector<std::byte>(static_cast<std::size_t>(groups * param_bytes)));
  for (Index k = 0; k < tokens; ++k) {
    const Index slot = k * 13 % tokens;
    for (Code& code : codes[static_cast<std::size_t>(slot)])
      code = static_cast<Code>(
                 static_cast<std::uint64_t>(random.integer(0, std::numeric_limits<Index>::max())) * 2 &
                 detail::low_bits<std::uint64_t>(bits)) |
             static_cast<Code>(random.integer(0, 1));
    for (std::byte& byte : params[static_cast<std::size_t>(slot)])
      byte = static_cast<std::byte>(random.integer(0, 255));
    from.store(slot, codes[static_cast<std::size_t>(slot)], params[static_cast<std::size_t>(slot)]);
  }
  std::vector<Code> code(static_cast<std::size_t>(dim));
  std::vector<std::byte> param(static_cast<std::size_t>(groups * param_bytes));
  bool same = true;
  for (Index slot = 0; slot < tokens; ++slot) {
    from.load(slot, code, param);
    same &= code == codes[static_cast<std::size_t>(slot)] && param == params[static_cast<std::size_t>(slot)];
    to.store(slot, code, param);
  }
  for (Index slot = 0; slot < tokens; ++slot) {
    to.load(slot, code, param);
    same &= code == codes[static_cast<std::size_t>(slot)] && param == params[static_cast<std::size_t>(slot)];
    again.store(slot, code, param);
  }
  CAPTURE(dim);
  CAPTURE(bits);
  CHECK(same);
  CHECK(again.page.codes == from.page.codes);
  CHECK(again.page.params == from.page.params);
}

}  // namespace

TEST_CASE_TEMPLATE("tokens come back from any slot, and conversion is lossless", Interleaved,
                   TokenInterleaved<16>, TokenInterleaved<8>, TokenInterleaved<1>) {
  test::Random random(300);
  for (int bits = 1; bits <= 8; ++bits)
    for (const Index dim : {1, 7, 30, 64, 80, 96, 112, 192}) {
      check_round_trip<TokenMajor, Interleaved, std::uint8_t>(random, dim, bits, 1, 4);
      check_round_trip<Interleaved, TokenMajor, std::uint8_t>(random, dim, bits, 2, 2);
    }
  for (const Index dim : {1, 5, 64}) {
    check_round_trip<TokenMajor, Interleaved, std::uint16_t>(random, dim, 16, 1, 0);
    check_round_trip<Interleaved, TokenMajor, std::uint16_t>(random, dim, 11, 1, 6);
    check_round_trip<TokenMajor, Interleaved, std::uint32_t>(random, dim, 32, 1, 0);
    check_round_trip<Interleaved, TokenMajor, std::uint64_t>(random, dim, 64, 1, 8);
  }
}

TEST_CASE("token-major 2-bit codes are OSCAR's quartered bytes") {
  const std::vector<std::uint8_t> codes = {0, 1, 2, 3, 1, 0, 3, 2};
  std::vector<std::byte> row(2);
  TokenMajor::store_codes(row.data(), {8, 2, 1, 4}, 0, codes.data());
  std::vector<std::uint8_t> expected(2);
  pack_quartered(codes, expected);
  CHECK(std::to_integer<int>(row[0]) == expected[0]);
  CHECK(std::to_integer<int>(row[1]) == expected[1]);
  CHECK(TokenMajor::code_row_bytes({128, 2, 1, 4}) == 32);
  CHECK(TokenMajor::code_row_bytes({80, 3, 1, 4}) == 30);
}

TEST_CASE("interleaved 2-bit codes: a shift and a mask give four dimensions of a token in a 32-bit lane") {
  const Index dim = 32;
  const TokenShape shape{dim, 2, 1, 4};
  std::vector<std::byte> row(static_cast<std::size_t>(TokenInterleaved<16>::code_row_bytes(shape)));
  CHECK(row.size() == 2 * 16 * 4);
  std::vector<std::uint8_t> codes(32);
  for (std::size_t i = 0; i < 32; ++i) codes[i] = static_cast<std::uint8_t>((i * 7 + 3) % 4);
  TokenInterleaved<16>::store_codes(row.data(), shape, 5, codes.data());
  for (std::size_t w = 0; w < 2; ++w) {
    std::uint32_t word = 0;
    std::memcpy(&word, row.data() + 4 * (16 * w + 5), 4);
    for (std::size_t j = 0; j < 4; ++j) {
      const std::uint32_t lane = word >> (2 * j) & 0x03030303U;
      for (std::size_t i = 0; i < 4; ++i) CHECK((lane >> (8 * i) & 0xFFU) == codes[16 * w + 4 * j + i]);
    }
  }
  // 3 bits: a plane of the low two, then one of the high.
  CHECK(TokenInterleaved<16>::code_row_bytes({64, 3, 1, 4}) == 16 * 4 * (4 + 2));
  // Padding: 80 dimensions of 1 bit take three words.
  CHECK(TokenInterleaved<16>::code_row_bytes({80, 1, 1, 4}) == 16 * 4 * 3);
}
