// SPDX-License-Identifier: Apache-2.0
#include "wushkv/io/safetensors.hpp"

#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "support.hpp"
#include "temporary_file.hpp"

#if defined(__unix__)
#include <sys/resource.h>

#include <csignal>
#endif

namespace {

using test::message_of;
using test::Random;
using wushkv::Batch;
using wushkv::DType;
using wushkv::Dynamic;
using wushkv::FileError;
using wushkv::Index;
using wushkv::SafetensorsFile;
using wushkv::SafetensorsView;
using wushkv::SafetensorsWriter;
using wushkv::TensorShape;
using wushkv::TensorView;
using wushkv::Vector;

using Bytes = std::vector<std::byte>;

// A view of a temporary vector would dangle.
static_assert(!std::is_constructible_v<SafetensorsView, Bytes>);
static_assert(std::is_constructible_v<SafetensorsView, Bytes&>);
static_assert(std::is_constructible_v<SafetensorsView, const Bytes&>);
static_assert(std::is_constructible_v<SafetensorsView, std::span<const std::byte>>);

/// A file put together by hand: length, header as it is, `data_size` bytes of data.
Bytes raw_file(std::string_view header, std::size_t data_size) {
  const std::uint64_t length = header.size();
  Bytes out(sizeof length + header.size() + data_size, std::byte{0x2A});
  std::memcpy(out.data(), &length, sizeof length);
  if (!header.empty()) std::memcpy(out.data() + sizeof length, header.data(), header.size());
  return out;
}

std::string refusal(const Bytes& file) {
  return message_of<FileError>([&] { SafetensorsView view(file); });
}

bool contains(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

/// One sentence: our prefix, no line break, and the part that tells what is wrong.
void check_message(const std::string& message, std::string_view part) {
  CAPTURE(message);
  CAPTURE(part);
  CHECK(message.starts_with("safetensors: "));
  CHECK(contains(message, part));
  CHECK_FALSE(contains(message, "\n"));
}

Bytes copy_of(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

/// The number of files and directories in `directory`.
std::ptrdiff_t entries(const std::filesystem::path& directory) {
  return std::distance(std::filesystem::directory_iterator(directory), std::filesystem::directory_iterator());
}

/// Two tensors, metadata and padding: small enough to be cut at every byte.
Bytes sample_file() {
  SafetensorsWriter writer;
  writer.set_metadata("format", "wushkv");
  writer.add("key.scale", TensorShape{2, 3}, std::vector<float>{1, 2, 3, 4, 5, 6});
  writer.add("codes", TensorShape{5}, std::vector<std::uint8_t>{0, 1, 2, 3, 255});
  writer.add("mean", TensorShape{}, std::array<double, 1>{0.25});
  return writer.bytes();
}

std::byte random_byte(Random& random) { return static_cast<std::byte>(random.integer(0, 255)); }

template <class T>
std::vector<T> some_values(std::size_t count) {
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<T>(static_cast<float>(i) + 1.0F);
  return values;
}

template <class T>
void check_round_trip(DType dtype) {
  CAPTURE(wushkv::dtype_name(dtype));
  static_assert(wushkv::dtype_v<std::int64_t> == DType::I64);
  CHECK(wushkv::dtype_v<T> == dtype);
  CHECK(wushkv::dtype_size(dtype) == static_cast<Index>(sizeof(T)));
  for (const TensorShape& shape :
       {TensorShape{}, TensorShape{0}, TensorShape{7}, TensorShape{3, 5}, TensorShape{2, 3, 4},
        TensorShape{2, 0, 4}, TensorShape{1, 1, 2, 1, 3, 1, 1, 2}}) {
    const std::vector<T> values = some_values<T>(static_cast<std::size_t>(shape.size()));
    SafetensorsWriter writer;
    writer.add("x", shape, values);
    const SafetensorsFile file = SafetensorsFile::from_bytes(writer.bytes());
    const TensorView tensor = file.tensor("x");
    CHECK(tensor.dtype() == dtype);
    CHECK(tensor.shape() == shape);
    CHECK(tensor.size() == shape.size());
    CHECK(tensor.bytes().size() == values.size() * sizeof(T));
    const Batch<T> matrix = file.matrix<T>("x", shape);
    CHECK(matrix.rows() == shape.rows());
    CHECK(matrix.cols() == shape.cols());
    const Vector<T> vector = file.vector<T>("x");
    const std::span<const T> in_place = file.values<T>("x");
    REQUIRE(vector.size() == shape.size());
    REQUIRE(in_place.size() == values.size());
    const Vector<double> widened = file.vector<double>("x", shape);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto at = static_cast<Index>(i);
      CHECK(matrix.data()[i] == values[i]);
      CHECK(vector(at) == values[i]);
      CHECK(in_place[i] == values[i]);
      CHECK(widened(at) == static_cast<double>(i + 1));
    }
  }
}

TEST_CASE("safetensors: every type and shape comes back as it was written") {
  check_round_trip<double>(DType::F64);
  check_round_trip<float>(DType::F32);
  check_round_trip<Eigen::half>(DType::F16);
  check_round_trip<Eigen::bfloat16>(DType::BF16);
  check_round_trip<std::uint8_t>(DType::U8);
  check_round_trip<std::int64_t>(DType::I64);
}

TEST_CASE("safetensors: Eigen expressions are written in row-major order, whatever their own") {
  Eigen::Matrix<double, 2, 3> column_major;
  column_major << 1, 2, 3, 4, 5, 6;
  SafetensorsWriter writer;
  writer.add("matrix", column_major);
  writer.add("transposed", 2.0 * column_major.transpose());
  writer.add("block", column_major.rightCols<2>());
  writer.add("column", column_major.col(1));
  writer.add("row", column_major.row(1));
  writer.add("array", column_major.array() + 1.0);
  writer.add("product", column_major * column_major.transpose());
  writer.add("reshaped", TensorShape{1, 3, 2}, column_major.cast<float>());
  const Bytes bytes = writer.bytes();
  const SafetensorsView view(bytes);

  CHECK(view.matrix<double>("matrix", {2, 3}) == column_major);
  CHECK(view.matrix<double>("transposed", {3, 2}) == 2.0 * column_major.transpose());
  CHECK(view.matrix<double>("block", {2, 2}) == column_major.rightCols<2>());
  CHECK(view.vector<double>("column", {2}) == column_major.col(1));
  CHECK(view.matrix<double>("row", {1, 3}) == column_major.row(1));
  CHECK(view.matrix<double>("array")(1, 2) == 7.0);
  CHECK(view.matrix<double>("product", {2, 2}) == column_major * column_major.transpose());
  CHECK(view.tensor("reshaped").dtype() == DType::F32);
  CHECK(view.vector<int>("reshaped", {1, 3, 2}) == Vector<int>{{1, 2, 3, 4, 5, 6}});
  CHECK(view.matrix<float>("reshaped").rows() == 3);
  CHECK(view.names() == std::vector<std::string>{"array", "block", "column", "matrix", "product", "reshaped",
                                                 "row", "transposed"});
  CHECK(view.contains("block"));
  CHECK_FALSE(view.contains("blocks"));
}

TEST_CASE("safetensors: a tensor of tokens and heads is read with its heads side by side") {
  constexpr Index tokens = 3, heads = 2, dim = 4;
  const std::vector<float> values = some_values<float>(static_cast<std::size_t>(tokens * heads * dim));
  SafetensorsWriter writer;
  writer.add("keys", TensorShape{tokens, heads, dim}, values);
  writer.add("flat", TensorShape{tokens, heads * dim}, values);
  writer.add("deep", TensorShape{tokens, 1, heads, 2, 2}, values);
  writer.add("vector", TensorShape{tokens * heads * dim}, values);
  writer.add("scalar", TensorShape{}, std::array<float, 1>{1});
  writer.add("no tokens", TensorShape{0, heads, dim}, std::vector<float>{});
  writer.add("no heads", TensorShape{tokens, 0, dim}, std::vector<float>{});
  writer.add("fraction", TensorShape{1, 1}, std::array<float, 1>{0.5F});
  const Bytes bytes = writer.bytes();
  const SafetensorsView view(bytes);

  const Batch<double> keys = view.token_matrix<double>("keys");
  REQUIRE(keys.rows() == tokens);
  REQUIRE(keys.cols() == heads * dim);
  for (Index token = 0; token < tokens; ++token)
    for (Index head = 0; head < heads; ++head)
      for (Index i = 0; i < dim; ++i) {
        const Index at = (token * heads + head) * dim + i;
        CHECK(keys(token, head * dim + i) == static_cast<double>(values[static_cast<std::size_t>(at)]));
      }
  CHECK(test::identical(view.token_matrix<float>("flat"), keys));
  CHECK(test::identical(view.token_matrix<int>("deep"), keys));
  CHECK(view.token_matrix<float>("no tokens").rows() == 0);
  CHECK(view.token_matrix<float>("no tokens").cols() == heads * dim);
  CHECK(view.token_matrix<float>("no heads").rows() == tokens);
  CHECK(view.token_matrix<float>("no heads").cols() == 0);

  const auto refused = [&](std::string_view name) {
    return message_of<FileError>([&] { static_cast<void>(view.token_matrix<int>(name)); });
  };
  check_message(refused("vector"), "tensor \"vector\": shape is [24], expected at least 2 dimensions");
  check_message(refused("scalar"), "tensor \"scalar\": shape is [], expected at least 2 dimensions");
  check_message(refused("fraction"), "tensor \"fraction\": element 0 is 0.5");
  check_message(refused("values"), "there is no tensor \"values\"");
}

TEST_CASE("safetensors: metadata and names keep escapes and Unicode") {
  const std::string every_control = [] {
    std::string text = "\"\\/\x7F";
    for (char c = 0; c < 0x20; ++c) text += c;
    return text;
  }();
  const std::string unicode = "Größe \xE2\x82\xAC \xF0\x9F\x98\x80";
  SafetensorsWriter writer;
  writer.set_metadata(unicode, every_control);
  writer.set_metadata("", "replaced");
  writer.set_metadata("", "");
  writer.add(every_control, TensorShape{1}, std::array<float, 1>{1});
  writer.add(unicode, TensorShape{1}, std::array<float, 1>{2});
  const Bytes bytes = writer.bytes();
  const SafetensorsView view(bytes);
  CHECK(view.metadata() == wushkv::TensorMetadata{{unicode, every_control}, {"", ""}});
  CHECK(view.vector<float>(every_control)(0) == 1.0F);
  CHECK(view.vector<float>(unicode)(0) == 2.0F);
}

TEST_CASE("safetensors: every JSON escape is understood") {
  const Bytes bytes = raw_file(
      R"({"__metadata__":{"short":"\"\\\/\b\f\n\r\t","units":"\u0041\u00e9\u20AC\ud83d\uDE00\u0000"} } )", 0);
  const SafetensorsView view(bytes);
  using namespace std::string_literals;
  CHECK(view.metadata().at("short") == "\"\\/\b\f\n\r\t");
  CHECK(view.metadata().at("units") == "A\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\0"s);
  CHECK(view.names().empty());
}

