// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_IO_SAFETENSORS_READER_HPP
#define WUSHKV_IO_SAFETENSORS_READER_HPP

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <ios>
#include <limits>
#include <map>
#include <optional>
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
#include "wushkv/io/safetensors_header.hpp"
#include "wushkv/io/tensor.hpp"

namespace wushkv {

namespace detail::safetensors {

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

  /// A temporary's bytes end before the view does: `SafetensorsFile::from_bytes` keeps them.
  explicit SafetensorsView(std::vector<std::byte>&&) = delete;

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

  /// A tensor `[tokens, ...]` of at least two dimensions as the batch `[tokens, product of the others]`: one
  /// of `[tokens, heads, dim]` has its heads side by side in a token's row, as the rest of the library takes
  /// them. (`matrix` would give each head of each token a row.) Converted as `matrix` does; throws
  /// `FileError` for fewer dimensions.
  template <TensorTarget Scalar>
  Batch<Scalar> token_matrix(std::string_view name) const {
    const TensorView found = tensor(name);
    const TensorShape& shape = found.shape();
    if (shape.rank() < 2)
      source_.fail(detail::safetensors::tensor_label(name), ": shape is ", shape.to_string(),
                   ", expected at least 2 dimensions");
    const TensorShape row(shape.dims().subspan(1));
    const TensorShape flat{shape[0], row.size()};
    return to_matrix<Scalar>(TensorView(found.dtype(), flat, found.bytes()), name);
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
      source_.fail("the header's length is ", length, ", expected 2 to ",
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

}  // namespace wushkv

#endif  // WUSHKV_IO_SAFETENSORS_READER_HPP
