// SPDX-License-Identifier: Apache-2.0
#include "engine/gguf.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/dequantize.hpp"
#include "engine/mapped_file.hpp"
#include "gguf_writer.hpp"
#include "support.hpp"
#include "temporary_file.hpp"

namespace {

using engine::GgufFile;
using engine::GgufTensor;
using engine::MappedFile;
using test::ByteWriter;
using test::GgufWriter;
using test::message_of;
using test::Random;
using wushkv::Batch;
using wushkv::FileError;
using wushkv::Index;
using wushkv::Vector;

using Bytes = std::vector<std::byte>;
using Dims = std::vector<std::uint64_t>;

// Bytes of a temporary would dangle, and two owners of a mapping would unmap it twice.
static_assert(!std::is_constructible_v<GgufFile, Bytes>);
static_assert(std::is_constructible_v<GgufFile, const Bytes&>);
static_assert(!std::is_copy_constructible_v<GgufFile> && std::is_move_constructible_v<GgufFile>);
static_assert(!std::is_copy_constructible_v<MappedFile> && std::is_nothrow_move_constructible_v<MappedFile>);

constexpr std::uint32_t all_types[] = {engine::type_f32,  engine::type_f16,  engine::type_bf16,
                                       engine::type_q4_0, engine::type_q4_1, engine::type_q8_0,
                                       engine::type_q6_k};

// ---- Encoders: nearest codes and the simplest scales, block by block ----

std::uint16_t half_bits(float x) { return std::bit_cast<std::uint16_t>(static_cast<Eigen::half>(x)); }
float half_value(std::uint16_t bits) { return static_cast<float>(std::bit_cast<Eigen::half>(bits)); }

int code_of(float x, float step, int low, int high) {
  return step == 0 ? 0 : std::clamp(static_cast<int>(std::lround(x / step)), low, high);
}

float largest(const float* x, int count) {
  float result = 0;
  for (int i = 0; i < count; ++i) result = std::max(result, std::abs(x[i]));
  return result;
}

void put_nibbles(ByteWriter& out, const std::array<int, 32>& codes) {
  for (std::size_t i = 0; i < 16; ++i) out.number(static_cast<std::uint8_t>(codes[i] | codes[i + 16] << 4));
}

void encode_q4_0(ByteWriter& out, const float* x) {
  const std::uint16_t scale = half_bits(largest(x, 32) / 7);
  std::array<int, 32> codes{};
  for (std::size_t i = 0; i < 32; ++i) codes[i] = 8 + code_of(x[i], half_value(scale), -8, 7);
  out.number(scale);
  put_nibbles(out, codes);
}

void encode_q4_1(ByteWriter& out, const float* x) {
  const auto [low, high] = std::minmax_element(x, x + 32);
  const std::uint16_t minimum = half_bits(*low), scale = half_bits((*high - *low) / 15);
  std::array<int, 32> codes{};
  for (std::size_t i = 0; i < 32; ++i)
    codes[i] = code_of(x[i] - half_value(minimum), half_value(scale), 0, 15);
  out.number(scale).number(minimum);
  put_nibbles(out, codes);
}

void encode_q8_0(ByteWriter& out, const float* x) {
  const std::uint16_t scale = half_bits(largest(x, 32) / 127);
  out.number(scale);
  for (int i = 0; i < 32; ++i)
    out.number(static_cast<std::int8_t>(code_of(x[i], half_value(scale), -127, 127)));
}

void encode_q6_k(ByteWriter& out, const float* x) {
  const std::uint16_t scale = half_bits(largest(x, 256) / 31 / 127);
  std::array<std::uint8_t, 128> low{};
  std::array<std::uint8_t, 64> high{};
  std::array<std::int8_t, 16> scales{};
  for (std::size_t i = 0; i < 256; ++i) {
    const float d = half_value(scale);
    const int group =
        std::clamp(d == 0 ? 0 : static_cast<int>(std::ceil(largest(x + i / 16 * 16, 16) / 31 / d)), 0, 127);
    scales[i / 16] = static_cast<std::int8_t>(group);
    const int code = 32 + code_of(x[i], d * static_cast<float>(group), -32, 31);
    const std::size_t part = i / 128, in_part = i % 128;
    low[64 * part + in_part % 64] |= static_cast<std::uint8_t>((code & 15) << (in_part < 64 ? 0 : 4));
    high[32 * part + in_part % 32] |= static_cast<std::uint8_t>((code >> 4) << (2 * (in_part / 32)));
  }
  out.raw(std::as_bytes(std::span(low))).raw(std::as_bytes(std::span(high)));
  out.raw(std::as_bytes(std::span(scales))).number(scale);
}

Bytes encode(std::uint32_t type, const Batch<float>& x) {
  ByteWriter out;
  const float* const end = x.data() + x.size();
  for (const float* at = x.data(); at < end; at += engine::find_type(type)->block) switch (type) {
      case engine::type_f32:
        out.number(*at);
        break;
      case engine::type_f16:
        out.number(half_bits(*at));
        break;
      case engine::type_bf16:
        out.number(std::bit_cast<std::uint16_t>(static_cast<Eigen::bfloat16>(*at)));
        break;
      case engine::type_q4_0:
        encode_q4_0(out, at);
        break;
      case engine::type_q4_1:
        encode_q4_1(out, at);
        break;
      case engine::type_q8_0:
        encode_q8_0(out, at);
        break;
      default:
        encode_q6_k(out, at);
    }
  return out.bytes();
}

/// What the encoder above may lose of an element, relative to the largest.
float tolerance(std::uint32_t type) {
  switch (type) {
    case engine::type_f32:
      return 0;
    case engine::type_f16:
      return 1.0F / 2048;
    case engine::type_bf16:
      return 1.0F / 256;
    case engine::type_q4_0:
      return 0.52F / 7;
    case engine::type_q4_1:
      return 0.52F * 2 / 15;
    case engine::type_q8_0:
      return 0.52F / 127;
    default:
      return 0.55F / 31;
  }
}

// ---- Files ----

void add_encoded(GgufWriter& writer, std::uint32_t type, const Batch<float>& x) {
  const Dims dims{static_cast<std::uint64_t>(x.cols()), static_cast<std::uint64_t>(x.rows())};
  writer.add_tensor(std::string(engine::type_name(type)), dims, type, encode(type, x));
}

/// Every kind of value and of tensor, in few bytes.
GgufWriter sample() {
  GgufWriter writer;
  writer.add_number<std::uint8_t>("u8", 0, 200);
  writer.add_number<std::int8_t>("i8", 1, -100);
  writer.add_number<std::uint16_t>("u16", 2, 60000);
  writer.add_number<std::int16_t>("i16", 3, 30000);
  writer.add("u32", std::uint32_t{4000000000U});
  writer.add("i32", std::int32_t{-5});
  writer.add("f32", 0.25F);
  writer.add("yes", true);
  writer.add("no", false);
  writer.add("text", "a \"b\"\n");
  writer.add("empty text", std::string());
  writer.add("u64", std::numeric_limits<std::uint64_t>::max());
  writer.add("i64", std::int64_t{1} << 40U);
  writer.add("f64", 1e300);
  writer.add("texts", std::vector<std::string>{"one", "", "three"});
  writer.add("no texts", std::vector<std::string>{});
  writer.add("i32s", std::vector<std::int32_t>{1, -2, 3});
  writer.add("f32s", std::vector<float>{1.5F});
  writer.add_numbers("bools", 7, std::vector<std::uint8_t>{0, 1, 1});
  const Bytes empty_array = ByteWriter().number(0U).number(std::uint64_t{0}).bytes();
  writer.add_raw("nested", 9,
                 ByteWriter().number(9U).number(std::uint64_t{2}).raw(empty_array).raw(empty_array).bytes());
  Random random(1);
  writer.add_tensor("vector", Vector<float>{{1, 2, 3}});
  for (const std::uint32_t type : all_types) {
    add_encoded(writer, type, random.batch<float>(1, std::max<Index>(2, engine::find_type(type)->block)));
  }
  return writer;
}

/// Calls everything that can be called; any exception but FileError ends the test.
void visit(const GgufFile& file) {
  const auto allow_refusal = [](const auto& call) { static_cast<void>(message_of<FileError>(call)); };
  for (const std::string_view key : file.keys()) {
    allow_refusal([&] { static_cast<void>(file.integer(key)); });
    allow_refusal([&] { static_cast<void>(file.number(key)); });
    allow_refusal([&] { static_cast<void>(file.string(key)); });
    allow_refusal([&] { static_cast<void>(file.boolean_or(key, false)); });
    allow_refusal([&] { static_cast<void>(file.strings(key)); });
    allow_refusal([&] { static_cast<void>(file.integers(key)); });
  }
  for (const GgufTensor& tensor : file.tensors()) {
    REQUIRE(file.find(tensor.name) == &tensor);
    allow_refusal([&] { static_cast<void>(engine::dequantize(tensor)); });
  }
}

/// One sentence: the file, no line break, and the part that tells what is wrong.
void check_message(const std::string& message, std::string_view part) {
  CAPTURE(message);
  CAPTURE(part);
  CHECK(message.starts_with("gguf: memory: "));
  CHECK(message.find(part) != std::string::npos);
  CHECK(message.find('\n') == std::string::npos);
}

void check_refused(const Bytes& bytes, std::string_view part) {
  check_message(message_of<FileError>([&] { GgufFile file(bytes); }), part);
}

/// The beginning of a file that is written by hand.
ByteWriter header(std::uint64_t tensors, std::uint64_t keys, std::uint32_t version = 3) {
  return ByteWriter().raw("GGUF").number(version).number(tensors).number(keys);
}

ByteWriter one_key(std::uint32_t type) { return header(0, 1).text("k").number(type); }

/// A file of one tensor "t" and `data_size` bytes of data.
Bytes one_tensor(const Dims& dims, std::uint32_t type, std::uint64_t offset, std::size_t data_size) {
  ByteWriter out = header(1, 0).text("t").number(static_cast<std::uint32_t>(dims.size()));
  for (const std::uint64_t dim : dims) out.number(dim);
  return out.number(type).number(offset).pad_to(32).raw(Bytes(data_size)).bytes();
}

GgufTensor tensor_of(std::uint32_t type, const Dims& dims, const Bytes& bytes) {
  return {.name = "t", .dims = dims, .type = type, .data = bytes};
}

Batch<float> decode(std::uint32_t type, const Bytes& bytes, std::uint64_t cols) {
  return engine::dequantize(tensor_of(type, {cols}, bytes));
}

// ---- What a file says ----

TEST_CASE("gguf: every key comes back as it was written, in versions 2 and 3") {
  for (const std::uint32_t version : {2U, 3U}) {
    const Bytes bytes = sample().bytes(version);
    const GgufFile file(bytes);
    CHECK(file.version() == version);
    CHECK(file.keys().size() == 20);
    CHECK(file.contains("u8"));
    CHECK_FALSE(file.contains("u9"));

    CHECK(file.integer("u8") == 200);
    CHECK(file.integer("u16") == 60000);
    CHECK(file.integer("i16") == 30000);
    CHECK(file.integer("u32") == 4000000000U);
    CHECK(file.integer("u64") == std::numeric_limits<std::uint64_t>::max());
    CHECK(file.integer("i64") == std::uint64_t{1} << 40U);
    CHECK(file.integer_or("u8", 7) == 200);
    CHECK(file.integer_or("u9", 7) == 7);

    CHECK(file.number("i8") == -100);
    CHECK(file.number("i32") == -5);
    CHECK(file.number("f32") == 0.25);
    CHECK(file.number("f64") == 1e300);
    CHECK(file.number_or("f32", 7) == 0.25);
    CHECK(file.number_or("f33", 7) == 7);

    CHECK(file.string("text") == "a \"b\"\n");
    CHECK(file.string("empty text").empty());
    CHECK(file.string_or("text", "x") == "a \"b\"\n");
    CHECK(file.string_or("texd", "x") == "x");

    CHECK(file.boolean_or("yes", false));
    CHECK_FALSE(file.boolean_or("no", true));
    CHECK(file.boolean_or("perhaps", true));

    CHECK(file.strings("texts") == std::vector<std::string_view>{"one", "", "three"});
    CHECK(file.strings("no texts").empty());
    CHECK(file.integers("i32s") == std::vector<std::int64_t>{1, -2, 3});
  }
}

template <class T>
void check_integers(std::uint32_t type) {
  const T low = std::numeric_limits<T>::min();
  const T high = static_cast<T>(std::min<std::uint64_t>(std::numeric_limits<T>::max(), INT64_MAX));
  GgufWriter writer;
  writer.add_numbers<T>("k", type, {low, T{7}, high});
  const Bytes bytes = writer.bytes();
  CHECK(GgufFile(bytes).integers("k") ==
        std::vector<std::int64_t>{static_cast<std::int64_t>(low), 7, static_cast<std::int64_t>(high)});
}

TEST_CASE("gguf: arrays of every integer type are read") {
  check_integers<std::uint8_t>(0);
  check_integers<std::int8_t>(1);
  check_integers<std::uint16_t>(2);
  check_integers<std::int16_t>(3);
  check_integers<std::uint32_t>(4);
  check_integers<std::int32_t>(5);
  check_integers<std::uint64_t>(10);
  check_integers<std::int64_t>(11);
}

TEST_CASE("gguf: a key that is missing or of another type is named, with what came and what was expected") {
  GgufWriter writer = sample();
  writer.add("nan", std::numeric_limits<float>::quiet_NaN());
  writer.add("inf", -std::numeric_limits<double>::infinity());
  writer.add_numbers("large", 10, std::vector<std::uint64_t>{1, std::uint64_t{1} << 63U});
  const Bytes bytes = writer.bytes();
  const GgufFile file(bytes);
  const auto check = [&](const auto& call, std::string_view part) {
    check_message(message_of<FileError>([&] { static_cast<void>(call()); }), part);
  };
  check([&] { return file.integer("x"); }, "key \"x\" is missing, expected an integer of at least 0");
  check([&] { return file.number("x"); }, "key \"x\" is missing, expected a finite number");
  check([&] { return file.string("x"); }, "key \"x\" is missing, expected a string");
  check([&] { return file.strings("x"); }, "key \"x\" is missing, expected an array of strings");
  check([&] { return file.integers("x"); }, "key \"x\" is missing, expected an array of integers");
  check([&] { return file.string(std::string(100, '\n')); }, "\\x0a\"... is missing");

  check([&] { return file.integer("i32"); },
        "key \"i32\" is of type int32, -5, expected an integer of at least 0");
  check([&] { return file.integer("f32"); }, "key \"f32\" is of type float32, 0.25, expected an integer");
  check([&] { return file.integer("yes"); }, "key \"yes\" is of type bool, expected an integer");
  check([&] { return file.integer_or("text", 1); }, "key \"text\" is of type string, expected an integer");
  check([&] { return file.integer("i32s"); }, "key \"i32s\" is an array of 3 int32, expected an integer");

  check([&] { return file.number_or("text", 1); },
        "key \"text\" is of type string, expected a finite number");
  check([&] { return file.number("f32s"); },
        "key \"f32s\" is an array of 1 float32, expected a finite number");
  check([&] { return file.number("nan"); }, "key \"nan\" is of type float32, nan, expected a finite number");
  check([&] { return file.number("inf"); }, "key \"inf\" is of type float64, -inf, expected a finite number");

  check([&] { return file.string("u8"); }, "key \"u8\" is of type uint8, 200, expected a string");
  check([&] { return file.string_or("texts", ""); },
        "key \"texts\" is an array of 3 string, expected a string");
  check([&] { return file.boolean_or("u8", true); }, "key \"u8\" is of type uint8, 200, expected a bool");
  check([&] { return file.boolean_or("bools", true); },
        "key \"bools\" is an array of 3 bool, expected a bool");

  check([&] { return file.strings("text"); }, "key \"text\" is of type string, expected an array of strings");
  check([&] { return file.strings("i32s"); },
        "key \"i32s\" is an array of 3 int32, expected an array of strings");
  check([&] { return file.strings("nested"); },
        "key \"nested\" is an array of 2 array, expected an array of");
  check([&] { return file.integers("u8"); },
        "key \"u8\" is of type uint8, 200, expected an array of integers");
  check([&] { return file.integers("f32s"); },
        "key \"f32s\" is an array of 1 float32, expected an array of int");
  check([&] { return file.integers("no texts"); },
        "key \"no texts\" is an array of 0 string, expected an array");
  check([&] { return file.integers("large"); },
        "key \"large\" is an array of 2 uint64, expected an array of int");
}

TEST_CASE("gguf: tensors come back with their names, dimensions, types and bytes") {
  Random random(2);
  const Batch<float> matrix = random.batch<float>(3, 5);
  const Bytes odd{std::byte{1}, std::byte{2}, std::byte{3}};
  for (const std::uint32_t alignment : {1U, 8U, 32U, 4096U}) {
    GgufWriter writer;
    writer.set_alignment(alignment);
    writer.add_tensor("odd", {3}, 24, odd);
    writer.add_tensor("matrix", matrix);
    writer.add_tensor("vector", Vector<float>{{4, 5}});
    writer.add_tensor("four", {4, 1, 3, 2}, engine::type_f16, Bytes(48));
    const Bytes bytes = writer.bytes();
    const GgufFile file(bytes);
    REQUIRE(file.tensors().size() == 4);
    CHECK(file.tensors()[1].name == "matrix");
    CHECK(std::ranges::equal(file.tensor("odd").data, odd));
    CHECK(file.tensor("matrix").dims == Dims{5, 3});
    CHECK(file.tensor("matrix").type == engine::type_f32);
    CHECK(test::identical(engine::dequantize(file.tensor("matrix")), matrix));  // at any address
    CHECK(test::identical(engine::dequantize(file.tensor("vector")), Batch<float>{{4, 5}}));
    CHECK(file.tensor("four").rows() == 6);
    CHECK(file.tensor("four").cols() == 4);
    CHECK(file.tensor("vector").rows() == 1);
    CHECK(file.find("matrix") == &file.tensors()[1]);
    CHECK(file.find("Matrix") == nullptr);
    check_message(message_of<FileError>([&] { static_cast<void>(file.tensor("x")); }),
                  "there is no tensor \"x\" among the file's 4 tensors");
  }
}

TEST_CASE("gguf: a file is mapped, and stays so when the reader is moved") {
  const test::TemporaryFile file("model.gguf");
  const GgufWriter writer = sample();
  writer.save(file.path());
  GgufFile first(file.path());
  const GgufTensor* const tensor = first.find("vector");
  const GgufFile second(std::move(first));
  CHECK(second.find("vector") == tensor);
  CHECK(second.string("text") == "a \"b\"\n");
  CHECK(test::identical(engine::dequantize(*tensor), Batch<float>{{1, 2, 3}}));

  MappedFile a(file.path());
  CHECK(std::ranges::equal(a.bytes(), writer.bytes()));
  MappedFile b;
  CHECK(b.bytes().empty());
  b = std::move(a);
  const MappedFile c(std::move(b));
  CHECK(std::ranges::equal(c.bytes(), writer.bytes()));

  const std::string name = file.path().string();
  std::filesystem::resize_file(file.path(), 10);
  CHECK(message_of<FileError>([&] { GgufFile cut(file.path()); }) ==
        "gguf: " + name + ": the number of tensors at byte 8 takes 8 bytes, but only 2 are left in the file");
  std::filesystem::resize_file(file.path(), 0);
  CHECK(message_of<FileError>([&] { MappedFile empty(file.path()); }) == "file " + name + " is empty");
  const std::string directory = file.path().parent_path().string();
  CHECK(message_of<FileError>([&] { MappedFile none(directory); }) ==
        "file " + directory + " is not a regular file");
  CHECK(message_of<FileError>([&] {
          GgufFile missing(std::filesystem::path(name + "x"));
        }).starts_with("file " + name + "x cannot be opened: "));
}

// ---- What a file may get wrong ----

TEST_CASE("gguf: magic, version and counts are checked") {
  check_refused({}, "the magic at byte 0 takes 4 bytes, but only 0 are left");
  check_refused(ByteWriter().raw("GGML").number(3U).bytes(), "the magic is \"GGML\", expected \"GGUF\"");
  check_refused(ByteWriter().raw(std::string_view("\x89PN\n", 4)).bytes(), "the magic is \"\\x89PN\\x0a\"");
  check_refused(header(0, 0, 0).bytes(), "the version is 0, expected 2 or 3");
  check_refused(header(0, 0, 1).bytes(), "the version is 1, whose lengths have 32 bits, expected 2 or 3");
  check_refused(header(0, 0, 4).bytes(), "the version is 4, expected 2 or 3");
  check_refused(header(0, 0, 0x03000000U).bytes(),
                "the version is 3 with its bytes swapped, so the file is big-");
  check_refused(header(0, 0, 0x02000000U).bytes(),
                "the version is 2 with its bytes swapped, so the file is big-");
  check_refused(header(0, 1).bytes(), "the number of keys is 1, but the 0 bytes that follow hold at most 0");
  check_refused(header(3, 0).raw(Bytes(66)).bytes(),
                "the number of tensors is 3, but the 66 bytes that follow hold at most 2");
  check_refused(header(0, ~std::uint64_t{0}).raw(Bytes(30)).bytes(),
                "the number of keys is 18446744073709551615, but the 30 bytes that follow hold at most 2");
  const Bytes nothing = header(0, 0).bytes();
  CHECK(GgufFile(nothing).tensors().empty());
}

TEST_CASE("gguf: keys and values are checked") {
  const auto key = [](std::string_view name) {
    return header(0, 1).text(name).number(0U).number(std::uint8_t{1}).raw(Bytes(8)).bytes();
  };
  check_refused(key(""), "key 0: the length of the key's name is 0, expected 1 to 65535");
  check_refused(key(std::string(65536, 'k')),
                "key 0: the length of the key's name is 65536, expected 1 to 65535");
  const Bytes longest = key(std::string(65535, 'k'));
  CHECK(GgufFile(longest).keys().size() == 1);
  check_refused(header(0, 1).number(std::uint64_t{1} << 63U).raw(Bytes(9)).bytes(),
                "key 0: the key's name at byte 32 takes 9223372036854775808 bytes, but only 9 are left");
  GgufWriter twice;
  twice.add("k\n", 1U);
  twice.add("k\n", 2U);
  check_refused(twice.bytes(), "key \"k\\x0a\": comes twice");

  check_refused(one_key(13).raw(Bytes(8)).bytes(), "key \"k\": the value's type is 13, expected 0 to 12");
  check_refused(one_key(4).number(std::uint16_t{1}).bytes(),
                "key \"k\": the value at byte 37 takes 4 bytes, but");
  check_refused(one_key(7).number(std::uint8_t{2}).bytes(), "key \"k\": a bool is 2, expected 0 or 1");
  check_refused(one_key(8).number(std::uint64_t{5}).raw("four").bytes(),
                "key \"k\": the string at byte 45 takes 5 bytes, but only 4 are left");
  check_refused(one_key(8).number(~std::uint64_t{0}).bytes(),
                "key \"k\": the string at byte 45 takes 18446744073709551615 bytes");
}

TEST_CASE("gguf: arrays are checked") {
  const auto array = [](std::uint32_t type, std::uint64_t count) {
    return one_key(9).number(type).number(count);
  };
  check_refused(array(99, 0).bytes(), "key \"k\": the type of the array's elements is 99, expected 0 to 12");
  check_refused(array(4, 3).raw(Bytes(11)).bytes(),
                "key \"k\": the length of the array is 3, but the 11 bytes that follow hold at most 2");
  // 2^62 elements of 4 bytes are 0 bytes modulo 2^64.
  check_refused(array(4, std::uint64_t{1} << 62U).raw(Bytes(8)).bytes(),
                "key \"k\": the length of the array is 4611686018427387904, but the 8 bytes that follow");
  check_refused(array(8, std::uint64_t{1} << 61U).raw(Bytes(8)).bytes(),
                "the length of the array is 23058430092");
  check_refused(array(8, 3).raw(Bytes(16)).bytes(), "is 3, but the 16 bytes that follow hold at most 2");
  check_refused(array(9, 2).raw(Bytes(12)).bytes(), "is 2, but the 12 bytes that follow hold at most 1");
  check_refused(array(9, std::uint64_t{1} << 60U).raw(Bytes(12)).bytes(),
                "the length of the array is 11529215046");
  check_refused(array(8, 2).text("ab").number(std::uint64_t{3}).raw("cd").bytes(),
                "key \"k\": a string of the array at byte 67 takes 3 bytes, but only 2 are left");
  check_refused(array(7, 2).number(std::uint8_t{1}).number(std::uint8_t{255}).bytes(),
                "a bool is 255, expected");

  const auto nested = [&](int depth) {
    ByteWriter out = one_key(9);
    for (int i = 1; i < depth; ++i) out.number(9U).number(std::uint64_t{1});
    return out.number(0U).number(std::uint64_t{1}).number(std::uint8_t{1}).bytes();
  };
  const Bytes deepest = nested(4);
  CHECK(GgufFile(deepest).contains("k"));
  check_refused(nested(5), "key \"k\": arrays are nested more than 4 deep");
  check_refused(nested(10000), "key \"k\": arrays are nested more than 4 deep");
}

TEST_CASE("gguf: alignment is checked") {
  const auto aligned = [](std::uint32_t alignment) {
    GgufWriter writer;
    writer.add("general.alignment", alignment);
    return writer.bytes();
  };
  for (const std::uint32_t wrong : {0U, 3U, 48U, 1U << 21U, ~0U})
    check_refused(aligned(wrong), "key \"general.alignment\" is " + std::to_string(wrong) +
                                      ", expected a power of two up to 1048576");
  for (const std::uint32_t right : {1U, 2U, 64U, 1U << 20U}) {
    const Bytes bytes = aligned(right);
    CHECK(GgufFile(bytes).integer("general.alignment") == right);
  }
  GgufWriter text;
  text.add("general.alignment", "32");
  check_refused(text.bytes(),
                "key \"general.alignment\" is of type string, expected an integer of at least 0");
}

TEST_CASE("gguf: names, dimensions and types of tensors are checked") {
  const auto named = [](const std::string& name) {
    GgufWriter writer;
    writer.add_tensor(name, Vector<float>{{1, 2}});
    return writer.bytes();
  };
  check_refused(named(""), "tensor 0: the length of the tensor's name is 0, expected 1 to 64");
  check_refused(named(std::string(65, 't')),
                "tensor 0: the length of the tensor's name is 65, expected 1 to 64");
  const Bytes longest = named(std::string(64, 't'));
  CHECK(GgufFile(longest).tensors().size() == 1);
  GgufWriter twice;
  twice.add_tensor("t", Vector<float>{{1, 2}});
  twice.add_tensor("t", Vector<float>{{1, 2}});
  check_refused(twice.bytes(), "tensor \"t\": comes twice");

  check_refused(one_tensor({}, 0, 0, 64), "tensor \"t\": the number of dimensions is 0, expected 1 to 4");
  check_refused(one_tensor({1, 1, 1, 1, 1}, 0, 0, 64),
                "tensor \"t\": the number of dimensions is 5, expected 1");
  check_refused(one_tensor({0}, 0, 0, 64), "tensor \"t\": dimension 0 is 0, expected at least 1");
  check_refused(one_tensor({4, 0}, 0, 0, 64), "tensor \"t\": dimension 1 is 0, expected at least 1");
  check_refused(
      one_tensor({1, std::uint64_t{1} << 63U}, 24, 0, 64),
      "tensor \"t\": dimension 1 is 9223372036854775808, so that the number of elements is larger than");
  const std::uint64_t big = std::uint64_t{1} << 32U;  // squared, it is 0 modulo 2^64
  check_refused(one_tensor({big, big}, 24, 0, 64),
                "tensor \"t\": dimension 1 is 4294967296, so that the number");

  for (const std::uint32_t unknown : {4U, 5U, 33U, 1000U})
    check_refused(one_tensor({32}, unknown, 0, 64),
                  "tensor \"t\": the type is " + std::to_string(unknown) + ", which is no known ggml type");
  check_refused(one_tensor({33}, engine::type_q4_1, 0, 64),
                "tensor \"t\": the first dimension is 33, expected a multiple of 32 for Q4_1");
  check_refused(one_tensor({128, 2}, engine::type_q6_k, 0, 500),
                "tensor \"t\": the first dimension is 128, expected a multiple of 256 for Q6_K");
}

TEST_CASE("gguf: places of tensors are checked") {
  const Bytes whole = one_tensor({4, 4}, 0, 32, 96);
  CHECK(GgufFile(whole).tensor("t").data.data() == whole.data() + whole.size() - 64);
  check_refused(one_tensor({4, 4}, 0, 33, 128), "tensor \"t\": the offset is 33, expected a multiple of 32");
  check_refused(one_tensor({4}, 0, 96, 64),
                "tensor \"t\": the offset is 96, but there are only 64 bytes of data");
  check_refused(one_tensor({4}, 0, ~std::uint64_t{31}, 64),
                "tensor \"t\": the offset is 18446744073709551584, but");
  check_refused(
      one_tensor({4, 4}, 0, 32, 95),
      "tensor \"t\": 16 blocks of 4 bytes are expected for F32, but only 63 bytes are left at its offset 32");
  check_refused(one_tensor({256, 2}, engine::type_q6_k, 0, 419),
                "2 blocks of 210 bytes are expected for Q6_K");
  // 2^62 floats are 0 bytes modulo 2^64.
  check_refused(one_tensor({std::uint64_t{1} << 62U}, 0, 0, 64),
                "4611686018427387904 blocks of 4 bytes are expec");
  check_refused(one_tensor({std::uint64_t{1} << 60U, 4}, 28, 0, 64),
                "4611686018427387904 blocks of 8 bytes are e");

  const auto two = [](std::uint64_t first, std::uint64_t second) {
    ByteWriter out = header(2, 0);
    out.text("a").number(1U).number(std::uint64_t{33}).number(24U).number(first);
    out.text("b").number(1U).number(std::uint64_t{8}).number(0U).number(second);
    return out.pad_to(32).raw(Bytes(128)).bytes();
  };
  check_refused(two(0, 0), "begin 0 bytes after those of tensor");
  check_refused(two(0, 32),
                "tensor \"b\": its data begin 32 bytes after those of tensor \"a\", which has 33 bytes");
  const Bytes swapped = two(32, 0);
  CHECK(GgufFile(swapped).tensors().size() == 2);
  const Bytes apart = two(0, 96);
  CHECK(GgufFile(apart).tensors().size() == 2);
}

TEST_CASE("gguf: a file that is cut at any byte is refused") {
  const Bytes bytes = sample().bytes();
  CHECK(bytes.size() < 4000);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    const Bytes cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    const std::string message = message_of<FileError>([&] { GgufFile file(cut); });
    CAPTURE(size);
    CHECK(message.starts_with("gguf: memory: "));
  }
}

