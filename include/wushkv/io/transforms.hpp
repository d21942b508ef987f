// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_IO_TRANSFORMS_HPP
#define WUSHKV_IO_TRANSFORMS_HPP

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "wushkv/calibrate/build.hpp"
#include "wushkv/io/safetensors.hpp"
#include "wushkv/io/statistics.hpp"
#include "wushkv/transform/kronecker.hpp"

namespace wushkv {

// A transforms file is a safetensors file of, per layer L, `k.L` = T_K, `k_inv.L` = T_K^-1, `v_t.L` = T_Vᵀ
// and `v_inv_t.L` = T_V^-T, each `[kv_heads, blocks, group, group]`. Metadata: `format: wushkv-transforms-1`,
// `layers`, `convention` (`column`: y = T x, as here; `row`: y = x T, so every matrix is the transpose),
// `construction`, and what else the writer knows
// (`damping`, `exponent`, `bits_k`, `bits_v`, …).

/// How the matrices of a file act: on columns (`y = T x`) or on rows (`y = x T`).
enum class VectorConvention { Column, Row };

/// The transforms of all layers of a model, with what is known of their making.
struct ModelTransforms {
  std::vector<LayerTransforms> layers;
  std::map<std::string, std::string> metadata;  ///< free, but for the keys that the file's form needs
};

/// What a file should say of transforms that `build_transforms` made.
inline std::map<std::string, std::string> describe(const BuildOptions& options) {
  std::map<std::string, std::string> metadata{{"construction", std::string(to_string(options.construction))}};
  if (options.construction == Construction::Wush) {
    metadata["damping"] = detail::concat(options.damping);
    metadata["exponent"] = detail::concat(options.exponent);
  }
  if (options.construction == Construction::Random) metadata["seed"] = std::to_string(options.seed);
  return metadata;
}

namespace detail {

inline constexpr std::string_view transforms_format = "wushkv-transforms-1";

enum class BlockMatrix { Forward, Inverse, ForwardTransposed, InverseTransposed };

inline SquareMatrix<double> block_matrix(const Dense<double>& block, BlockMatrix which) {
  switch (which) {
    case BlockMatrix::Forward:
      return block.matrix();
    case BlockMatrix::Inverse:
      return block.inverse_matrix();
    case BlockMatrix::ForwardTransposed:
      return block.matrix().transpose();
    case BlockMatrix::InverseTransposed:
      return block.inverse_matrix().transpose();
  }
  invalid_argument("block_matrix: no such matrix");
}

inline void add_blocks(SafetensorsWriter& writer, const std::string& name,
                       const std::vector<BlockTransform>& heads, BlockMatrix which) {
  const Index blocks = heads.front().block_count(), group = heads.front().block_dim();
  Batch<double> rows(static_cast<Index>(heads.size()) * blocks * group, group);
  Index at = 0;
  for (const BlockTransform& head : heads) {
    if (head.block_count() != blocks || head.block_dim() != group)
      invalid_argument("save_transforms: ", name, " mixes heads of ", head.block_count(), " x ",
                       head.block_dim(), " and ", blocks, " x ", group);
    for (const Dense<double>& block : head.blocks()) {
      rows.middleRows(at, group) = block_matrix(block, which);
      at += group;
    }
  }
  writer.add(name, TensorShape{static_cast<Index>(heads.size()), blocks, group, group}, rows);
}

/// Reads `[kv_heads, blocks, group, group]` matrices; `transposed` says that the file holds transposes.
inline std::vector<BlockTransform> read_blocks(const SafetensorsView& file, const std::string& name,
                                               const std::string& inverse_name, bool transposed) {
  const TensorShape shape = file.expect_shape(name, {Dynamic, Dynamic, Dynamic, Dynamic}).shape();
  const Index heads = shape[0], blocks = shape[1], group = shape[2];
  if (heads < 1 || blocks < 1 || group < 1)
    file_error("safetensors: tensor \"", name, "\": shape is ", shape.to_string(),
               ", expected no empty dimension");
  const TensorShape square{heads, blocks, group, group};
  const Batch<double> forward = file.matrix<double>(name, square),
                      inverse = file.matrix<double>(inverse_name, square);
  // A file may hold single precision: the pair then agrees to its rounding, times the condition number.
  const double tolerance = 1e-3;
  std::vector<BlockTransform> result;
  for (Index h = 0; h < heads; ++h) {
    std::vector<Dense<double>> of_head;
    for (Index b = 0; b < blocks; ++b) {
      const Index at = (h * blocks + b) * group;
      MatrixPair pair{forward.middleRows(at, group), inverse.middleRows(at, group)};
      if (transposed) {
        pair.forward.transposeInPlace();
        pair.inverse.transposeInPlace();
      }
      of_head.emplace_back(pair, tolerance);
    }
    result.emplace_back(std::move(of_head));
  }
  return result;
}

}  // namespace detail

/// Writes transforms. Throws `std::invalid_argument` for no layers, no heads, or heads of one layer in
/// different blocks, `FileError` if the file cannot be written.
inline void save_transforms(const std::filesystem::path& path, const ModelTransforms& transforms) {
  if (transforms.layers.empty()) detail::invalid_argument("save_transforms: 0 layers, expected at least one");
  SafetensorsWriter writer;
  for (const auto& [key, value] : transforms.metadata) writer.set_metadata(key, value);
  writer.set_metadata("format", detail::transforms_format);
  writer.set_metadata("layers", std::to_string(transforms.layers.size()));
  writer.set_metadata("convention", "column");
  for (std::size_t l = 0; l < transforms.layers.size(); ++l) {
    const auto& [keys, values] = transforms.layers[l];
    if (keys.empty() || keys.size() != values.size())
      detail::invalid_argument("save_transforms: layer ", l, " has ", keys.size(), " key and ", values.size(),
                               " value transforms, expected one each a KV head");
    const std::string layer = "." + std::to_string(l);
    detail::add_blocks(writer, "k" + layer, keys, detail::BlockMatrix::Forward);
    detail::add_blocks(writer, "k_inv" + layer, keys, detail::BlockMatrix::Inverse);
    detail::add_blocks(writer, "v_t" + layer, values, detail::BlockMatrix::ForwardTransposed);
    detail::add_blocks(writer, "v_inv_t" + layer, values, detail::BlockMatrix::InverseTransposed);
  }
  writer.save(path);
}

/// Reads transforms in either convention. Throws `FileError` for a file that cannot be read, is damaged or
/// something else, `std::invalid_argument` for matrices that are singular or no pairs of inverses.
inline ModelTransforms load_transforms(const SafetensorsView& file) {
  const Index count = detail::layer_count(file, detail::transforms_format);
  const auto convention = file.metadata().find("convention");
  if (convention == file.metadata().end() || (convention->second != "column" && convention->second != "row"))
    detail::file_error(
        "safetensors: metadata 'convention' is ",
        convention == file.metadata().end() ? std::string("missing") : "'" + convention->second + "'",
        ", expected 'column' or 'row'");
  const bool row = convention->second == "row";
  ModelTransforms result;
  result.metadata = {file.metadata().begin(), file.metadata().end()};
  for (Index l = 0; l < count; ++l) {
    const std::string layer = "." + std::to_string(l);
    LayerTransforms transforms{detail::read_blocks(file, "k" + layer, "k_inv" + layer, row),
                               detail::read_blocks(file, "v_t" + layer, "v_inv_t" + layer, !row)};
    if (transforms.keys.size() != transforms.values.size())
      detail::file_error("safetensors: layer ", l, " has ", transforms.keys.size(), " key and ",
                         transforms.values.size(), " value transforms, expected as many");
    result.layers.push_back(std::move(transforms));
  }
  return result;
}

inline ModelTransforms load_transforms(const std::filesystem::path& path) {
  return load_transforms(SafetensorsFile(path));
}

/// A learned transform given as a square matrix by name, as SpinQuant's rotations or FlatQuant's are;
/// `convention` says how the file's matrix acts. Throws `FileError` if it is not there or not square, and as
/// the transform's constructor does.
inline SquareMatrix<double> load_matrix(const SafetensorsView& file, std::string_view name,
                                        VectorConvention convention = VectorConvention::Column) {
  const TensorShape shape = file.expect_shape(name, {Dynamic, Dynamic}).shape();
  const SquareMatrix<double> matrix = file.matrix<double>(name, {shape[0], shape[0]});
  return convention == VectorConvention::Row ? SquareMatrix<double>(matrix.transpose()) : matrix;
}

template <class Scalar>
Orthogonal<Scalar> load_orthogonal(const SafetensorsView& file, std::string_view name,
                                   VectorConvention convention = VectorConvention::Column) {
  return Orthogonal<Scalar>(load_matrix(file, name, convention));
}

template <class Scalar>
Dense<Scalar> load_dense(const SafetensorsView& file, std::string_view name,
                         VectorConvention convention = VectorConvention::Column) {
  return Dense<Scalar>(load_matrix(file, name, convention));
}

template <class Scalar>
Kronecker<Scalar> load_kronecker(const SafetensorsView& file, std::string_view a, std::string_view b,
                                 VectorConvention convention = VectorConvention::Column) {
  return Kronecker<Scalar>(Dense<Scalar>(load_matrix(file, a, convention)),
                           Dense<Scalar>(load_matrix(file, b, convention)));
}

}  // namespace wushkv

#endif  // WUSHKV_IO_TRANSFORMS_HPP
