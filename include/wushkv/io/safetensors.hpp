// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_IO_SAFETENSORS_HPP
#define WUSHKV_IO_SAFETENSORS_HPP

/// A strict reader and writer of safetensors files (github.com/huggingface/safetensors, README, "Format"):
///
///     8 bytes   N, the header's length, little-endian
///     N bytes   JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
///     the rest  the tensors' elements, little-endian, row-major; offsets count from here
///
/// A file is checked whole before any of it is used, and one that breaks a rule of the format is refused with
/// a `FileError` of one sentence (design.md, section 4). Beyond the format's rules, a tensor has at most
/// `TensorShape::max_rank` dimensions, a name that is not empty, and one of the types of `DType`.

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <ios>
#include <limits>
#include <map>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "wushkv/core/check.hpp"
#include "wushkv/core/error.hpp"
#include "wushkv/core/types.hpp"

namespace wushkv {

static_assert(
    std::endian::native == std::endian::little,
    "safetensors files are little-endian and wushkv copies their elements as they are: this machine "
    "is not little-endian and would need byte swaps that nobody has written yet");

/// An element type, under the name the file uses.
enum class DType { F64, F32, F16, BF16, U8, I64 };

/// The name in the file: "F64", "F32", "F16", "BF16", "U8" or "I64".
constexpr std::string_view dtype_name(DType dtype) {
  constexpr std::array<std::string_view, 6> names{"F64", "F32", "F16", "BF16", "U8", "I64"};
  return names[static_cast<std::size_t>(dtype)];
}

/// The size of an element in bytes.
constexpr Index dtype_size(DType dtype) {
  constexpr std::array<Index, 6> sizes{8, 4, 2, 2, 1, 8};
  return sizes[static_cast<std::size_t>(dtype)];
}

/// A C++ type whose bytes are those of a `DType`.
template <class T>
concept TensorElement = std::same_as<T, double> || std::same_as<T, float> || std::same_as<T, Eigen::half> ||
    std::same_as<T, Eigen::bfloat16> || std::same_as<T, std::uint8_t> ||
    (std::signed_integral<T> && sizeof(T) == 8);

/// A C++ type that a tensor can be converted to: a `TensorElement` or any integer that is no character.
template <class T>
concept TensorTarget = TensorElement<T> ||
    (std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, char> && !std::same_as<T, wchar_t> &&
     !std::same_as<T, char8_t> && !std::same_as<T, char16_t> && !std::same_as<T, char32_t>);

namespace detail::safetensors {

template <TensorElement T>
constexpr DType dtype_of() {
  if constexpr (std::same_as<T, double>)
    return DType::F64;
  else if constexpr (std::same_as<T, float>)
    return DType::F32;
  else if constexpr (std::same_as<T, Eigen::half>)
    return DType::F16;
  else if constexpr (std::same_as<T, Eigen::bfloat16>)
    return DType::BF16;
  else if constexpr (std::same_as<T, std::uint8_t>)
    return DType::U8;
  else
    return DType::I64;
}

}  // namespace detail::safetensors

/// The `DType` whose bytes are those of `T`.
template <TensorElement T>
inline constexpr DType dtype_v = detail::safetensors::dtype_of<T>();

namespace detail::safetensors {

inline constexpr std::uint64_t max_header_bytes = 100'000'000;  // the reference implementation's limit
inline constexpr std::string_view metadata_key = "__metadata__";
inline constexpr Index max_index = std::numeric_limits<Index>::max();

/// a * b for a, b >= 0, or nothing where it does not fit an `Index`.
constexpr std::optional<Index> checked_product(Index a, Index b) {
  if (b != 0 && a > max_index / b) return std::nullopt;
  return a * b;
}

/// The product of the dimensions above zero: if it fits, so does every product of some of the dimensions.
constexpr std::optional<Index> checked_extent(std::span<const Index> dims) {
  std::optional<Index> extent = 1;
  for (const Index dim : dims)
    if (extent && dim > 0) extent = checked_product(*extent, dim);
  return extent;
}

}  // namespace detail::safetensors

/// The dimensions of a tensor, outermost first, stored in place; `{}` is a scalar's. A dimension may be zero,
/// or `Dynamic` in a shape that is only compared with (`SafetensorsView::expect_shape`).
class TensorShape {
 public:
  static constexpr Index max_rank = 8;

  TensorShape() = default;

  /// Throws `std::invalid_argument` for more than `max_rank` dimensions, a negative dimension other than
  /// `Dynamic`, or a product that does not fit an `Index`.
  TensorShape(std::initializer_list<Index> dims)
      : TensorShape(std::span<const Index>(dims.begin(), dims.size())) {}
  explicit TensorShape(std::span<const Index> dims) : rank_(static_cast<Index>(dims.size())) {
    if (rank_ > max_rank)
      detail::invalid_argument("safetensors: shape has ", rank_, " dimensions, expected at most ", max_rank);
    for (const Index dim : dims)
      if (dim < 0 && dim != Dynamic)
        detail::invalid_argument("safetensors: shape has a dimension of ", dim, ", expected at least 0");
    std::copy(dims.begin(), dims.end(), dims_.begin());
    if (!detail::safetensors::checked_extent(dims))
      detail::invalid_argument("safetensors: shape ", to_string(),
                               " has more elements than an Index can count");
  }