TEST_CASE("gguf: a file with any bytes changed is read or refused") {
  const Bytes bytes = sample().bytes();
  Random random(3);
  const auto end = static_cast<Index>(bytes.size()) - 1;
  int read = 0, refused = 0;
  for (int i = 0; i < 20000; ++i) {
    Bytes changed = bytes;
    for (Index count = random.integer(1, 4); count > 0; --count) {
      const auto at = static_cast<std::size_t>(random.integer(0, end));
      changed[at] = static_cast<std::byte>(random.pick<Index>({0, 1, 127, 128, 255, random.integer(0, 255)}));
    }
    try {
      visit(GgufFile(std::as_const(changed)));
      ++read;
    } catch (const FileError&) {
      ++refused;
    }
  }
  CHECK(read > 1000);
  CHECK(refused > 1000);
}

// ---- Weights ----

TEST_CASE("dequantize: every type's encoder and decoder agree as far as its codes allow") {
  Random random(4);
  const Batch<float> x = random.batch<float>(5, 512);
  const float size = x.cwiseAbs().maxCoeff();
  GgufWriter writer;
  for (const std::uint32_t type : all_types) add_encoded(writer, type, x);
  const Bytes bytes = writer.bytes();
  const GgufFile file(bytes);
  for (const std::uint32_t type : all_types) {
    CAPTURE(engine::type_name(type));
    const Batch<float> read = engine::dequantize(file.tensor(engine::type_name(type)));
    REQUIRE(read.rows() == 5);
    REQUIRE(read.cols() == 512);
    CHECK((read - x).cwiseAbs().maxCoeff() <= tolerance(type) * size);
  }
}

