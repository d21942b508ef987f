// SPDX-License-Identifier: Apache-2.0
#include "engine/gguf.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "wushkv/core/check.hpp"

namespace engine {

static_assert(std::endian::native == std::endian::little, "GGUF's numbers are read as they lie");

namespace {

using Bytes = std::span<const std::byte>;
using wushkv::detail::concat;

constexpr std::uint64_t max_index = std::numeric_limits<wushkv::Index>::max();

constexpr TensorType types[] = {
    {type_f32, "F32", 1, 4},
    {type_f16, "F16", 1, 2},
    {type_q4_0, "Q4_0", 32, 18},
    {type_q4_1, "Q4_1", 32, 20},
    {6, "Q5_0", 32, 22},
    {7, "Q5_1", 32, 24},
    {type_q8_0, "Q8_0", 32, 34},
    {9, "Q8_1", 32, 36},
    {10, "Q2_K", 256, 84},
    {11, "Q3_K", 256, 110},
    {12, "Q4_K", 256, 144},
    {13, "Q5_K", 256, 176},
    {type_q6_k, "Q6_K", 256, 210},
    {15, "Q8_K", 256, 292},
    {16, "IQ2_XXS", 256, 66},
    {17, "IQ2_XS", 256, 74},
    {18, "IQ3_XXS", 256, 98},
    {19, "IQ1_S", 256, 50},
    {20, "IQ4_NL", 32, 18},
    {21, "IQ3_S", 256, 110},
    {22, "IQ2_S", 256, 82},
    {23, "IQ4_XS", 256, 136},
    {24, "I8", 1, 1},
    {25, "I16", 1, 2},
    {26, "I32", 1, 4},
    {27, "I64", 1, 8},
    {28, "F64", 1, 8},
    {29, "IQ1_M", 256, 56},
    {type_bf16, "BF16", 1, 2},
    {34, "TQ1_0", 256, 54},
    {35, "TQ2_0", 256, 66},
    {39, "MXFP4", 32, 17},
    {40, "NVFP4", 64, 36},
    {41, "Q1_0", 128, 18},
};

enum ValueType : std::uint32_t {
  uint8,
  int8,
  uint16,
  int16,
  uint32,
  int32,
  float32,
  boolean,
  text,
  array,
  uint64,
  int64,
  float64
};

struct ValueFormat {
  std::string_view name;
  std::uint64_t bytes;  // 0 where it depends on the value
};
constexpr ValueFormat formats[] = {{"uint8", 1},  {"int8", 1},    {"uint16", 2}, {"int16", 2},  {"uint32", 4},
                                   {"int32", 4},  {"float32", 4}, {"bool", 1},   {"string", 0}, {"array", 0},
                                   {"uint64", 8}, {"int64", 8},   {"float64", 8}};

template <class T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

std::string_view as_text(Bytes bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

bool is_integer(std::uint32_t type) { return type < float32 || type == uint64 || type == int64; }

/// Calls `function` with the integer of GGUF type `type` at `at`, if that is an integer type.
template <class Function>
void visit_integer(std::uint32_t type, const std::byte* at, const Function& function) {
  switch (type) {
    case uint8:
      return function(load<std::uint8_t>(at));
    case int8:
      return function(load<std::int8_t>(at));
    case uint16:
      return function(load<std::uint16_t>(at));
    case int16:
      return function(load<std::int16_t>(at));
    case uint32:
      return function(load<std::uint32_t>(at));
    case int32:
      return function(load<std::int32_t>(at));
    case uint64:
      return function(load<std::uint64_t>(at));
    case int64:
      return function(load<std::int64_t>(at));
    default:
      break;
  }
}

}  // namespace

std::string quote_name(std::string_view name) {
  constexpr std::size_t longest = 80;
  constexpr std::string_view digits = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : name.substr(0, longest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7F)
      out += c;
    else
      out.append({'\\', 'x', digits[byte >> 4U], digits[byte & 0xFU]});
  }
  return out += name.size() > longest ? "\"..." : "\"";
}

const TensorType* find_type(std::uint32_t number) {
  const auto* const found = std::ranges::find(types, number, &TensorType::number);
  return found != std::end(types) ? found : nullptr;
}

std::string_view type_name(std::uint32_t number) {
  const TensorType* const type = find_type(number);
  return type != nullptr ? type->name : "unknown";
}

wushkv::Index GgufTensor::cols() const { return dims.empty() ? 0 : static_cast<wushkv::Index>(dims[0]); }

wushkv::Index GgufTensor::rows() const {
  std::uint64_t product = 1;
  for (std::size_t i = 1; i < dims.size(); ++i) product *= dims[i];
  return static_cast<wushkv::Index>(product);
}

/// Reads the file front to back. Nothing is allocated from a number in the file before it was compared with
/// the bytes that are there.
class GgufFile::Parser {
 public:
  Parser(GgufFile& file, Bytes bytes) : file_(file), bytes_(bytes) {}

