// SPDX-License-Identifier: Apache-2.0
// What the reader accepts, it hands out without error other than FileError: every key in every way, and every
// tensor. Build with clang++ -std=c++20 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all, with
// examples/engine/gguf.cpp and dequantize.cpp.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <span>
#include <string_view>

#include "engine/dequantize.hpp"
#include "engine/gguf.hpp"
#include "wushkv/core/check.hpp"
#include "wushkv/core/error.hpp"

namespace {

constexpr std::size_t largest_tensor = 1U << 20U;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "gguf_fuzz: %s\n", what);
  std::abort();
}

/// True if `call` returned, false if it threw the one thing that is documented.
template <class Call>
bool allowed(const Call& call) {
  try {
    call();
    return true;
  } catch (const wushkv::FileError&) {
    return false;
  }
}

/// Reads every character, so that a view past the end is found.
std::size_t zeros(std::string_view text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\0'));
}

void visit_key(const engine::GgufFile& file, std::string_view key) {
  require(file.contains(key), "a key is not there");
  int kinds = 0;
  if (allowed([&] { static_cast<void>(file.integer(key)); }))
    require(allowed([&] { static_cast<void>(file.number(key)); }), "an integer is no number");
  kinds += allowed([&] { require(wushkv::is_finite(file.number(key)), "a number is not finite"); });
  kinds += allowed(
      [&] { require(zeros(file.string(key)) <= file.string(key).size(), "a string has another size"); });
  kinds += allowed([&] { static_cast<void>(file.boolean_or(key, false)); });
  kinds += allowed([&] {
    for (const std::string_view text : file.strings(key))
      require(zeros(text) <= text.size(), "a string has another size");
  });
  kinds += allowed([&] { static_cast<void>(file.integers(key)); });
  require(kinds <= 1, "a key has several types");
}

void visit_tensor(const engine::GgufFile& file, const engine::GgufTensor& tensor) {
  require(file.find(tensor.name) == &tensor, "a tensor is not found by its name");
  require(engine::find_type(tensor.type) != nullptr, "a tensor's type is unknown");
  if (tensor.data.size() > largest_tensor) return;
  allowed([&] {
    const wushkv::Batch<float> weights = engine::dequantize(tensor);
    require(weights.rows() == tensor.rows() && weights.cols() == tensor.cols(), "weights have another shape");
    require(wushkv::all_finite(weights), "a weight is not finite");
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::optional<engine::GgufFile> file;
  if (!allowed([&] { file.emplace(std::as_bytes(std::span(data, size))); })) return 0;
  for (const std::string_view key : file->keys()) visit_key(*file, key);  // whatever it throws is a bug
  for (const engine::GgufTensor& tensor : file->tensors()) visit_tensor(*file, tensor);
  return 0;
}