TEST_CASE("dequantize: numbers are read bit by bit") {
  CHECK(test::identical(decode(engine::type_f32, ByteWriter().number(1.5F).number(-1e-40F).bytes(), 2),
                        Batch<float>{{1.5F, -1e-40F}}));
  ByteWriter halves;
  for (const int bits : {0x3C00, 0xC000, 0x0001, 0x7BFF, 0x3555})
    halves.number(static_cast<std::uint16_t>(bits));
  CHECK(test::identical(decode(engine::type_f16, halves.bytes(), 5),
                        Batch<float>{{1, -2, 0x1p-24F, 65504, 0x1.554p-2F}}));
  ByteWriter brains;
  for (const int bits : {0x3F80, 0xC040, 0x0080, 0x7F7F}) brains.number(static_cast<std::uint16_t>(bits));
  CHECK(test::identical(decode(engine::type_bf16, brains.bytes(), 4),
                        Batch<float>{{1, -3, 0x1p-126F, 0x1.FEp127F}}));
}

TEST_CASE("dequantize: a Q4_0 block by hand") {
  // Scale 1/4; low nibbles 0, 1, ... 15, high nibbles 15, 14, ... 0.
  ByteWriter block;
  block.number(std::uint16_t{0x3400});
  for (int i = 0; i < 16; ++i) block.number(static_cast<std::uint8_t>(i | (15 - i) << 4));
  CHECK(test::identical(
      decode(engine::type_q4_0, block.bytes(), 32),
      Batch<float>{{-2,    -1.75F, -1.5F,  -1.25F, -1,     -0.75F, -0.5F,  -0.25F, 0,      0.25F, 0.5F,
                    0.75F, 1,      1.25F,  1.5F,   1.75F,  1.75F,  1.5F,   1.25F,  1,      0.75F, 0.5F,
                    0.25F, 0,      -0.25F, -0.5F,  -0.75F, -1,     -1.25F, -1.5F,  -1.75F, -2}}));
}

