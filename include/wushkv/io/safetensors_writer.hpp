// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_IO_SAFETENSORS_WRITER_HPP
#define WUSHKV_IO_SAFETENSORS_WRITER_HPP

#include <algorithm>
#include <cerrno>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "wushkv/core/error.hpp"
#include "wushkv/core/types.hpp"
#include "wushkv/io/safetensors_header.hpp"
#include "wushkv/io/tensor.hpp"

namespace wushkv {

namespace detail::safetensors {

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
  std::error_code missing;
  if (std::filesystem::exists(path, missing) && !std::filesystem::is_regular_file(path, missing))
    source.fail("is no regular file, and would be replaced by one");
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

}  // namespace detail::safetensors

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
    const auto append = [&end](std::span<const std::byte> part) { end = std::ranges::copy(part, end).out; };
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

#endif  // WUSHKV_IO_SAFETENSORS_WRITER_HPP
