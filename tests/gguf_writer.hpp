// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TESTS_GGUF_WRITER_HPP
#define WUSHKV_TESTS_GGUF_WRITER_HPP

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <ios>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/gguf.hpp"
#include "wushkv/core/types.hpp"

namespace test {

/// Bytes put one after the other, numbers as they lie in memory.
class ByteWriter {
 public:
  template <class T>
  requires std::is_arithmetic_v<T> ByteWriter& number(T value) {
    return raw(std::as_bytes(std::span(&value, 1)));
  }
  ByteWriter& raw(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  ByteWriter& raw(std::string_view text) { return raw(std::as_bytes(std::span(text))); }
  /// As GGUF has it: the length and the characters.
  ByteWriter& text(std::string_view text) { return number<std::uint64_t>(text.size()).raw(text); }
  ByteWriter& pad_to(std::size_t multiple) {
    bytes_.resize((bytes_.size() + multiple - 1) / multiple * multiple);
    return *this;
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

/// Writes GGUF files, which the caller may also get wrong: nothing is checked.
class GgufWriter {
 public:
  void add(const std::string& key, std::uint32_t value) { add_number(key, 4, value); }
  void add(const std::string& key, std::int32_t value) { add_number(key, 5, value); }
  void add(const std::string& key, float value) { add_number(key, 6, value); }
  void add(const std::string& key, bool value) { add_number(key, 7, static_cast<std::uint8_t>(value)); }
  void add(const std::string& key, std::uint64_t value) { add_number(key, 10, value); }
  void add(const std::string& key, std::int64_t value) { add_number(key, 11, value); }
  void add(const std::string& key, double value) { add_number(key, 12, value); }
  void add(const std::string& key, const std::string& value) {
    add_raw(key, 8, ByteWriter().text(value).bytes());
  }
  void add(const std::string& key, const char* value) { add(key, std::string(value)); }  // or it is a bool
  void add(const std::string& key, const std::vector<std::string>& values) {
    ByteWriter out;
    out.number<std::uint32_t>(8).number<std::uint64_t>(values.size());
    for (const std::string& value : values) out.text(value);
    add_raw(key, 9, out.bytes());
  }
  void add(const std::string& key, const std::vector<std::int32_t>& values) { add_numbers(key, 5, values); }
  void add(const std::string& key, const std::vector<float>& values) { add_numbers(key, 6, values); }

  /// An array of numbers of GGUF's type `type`.
  template <class T>
  void add_numbers(const std::string& key, std::uint32_t type, const std::vector<T>& values) {
    ByteWriter out;
    out.number(type).number<std::uint64_t>(values.size()).raw(std::as_bytes(std::span(values)));
    add_raw(key, 9, out.bytes());
  }
  template <class T>
  void add_number(const std::string& key, std::uint32_t type, T value) {
    add_raw(key, type, ByteWriter().number(value).bytes());
  }
  void add_raw(const std::string& key, std::uint32_t type, std::span<const std::byte> value) {
    keys_.text(key).number(type).raw(value);
    ++key_count_;
  }

  /// Of the tensors; adds the key that says so.
  void set_alignment(std::uint32_t alignment) {
    alignment_ = alignment;
    add("general.alignment", alignment);
  }

  void add_tensor(const std::string& name, const std::vector<std::uint64_t>& dims, std::uint32_t type,
                  std::vector<std::byte> bytes) {
    tensors_.push_back({name, dims, type, std::move(bytes)});
  }
  void add_tensor(const std::string& name, const wushkv::Batch<float>& matrix) {
    add_floats(name, {static_cast<std::uint64_t>(matrix.cols()), static_cast<std::uint64_t>(matrix.rows())},
               matrix.data(), matrix.size());
  }
  void add_tensor(const std::string& name, const wushkv::Vector<float>& vector) {
    add_floats(name, {static_cast<std::uint64_t>(vector.size())}, vector.data(), vector.size());
  }

  std::vector<std::byte> bytes(std::uint32_t version = 3) const {
    ByteWriter out;
    out.raw("GGUF").number(version).number<std::uint64_t>(tensors_.size()).number(key_count_);
    out.raw(keys_.bytes());
    ByteWriter data;
    for (const Tensor& tensor : tensors_) {
      data.pad_to(alignment_);
      out.text(tensor.name).number(static_cast<std::uint32_t>(tensor.dims.size()));
      for (const std::uint64_t dim : tensor.dims) out.number(dim);
      out.number(tensor.type).number<std::uint64_t>(data.bytes().size());
      data.raw(tensor.bytes);  // no padding after the last: no byte can be spared
    }
    return out.pad_to(alignment_).raw(data.bytes()).bytes();
  }

  void save(const std::filesystem::path& path) const {
    const std::vector<std::byte> all = bytes();
    std::ofstream out(path, std::ios::binary);
    out.exceptions(std::ios::failbit | std::ios::badbit);
    out.write(reinterpret_cast<const char*>(all.data()), static_cast<std::streamsize>(all.size()));
    out.close();
  }

 private:
  struct Tensor {
    std::string name;
    std::vector<std::uint64_t> dims;
    std::uint32_t type;
    std::vector<std::byte> bytes;
  };

  void add_floats(const std::string& name, const std::vector<std::uint64_t>& dims, const float* values,
                  wushkv::Index count) {
    const auto bytes = std::as_bytes(std::span(values, static_cast<std::size_t>(count)));
    add_tensor(name, dims, engine::type_f32, {bytes.begin(), bytes.end()});
  }

  std::uint32_t alignment_ = 32;
  std::uint64_t key_count_ = 0;
  ByteWriter keys_;
  std::vector<Tensor> tensors_;
};

}  // namespace test

#endif  // WUSHKV_TESTS_GGUF_WRITER_HPP