  Index rank() const { return rank_; }
  std::span<const Index> dims() const { return {dims_.data(), static_cast<std::size_t>(rank_)}; }
  Index operator[](Index axis) const { return dims_[static_cast<std::size_t>(axis)]; }

  /// The number of elements: the product of the dimensions (1 for a scalar), `Dynamic` if one of them is.
  Index size() const {
    Index product = 1;
    for (const Index dim : dims()) {
      if (dim == Dynamic) return Dynamic;
      product *= dim;
    }
    return product;
  }

  /// The shape seen as a row-major matrix: `cols()` is the last dimension, `rows()` the product of the
  /// others; a scalar is 1 x 1.
  Index cols() const { return rank_ == 0 ? 1 : (*this)[rank_ - 1]; }
  Index rows() const {
    Index product = 1;
    for (Index axis = 0; axis + 1 < rank_; ++axis) product *= (*this)[axis];
    return product;
  }

  /// True if the dimensions are those of `expected`, where `Dynamic` stands for any.
  bool matches(const TensorShape& expected) const {
    const auto agree = [](Index dim, Index wanted) { return wanted == Dynamic || dim == wanted; };
    return std::ranges::equal(dims(), expected.dims(), agree);
  }

  /// "[2, 3]", with "?" for `Dynamic`.
  std::string to_string() const {
    std::string text = "[";
    for (const Index dim : dims()) {
      if (text.size() > 1) text += ", ";
      text += dim == Dynamic ? std::string("?") : std::to_string(dim);
    }
    return text += "]";
  }

  friend bool operator==(const TensorShape&, const TensorShape&) = default;

 private:
  std::array<Index, static_cast<std::size_t>(max_rank)> dims_{};
  Index rank_ = 0;
};

/// A tensor of a file: type, shape and a view of its bytes, which are `size() * dtype_size(dtype())` many,
/// row-major, little-endian and aligned to nothing in particular. Valid as long as the bytes it was parsed
/// from.
class TensorView {
 public:
  TensorView() = default;
  TensorView(DType dtype, const TensorShape& shape, std::span<const std::byte> bytes)
      : shape_(shape), bytes_(bytes), dtype_(dtype) {}

  DType dtype() const { return dtype_; }
  const TensorShape& shape() const { return shape_; }
  Index size() const { return shape_.size(); }
  Index rows() const { return shape_.rows(); }
  Index cols() const { return shape_.cols(); }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  TensorShape shape_{0};
  std::span<const std::byte> bytes_;
  DType dtype_ = DType::F32;
};

/// The `__metadata__` of a file, sorted by key.
using TensorMetadata = std::map<std::string, std::string, std::less<>>;

namespace detail::safetensors {

constexpr unsigned char to_byte(char c) { return static_cast<unsigned char>(c); }
constexpr bool is_continuation(char c) { return (to_byte(c) & 0xC0U) == 0x80U; }

/// The number of bytes of the UTF-8 sequence that `text` (not empty) begins with, 0 if it is not a valid one.
/// The second byte's range is what excludes overlong forms, surrogates and code points above U+10FFFF
/// (Unicode, table 3-7).
constexpr std::size_t utf8_length(std::string_view text) {
  const unsigned char lead = to_byte(text[0]);
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return 0;
  const std::size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (text.size() < length) return 0;
  const unsigned char low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned char high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (to_byte(text[1]) < low || to_byte(text[1]) > high) return 0;
  for (std::size_t i = 2; i < length; ++i)
    if (!is_continuation(text[i])) return 0;
  return length;
}

constexpr bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

/// Appends a Unicode scalar value, that is, no surrogate and nothing above U+10FFFF.
inline void append_utf8(std::string& out, std::uint32_t code) {
  const auto push = [&out](std::uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  const auto push_tail = [&](std::uint32_t shift) { push(0x80U | ((code >> shift) & 0x3FU)); };
  if (code < 0x80U) {
    push(code);
  } else if (code < 0x800U) {
    push(0xC0U | (code >> 6U));
    push_tail(0);
  } else if (code < 0x10000U) {
    push(0xE0U | (code >> 12U));
    push_tail(6);
    push_tail(0);
  } else {
    push(0xF0U | (code >> 18U));
    push_tail(12);
    push_tail(6);
    push_tail(0);
  }
}

inline std::string hex_byte(char c) {
  constexpr std::string_view digits = "0123456789abcdef";
  return {digits[to_byte(c) >> 4U], digits[to_byte(c) & 0xFU]};
}

/// Appends `text` as a JSON string, quotes included.
inline void append_json_string(std::string& out, std::string_view text) {
  out.push_back('"');
  for (const char c : text) {
    if (c == '"' || c == '\\')
      out.append({'\\', c});
    else if (to_byte(c) < 0x20 || c == 0x7F)
      out.append("\\u00").append(hex_byte(c));
    else
      out.push_back(c);
  }
  out.push_back('"');
}

/// A name as a message shows it: escaped, and cut short, because a header may hold a name of megabytes.
inline std::string show_name(std::string_view name) {
  constexpr std::size_t longest = 80;
  std::string out;
  if (name.size() <= longest) {
    append_json_string(out, name);
    return out;
  }
  std::size_t end = longest;
  while (end > 0 && is_continuation(name[end])) --end;
  append_json_string(out, name.substr(0, end));
  return out += "...";
}

inline std::string tensor_label(std::string_view name) { return concat("tensor ", show_name(name)); }

/// Where the bytes came from (a path, or nothing), so that a message can tell.
class Source {
 public:
  Source() = default;
  explicit Source(std::string_view path) : prefix_(concat("safetensors: ", path, ": ")) {}

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    file_error(prefix_, parts...);
  }

 private:
  std::string prefix_ = "safetensors: ";
};

inline std::optional<DType> find_dtype(std::string_view name) {
  using enum DType;
  for (const DType dtype : {F64, F32, F16, BF16, U8, I64})
    if (dtype_name(dtype) == name) return dtype;
  return std::nullopt;
}

/// What the header says of one tensor, not yet compared with the data.
struct HeaderEntry {
  DType dtype{};
  TensorShape shape;
  Index begin = 0;
  Index end = 0;
};

struct Header {
  std::map<std::string, HeaderEntry, std::less<>> tensors;
  TensorMetadata metadata;
};

/// Reads the header's JSON, and only JSON of a header's form: objects nest two deep, so nothing recurses. The
/// text must outlive the parser.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const Source& source) : text_(text), source_(source) {}

