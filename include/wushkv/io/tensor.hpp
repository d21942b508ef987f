// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_IO_TENSOR_HPP
#define WUSHKV_IO_TENSOR_HPP

/// What a safetensors file is made of: element types, shapes and views of tensors.

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

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

}  // namespace wushkv

#endif  // WUSHKV_IO_TENSOR_HPP