TEST_CASE("dequantize: a Q4_1 block by hand") {
  // Scale 1/2, minimum -1; low nibbles 0, 1, ... 15, high nibbles all 3 but the last, 15.
  ByteWriter block;
  block.number(std::uint16_t{0x3800}).number(std::uint16_t{0xBC00});
  for (int i = 0; i < 15; ++i) block.number(static_cast<std::uint8_t>(i | 3 << 4));
  block.number(std::uint8_t{0xFF});
  CHECK(test::identical(decode(engine::type_q4_1, block.bytes(), 32),
                        Batch<float>{{-1,   -0.5F, 0,    0.5F, 1,    1.5F, 2,    2.5F, 3,    3.5F, 4,
                                      4.5F, 5,     5.5F, 6,    6.5F, 0.5F, 0.5F, 0.5F, 0.5F, 0.5F, 0.5F,
                                      0.5F, 0.5F,  0.5F, 0.5F, 0.5F, 0.5F, 0.5F, 0.5F, 0.5F, 6.5F}}));
}

TEST_CASE("dequantize: a Q8_0 block by hand, and rows one after the other") {
  ByteWriter blocks;
  blocks.number(std::uint16_t{0x4000});  // 2
  for (const int code : {-128, 127, -1, 0}) blocks.number(static_cast<std::int8_t>(code));
  blocks.raw(Bytes(28)).number(std::uint16_t{0x8001});  // -2^-24
  for (int i = 0; i < 32; ++i) blocks.number(static_cast<std::int8_t>(i));
  const Batch<float> read = engine::dequantize(tensor_of(engine::type_q8_0, {32, 2}, blocks.bytes()));
  REQUIRE(read.rows() == 2);
  CHECK(test::identical(read.row(0).head(5), Batch<float>{{-256, 254, -2, 0, 0}}));
  CHECK(read.row(0).tail(27).isZero(0));
  for (Index i = 0; i < 32; ++i) CHECK(read(1, i) == -0x1p-24F * static_cast<float>(i));
}

