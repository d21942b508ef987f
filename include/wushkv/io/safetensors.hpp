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

#include "wushkv/io/safetensors_reader.hpp"
#include "wushkv/io/safetensors_writer.hpp"

#endif  // WUSHKV_IO_SAFETENSORS_HPP