  Header parse() {
    Header header;
    bool has_metadata = false;
    if (peek() != '{') unexpected("\"{\"");
    parse_object([&](std::string key) {
      if (key != metadata_key) return parse_tensor(header, std::move(key));
      if (std::exchange(has_metadata, true)) fail("the key \"__metadata__\" comes twice");
      parse_metadata(header.metadata);
    });
    while (peek() == ' ') ++at_;
    if (at_ != text_.size()) unexpected("nothing but spaces after the closing brace");
    return header;
  }

 private:
  static constexpr char end_mark = '\0';  // never a valid token, so the end of the text matches nothing

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    source_.fail(subject_, parts...);
  }

  [[noreturn]] void unexpected(std::string_view wanted) const {
    if (at_ == text_.size()) fail("the header ends at byte ", at_, ", expected ", wanted);
    const char c = text_[at_];
    const bool printable = to_byte(c) > 0x20 && to_byte(c) < 0x7F;
    const std::string shown = printable ? show_name({&c, 1}) : "0x" + hex_byte(c);
    fail("header byte ", at_, " is ", shown, ", expected ", wanted);
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : end_mark; }

  void skip_space() {
    while (peek() == ' ' || peek() == '\t' || peek() == '\n' || peek() == '\r') ++at_;
  }

  bool accept(char token) {
    skip_space();
    if (peek() != token) return false;
    ++at_;
    return true;
  }

  void expect(char token, std::string_view wanted) {
    if (!accept(token)) unexpected(wanted);
  }

  /// True after a comma, false after the closing token.
  bool another(char close, std::string_view wanted) {
    if (accept(',')) return true;
    expect(close, wanted);
    return false;
  }

  /// Calls `member(key)` for each member, which then reads the value.
  template <class Member>
  void parse_object(const Member& member) {
    expect('{', "\"{\"");
    if (accept('}')) return;
    do {
      std::string key = parse_string();
      expect(':', "\":\"");
      member(std::move(key));
    } while (another('}', "\",\" or \"}\""));
  }

  void parse_metadata(TensorMetadata& metadata) {
    subject_ = "__metadata__: ";
    parse_object([&](std::string key) {
      std::string value = parse_string();
      const auto [at, is_new] = metadata.try_emplace(std::move(key), std::move(value));
      if (!is_new) fail("the key ", show_name(at->first), " comes twice");
    });
    subject_.clear();
  }

  void parse_tensor(Header& header, std::string name) {
    if (name.empty()) fail("a tensor has an empty name, expected at least one character");
    const auto [at, is_new] = header.tensors.try_emplace(std::move(name));
    if (!is_new) fail(tensor_label(at->first), " comes twice");
    subject_ = tensor_label(at->first) + ": ";
    parse_fields(at->second);
    subject_.clear();
  }

  void parse_fields(HeaderEntry& entry) {
    constexpr std::array<std::string_view, 3> fields{"dtype", "shape", "data_offsets"};
    std::array<bool, 3> seen{};
    parse_object([&](const std::string& key) {
      const auto field = static_cast<std::size_t>(std::ranges::find(fields, key) - fields.begin());
      if (field == fields.size())
        fail("unknown field ", show_name(key), ", expected \"dtype\", \"shape\" and \"data_offsets\"");
      if (std::exchange(seen[field], true)) fail("the field ", show_name(key), " comes twice");
      if (field == 0)
        entry.dtype = parse_dtype();
      else if (field == 1)
        entry.shape = parse_shape();
      else
        parse_offsets(entry);
    });
    for (std::size_t field = 0; field < fields.size(); ++field)
      if (!seen[field]) fail("the field ", show_name(fields[field]), " is missing");
  }

  DType parse_dtype() {
    const std::string name = parse_string();
    const std::optional<DType> dtype = find_dtype(name);
    if (!dtype) fail("dtype is ", show_name(name), ", expected F64, F32, F16, BF16, U8 or I64");
    return *dtype;
  }

