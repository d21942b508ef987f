// SPDX-License-Identifier: Apache-2.0
// What the reader accepts, it reads without error, and the writer writes back as the same tensors. Build with
// clang++ -std=c++20 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all; seeds are in corpus/.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "wushkv/io/safetensors.hpp"
#include "wushkv/io/statistics.hpp"
#include "wushkv/io/transforms.hpp"

namespace {

using Bytes = std::vector<std::byte>;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "safetensors_fuzz: %s\n", what);
  std::abort();
}

/// Every type converts to double, so any error here is a bug. Returns the number of NaNs, which depends on
/// every byte.
std::size_t touch(const wushkv::SafetensorsView& view, const std::string& name) {
  const wushkv::TensorView tensor = view.tensor(name);
  const wushkv::Batch<double> matrix = view.matrix<double>(name);
  require(matrix.rows() == tensor.rows() && matrix.cols() == tensor.cols(), "matrix has another shape");
  require(matrix.size() == tensor.size(), "matrix has another size");
  const auto is_nan = [](double value) { return std::isnan(value); };
  return static_cast<std::size_t>(std::count_if(matrix.data(), matrix.data() + matrix.size(), is_nan));
}

/// Narrow conversions may be refused, in the one way that is documented.
void convert(const wushkv::SafetensorsView& view, const std::string& name) {
  try {
    static_cast<void>(view.vector<Eigen::half>(name));
    static_cast<void>(view.vector<std::int16_t>(name));
  } catch (const wushkv::FileError&) {
  }
}

Bytes write_again(const wushkv::SafetensorsView& view) {
  wushkv::SafetensorsWriter writer;
  for (const auto& [key, value] : view.metadata()) writer.set_metadata(key, value);
  for (const std::string& name : view.names()) writer.add(name, view.tensor(name));
  return writer.bytes();
}

void require_equal(const wushkv::SafetensorsView& a, const wushkv::SafetensorsView& b) {
  require(a.metadata() == b.metadata(), "metadata differ");
  require(a.names() == b.names(), "names differ");
  for (const std::string& name : a.names()) {
    const wushkv::TensorView x = a.tensor(name);
    const wushkv::TensorView y = b.tensor(name);
    require(x.dtype() == y.dtype(), "dtypes differ");
    require(x.shape() == y.shape(), "shapes differ");
    require(std::ranges::equal(x.bytes(), y.bytes()), "bytes differ");
    require(touch(a, name) == touch(b, name), "values differ");
  }
}

void round_trip(const wushkv::SafetensorsView& view) {
  for (const std::string& name : view.names()) convert(view, name);
  const Bytes written = write_again(view);
  const auto file = wushkv::SafetensorsFile::from_bytes(written);
  require_equal(view, file);
  require(write_again(file) == written, "the file changes when it is written twice");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::optional<wushkv::SafetensorsView> view;
  try {
    view.emplace(std::as_bytes(std::span(data, size)));
  } catch (const wushkv::FileError&) {
    return 0;
  }
  round_trip(*view);  // whatever it throws is a bug, and ends the fuzzer
  try {
    static_cast<void>(wushkv::load_statistics(*view));
  } catch (const wushkv::FileError&) {  // anything else ends the fuzzer too
  }
  try {
    static_cast<void>(wushkv::load_transforms(*view));
  } catch (const wushkv::FileError&) {
  }
  return 0;
}