TEST_CASE("safetensors: white space between tokens, any order of fields and of tensors is legal") {
  const Bytes bytes = raw_file(
      "{ \"b\" :\t{\"shape\":\n[ 2 , 1 ],\r\"data_offsets\" : [ 3, 5 ] , \"dtype\":\"U8\"},"
      "\"empty\":{\"dtype\":\"F64\",\"shape\":[0,4],\"data_offsets\":[3,3]},"
      "\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},\"__metadata__\":{} }   ",
      5);
  const SafetensorsView view(bytes);
  CHECK(view.names() == std::vector<std::string>{"a", "b", "empty"});
  CHECK(view.expect_shape("b", {2, 1}).bytes().data() == bytes.data() + bytes.size() - 2);
  CHECK(view.matrix<float>("empty").cols() == 4);
}

TEST_CASE("safetensors: a file without tensors, and a shape with a huge and a zero dimension") {
  const Bytes empty = SafetensorsWriter().bytes();
  CHECK(empty.size() == 16);
  CHECK(SafetensorsView(empty).names().empty());
  const Bytes huge =
      raw_file(R"({"x":{"dtype":"F64","shape":[4611686018427387904,0],"data_offsets":[0,0]}})", 0);
  const SafetensorsView view(huge);
  CHECK(view.tensor("x").size() == 0);
  CHECK(view.matrix<float>("x").size() == 0);
  CHECK(view.values<double>("x").empty());
}

