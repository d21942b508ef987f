// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_IO_TRANSFORMS_HPP
#define WUSHKV_IO_TRANSFORMS_HPP

#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "wushkv/calibrate/build_options.hpp"
#include "wushkv/calibrate/layer_transforms.hpp"
#include "wushkv/io/layer_count.hpp"
#include "wushkv/io/safetensors.hpp"
#include "wushkv/transform/kronecker.hpp"
#include "wushkv/transform/orthogonal.hpp"

namespace wushkv {

// A transforms file is a safetensors file of, per layer L, `k.L` = T_K, `k_inv.L` = T_K^-1, `v_t.L` = T_Vᵀ
// and `v_inv_t.L` = T_V^-T, each `[kv_heads, blocks, group, group]`; unless all are zero, the means
// `k_mean.L` and `v_mean.L`, `[kv_heads, dim]`; if known, the sensitivities `k_sensitivity.L` and
// `v_sensitivity.L`,
// `[kv_heads, dim, dim]`, in stored coordinates, and what quantizers were tuned to, `k_tuned.L:NAME` and
// `v_tuned.L:NAME`, `[kv_heads]`. Metadata: `format: wushkv-transforms-1`, `layers`, `convention` (`column`:
// y = T x, as here; `row`: y = x T, so every matrix is the transpose), `construction`, and what else the
// writer knows (`damping`, `exponent`, `bits_k`, `bits_v`, …).

/// How the matrices of a file act: on columns (`y = T x`) or on rows (`y = x T`).
enum class VectorConvention { Column, Row };

/// The transforms of all layers of a model, with what is known of their making.
struct ModelTransforms {
  std::vector<LayerTransforms> layers;
  std::map<std::string, std::string> metadata;  ///< free, but for the keys that the file's form needs
};

/// What a file should say of transforms that `build_transforms` made.
inline std::map<std::string, std::string> transform_metadata(const BuildOptions& options) {
  std::map<std::string, std::string> metadata{{"construction", std::string(to_string(options.construction))}};
  if (detail::is_wush(options.construction)) {
    metadata["damping"] = detail::concat(options.damping);
    metadata["exponent"] = options.choose_exponent_for > 0 ? "by head" : detail::concat(options.exponent);
  }
  if (options.construction == Construction::Random) metadata["seed"] = std::to_string(options.seed);
  if (options.key_bits > 0) metadata["bits_k"] = std::to_string(options.key_bits);
  if (options.value_bits > 0) metadata["bits_v"] = std::to_string(options.value_bits);
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
                       const std::vector<HeadTransform>& heads, BlockMatrix which) {
  const Index blocks = heads.front().linear.block_count(), group = heads.front().linear.block_dim();
  Batch<double> rows(static_cast<Index>(heads.size()) * blocks * group, group);
  Index at = 0;
  for (const HeadTransform& of_head : heads) {
    const BlockTransform& head = of_head.linear;
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

/// The means of a side, `k` or `v`, if there is one, and its sensitivities.
inline void add_affine_parts(SafetensorsWriter& writer, const std::string& side, const std::string& layer,
                             const std::vector<HeadTransform>& heads) {
  const Index count = static_cast<Index>(heads.size()), d = heads.front().linear.dim();
  Batch<double> means(count, d), sensitivities(count * d, d);
  Index known = 0;
  for (Index h = 0; h < count; ++h) {
    const HeadTransform& head = heads[static_cast<std::size_t>(h)];
    check_shape(concat("save_transforms: mean of ", side, layer), head.mean, d, 1);
    check_finite(concat("save_transforms: mean of ", side, layer), head.mean);
    means.row(h) = head.mean.transpose();
    if (!head.has_sensitivity()) continue;
    ++known;
    check_shape(concat("save_transforms: sensitivity of ", side, layer), head.sensitivity, d, d);
    check_finite(concat("save_transforms: sensitivity of ", side, layer), head.sensitivity);
    sensitivities.middleRows(h * d, d) = head.sensitivity;
  }
  if (known != 0 && known != count)
    invalid_argument("save_transforms: ", known, " heads of ", side, layer,
                     " have a sensitivity, expected none or all ", count);
  if (!means.isZero(0)) writer.add(side + "_mean" + layer, TensorShape{count, d}, means);
  if (known > 0) writer.add(side + "_sensitivity" + layer, TensorShape{count, d, d}, sensitivities);
}

/// Tuned parameters, a tensor of one a head for each name.
inline void add_tuned(SafetensorsWriter& writer, const std::string& side, const std::string& layer,
                      const std::vector<HeadTransform>& heads) {
  for (const HeadTransform& head : heads)
    if (head.tuned.size() != heads.front().tuned.size())
      invalid_argument("save_transforms: heads of ", side, layer, " are tuned for ", head.tuned.size(),
                       " and ", heads.front().tuned.size(), " quantizers, expected the same for all");
  for (const auto& [name, first] : heads.front().tuned) {
    Vector<double> parameters(static_cast<Index>(heads.size()));
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const auto found = heads[h].tuned.find(name);
      if (found == heads[h].tuned.end() || !(is_finite(found->second) && found->second > 0))
        invalid_argument("save_transforms: ", side, layer, " head ", h, " is not tuned for '", name,
                         "', expected the same names for all heads, and positive parameters");
      parameters[static_cast<Index>(h)] = found->second;
    }
    writer.add(side + "_tuned" + layer + ":" + name, parameters);
  }
}

/// Reads what `add_tuned` wrote.
inline void read_tuned(const SafetensorsView& file, const std::string& side, const std::string& layer,
                       std::vector<HeadTransform>& heads) {
  const std::string prefix = side + "_tuned" + layer + ":";
  for (const std::string& tensor : file.names()) {
    if (!tensor.starts_with(prefix)) continue;
    const Vector<double> parameters = file.vector<double>(tensor, {static_cast<Index>(heads.size())});
    if (!all_finite(parameters) || !(parameters.minCoeff() > 0))
      file_error("safetensors: tensor \"", tensor, "\" has a parameter that is not positive and finite");
    for (std::size_t h = 0; h < heads.size(); ++h)
      heads[h].tuned[tensor.substr(prefix.size())] = parameters[static_cast<Index>(h)];
  }
}

/// Throws `FileError` unless the two matrices of a file are inverses of each other. A file may hold single
/// precision: a pair then agrees to its rounding times the condition number.
inline Dense<double> read_pair(const MatrixPair& pair, const std::string& name,
                               const std::string& inverse_name) {
  const Index d = pair.forward.rows();
  const double off =
      (pair.forward * pair.inverse - SquareMatrix<double>::Identity(d, d)).cwiseAbs().maxCoeff();
  if (!all_finite(pair.forward) || !all_finite(pair.inverse) || !(off <= 1e-3))
    file_error("safetensors: tensors \"", name, "\" and \"", inverse_name,
               "\" are no finite pair of inverses, their product is off by ", off, " from the identity");
  return Dense<double>(pair, std::numeric_limits<double>::infinity());
}

/// Reads `[kv_heads, blocks, group, group]` matrices; `transposed` says that the file holds transposes.
inline std::vector<HeadTransform> read_blocks(const SafetensorsView& file, const std::string& name,
                                              const std::string& inverse_name, bool transposed) {
  const TensorShape shape = file.expect_shape(name, {Dynamic, Dynamic, Dynamic, Dynamic}).shape();
  const Index heads = shape[0], blocks = shape[1], group = shape[2];
  if (shape[3] != group || shape.size() < 1)
    file_error("safetensors: tensor \"", name, "\": shape is ", shape.to_string(),
               ", expected square matrices and no empty dimension");
  const Batch<double> forward = file.matrix<double>(name), inverse = file.matrix<double>(inverse_name, shape);
  std::vector<HeadTransform> result;
  for (Index h = 0; h < heads; ++h) {
    std::vector<Dense<double>> of_head;
    for (Index b = 0; b < blocks; ++b) {
      const Index at = (h * blocks + b) * group;
      MatrixPair pair{forward.middleRows(at, group), inverse.middleRows(at, group)};
      if (transposed) {
        pair.forward.transposeInPlace();
        pair.inverse.transposeInPlace();
      }
      of_head.push_back(read_pair(pair, name, inverse_name));
    }
    result.emplace_back(BlockTransform(std::move(of_head)));
  }
  return result;
}

/// Reads what `add_affine_parts` wrote, if it is there.
inline void read_affine_parts(const SafetensorsView& file, const std::string& side, const std::string& layer,
                              std::vector<HeadTransform>& heads) {
  const Index count = static_cast<Index>(heads.size()), d = heads.front().linear.dim();
  const auto read = [&](const std::string& name, const TensorShape& shape) {
    Batch<double> rows = file.matrix<double>(name, shape);
    if (!all_finite(rows)) file_error("safetensors: tensor \"", name, "\" has a value that is not finite");
    return rows;
  };
  const std::string mean = side + "_mean" + layer, sensitivity = side + "_sensitivity" + layer;
  if (file.contains(mean)) {
    const Batch<double> rows = read(mean, {count, d});
    for (Index h = 0; h < count; ++h) heads[static_cast<std::size_t>(h)].mean = rows.row(h).transpose();
  }
  if (file.contains(sensitivity)) {
    const Batch<double> rows = read(sensitivity, {count, d, d});
    for (Index h = 0; h < count; ++h)
      heads[static_cast<std::size_t>(h)].sensitivity = rows.middleRows(h * d, d);
  }
}

}  // namespace detail

/// Writes transforms. Throws `std::invalid_argument` for no layers, no heads, heads of one layer in different
/// blocks, means or sensitivities of another dimension, not finite, or of some heads only, and heads tuned
/// for different quantizers or to no positive number, `FileError` if the file cannot be written.
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
    detail::add_affine_parts(writer, "k", layer, keys);
    detail::add_tuned(writer, "k", layer, keys);
    detail::add_affine_parts(writer, "v", layer, values);
    detail::add_tuned(writer, "v", layer, values);
  }
  writer.save(path);
}