  void parse() {
    read_magic();
    read_version();
    const auto tensors = take<std::uint64_t>("the number of tensors");
    const auto keys = take<std::uint64_t>("the number of keys");
    check_count("the number of keys", keys, least_key_bytes);
    check_count("the number of tensors", tensors, least_tensor_bytes);
    for (std::uint64_t i = 0; i < keys; ++i) read_key(i);
    for (std::uint64_t i = 0; i < tensors; ++i) read_tensor(i);
    subject_.clear();
    place_tensors();
  }

 private:
  // What the shortest of names, values and numbers of dims takes.
  static constexpr std::uint64_t least_key_bytes = 8 + 1 + 4 + 1;
  static constexpr std::uint64_t least_tensor_bytes = 8 + 1 + 4 + 8 + 4 + 8;
  static constexpr std::uint64_t longest_key = 65535, longest_tensor_name = 64;  // the format's limits
  static constexpr std::uint64_t largest_alignment = 1U << 20U;                  // ours
  static constexpr int deepest_array = 4;                                        // ours

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    file_.fail(subject_, parts...);
  }

  std::uint64_t left() const { return bytes_.size() - at_; }

  Bytes take_bytes(std::uint64_t size, std::string_view what) {
    if (size > left())
      fail(what, " at byte ", at_, " takes ", size, " bytes, but only ", left(), " are left in the file");
    const Bytes taken = bytes_.subspan(at_, static_cast<std::size_t>(size));
    at_ += taken.size();
    return taken;
  }

  template <class T>
  T take(std::string_view what) {
    return load<T>(take_bytes(sizeof(T), what).data());
  }

  Bytes take_text(std::string_view what) {
    const auto length = take<std::uint64_t>(concat("the length of ", what));
    return take_bytes(length, what);
  }

  std::string_view take_name(std::string_view what, std::uint64_t longest) {
    const std::string_view name = as_text(take_text(what));
    if (name.empty() || name.size() > longest)
      fail("the length of ", what, " is ", name.size(), ", expected 1 to ", longest);
    return name;
  }

  void check_count(std::string_view what, std::uint64_t count, std::uint64_t least_bytes) const {
    if (count > left() / least_bytes)
      fail(what, " is ", count, ", but the ", left(), " bytes that follow hold at most ",
           left() / least_bytes);
  }

  void read_magic() {
    const Bytes magic = take_bytes(4, "the magic");
    if (as_text(magic) != "GGUF") fail("the magic is ", quote_name(as_text(magic)), ", expected \"GGUF\"");
  }

  void read_version() {
    const auto version = take<std::uint32_t>("the version");
    if (version == 1) fail("the version is 1, whose lengths have 32 bits, expected 2 or 3");
    if (version == 2U << 24U || version == 3U << 24U)
      fail("the version is ", version >> 24U, " with its bytes swapped, so the file is big-endian, expected ",
           "a little-endian one");
    if (version != 2 && version != 3) fail("the version is ", version, ", expected 2 or 3");
    file_.version_ = version;
  }