  TensorShape parse_shape() {
    std::array<Index, static_cast<std::size_t>(TensorShape::max_rank)> dims{};
    std::size_t rank = 0;
    expect('[', "\"[\"");
    if (!accept(']')) {
      do {
        if (rank == dims.size())
          fail("shape has more than ", TensorShape::max_rank, " dimensions, the most that are supported");
        dims[rank++] = parse_number();
      } while (another(']', "\",\" or \"]\""));
    }
    const std::span<const Index> used(dims.data(), rank);
    if (!checked_extent(used)) fail("the product of the dimensions above zero is larger than ", max_index);
    return TensorShape(used);
  }

  void parse_offsets(HeaderEntry& entry) {
    expect('[', "\"[\"");
    entry.begin = parse_number();
    expect(',', "\",\" between the two data_offsets");
    entry.end = parse_number();
    expect(']', "\"]\" after the two data_offsets");
  }

  Index parse_number() {
    skip_space();
    const std::size_t start = at_;
    const auto is_digit = [this] { return peek() >= '0' && peek() <= '9'; };
    if (!is_digit()) unexpected("an integer of at least 0");
    Index value = 0;
    for (; is_digit(); ++at_) {
      const Index digit = peek() - '0';
      if (value > (max_index - digit) / 10)
        fail("the number at header byte ", start, " is larger than ", max_index);
      value = 10 * value + digit;
    }
    if (text_[start] == '0' && at_ - start > 1) fail("the number at header byte ", start, " begins with a 0");
    if (peek() == '.' || peek() == 'e' || peek() == 'E')
      fail("the number at header byte ", start, " has a fraction or an exponent, expected an integer");
    return value;
  }

  std::string parse_string() {
    expect('"', "a string");
    std::string out;
    while (peek() != '"') {
      if (at_ == text_.size()) unexpected("the closing quote of a string");
      if (to_byte(text_[at_]) < 0x20) unexpected("no control character in a string");
      if (text_[at_] == '\\') {
        ++at_;
        parse_escape(out);
        continue;
      }
      const std::size_t length = utf8_length(text_.substr(at_));
      if (length == 0) unexpected("valid UTF-8");
      out.append(text_.substr(at_, length));
      at_ += length;
    }
    ++at_;
    return out;
  }

  void parse_escape(std::string& out) {
    constexpr std::string_view letters = "\"\\/bfnrt";
    constexpr std::string_view meanings = "\"\\/\b\f\n\r\t";
    if (peek() == 'u') {
      ++at_;
      append_utf8(out, parse_code_point());
      return;
    }
    const std::size_t which = letters.find(peek());
    if (which == std::string_view::npos) unexpected("one of \" \\ / b f n r t u after a backslash");
    out.push_back(meanings[which]);
    ++at_;
  }

  std::uint32_t parse_code_point() {
    const std::size_t start = at_;
    const auto is_low = [](std::uint32_t unit) { return unit >= 0xDC00U && unit <= 0xDFFFU; };
    const auto is_high = [](std::uint32_t unit) { return unit >= 0xD800U && unit <= 0xDBFFU; };
    const std::uint32_t first = parse_hex4();
    if (is_low(first)) fail("a lone low surrogate escape stands before header byte ", at_);
    if (!is_high(first)) return first;
    if (text_.substr(at_, 2) == "\\u") {
      at_ += 2;
      const std::uint32_t second = parse_hex4();
      if (is_low(second)) return 0x10000U + ((first - 0xD800U) << 10U) + (second - 0xDC00U);
    }
    fail("a high surrogate escape at header byte ", start, " has no low surrogate after it");
  }

  std::uint32_t parse_hex4() {
    std::uint32_t unit = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      constexpr std::string_view digits = "0123456789abcdef0123456789ABCDEF";
      const std::size_t digit = digits.find(peek());
      if (digit == std::string_view::npos) unexpected("four hexadecimal digits after \\u");
      unit = 16U * unit + static_cast<std::uint32_t>(digit % 16);
    }
    return unit;
  }

  std::string_view text_;
  const Source& source_;
  std::string subject_;  // what a message is about, with a colon; empty between the tensors
  std::size_t at_ = 0;
};

/// Calls `function(std::type_identity<T>{})` with the C++ type of `dtype`.
template <class Function>
decltype(auto) visit_dtype(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::F32:
      return function(std::type_identity<float>{});
    case DType::F16:
      return function(std::type_identity<Eigen::half>{});
    case DType::BF16:
      return function(std::type_identity<Eigen::bfloat16>{});
    case DType::U8:
      return function(std::type_identity<std::uint8_t>{});
    case DType::I64:
      return function(std::type_identity<std::int64_t>{});
    case DType::F64:
      break;
  }
  return function(std::type_identity<double>{});
}

template <class T>
auto widen(T value) {
  if constexpr (std::same_as<T, Eigen::half> || std::same_as<T, Eigen::bfloat16>)
    return static_cast<float>(value);
  else
    return value;
}

/// Exact, or false: a fraction, a NaN or a number out of range is never turned into another integer.
template <std::integral To, class From>
bool convert_to_integer(From from, To& to) {
  if constexpr (std::integral<From>) {
    if (!std::in_range<To>(from)) return false;
  } else {
    const double real = from;
    const double limit = std::ldexp(1.0, std::numeric_limits<To>::digits);  // max + 1, which is exact
    const double lowest = std::signed_integral<To> ? -limit : 0.0;
    if (!is_finite(real) || real < lowest || real >= limit || std::trunc(real) != real) return false;
  }
  to = static_cast<To>(from);
  return true;
}

