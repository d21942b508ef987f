// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TESTS_ATTENTION_REFERENCE_HPP
#define WUSHKV_TESTS_ATTENTION_REFERENCE_HPP

#include <string>

#include "support.hpp"
#include "wushkv/core/heads.hpp"
#include "wushkv/io/safetensors.hpp"

namespace test {

/// tests/data/attention.safetensors: one sequence of 40 tokens, 6 query and 2 KV heads of 16, model
/// dimension 24.
struct AttentionReference {
  wushkv::SafetensorsFile file{data("attention.safetensors")};
  wushkv::AttentionHeads heads{6, 2, 16, 16};
  Batch<double> q = side_by_side("q"), k = side_by_side("k"), v = side_by_side("v");
  Batch<double> w_o = file.matrix<double>("w_o", {6, 16, 24});

  /// `[tokens, heads, dim]` as `[tokens, heads * dim]`.
  Batch<double> side_by_side(const std::string& name) const { return file.token_matrix<double>(name); }
  /// One head's `[dim, dim]` of a tensor `[heads, dim, dim]`.
  Batch<double> of_head(const std::string& name, Index head) const {
    const Batch<double> rows = file.matrix<double>(name);
    return rows.middleRows(head * rows.cols(), rows.cols());
  }
};

}  // namespace test

#endif  // WUSHKV_TESTS_ATTENTION_REFERENCE_HPP