  void read_key(std::uint64_t number) {
    subject_ = concat("key ", number, ": ");
    const std::string_view key = take_name("the key's name", longest_key);
    subject_ = concat("key ", quote_name(key), ": ");
    const auto [at, is_new] = file_.values_.try_emplace(key);
    if (!is_new) fail("comes twice, expected once");
    at->second = take_value(take_value_type("the value's type"));
  }

  std::uint32_t take_value_type(std::string_view what) {
    const auto type = take<std::uint32_t>(what);
    if (type >= std::size(formats)) fail(what, " is ", type, ", expected 0 to ", std::size(formats) - 1);
    return type;
  }

  Value take_value(std::uint32_t type) {
    if (type == text) return {.type = type, .data = take_text("the string")};
    if (type == array) return take_array(1);
    const Value value{.type = type, .data = take_bytes(formats[type].bytes, "the value")};
    if (type == boolean) check_booleans(value.data);
    return value;
  }

  Value take_array(int depth) {
    if (depth > deepest_array) fail("arrays are nested more than ", deepest_array, " deep");
    const std::uint32_t type = take_value_type("the type of the array's elements");
    const auto count = take<std::uint64_t>("the length of the array");
    const std::uint64_t least = type == text ? 8 : type == array ? 12 : formats[type].bytes;
    check_count("the length of the array", count, least);
    const std::size_t start = at_;
    if (type == text) {
      for (std::uint64_t i = 0; i < count; ++i) take_text("a string of the array");
    } else if (type == array) {
      for (std::uint64_t i = 0; i < count; ++i) take_array(depth + 1);
    } else {
      const Bytes elements = take_bytes(count * formats[type].bytes, "the array");
      if (type == boolean) check_booleans(elements);
    }
    return {.type = type, .is_array = true, .count = count, .data = bytes_.subspan(start, at_ - start)};
  }

  void check_booleans(Bytes values) const {
    for (const std::byte value : values)
      if (value > std::byte{1}) fail("a bool is ", static_cast<unsigned>(value), ", expected 0 or 1");
  }

  void read_tensor(std::uint64_t number) {
    subject_ = concat("tensor ", number, ": ");
    const std::string_view name = take_name("the tensor's name", longest_tensor_name);
    subject_ = concat("tensor ", quote_name(name), ": ");
    if (!file_.tensor_at_.try_emplace(name, file_.tensors_.size()).second) fail("comes twice, expected once");
    GgufTensor tensor{.name = std::string(name), .dims = take_dims(), .type = 0, .data = {}};
    tensor.type = take<std::uint32_t>("the type");
    const TensorType* const type = find_type(tensor.type);
    if (type == nullptr) fail("the type is ", tensor.type, ", which is no known ggml type");
    if (tensor.dims[0] % type->block != 0)
      fail("the first dimension is ", tensor.dims[0], ", expected a multiple of ", type->block, " for ",
           type->name);
    offsets_.push_back(take<std::uint64_t>("the offset"));
    file_.tensors_.push_back(std::move(tensor));
  }

  std::vector<std::uint64_t> take_dims() {
    const auto count = take<std::uint32_t>("the number of dimensions");
    if (count < 1 || count > 4) fail("the number of dimensions is ", count, ", expected 1 to 4");
    std::vector<std::uint64_t> dims(count);
    std::uint64_t product = 1;
    for (std::size_t i = 0; i < dims.size(); ++i) {
      dims[i] = take<std::uint64_t>("a dimension");
      if (dims[i] == 0) fail("dimension ", i, " is 0, expected at least 1");
      if (dims[i] > max_index / product)
        fail("dimension ", i, " is ", dims[i], ", so that the number of elements is larger than ", max_index);
      product *= dims[i];
    }
    return dims;
  }

  std::uint64_t alignment() const {
    const std::uint64_t alignment = file_.integer_or("general.alignment", 32);
    if (!std::has_single_bit(alignment) || alignment > largest_alignment)
      fail("key \"general.alignment\" is ", alignment, ", expected a power of two up to ", largest_alignment);
    return alignment;
  }