/// The four elements that share bytes, one after the other, as the format's description has them.
std::array<float, 256> naive_q6_k(const std::array<std::uint8_t, 208>& bytes, float d) {
  std::array<float, 256> y{};
  const auto scale = [&](std::size_t i) { return static_cast<std::int8_t>(bytes[192 + i]); };
  for (std::size_t n = 0; n < 2; ++n)
    for (std::size_t l = 0; l < 32; ++l) {
      const int a = bytes[64 * n + l], b = bytes[64 * n + l + 32], h = bytes[128 + 32 * n + l];
      const int q1 = (a % 16 + 16 * (h % 4)) - 32, q2 = (b % 16 + 16 * (h / 4 % 4)) - 32;
      const int q3 = (a / 16 + 16 * (h / 16 % 4)) - 32, q4 = (b / 16 + 16 * (h / 64)) - 32;
      const std::size_t s = 8 * n + l / 16, at = 128 * n + l;
      y[at] = d * static_cast<float>(scale(s) * q1);
      y[at + 32] = d * static_cast<float>(scale(s + 2) * q2);
      y[at + 64] = d * static_cast<float>(scale(s + 4) * q3);
      y[at + 96] = d * static_cast<float>(scale(s + 6) * q4);
    }
  return y;
}

TEST_CASE("dequantize: Q6_K super-blocks are those of a naive formula") {
  Random random(5);
  for (int i = 0; i < 100; ++i) {
    std::array<std::uint8_t, 208> bytes{};
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random.integer(0, 255));
    const std::uint16_t d = half_bits(static_cast<float>(random.normal()));
    const std::array<float, 256> expected = naive_q6_k(bytes, half_value(d));
    const Batch<float> read =
        decode(engine::type_q6_k, ByteWriter().raw(std::as_bytes(std::span(bytes))).number(d).bytes(), 256);
    CHECK(std::equal(expected.begin(), expected.end(), read.data()));
  }
}