/// Rounded to the nearest, or false if a finite number overflows; an infinity or a NaN stays one.
template <class To, class From>
bool convert_to_floating(From from, To& to) {
  // Eigen's 16-bit types round from a float.
  using Step = std::conditional_t<(sizeof(To) < sizeof(float)), float, To>;
  to = static_cast<To>(static_cast<Step>(from));
  if constexpr (std::integral<From>)
    return is_finite(to);
  else
    return is_finite(to) || !is_finite(from);
}

template <class To>
std::string describe_target() {
  constexpr auto bits = 8 * sizeof(To);
  if constexpr (std::integral<To>)
    return concat(std::signed_integral<To> ? "a signed " : "an unsigned ", bits, "-bit integer");
  else if constexpr (std::same_as<To, Eigen::bfloat16>)
    return "a bfloat16";
  else
    return concat("a ", bits, "-bit floating-point number");
}

template <class T>
T load(const std::byte* at) {
  T value;
  std::memcpy(static_cast<void*>(&value), at, sizeof(T));
  return value;
}

inline void copy_bytes(void* to, std::span<const std::byte> from) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size());  // memcpy takes no null, not even for 0 bytes
}

/// Converts the elements of `tensor`, in their order, into `out`.
template <class To>
void convert_elements(const TensorView& tensor, To* out, std::string_view name, const Source& source) {
  if constexpr (TensorElement<To>)
    if (tensor.dtype() == dtype_v<To>) return copy_bytes(out, tensor.bytes());
  visit_dtype(tensor.dtype(), [&]<class From>(std::type_identity<From>) {
    const std::byte* const data = tensor.bytes().data();
    const Index count = tensor.size();
    for (Index i = 0; i < count; ++i) {
      const auto value = widen(load<From>(data + i * static_cast<Index>(sizeof(From))));
      bool fits = false;
      if constexpr (std::integral<To>)
        fits = convert_to_integer(value, out[i]);
      else
        fits = convert_to_floating(value, out[i]);
      if (!fits) [[unlikely]]
        source.fail(tensor_label(name), ": element ", i, " is ", value, ", which ", describe_target<To>(),
                    " cannot hold");
    }
  });
}

inline std::vector<std::byte> read_file(const std::filesystem::path& path) {
  const Source source(path.string());
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (error) source.fail("cannot be read: ", error.message());
  std::ifstream stream(path, std::ios::binary);
  if (!stream) source.fail("cannot be opened for reading");
  std::vector<std::byte> bytes(static_cast<std::size_t>(size));
  stream.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (stream.gcount() != static_cast<std::streamsize>(bytes.size()))
    source.fail("only ", stream.gcount(), " of its ", bytes.size(), " bytes could be read");
  return bytes;
}

inline std::error_code write_and_close(std::FILE* file, std::span<const std::byte> bytes) {
  errno = 0;
  const bool written =
      std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size() && std::fflush(file) == 0;
  const int reason = errno;  // before closing, which has to happen anyhow, changes it
  if (std::fclose(file) == 0 && written) return {};
  return {reason != 0 ? reason : EIO, std::generic_category()};
}

/// Writes a new file beside `path`, then renames it: whoever opens `path` finds the old content or the new.
inline void replace_file(const std::filesystem::path& path, std::span<const std::byte> bytes) {
  const Source source(path.string());
  std::filesystem::path temporary;
  std::FILE* file = nullptr;
  errno = EEXIST;
  for (int attempt = 0; file == nullptr && errno == EEXIST && attempt < 100; ++attempt) {
    temporary = path;
    temporary += concat(".tmp", attempt);
    file = std::fopen(temporary.string().c_str(), "wbx");  // x: never a file that another writer has begun
  }
  if (file == nullptr)
    source.fail("a temporary file beside it cannot be made: ", std::generic_category().message(errno));
  std::error_code error = write_and_close(file, bytes);
  if (!error) std::filesystem::rename(temporary, path, error);
  if (!error) return;
  std::error_code ignored;
  std::filesystem::remove(temporary, ignored);
  source.fail("cannot be written: ", error.message());
}

/// A span, vector or array; Eigen's columns are ranges too, but are added as expressions.
template <class Range>
concept ContiguousRange =
    !std::derived_from<Range, Eigen::EigenBase<Range>> && std::ranges::contiguous_range<const Range>;

/// The bytes of a file, as a base class, so that they exist before the view of them is built.
struct OwnedBytes {
  std::vector<std::byte> owned;
};

}  // namespace detail::safetensors

/// The tensors of a safetensors file that lies in memory, which has to stay there unchanged as long as the
/// view, its copies or anything they returned is used. Const calls are safe from several threads.
///
/// A name that the file does not have, and a tensor that is not what the call asks for, throw `FileError`.
class SafetensorsView {
 public:
  /// Parses and checks the whole file `bytes`, except for the elements' values. Throws `FileError` unless
  /// every byte is accounted for.
  explicit SafetensorsView(std::span<const std::byte> bytes)
      : SafetensorsView(bytes, detail::safetensors::Source()) {}