  void place_tensors() {
    const std::uint64_t aligned_to = alignment();
    if (file_.tensors_.empty()) return;
    const std::uint64_t padding = (aligned_to - at_ % aligned_to) % aligned_to;
    take_bytes(padding, "the padding before the tensors' data");
    const Bytes data = bytes_.subspan(at_);
    for (std::size_t i = 0; i < offsets_.size(); ++i) place(file_.tensors_[i], offsets_[i], aligned_to, data);
    check_overlaps();
  }

  void place(GgufTensor& tensor, std::uint64_t offset, std::uint64_t aligned_to, Bytes data) const {
    const std::string label = concat("tensor ", quote_name(tensor.name), ": ");
    if (offset % aligned_to != 0)
      fail(label, "the offset is ", offset, ", expected a multiple of ", aligned_to);
    if (offset > data.size())
      fail(label, "the offset is ", offset, ", but there are only ", data.size(), " bytes of data");
    const TensorType& type = *find_type(tensor.type);
    const Bytes from = data.subspan(static_cast<std::size_t>(offset));
    const std::uint64_t blocks = static_cast<std::uint64_t>(tensor.rows()) * (tensor.dims[0] / type.block);
    if (blocks > from.size() / type.bytes)
      fail(label, blocks, " blocks of ", type.bytes, " bytes are expected for ", type.name, ", but only ",
           from.size(), " bytes are left at its offset ", offset);
    tensor.data = from.first(static_cast<std::size_t>(blocks * type.bytes));
  }

  /// An overlap would make one tensor's bytes another's weights.
  void check_overlaps() const {
    std::vector<const GgufTensor*> sorted;
    for (const GgufTensor& tensor : file_.tensors_) sorted.push_back(&tensor);
    std::ranges::sort(sorted, {}, [](const GgufTensor* tensor) { return tensor->data.data(); });
    for (std::size_t i = 1; i < sorted.size(); ++i) {
      const GgufTensor &before = *sorted[i - 1], &after = *sorted[i];
      const auto distance = static_cast<std::size_t>(after.data.data() - before.data.data());
      if (distance < before.data.size())
        fail("tensor ", quote_name(after.name), ": its data begin ", distance,
             " bytes after those of tensor ", quote_name(before.name), ", which has ", before.data.size(),
             " bytes, expected no overlap");
    }
  }

  GgufFile& file_;
  Bytes bytes_;
  std::size_t at_ = 0;
  std::string subject_;  // what a message is about, with a colon
  std::vector<std::uint64_t> offsets_;
};

GgufFile::GgufFile(const std::filesystem::path& path) : file_(path), name_(path.string()) {
  Parser(*this, file_.bytes()).parse();
}

GgufFile::GgufFile(std::span<const std::byte> bytes, std::string name) : name_(std::move(name)) {
  Parser(*this, bytes).parse();
}

std::vector<std::string_view> GgufFile::keys() const {
  std::vector<std::string_view> keys;
  for (const auto& [key, ignored] : values_) keys.push_back(key);
  return keys;
}

const GgufFile::Value& GgufFile::value(std::string_view key, std::string_view expected) const {
  const auto at = values_.find(key);
  if (at == values_.end()) fail("key ", quote_name(key), " is missing, expected ", expected);
  return at->second;
}

void GgufFile::refuse(std::string_view key, const Value& value, std::string_view expected) const {
  const std::string_view type = formats[value.type].name;
  std::string what =
      value.is_array ? concat("an array of ", value.count, " ", type) : concat("of type ", type);
  if (!value.is_array) {
    visit_integer(value.type, value.data.data(), [&](auto integer) { what += concat(", ", integer); });
    if (value.type == float32) what += concat(", ", load<float>(value.data.data()));
    if (value.type == float64) what += concat(", ", load<double>(value.data.data()));
  }
  fail("key ", quote_name(key), " is ", what, ", expected ", expected);
}