struct Corruption {
  std::string_view header;
  std::size_t data_size;
  std::string_view message;
};

constexpr Corruption corruptions[] = {
    {"", 0, "the header's length is 0, expected 2 to 100000000"},
    {"[]", 0, "header byte 0 is \"[\", expected \"{\""},
    {" {}", 0, "header byte 0 is 0x20, expected \"{\""},
    {"\xEF\xBB\xBF{}", 0, "header byte 0 is 0xef, expected \"{\""},
    {"{", 0, "the header ends at byte 1, expected a string"},
    {"{}x", 0, "header byte 2 is \"x\", expected nothing but spaces after the closing brace"},
    {"{} \n", 0, "header byte 3 is 0x0a, expected nothing but spaces"},
    {"{}{}", 0, "expected nothing but spaces"},
    {"{,}", 0, "header byte 1 is \",\", expected a string"},
    {"{1:{}}", 0, "header byte 1 is \"1\", expected a string"},
    {"{\"a\"}", 0, "header byte 4 is \"}\", expected \":\""},
    {"{\"a\":1}", 0, "header byte 5 is \"1\", expected \"{\""},
    {"{\"a\":[[[[[[[[[[", 0, "header byte 5 is \"[\", expected \"{\""},
    {"{\"a\":{\"a\":{\"a\":{", 0, "tensor \"a\": unknown field \"a\""},
    {"{\"a\":{}}", 0, "tensor \"a\": the field \"dtype\" is missing"},
    {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "tensor \"a\": the field \"shape\" is missing"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "tensor \"a\": the field \"data_offsets\" is missing"},
    {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\"}}", 0, "tensor \"a\": the field \"dtype\" comes twice"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"more\":1}}", 1,
     "tensor \"a\": unknown field \"more\""},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],}}", 1, "is \"}\", expected a string"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},}", 1, "is \"}\", expected a string"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}", 1,
     "the header ends at byte 52, expected \",\" or \"}\""},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
     "\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
     0, "tensor \"a\" comes twice"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
     "\"\\u0061\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
     0, "tensor \"a\" comes twice"},
    {"{\"\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0, "a tensor has an empty name"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "the key \"__metadata__\" comes twice"},
    {"{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0, "__metadata__: the key \"k\" comes twice"},
    {"{\"__metadata__\":{\"k\":1}}", 0, "__metadata__: header byte 21 is \"1\", expected a string"},
    {"{\"__metadata__\":{\"k\":{}}}", 0, "__metadata__: header byte 21 is \"{\", expected a string"},
    {"{\"__metadata__\":null}", 0, "__metadata__: header byte 16 is \"n\", expected \"{\""},
    {"{\"a\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
     "tensor \"a\": dtype is \"I32\", expected F64, F32, F16, BF16, U8 or I64"},
    {"{\"a\":{\"dtype\":\"f32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "dtype is \"f32\""},
    {"{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
     "tensor \"a\": header byte 14 is \"7\""},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 1,
     "is \"-\", expected an integer of at least 0"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1.5],\"data_offsets\":[0,1]}}", 1, "has a fraction or an exponent"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1e0],\"data_offsets\":[0,1]}}", 1, "has a fraction or an exponent"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[01],\"data_offsets\":[0,1]}}", 1, "begins with a 0"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[+1],\"data_offsets\":[0,1]}}", 1, "is \"+\", expected an integer"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,],\"data_offsets\":[0,1]}}", 1, "is \"]\", expected an integer"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1 1],\"data_offsets\":[0,1]}}", 1, "expected \",\" or \"]\""},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}}", 1, "is \"1\", expected \"[\""},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[9223372036854775808],\"data_offsets\":[0,1]}}", 1,
     "is larger than 9223372036854775807"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[18446744073709551617],\"data_offsets\":[0,1]}}", 1,
     "is larger than"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
     "tensor \"a\": the product of the dimensions above zero is larger than"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[0,4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
     "the product of the dimensions above zero is larger than"},
    {"{\"a\":{\"dtype\":\"F64\",\"shape\":[2305843009213693952],\"data_offsets\":[0,0]}}", 0,
     "F64 of shape [2305843009213693952] needs more than any file has"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1,
     "shape has more than 8 dimensions"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,0]}}", 1,
     "data_offsets are [1, 0], expected the first to be at most the second"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 1,
     "data_offsets end at 2, but the file has 1 bytes of data"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,9223372036854775807]}}", 1,
     "data_offsets end at 9223372036854775807"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1,
     "expected \",\" between the two data_offsets"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,1]}}", 1,
     "expected \"]\" after the two data_offsets"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[]}}", 1, "expected an integer of at least 0"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,3]}}", 3,
     "tensor \"a\": data_offsets span 3 bytes, but F32 of shape [1] needs 4"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,0]}}", 0,
     "data_offsets span 0 bytes, but F32 of shape [] needs 4"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
     "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}",
     3, "tensor \"b\": data_offsets begin at 1 and overlap another tensor's, which end at 2"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
     "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}",
     2, "tensor \"b\": data_offsets begin at 0 and overlap"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
     "\"b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[1,1]}}",
     2, "tensor \"b\": data_offsets begin at 1 and overlap"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
     "\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]}}",
     3, "tensor \"b\": data_offsets begin at 2, expected 1"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", 2, "begin at 1, expected 0"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 2,
     "the file has 2 bytes of data, but its tensors cover 1"},
    {"{}", 1, "the file has 1 bytes of data, but its tensors cover 0"},
    {"{\"__metadata__\":{\"\\x\":\"\"}}", 0, "header byte 19 is \"x\", expected one of"},
    {"{\"__metadata__\":{\"\\", 0, "the header ends at byte 19, expected one of"},
    {"{\"__metadata__\":{\"k", 0, "the header ends at byte 19, expected the closing quote of a string"},
    {"{\"__metadata__\":{\"\\u12", 0, "the header ends at byte 22, expected four hexadecimal digits"},
    {"{\"__metadata__\":{\"\\u12G4\":\"\"}}", 0, "header byte 22 is \"G\", expected four hexadecimal digits"},
    {"{\"__metadata__\":{\"\\ud800\":\"\"}}", 0, "a high surrogate escape at header byte 20 has no low"},
    {"{\"__metadata__\":{\"\\ud800\\u0041\":\"\"}}", 0, "a high surrogate escape"},
    {"{\"__metadata__\":{\"\\ud800\\ud800\":\"\"}}", 0, "a high surrogate escape"},
    {"{\"__metadata__\":{\"\\udc00\":\"\"}}", 0, "a lone low surrogate escape"},
    {"{\"__metadata__\":{\"a\nb\":\"\"}}", 0, "header byte 19 is 0x0a, expected no control character"},
    {"{\"__metadata__\":{\"\x80\":\"\"}}", 0, "header byte 18 is 0x80, expected valid UTF-8"},
    {"{\"__metadata__\":{\"\xC0\xAF\":\"\"}}", 0, "expected valid UTF-8"},
    {"{\"__metadata__\":{\"\xE0\x80\xAF\":\"\"}}", 0, "expected valid UTF-8"},
    {"{\"__metadata__\":{\"\xED\xA0\x80\":\"\"}}", 0, "expected valid UTF-8"},
    {"{\"__metadata__\":{\"\xF4\x90\x80\x80\":\"\"}}", 0, "expected valid UTF-8"},
    {"{\"__metadata__\":{\"\xF0\x9F\x98\":\"\"}}", 0, "expected valid UTF-8"},
    {"{\"__metadata__\":{\"\xF0\x9F\x98", 0, "expected valid UTF-8"},
};