  /// The names of the tensors, sorted by their bytes.
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    names.reserve(tensors_.size());
    for (const auto& [name, tensor] : tensors_) names.push_back(name);
    return names;
  }

  bool contains(std::string_view name) const { return tensors_.find(name) != tensors_.end(); }

  const TensorMetadata& metadata() const { return metadata_; }

  TensorView tensor(std::string_view name) const {
    const auto at = tensors_.find(name);
    if (at == tensors_.end())
      source_.fail("there is no ", detail::safetensors::tensor_label(name), " among the file's ",
                   tensors_.size(), " tensors");
    return at->second;
  }

  /// The tensor, whose shape must be `expected`; `Dynamic` there stands for any dimension.
  TensorView expect_shape(std::string_view name, const TensorShape& expected) const {
    const TensorView found = tensor(name);
    if (!found.shape().matches(expected))
      source_.fail(detail::safetensors::tensor_label(name), ": shape is ", found.shape().to_string(),
                   ", expected ", expected.to_string());
    return found;
  }

  /// The tensor as `[rows, cols]`: cols is its last dimension, rows the product of the others (a scalar is
  /// 1 x 1, a vector one row). Floating-point targets round to the nearest (16-bit ones from what a float
  /// holds); a finite element that overflows the target, and one that an integer target does not hold
  /// exactly, throw `FileError`.
  template <TensorTarget Scalar>
  Batch<Scalar> matrix(std::string_view name) const {
    return to_matrix<Scalar>(tensor(name), name);
  }

  /// The same of a tensor whose shape must be `expected`, as in `expect_shape`.
  template <TensorTarget Scalar>
  Batch<Scalar> matrix(std::string_view name, const TensorShape& expected) const {
    return to_matrix<Scalar>(expect_shape(name, expected), name);
  }

  /// All elements of the tensor, whatever its shape, in row-major order; converted as `matrix` does.
  template <TensorTarget Scalar>
  Vector<Scalar> vector(std::string_view name) const {
    return to_vector<Scalar>(tensor(name), name);
  }

  /// The same of a tensor whose shape must be `expected`, as in `expect_shape`.
  template <TensorTarget Scalar>
  Vector<Scalar> vector(std::string_view name, const TensorShape& expected) const {
    return to_vector<Scalar>(expect_shape(name, expected), name);
  }

  /// The elements in place, row-major, without a copy. Throws `FileError` unless the tensor's type is `T`'s
  /// and its address a multiple of `alignof(T)`, which the format does not promise (`SafetensorsWriter`'s
  /// files, read by `SafetensorsFile`, keep it).
  template <TensorElement T>
  std::span<const T> values(std::string_view name) const {
    const TensorView found = tensor(name);
    if (found.dtype() != dtype_v<T>)
      source_.fail(detail::safetensors::tensor_label(name), ": dtype is ", dtype_name(found.dtype()),
                   ", expected ", dtype_name(dtype_v<T>));
    if (found.size() == 0) return {};
    const auto address = reinterpret_cast<std::uintptr_t>(found.bytes().data());
    if (address % alignof(T) != 0)
      source_.fail(detail::safetensors::tensor_label(name), ": its address is not a multiple of ", alignof(T),
                   " bytes, so it can only be copied");
    return {reinterpret_cast<const T*>(found.bytes().data()), static_cast<std::size_t>(found.size())};
  }

 protected:
  SafetensorsView(std::span<const std::byte> bytes, detail::safetensors::Source source)
      : source_(std::move(source)) {
    const std::span<const std::byte> text = header_text(bytes);
    const std::string_view json(reinterpret_cast<const char*>(text.data()), text.size());
    detail::safetensors::Header header = detail::safetensors::HeaderParser(json, source_).parse();
    place_tensors(header, bytes.subspan(length_bytes + text.size()));
    metadata_ = std::move(header.metadata);
  }

 private:
  using HeaderEntry = detail::safetensors::HeaderEntry;
  static constexpr std::size_t length_bytes = 8;

  std::span<const std::byte> header_text(std::span<const std::byte> bytes) const {
    if (bytes.size() < length_bytes)
      source_.fail("the file has ", bytes.size(), " bytes, expected at least the 8 of the header's length");
    const auto length = detail::safetensors::load<std::uint64_t>(bytes.data());
    if (length == 0 || length > detail::safetensors::max_header_bytes)
      source_.fail("the header's length is ", std::to_string(length), ", expected 2 to ",
                   detail::safetensors::max_header_bytes);
    if (length > bytes.size() - length_bytes)
      source_.fail("the header's length is ", length, ", but only ", bytes.size() - length_bytes,
                   " bytes follow");
    return bytes.subspan(length_bytes, static_cast<std::size_t>(length));
  }

  void check_range(std::string_view name, const HeaderEntry& entry, std::size_t data_size) const {
    const std::string label = detail::safetensors::tensor_label(name);
    if (entry.begin > entry.end)
      source_.fail(label, ": data_offsets are [", entry.begin, ", ", entry.end,
                   "], expected the first to be at most the second");
    if (std::cmp_greater(entry.end, data_size))
      source_.fail(label, ": data_offsets end at ", entry.end, ", but the file has ", data_size,
                   " bytes of data");
    const auto needed = detail::safetensors::checked_product(entry.shape.size(), dtype_size(entry.dtype));
    if (!needed || entry.end - entry.begin != *needed)
      source_.fail(label, ": data_offsets span ", entry.end - entry.begin, " bytes, but ",
                   dtype_name(entry.dtype), " of shape ", entry.shape.to_string(), " needs ",
                   needed ? std::to_string(*needed) : std::string("more than any file has"));
  }

  /// The tensors have to cover the data exactly: an overlap would alias them, and bytes that belong to none
  /// could hide anything.
  void place_tensors(const detail::safetensors::Header& header, std::span<const std::byte> data) {
    struct Extent {
      Index begin, end;
      std::string_view name;
    };
    std::vector<Extent> extents;
    extents.reserve(header.tensors.size());
    for (const auto& [name, entry] : header.tensors) {
      check_range(name, entry, data.size());
      const auto bytes = data.subspan(static_cast<std::size_t>(entry.begin),
                                      static_cast<std::size_t>(entry.end - entry.begin));
      tensors_.emplace_hint(tensors_.end(), name, TensorView(entry.dtype, entry.shape, bytes));
      extents.push_back({entry.begin, entry.end, name});
    }
    std::ranges::stable_sort(extents, {}, [](const Extent& e) { return std::pair(e.begin, e.end); });
    Index covered = 0;
    for (const Extent& extent : extents) {
      if (extent.begin < covered)
        source_.fail(detail::safetensors::tensor_label(extent.name), ": data_offsets begin at ", extent.begin,
                     " and overlap another tensor's, which end at ", covered);
      if (extent.begin > covered)
        source_.fail(detail::safetensors::tensor_label(extent.name), ": data_offsets begin at ", extent.begin,
                     ", expected ", covered, " because no tensor covers the bytes before");
      covered = extent.end;
    }
    if (std::cmp_not_equal(covered, data.size()))
      source_.fail("the file has ", data.size(), " bytes of data, but its tensors cover ", covered);
  }

  template <class Scalar>
  Batch<Scalar> to_matrix(const TensorView& tensor, std::string_view name) const {
    Batch<Scalar> out(tensor.rows(), tensor.cols());
    detail::safetensors::convert_elements(tensor, out.data(), name, source_);
    return out;
  }

  template <class Scalar>
  Vector<Scalar> to_vector(const TensorView& tensor, std::string_view name) const {
    Vector<Scalar> out(tensor.size());
    detail::safetensors::convert_elements(tensor, out.data(), name, source_);
    return out;
  }

  detail::safetensors::Source source_;
  std::map<std::string, TensorView, std::less<>> tensors_;
  TensorMetadata metadata_;
};