std::uint64_t GgufFile::integer(std::string_view key) const {
  constexpr std::string_view expected = "an integer of at least 0";
  const Value& found = value(key, expected);
  std::uint64_t result = 0;
  bool fits = false;
  if (!found.is_array)
    visit_integer(found.type, found.data.data(), [&](auto stored) {
      fits = std::in_range<std::uint64_t>(stored);
      result = static_cast<std::uint64_t>(stored);
    });
  if (!fits) refuse(key, found, expected);
  return result;
}

double GgufFile::number(std::string_view key) const {
  constexpr std::string_view expected = "a finite number";
  const Value& found = value(key, expected);
  double result = std::numeric_limits<double>::quiet_NaN();
  if (!found.is_array) {
    const std::byte* const at = found.data.data();
    visit_integer(found.type, at, [&](auto stored) { result = static_cast<double>(stored); });
    if (found.type == float32) result = static_cast<double>(load<float>(at));
    if (found.type == float64) result = load<double>(at);
  }
  if (!wushkv::is_finite(result)) refuse(key, found, expected);
  return result;
}

std::string_view GgufFile::string(std::string_view key) const {
  constexpr std::string_view expected = "a string";
  const Value& found = value(key, expected);
  if (found.is_array || found.type != text) refuse(key, found, expected);
  return as_text(found.data);
}

std::uint64_t GgufFile::integer_or(std::string_view key, std::uint64_t otherwise) const {
  return contains(key) ? integer(key) : otherwise;
}

double GgufFile::number_or(std::string_view key, double otherwise) const {
  return contains(key) ? number(key) : otherwise;
}

std::string_view GgufFile::string_or(std::string_view key, std::string_view otherwise) const {
  return contains(key) ? string(key) : otherwise;
}

bool GgufFile::boolean_or(std::string_view key, bool otherwise) const {
  if (!contains(key)) return otherwise;
  constexpr std::string_view expected = "a bool";
  const Value& found = value(key, expected);
  if (found.is_array || found.type != boolean) refuse(key, found, expected);
  return found.data[0] != std::byte{0};
}

std::vector<std::string_view> GgufFile::strings(std::string_view key) const {
  constexpr std::string_view expected = "an array of strings";
  const Value& found = value(key, expected);
  if (!found.is_array || found.type != text) refuse(key, found, expected);
  std::vector<std::string_view> result;
  result.reserve(static_cast<std::size_t>(found.count));
  for (Bytes rest = found.data; !rest.empty();) {
    const auto length = static_cast<std::size_t>(load<std::uint64_t>(rest.data()));
    result.push_back(as_text(rest.subspan(8, length)));
    rest = rest.subspan(8 + length);
  }
  return result;
}

std::vector<std::int64_t> GgufFile::integers(std::string_view key) const {
  constexpr std::string_view expected = "an array of integers up to 9223372036854775807";
  const Value& found = value(key, expected);
  if (!found.is_array || !is_integer(found.type)) refuse(key, found, expected);
  std::vector<std::int64_t> result(static_cast<std::size_t>(found.count));
  const std::byte* at = found.data.data();
  for (std::int64_t& element : result) {
    bool fits = false;
    visit_integer(found.type, at, [&](auto stored) {
      fits = std::in_range<std::int64_t>(stored);
      element = static_cast<std::int64_t>(stored);
    });
    if (!fits) refuse(key, found, expected);
    at += formats[found.type].bytes;
  }
  return result;
}

const GgufTensor* GgufFile::find(std::string_view name) const {
  const auto at = tensor_at_.find(name);
  return at != tensor_at_.end() ? &tensors_[at->second] : nullptr;
}

const GgufTensor& GgufFile::tensor(std::string_view name) const {
  const GgufTensor* const found = find(name);
  if (found == nullptr)
    fail("there is no tensor ", quote_name(name), " among the file's ", tensors_.size(), " tensors");
  return *found;
}

}  // namespace engine
