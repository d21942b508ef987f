// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_MEASURE_MEASURE_HPP
#define WUSHKV_MEASURE_MEASURE_HPP

// Measures of what a cache loses (design.md, section 3); the assertions for doctest are in
// measure/doctest.hpp.
#include "wushkv/measure/attention.hpp"
#include "wushkv/measure/distribution.hpp"
#include "wushkv/measure/errors.hpp"
#include "wushkv/measure/loss_bound.hpp"
#include "wushkv/measure/relative_error.hpp"

#endif  // WUSHKV_MEASURE_MEASURE_HPP