TEST_CASE("safetensors: corrupted headers are refused with a sentence that tells why") {
  for (const Corruption& corruption : corruptions) {
    CAPTURE(std::string(corruption.header));
    check_message(refusal(raw_file(corruption.header, corruption.data_size)), corruption.message);
  }
}

TEST_CASE("safetensors: a NUL in the header is refused wherever it stands") {
  const std::string good = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}} )";
  REQUIRE(refusal(raw_file(good, 1)).empty());
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = '\0';
    check_message(refusal(raw_file(bad, 1)), "0x00");
  }
}

TEST_CASE("safetensors: header lengths that do not fit are refused") {
  Bytes file = sample_file();
  const auto with_length = [&](std::uint64_t length) {
    std::memcpy(file.data(), &length, sizeof length);
    return refusal(file);
  };
  check_message(with_length(file.size() - 7),
                "but only " + std::to_string(file.size() - 8) + " bytes follow");
  check_message(with_length(100'000'000), "the header's length is 100000000, but only");
  check_message(with_length(100'000'001), "the header's length is 100000001, expected 2 to 100000000");
  check_message(with_length(~std::uint64_t{0}), "the header's length is 18446744073709551615, expected 2 to");
}

TEST_CASE("safetensors: a file cut at any byte is refused") {
  const Bytes file = sample_file();
  REQUIRE(refusal(file).empty());
  for (std::size_t size = 0; size < file.size(); ++size) {
    CAPTURE(size);
    // A copy, so that a read past the end leaves the allocation and a sanitizer sees it.
    check_message(refusal(Bytes(file.data(), file.data() + size)), "");
  }
  Bytes longer = file;
  longer.push_back(std::byte{0});
  check_message(refusal(longer), "bytes of data, but its tensors cover");
}