/// A safetensors file with its bytes in memory: a `SafetensorsView` that owns what it views, so a function
/// that takes `const SafetensorsView&` takes both. What it returned survives a move of the file, but not its
/// end; a file that was moved from can only be assigned or destroyed.
class SafetensorsFile : private detail::safetensors::OwnedBytes, public SafetensorsView {
 public:
  /// Reads and checks a whole regular file. Throws `FileError`, with the path in the message, if it cannot be
  /// read or breaks a rule.
  explicit SafetensorsFile(const std::filesystem::path& path)
      : SafetensorsFile(detail::safetensors::read_file(path), detail::safetensors::Source(path.string())) {}

  /// Takes over bytes from elsewhere and checks them in the same way.
  static SafetensorsFile from_bytes(std::vector<std::byte> bytes) {
    return SafetensorsFile(std::move(bytes), detail::safetensors::Source());
  }

  SafetensorsFile(SafetensorsFile&&) = default;
  SafetensorsFile& operator=(SafetensorsFile&&) = default;
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;
  ~SafetensorsFile() = default;

 private:
  SafetensorsFile(std::vector<std::byte> bytes, detail::safetensors::Source source)
      : OwnedBytes{std::move(bytes)}, SafetensorsView(owned, std::move(source)) {}
};

/// Collects tensors, by copy, and writes them as a safetensors file in which each lies at a multiple of its
/// element size. The same calls in the same order give the same bytes. Misuse throws `std::invalid_argument`
/// and leaves the writer as it was.
class SafetensorsWriter {
 public:
  /// Adds `values`, any Eigen expression, in row-major order under a shape with as many elements. The type in
  /// the file is that of the expression's scalar. The name must be new, valid UTF-8, not empty and not
  /// `__metadata__`.
  template <class Derived>
  void add(std::string_view name, const TensorShape& shape, const Eigen::DenseBase<Derived>& values) {
    using Scalar = typename Derived::Scalar;
    Batch<Scalar> rows(values.rows(), values.cols());
    rows.array() = values.derived().array();
    add(name, shape, std::span<const Scalar>(rows.data(), static_cast<std::size_t>(rows.size())));
  }

  /// Adds `values` under its own shape: `[rows]` for a column (at compile time), else `[rows, cols]`.
  template <class Derived>
  void add(std::string_view name, const Eigen::DenseBase<Derived>& values) {
    if constexpr (is_token_v<Derived>)
      add(name, TensorShape{values.rows()}, values);
    else
      add(name, TensorShape{values.rows(), values.cols()}, values);
  }

  /// Adds the elements of a span, vector or array.
  template <detail::safetensors::ContiguousRange Range>
  void add(std::string_view name, const TensorShape& shape, const Range& values) {
    using T = std::ranges::range_value_t<const Range>;
    static_assert(TensorElement<T>,
                  "a tensor's elements must be double, float, Eigen::half, Eigen::bfloat16, std::uint8_t or "
                  "std::int64_t");
    check_new(name, shape, static_cast<Index>(std::ranges::size(values)));
    const std::span<const T> elements(std::ranges::data(values), std::ranges::size(values));
    append(name, shape, dtype_v<T>, std::as_bytes(elements));
  }