/// Reads transforms in either convention. Throws `FileError` for a file that cannot be read, is damaged or
/// something else, or whose matrices are no pairs of inverses.
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
    detail::read_affine_parts(file, "k", layer, transforms.keys);
    detail::read_tuned(file, "k", layer, transforms.keys);
    detail::read_affine_parts(file, "v", layer, transforms.values);
    detail::read_tuned(file, "v", layer, transforms.values);
    result.layers.push_back(std::move(transforms));
  }
  return result;
}

inline ModelTransforms load_transforms(const std::filesystem::path& path) {
  return load_transforms(SafetensorsFile(path));
}

/// A learned transform given as a square matrix by name, as SpinQuant's rotations or FlatQuant's are, in
/// double; `convention` says how the file's matrix acts. Throws `FileError` if it is not there or not square.
inline SquareMatrix<double> load_matrix(const SafetensorsView& file, std::string_view name,
                                        VectorConvention convention = VectorConvention::Column) {
  const TensorShape shape = file.expect_shape(name, {Dynamic, Dynamic}).shape();
  const SquareMatrix<double> matrix = file.matrix<double>(name, {shape[0], shape[0]});
  return convention == VectorConvention::Row ? SquareMatrix<double>(matrix.transpose()) : matrix;
}

/// That matrix as a rotation, within `tolerance` of `R Rᵀ = I`: about 1e-3 for one kept in half, 1e-2 in
/// bfloat16. Throws as `load_matrix` and `Orthogonal`.
template <class Scalar>
Orthogonal<Scalar> load_orthogonal(const SafetensorsView& file, std::string_view name,
                                   VectorConvention convention = VectorConvention::Column,
                                   double tolerance = 1e-5) {
  return Orthogonal<Scalar>(load_matrix(file, name, convention), tolerance);
}

/// That matrix with its inverse. Throws as `load_matrix` and `Dense`.
template <class Scalar>
Dense<Scalar> load_dense(const SafetensorsView& file, std::string_view name,
                         VectorConvention convention = VectorConvention::Column) {
  return Dense<Scalar>(load_matrix(file, name, convention));
}

/// The Kronecker product `A ⊗ B` of two of them. Throws as `load_dense`.
template <class Scalar>
Kronecker<Scalar> load_kronecker(const SafetensorsView& file, std::string_view a, std::string_view b,
                                 VectorConvention convention = VectorConvention::Column) {
  return Kronecker<Scalar>(load_dense<Scalar>(file, a, convention), load_dense<Scalar>(file, b, convention));
}

}  // namespace wushkv

#endif  // WUSHKV_IO_TRANSFORMS_HPP