/// Touches all that a view gives out; FileErrors of conversions are fine, anything else is not.
double read_everything(const SafetensorsView& view) {
  double sum = 0;
  for (const std::string& name : view.names()) {
    sum += view.vector<double>(name).sum();
    sum += static_cast<double>(view.tensor(name).bytes().size());
  }
  return sum;
}

TEST_CASE("safetensors: random byte flips are refused or read, and never anything else") {
  Random random(20260901);
  const Bytes original = sample_file();
  std::uint64_t header_size = 0;
  std::memcpy(&header_size, original.data(), sizeof header_size);
  const auto file_end = static_cast<Index>(original.size());
  const auto header_end = static_cast<Index>(8 + header_size);
  int refused = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    Bytes file = original;
    // Mostly in the header, where it matters.
    for (Index flips = random.integer(1, 3); flips > 0; --flips) {
      const Index end = random.integer(0, 7) == 0 ? file_end : header_end;
      file[static_cast<std::size_t>(random.integer(0, end - 1))] = random_byte(random);
    }
    try {
      static_cast<void>(read_everything(SafetensorsView(file)));
    } catch (const FileError&) {
      ++refused;
    }
  }
  CHECK(refused > 15000);
  CHECK(refused < 20000);
}

/// A name or a text of up to 12 characters, from all lengths of UTF-8.
std::string random_text(Random& random) {
  std::string text;
  for (Index length = random.integer(0, 12); length > 0; --length) {
    constexpr std::array<Index, 5> from{0, 0x80, 0x800, 0xE000, 0x10000};  // no surrogates
    constexpr std::array<Index, 5> last{0x7F, 0x7FF, 0xD7FF, 0xFFFF, 0x10FFFF};
    const auto kind = static_cast<std::size_t>(random.integer(0, 4));
    const Index code = random.integer(from[kind], last[kind]);
    wushkv::detail::safetensors::append_utf8(text, static_cast<std::uint32_t>(code));
  }
  return text;
}

struct RandomTensor {
  DType dtype;
  TensorShape shape;
  Bytes bytes;
};

RandomTensor random_tensor(Random& random) {
  using enum DType;
  std::vector<Index> dims(static_cast<std::size_t>(random.integer(0, 4)));
  for (Index& dim : dims) dim = random.integer(0, 4);
  RandomTensor tensor{random.pick({F64, F32, F16, BF16, U8, I64}), TensorShape(dims), {}};
  tensor.bytes.resize(static_cast<std::size_t>(tensor.shape.size() * wushkv::dtype_size(tensor.dtype)));
  for (std::byte& byte : tensor.bytes) byte = random_byte(random);
  return tensor;
}

