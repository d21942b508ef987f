// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CORE_SCRATCH_HPP
#define WUSHKV_CORE_SCRATCH_HPP

#include <cstddef>
#include <memory>

#include "wushkv/core/types.hpp"

namespace wushkv::detail {

/// `size` values of working memory: on the stack up to `Inline` (every head dimension in use), else on the
/// heap, so that hot paths allocate nothing and odd sizes still work.
template <class Value, std::size_t Inline = 512>
class Scratch {
 public:
  explicit Scratch(Index size) {
    if (static_cast<std::size_t>(size) > Inline)
      heap_ = std::make_unique_for_overwrite<Value[]>(static_cast<std::size_t>(size));
  }
  Value* data() { return heap_ ? heap_.get() : inline_; }

 private:
  alignas(64) Value inline_[Inline];
  std::unique_ptr<Value[]> heap_;
};

}  // namespace wushkv::detail

#endif  // WUSHKV_CORE_SCRATCH_HPP