  /// Adds a tensor whose bytes are there already, row-major and little-endian, for example one of a
  /// `SafetensorsView`.
  void add(std::string_view name, const TensorView& tensor) {
    const Index element = dtype_size(tensor.dtype());
    const auto bytes = static_cast<Index>(tensor.bytes().size());
    if (bytes % element != 0)
      detail::invalid_argument("safetensors: ", detail::safetensors::tensor_label(name), ": ", bytes,
                               " bytes came, expected a multiple of ", element);
    check_new(name, tensor.shape(), bytes / element);
    append(name, tensor.shape(), tensor.dtype(), tensor.bytes());
  }

  /// Sets one entry of `__metadata__`, in place of an earlier one of that key. Both must be valid UTF-8.
  void set_metadata(std::string_view key, std::string_view value) {
    if (!detail::safetensors::is_utf8(key))
      detail::invalid_argument("safetensors: a metadata key is not valid UTF-8");
    if (!detail::safetensors::is_utf8(value))
      detail::invalid_argument("safetensors: the metadata value of ", detail::safetensors::show_name(key),
                               " is not valid UTF-8");
    metadata_.insert_or_assign(std::string(key), std::string(value));
  }

  /// The whole file. Throws `std::invalid_argument` if the header is larger than the format allows.
  std::vector<std::byte> bytes() const {
    const std::vector<const Entry*> order = layout();
    std::string header = header_text(order);
    header.append((8 - header.size() % 8) % 8, ' ');
    if (header.size() > detail::safetensors::max_header_bytes)
      detail::invalid_argument("safetensors: the header would have ", header.size(),
                               " bytes, expected at most ", detail::safetensors::max_header_bytes);
    std::size_t total = sizeof(std::uint64_t) + header.size();
    for (const Entry* entry : order) total += entry->bytes.size();
    std::vector<std::byte> out(total);
    std::byte* end = out.data();
    const auto append = [&end](std::span<const std::byte> part) {
      detail::safetensors::copy_bytes(end, part);
      end += part.size();
    };
    const std::uint64_t length = header.size();
    append(std::as_bytes(std::span(&length, 1)));
    append(std::as_bytes(std::span(header)));
    for (const Entry* entry : order) append(entry->bytes);
    return out;
  }

  /// Writes the file under another name in the same directory, then renames it to `path`: a failure leaves
  /// the old file, if any, as it was. Throws `FileError`.
  void save(const std::filesystem::path& path) const { detail::safetensors::replace_file(path, bytes()); }

 private:
  struct Entry {
    std::string name;
    TensorShape shape;
    DType dtype;
    std::vector<std::byte> bytes;
  };

  void check_new(std::string_view name, const TensorShape& shape, Index count) const {
    const std::string label = "safetensors: " + detail::safetensors::tensor_label(name);
    if (name.empty()) detail::invalid_argument("safetensors: name is empty");
    if (name == detail::safetensors::metadata_key)
      detail::invalid_argument(label, ": the format keeps this name for the metadata");
    if (!detail::safetensors::is_utf8(name)) detail::invalid_argument(label, ": name is not valid UTF-8");
    for (const Entry& entry : entries_)
      if (entry.name == name) detail::invalid_argument(label, " was added before");
    if (shape.size() != count)
      detail::invalid_argument(label, ": ", count, " elements came, expected as many as shape ",
                               shape.to_string(), " has");
  }

  void append(std::string_view name, const TensorShape& shape, DType dtype,
              std::span<const std::byte> bytes) {
    entries_.push_back({std::string(name), shape, dtype, {bytes.begin(), bytes.end()}});
  }

  /// Larger elements first: each tensor then begins at a multiple of its element size without padding, which
  /// the format forbids.
  std::vector<const Entry*> layout() const {
    std::vector<const Entry*> order;
    order.reserve(entries_.size());
    for (const Entry& entry : entries_) order.push_back(&entry);
    std::ranges::stable_sort(order, std::greater{}, [](const Entry* e) { return dtype_size(e->dtype); });
    return order;
  }

  std::string header_text(const std::vector<const Entry*>& order) const {
    std::string out = "{";
    if (!metadata_.empty()) append_metadata(out);
    std::size_t offset = 0;
    for (const Entry* entry : order) {
      if (out.size() > 1) out += ',';
      append_entry(out, *entry, offset);
      offset += entry->bytes.size();
    }
    return out += '}';
  }

  void append_metadata(std::string& out) const {
    detail::safetensors::append_json_string(out, detail::safetensors::metadata_key);
    char separator = '{';
    out += ':';
    for (const auto& [key, value] : metadata_) {
      out += std::exchange(separator, ',');
      detail::safetensors::append_json_string(out, key);
      out += ':';
      detail::safetensors::append_json_string(out, value);
    }
    out += '}';
  }

  static void append_entry(std::string& out, const Entry& entry, std::size_t offset) {
    detail::safetensors::append_json_string(out, entry.name);
    out += detail::concat(":{\"dtype\":\"", dtype_name(entry.dtype), "\",\"shape\":", entry.shape.to_string(),
                          ",\"data_offsets\":[", offset, ",", offset + entry.bytes.size(), "]}");
  }

  std::vector<Entry> entries_;
  TensorMetadata metadata_;
};

}  // namespace wushkv

#endif  // WUSHKV_IO_SAFETENSORS_HPP