TEST_CASE("safetensors: random files come back byte for byte, aligned, and are written the same again") {
  Random random(7);
  for (int trial = 0; trial < 500; ++trial) {
    std::map<std::string, RandomTensor> tensors;
    wushkv::TensorMetadata metadata;
    SafetensorsWriter writer;
    for (Index i = random.integer(0, 5); i > 0; --i) {
      const std::string name = random_text(random);
      if (name.empty() || tensors.contains(name)) continue;
      const RandomTensor& tensor = tensors[name] = random_tensor(random);
      writer.add(name, TensorView(tensor.dtype, tensor.shape, tensor.bytes));
    }
    for (Index i = random.integer(0, 3); i > 0; --i) {
      const std::string key = random_text(random);
      const std::string value = random_text(random);
      metadata.insert_or_assign(key, value);
      writer.set_metadata(key, value);
    }
    const Bytes bytes = writer.bytes();
    CHECK(bytes == writer.bytes());
    const SafetensorsView view(bytes);
    CHECK(view.metadata() == metadata);
    REQUIRE(view.names().size() == tensors.size());
    for (const auto& [name, tensor] : tensors) {
      const TensorView read = view.tensor(name);
      CHECK(read.dtype() == tensor.dtype);
      CHECK(read.shape() == tensor.shape);
      CHECK(copy_of(read.bytes()) == tensor.bytes);
      if (read.size() != 0)
        CHECK((read.bytes().data() - bytes.data()) % wushkv::dtype_size(read.dtype()) == 0);
    }
  }
}

TEST_CASE("safetensors: conversions are exact or rounded to the nearest") {
  using test::infinity;
  SafetensorsWriter writer;
  writer.add("double", TensorShape{5}, std::vector<double>{0.1, -2.5, infinity, -infinity, test::nan});
  writer.add("half", TensorShape{3},
             std::vector{Eigen::half(0.5F), Eigen::half(-65504.0F), Eigen::half(6e-8F)});
  writer.add("bfloat16", TensorShape{2}, std::vector{Eigen::bfloat16(3.140625F), Eigen::bfloat16(1e30F)});
  writer.add("byte", TensorShape{2}, std::vector<std::uint8_t>{0, 255});
  writer.add(
      "long", TensorShape{2},
      std::vector<std::int64_t>{std::numeric_limits<std::int64_t>::min(), (std::int64_t{1} << 53) + 1});
  writer.add("whole", TensorShape{3}, std::vector<float>{-128.0F, 127.0F, -0.0F});
  const Bytes bytes = writer.bytes();
  const SafetensorsView view(bytes);

  const Vector<float> narrowed = view.vector<float>("double");
  CHECK(narrowed(0) == 0.1F);
  CHECK(narrowed(1) == -2.5F);
  CHECK(narrowed(2) == std::numeric_limits<float>::infinity());
  CHECK(narrowed(3) == -std::numeric_limits<float>::infinity());
  CHECK(std::isnan(narrowed(4)));
  CHECK(std::isnan(static_cast<float>(view.vector<Eigen::half>("double")(4))));
  CHECK(view.vector<double>("half") == Vector<double>{{0.5, -65504.0, std::ldexp(1.0, -24)}});
  CHECK(view.vector<float>("bfloat16")(0) == 3.140625F);
  CHECK(static_cast<float>(view.vector<Eigen::bfloat16>("half")(0)) == 0.5F);
  CHECK(view.vector<double>("byte") == Vector<double>{{0.0, 255.0}});
  CHECK(view.vector<std::int64_t>("byte") == Vector<std::int64_t>{{0, 255}});
  CHECK(view.vector<double>("long") == Vector<double>{{-std::ldexp(1.0, 63), std::ldexp(1.0, 53)}});
  CHECK(view.vector<std::int8_t>("whole") == Vector<std::int8_t>{{-128, 127, 0}});
}

TEST_CASE("safetensors: a conversion that would change the number is refused") {
  SafetensorsWriter writer;
  writer.add("fraction", TensorShape{2}, std::vector<double>{1.0, 1.5});
  writer.add("nan", TensorShape{1}, std::vector<float>{std::numeric_limits<float>::quiet_NaN()});
  writer.add("infinite", TensorShape{1}, std::vector<float>{std::numeric_limits<float>::infinity()});
  writer.add("large", TensorShape{2}, std::vector<double>{0.0, 1e39});
  writer.add("2^63", TensorShape{1}, std::vector<double>{std::ldexp(1.0, 63)});
  writer.add("65520", TensorShape{1}, std::vector<std::int64_t>{65520});
  writer.add("-1", TensorShape{1}, std::vector<std::int64_t>{-1});
  const Bytes bytes = writer.bytes();
  const SafetensorsView view(bytes);
  const auto refusal_of = [&]<class T>(std::string_view name, T) {
    return message_of<FileError>([&] { static_cast<void>(view.vector<T>(name)); });
  };
  check_message(refusal_of("fraction", int{}),
                "tensor \"fraction\": element 1 is 1.5, which a signed 32-bit integer cannot hold");
  check_message(refusal_of("nan", std::int64_t{}), "tensor \"nan\": element 0 is nan");
  check_message(refusal_of("infinite", std::uint8_t{}), "an unsigned 8-bit integer cannot hold");
  check_message(refusal_of("large", float{}), "element 1 is 1e+39, which a 32-bit floating-point number");
  check_message(refusal_of("large", Eigen::bfloat16{}), "element 1 is 1e+39, which a bfloat16 cannot hold");
  check_message(refusal_of("2^63", std::int64_t{}), "which a signed 64-bit integer cannot hold");
  CHECK(view.vector<std::uint64_t>("2^63")(0) == std::uint64_t{1} << 63U);
  check_message(refusal_of("65520", Eigen::half{}),
                "element 0 is 65520, which a 16-bit floating-point number");
  check_message(refusal_of("-1", std::uint64_t{}), "element 0 is -1, which an unsigned 64-bit integer");
  check_message(refusal_of("-1", std::uint8_t{}), "element 0 is -1, which an unsigned 8-bit integer");
}