TEST_CASE("dequantize: single elements of a Q6_K super-block by hand") {
  // Scale 1, group scales 1, 2, ... 16, all codes 0 but two: element 37 (run 1 of the first half: byte 37's
  // low nibble 5, high byte 5's bits 2-3 are 2) is 5 + 16 * 2 = 37, element 255 (the last of all: high nibble
  // 15, bits 6-7 are 3) is 63. A code 32 would be zero.
  std::array<std::uint8_t, 208> bytes{};
  bytes[37] = 5;
  bytes[128 + 5] = 2 << 2;
  bytes[127] = 15 << 4;
  bytes[191] = 3 << 6;
  for (std::size_t i = 0; i < 16; ++i) bytes[192 + i] = static_cast<std::uint8_t>(i + 1);
  const Batch<float> read =
      decode(engine::type_q6_k,
             ByteWriter().raw(std::as_bytes(std::span(bytes))).number(std::uint16_t{0x3C00}).bytes(), 256);
  for (Index i = 0; i < 256; ++i) {
    const Index code = i == 37 ? 37 : i == 255 ? 63 : 0;
    CHECK(read(0, i) == static_cast<float>((code - 32) * (i / 16 + 1)));
  }
}

TEST_CASE("dequantize: a type that is not supported is named") {
  const auto check = [](std::uint32_t type, const Dims& dims, std::string_view part) {
    const std::string message = message_of<FileError>(
        [&] { static_cast<void>(engine::dequantize(tensor_of(type, dims, Bytes(1000)))); });
    CAPTURE(message);
    CHECK(message.starts_with("gguf: tensor \"t\": "));
    CHECK(message.find(part) != std::string::npos);
  };
  check(12, {256}, "the type is Q4_K (12), expected F32, F16, BF16, Q4_0, Q4_1, Q8_0 or Q6_K");
  check(6, {32}, "the type is Q5_0 (6), expected");
  check(1000, {32}, "the type is unknown (1000), expected");
  CHECK(engine::type_name(23) == "IQ4_XS");
  // A tensor that no GgufFile made.
  check(engine::type_f32, {2, 3}, "3 x 2 elements of F32 do not take 1000 bytes");
  check(engine::type_q4_1, {31}, "1 x 31 elements of Q4_1 do not take 1000 bytes");
  check(engine::type_f32, {}, "1 x 0 elements of F32 do not take 1000 bytes");
}

