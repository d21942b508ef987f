// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TESTS_SYMMETRIC_HPP
#define WUSHKV_TESTS_SYMMETRIC_HPP

#include <string>

#include "support.hpp"
#include "wushkv/io/safetensors.hpp"

namespace test {

/// A symmetric matrix of a reference file: whole, or (the large ones) as the rows of its upper triangle one
/// after the other.
inline SquareMatrix<double> symmetric(const wushkv::SafetensorsFile& file, const std::string& name,
                                      Index dim) {
  if (file.tensor(name).shape().rank() == 2) return file.matrix<double>(name, {dim, dim});
  const Vector<double> triangle = file.vector<double>(name, {dim * (dim + 1) / 2});
  SquareMatrix<double> matrix(dim, dim);
  for (Index i = 0, at = 0; i < dim; ++i)
    for (Index j = i; j < dim; ++j) matrix(i, j) = matrix(j, i) = triangle[at++];
  return matrix;
}

}  // namespace test

#endif  // WUSHKV_TESTS_SYMMETRIC_HPP