TEST_CASE("safetensors: values in place need the type and the alignment, copies do not") {
  // The header has 55 bytes here, so in an aligned buffer the doubles lie at 63: off by one from 64.
  const std::string header = R"({"x":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}})";
  REQUIRE(header.size() == 55);
  Bytes file = raw_file(header, 16);
  const std::array<double, 2> wanted{1.5, -2.5};
  std::memcpy(file.data() + 63, wanted.data(), sizeof wanted);
  const SafetensorsView view(file);
  CHECK(view.vector<double>("x") == Vector<double>{{1.5, -2.5}});
  CHECK(view.vector<float>("x") == Vector<float>{{1.5F, -2.5F}});
  check_message(message_of<FileError>([&] { static_cast<void>(view.values<double>("x")); }),
                "tensor \"x\": its address is not a multiple of 8 bytes");
  check_message(message_of<FileError>([&] { static_cast<void>(view.values<float>("x")); }),
                "tensor \"x\": dtype is F64, expected F32");

  const Bytes padded = raw_file(header + " ", 16);
  CHECK(SafetensorsView(padded).values<double>("x").size() == 2);
}

TEST_CASE("safetensors: what a caller asks for and the file does not have is named") {
  const Bytes bytes = sample_file();
  const SafetensorsView view(bytes);
  const auto refused = [](const auto& function) { return message_of<FileError>(function); };
  check_message(refused([&] { static_cast<void>(view.tensor("value.scale")); }),
                "there is no tensor \"value.scale\" among the file's 3 tensors");
  check_message(refused([&] {
                  static_cast<void>(view.expect_shape("key.scale", {3, 2}));
                }),
                "tensor \"key.scale\": shape is [2, 3], expected [3, 2]");
  check_message(refused([&] {
                  static_cast<void>(view.matrix<float>("key.scale", {Dynamic, 4}));
                }),
                "tensor \"key.scale\": shape is [2, 3], expected [?, 4]");
  check_message(refused([&] { static_cast<void>(view.vector<float>("key.scale", {6})); }), "expected [6]");
  check_message(refused([&] { static_cast<void>(view.vector<float>("mean", {1})); }),
                "shape is [], expected [1]");
  CHECK(view.expect_shape("key.scale", {Dynamic, 3}).rows() == 2);
  CHECK(view.vector<float>("mean", {})(0) == 0.25F);
  const std::string long_name(5000, 'n');
  CHECK(refused([&] { static_cast<void>(view.tensor(long_name)); }).size() < 200);
  std::string euros;
  while (euros.size() < 300) euros += "\xE2\x82\xAC";
  const std::string cut = refused([&] { static_cast<void>(view.tensor(euros)); });
  CHECK(cut.size() < 200);
  CHECK(wushkv::detail::safetensors::is_utf8(cut));
}

TEST_CASE("safetensors: files are saved, read, moved, and their errors name the path") {
  const test::TemporaryFile temporary("a b.safetensors");
  const std::filesystem::path& path = temporary.path();
  const std::filesystem::path directory = path.parent_path();
  SafetensorsWriter writer;
  writer.add("x", TensorShape{2}, std::vector<float>{1, 2});
  writer.save(path);
  writer.add("y", TensorShape{}, std::vector<std::uint8_t>{9});
  writer.save(path);
  CHECK(entries(directory) == 1);

  SafetensorsFile file(path);
  const TensorView before = file.tensor("x");
  SafetensorsFile moved(std::move(file));
  CHECK(moved.tensor("x").bytes().data() == before.bytes().data());
  SafetensorsFile assigned = SafetensorsFile::from_bytes(sample_file());
  assigned = std::move(moved);
  CHECK(assigned.tensor("x").bytes().data() == before.bytes().data());
  CHECK(assigned.vector<float>("x") == Vector<float>{{1, 2}});
  CHECK(assigned.values<std::uint8_t>("y")[0] == 9);
  const SafetensorsView view = assigned;
  CHECK(view.contains("y"));
  check_message(message_of<FileError>([&] { static_cast<void>(assigned.tensor("z")); }), path.string());

  const auto open = [](const std::filesystem::path& p) {
    return message_of<FileError>([&] { SafetensorsFile unused(p); });
  };
  check_message(open(directory / "missing"), (directory / "missing").string() + ": cannot be read: ");
  check_message(open(directory / "."), "cannot be read: ");
  check_message(open(""), "cannot be read: ");
  std::ofstream(directory / "short", std::ios::binary) << "1234";
  check_message(open(directory / "short"), (directory / "short").string() + ": the file has 4 bytes");
}

