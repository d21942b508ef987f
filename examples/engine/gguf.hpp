// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_GGUF_HPP
#define WUSHKV_EXAMPLES_ENGINE_GGUF_HPP

/// A strict reader of GGUF model files, versions 2 and 3, little-endian (github.com/ggml-org/ggml,
/// docs/gguf.md):
///
///     "GGUF"  version u32  number of tensors u64  number of keys u64
///     keys      name, type u32, value
///     tensors   name, number of dims u32, dims u64, type u32, offset u64
///     data      from the next multiple of general.alignment on; offsets count from here
///
/// A file is checked whole before any of it is used, and one that breaks a rule is refused with a
/// `wushkv::FileError` of one sentence.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/mapped_file.hpp"
#include "wushkv/core/error.hpp"
#include "wushkv/core/types.hpp"

namespace engine {

/// How a tensor's elements are stored: `block` neighbours of a row in `bytes` bytes.
struct TensorType {
  std::uint32_t number;
  std::string_view name;
  std::uint32_t block;
  std::uint32_t bytes;
};

/// Numbers of the types that `dequantize` reads.
inline constexpr std::uint32_t type_f32 = 0, type_f16 = 1, type_bf16 = 30, type_q4_0 = 2, type_q4_1 = 3,
                               type_q8_0 = 8, type_q6_k = 14;

/// Null for a number that stands for no type.
const TensorType* find_type(std::uint32_t number);

/// "unknown" for a number that stands for no type.
std::string_view type_name(std::uint32_t number);

/// A name as a message shows it: on one line and not too long, whatever its bytes.
std::string quote_name(std::string_view name);

struct GgufTensor {
  std::string name;
  std::vector<std::uint64_t> dims;  // ggml order, fastest first; 1 to 4 dims
  std::uint32_t type = 0;           // ggml type number
  std::span<const std::byte> data;  // exactly the tensor's bytes

  wushkv::Index rows() const;  // product of dims[1..]
  wushkv::Index cols() const;  // dims[0]
};

/// The keys and tensors of a GGUF file. Views it returns are of the file's bytes: of a file by path they live
/// as long as the object, or the one it was moved to. A key or tensor that is missing or not what the call
/// asks for throws `wushkv::FileError`. Const calls are safe from several threads.
class GgufFile {
 public:
  explicit GgufFile(const std::filesystem::path& path);
  /// `bytes` must outlive the object and what it returns.
  explicit GgufFile(std::span<const std::byte> bytes, std::string name = "memory");
  explicit GgufFile(std::vector<std::byte>&&, std::string = "memory") = delete;  // it would dangle

  std::uint32_t version() const { return version_; }

  std::vector<std::string_view> keys() const;  // sorted by their bytes
  bool contains(std::string_view key) const { return values_.contains(key); }

  std::uint64_t integer(std::string_view key) const;  // of any integer type, not negative
  std::uint64_t integer_or(std::string_view key, std::uint64_t otherwise) const;
  double number(std::string_view key) const;  // of any integer or floating-point type, finite
  double number_or(std::string_view key, double otherwise) const;
  std::string_view string(std::string_view key) const;
  std::string_view string_or(std::string_view key, std::string_view otherwise) const;
  bool boolean_or(std::string_view key, bool otherwise) const;
  std::vector<std::string_view> strings(std::string_view key) const;  // an array of strings
  std::vector<std::int64_t> integers(std::string_view key) const;     // an array of any integer type

  const std::vector<GgufTensor>& tensors() const { return tensors_; }  // in the file's order
  const GgufTensor* find(std::string_view name) const;                 // null if not there
  const GgufTensor& tensor(std::string_view name) const;

 private:
  class Parser;

  /// A checked value, still in the file's bytes.
  struct Value {
    std::uint32_t type = 0;  // GGUF's number; of an array, its elements'
    bool is_array = false;
    std::uint64_t count = 1;
    std::span<const std::byte> data;  // of a single string, without its length
  };

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    wushkv::detail::file_error("gguf: ", name_, ": ", parts...);
  }
  [[noreturn]] void refuse(std::string_view key, const Value& value, std::string_view expected) const;
  const Value& value(std::string_view key, std::string_view expected) const;

  MappedFile file_;
  std::string name_;
  std::uint32_t version_ = 0;
  std::map<std::string_view, Value> values_;
  std::vector<GgufTensor> tensors_;
  std::map<std::string_view, std::size_t> tensor_at_;
};

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_GGUF_HPP
