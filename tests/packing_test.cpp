// SPDX-License-Identifier: Apache-2.0
#include "wushkv/quantize/packing.hpp"

#include <vector>

#include "support.hpp"

using namespace wushkv;
using Bytes = std::vector<std::uint8_t>;

TEST_CASE("dense packing comes back for every width and length") {
  test::Random random(60);
  for (int bits = 1; bits <= 8; ++bits)
    for (std::size_t count = 0; count <= 260; ++count) {
      Bytes codes(count);
      for (auto& code : codes) code = static_cast<std::uint8_t>(random.integer(0, (1 << bits) - 1));
      CHECK(packed_bytes(count, bits) == (count * static_cast<std::size_t>(bits) + 7) / 8);
      Bytes packed(packed_bytes(count, bits), 0xAB), back(count, 0xCD);
      pack(codes, bits, packed);
      unpack(packed, bits, back);
      CHECK(back == codes);
      // Bit by bit, as documented.
      bool placed = true;
      for (std::size_t i = 0; i < 8 * packed.size(); ++i) {
        const std::size_t code = i / static_cast<std::size_t>(bits), bit = i % static_cast<std::size_t>(bits);
        const int expected = code < count ? codes[code] >> bit & 1 : 0;
        placed &= (packed[i / 8] >> (i % 8) & 1) == expected;
      }
      CHECK(placed);
    }
}

TEST_CASE("bits above the width do not reach a neighbour") {
  Bytes packed(1);
  pack(Bytes{0xFF, 0, 0xFD, 0}, 2, packed);
  CHECK(packed[0] == 0b00'01'00'11);
}

TEST_CASE("quartered bytes hold dimensions i, i + d/4, i + d/2, i + 3d/4 from the low bits up") {
  Bytes packed(2);
  pack_quartered(Bytes{0, 1, 2, 3, 1, 0, 3, 2}, packed);  // byte 0: dims 0 2 4 6 = 0 2 1 3
  CHECK(packed[0] == (0 | 2 << 2 | 1 << 4 | 3 << 6));
  CHECK(packed[1] == (1 | 3 << 2 | 0 << 4 | 2 << 6));
  test::Random random(61);
  for (std::size_t d = 0; d <= 256; d += 4) {
    Bytes codes(d), back(d, 9);
    for (auto& code : codes) code = static_cast<std::uint8_t>(random.integer(0, 3));
    Bytes bytes(d / 4);
    pack_quartered(codes, bytes);
    unpack_quartered(bytes, back);
    CHECK(back == codes);
  }
}

TEST_CASE("packing refuses sizes that do not fit") {
  Bytes codes(8), bytes(3);
  CHECK_REFUSED(pack(codes, 2, bytes), "8 codes of 2 bits came with 3 bytes, expected 2");
  CHECK_REFUSED(unpack(bytes, 2, codes), "expected 2");
  CHECK_REFUSED(pack(codes, 0, bytes), "bits is 0");
  CHECK_REFUSED(unpack(bytes, 9, codes), "bits is 9");
  CHECK_REFUSED(pack_quartered(codes, bytes), "expected 2");
  Bytes odd(6), one(1);
  CHECK_REFUSED(pack_quartered(odd, one), "multiple of 4");
  CHECK_REFUSED(unpack_quartered(one, odd), "multiple of 4");
}