TEST_CASE("dequantize: weights that are not finite are refused with the tensor's name") {
  const auto refused = [](std::uint32_t type, const Bytes& bytes, std::uint64_t cols) {
    return message_of<FileError>([&] { static_cast<void>(decode(type, bytes, cols)); }) ==
           "gguf: tensor \"t\": a weight is not finite";
  };
  const std::uint16_t infinity = 0x7C00, nan = 0x7E00, brain_nan = 0x7FC0, one = 0x3C00;
  CHECK(refused(engine::type_f32, ByteWriter().number(1.0F).number(-INFINITY).bytes(), 2));
  CHECK(refused(engine::type_f16, ByteWriter().number(infinity).bytes(), 1));
  CHECK(refused(engine::type_bf16, ByteWriter().number(brain_nan).bytes(), 1));
  CHECK(refused(engine::type_q4_0, ByteWriter().number(infinity).raw(Bytes(16)).bytes(), 32));
  CHECK(refused(engine::type_q4_1, ByteWriter().number(infinity).number(one).raw(Bytes(16)).bytes(), 32));
  CHECK(refused(engine::type_q4_1, ByteWriter().number(one).number(nan).raw(Bytes(16)).bytes(), 32));
  CHECK(refused(engine::type_q8_0, ByteWriter().number(nan).raw(Bytes(32)).bytes(), 32));
  CHECK(refused(engine::type_q6_k, ByteWriter().raw(Bytes(208)).number(infinity).bytes(), 256));
}

}  // namespace