TEST_CASE("safetensors: a save that fails leaves the old file and nothing else") {
  const test::TemporaryFile temporary("old");
  const std::filesystem::path& old = temporary.path();
  const std::filesystem::path directory = old.parent_path();
  SafetensorsWriter writer;
  writer.add("x", TensorShape{2}, std::vector<float>{1, 2});
  const auto save = [&](const std::filesystem::path& p) {
    return message_of<FileError>([&] { writer.save(p); });
  };
  check_message(save(directory / "no" / "such" / "directory"), "a temporary file beside it cannot be made");
  std::filesystem::create_directory(directory / "taken");
  check_message(save(directory / "taken"), "is no regular file");
  CHECK(entries(directory) == 1);

  std::ofstream(directory / "old.tmp0") << "another writer's";
  CHECK(save(old).empty());
  CHECK(SafetensorsFile(old).names().size() == 1);
  CHECK(std::filesystem::file_size(directory / "old.tmp0") == 16);
  CHECK(entries(directory) == 3);

#if defined(__unix__)
  writer.add("more", TensorShape{1 << 16}, std::vector<float>(1 << 16));
  rlimit limit{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &limit) == 0);
  const rlimit low{1024, limit.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  REQUIRE(setrlimit(RLIMIT_FSIZE, &low) == 0);
  const std::string message = save(old);
  REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  std::signal(SIGXFSZ, handler);
  check_message(message, "cannot be written: ");
  CHECK(SafetensorsFile(old).names().size() == 1);
  CHECK(entries(directory) == 3);
#endif
}

TEST_CASE("safetensors: the writer refuses misuse and stays as it was") {
  SafetensorsWriter writer;
  const std::vector<float> two{1, 2};
  writer.add("x", TensorShape{2}, two);
  writer.set_metadata("k", "v");
  const Bytes before = writer.bytes();
  const auto refused = [](const auto& function) { return message_of<std::invalid_argument>(function); };
  const auto add = [&](std::string_view name, const TensorShape& shape) {
    return refused([&] { writer.add(name, shape, two); });
  };
  check_message(add("", {2}), "name is empty");
  check_message(add("__metadata__", {2}), "the format keeps this name for the metadata");
  check_message(add("x", {2}), "tensor \"x\" was added before");
  check_message(add("bad \xFF", {2}), "name is not valid UTF-8");
  check_message(add("bad \xC3", {2}), "name is not valid UTF-8");
  check_message(add("y", {3}), "tensor \"y\": 2 elements came, expected as many as shape [3] has");
  check_message(add("y", {}), "expected as many as shape [] has");
  check_message(add("y", {Dynamic, 2}), "expected as many as shape [?, 2] has");
  check_message(refused([&] {
                  writer.add("y", TensorShape{2, 2}, Eigen::Vector3d::Zero());
                }),
                "3 elements came");
  check_message(refused([&] { writer.add("y", TensorView(DType::F32, {1}, std::span(before).first(3))); }),
                "tensor \"y\": 3 bytes came, expected a multiple of 4");
  check_message(refused([&] { writer.add("y", TensorView(DType::F32, {1}, std::span(before).first(8))); }),
                "2 elements came");
  check_message(refused([&] { writer.set_metadata("\x80", "v"); }), "a metadata key is not valid UTF-8");
  check_message(refused([&] { writer.set_metadata("k", "\x80"); }),
                "the metadata value of \"k\" is not valid UTF-8");
  check_message(refused([] { TensorShape{1, 1, 1, 1, 1, 1, 1, 1, 1}; }), "shape has 9 dimensions");
  check_message(refused([] { TensorShape{-2}; }), "a dimension of -2");
  check_message(refused([] { TensorShape{Index{1} << 40, Index{1} << 40}; }), "more elements than");
  CHECK(writer.bytes() == before);
}

TEST_CASE("safetensors: larger elements come first, so that all are aligned") {
  SafetensorsWriter writer;
  writer.add("1", TensorShape{1}, std::vector<std::uint8_t>{1});
  writer.add("2", TensorShape{1}, std::vector{Eigen::half(2.0F)});
  writer.add("4", TensorShape{1}, std::vector<float>{4});
  writer.add("2b", TensorShape{1}, std::vector{Eigen::bfloat16(2.0F)});
  writer.add("8", TensorShape{1}, std::vector<std::int64_t>{8});
  writer.add("8b", TensorShape{1}, std::vector<double>{8});
  const SafetensorsFile file = SafetensorsFile::from_bytes(writer.bytes());
  const std::byte* previous = nullptr;
  for (const char* name : {"8", "8b", "4", "2", "2b", "1"}) {
    CHECK(file.tensor(name).bytes().data() > previous);
    previous = file.tensor(name).bytes().data();
  }
  CHECK(file.values<std::int64_t>("8")[0] == 8);
  CHECK(file.values<double>("8b")[0] == 8.0);
  CHECK(file.values<Eigen::half>("2")[0] == Eigen::half(2.0F));
}

TEST_CASE("safetensors: the reference data of the quantizers can be read") {
  const SafetensorsFile file(test::data("quantizers.safetensors"));
  const Batch<double> x = file.matrix<double>("x64", {24, 64});
  CHECK((x.row(1).array() == 3.5).all());
  CHECK(file.names().size() > 100);
  CHECK(read_everything(file) != 0.0);
}

}  // namespace
