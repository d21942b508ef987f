// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TESTS_ALLOCATION_COUNTER_HPP
#define WUSHKV_TESTS_ALLOCATION_COUNTER_HPP

// Replaces the program's operator new by one that counts: for the one source file of a test. Eigen's own
// allocations go past it; EIGEN_RUNTIME_NO_MALLOC catches those.
#include <cstddef>
#include <cstdlib>
#include <new>

#include "support.hpp"

namespace test {

inline std::size_t allocations = 0;

/// The number of allocations by operator new in `call`; an Eigen assertion fails if it makes one of Eigen's.
template <class Call>
std::size_t allocations_of(Call call) {
  const std::size_t before = allocations;
  Eigen::internal::set_is_malloc_allowed(false);
  call();
  Eigen::internal::set_is_malloc_allowed(true);
  return allocations - before;
}

}  // namespace test

// Not inlined: GCC would see malloc and free on one side only and warn that they do not match.
[[gnu::noinline]] void* operator new(std::size_t size) {
  ++test::allocations;
  if (void* const at = std::malloc(size > 0 ? size : 1)) return at;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  ++test::allocations;
  return std::malloc(size > 0 ? size : 1);
}
[[gnu::noinline]] void operator delete(void* at) noexcept { std::free(at); }
[[gnu::noinline]] void operator delete(void* at, std::size_t) noexcept { std::free(at); }

#endif  // WUSHKV_TESTS_ALLOCATION_COUNTER_HPP
