// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_MEASURE_DOCTEST_HPP
#define WUSHKV_MEASURE_DOCTEST_HPP

// Assertions for unit tests of codecs with doctest, which the including file includes itself:
//
//     CHECK_RECONSTRUCTION(codec, data, 0.12);   // sum |x' - x|² <= 0.12 sum |x|² over the rows x of data
//
// `codec` is a `Codec` (or anything with `reconstruct`), `data` a batch `[tokens, head_dim]`. CHECK goes on
// after a failure, REQUIRE ends the test case, WARN only reports.
#include "wushkv/measure/errors.hpp"

#define WUSHKV_ASSERT_RECONSTRUCTION(assertion, codec, data, bound)                                   \
  do {                                                                                                \
    const double relative_squared_error = ::wushkv::reconstruction_error((codec), (data)).relative(); \
    assertion(relative_squared_error <= static_cast<double>(bound));                                  \
  } while (false)

#define CHECK_RECONSTRUCTION(codec, data, bound) \
  WUSHKV_ASSERT_RECONSTRUCTION(DOCTEST_CHECK, codec, data, bound)
#define REQUIRE_RECONSTRUCTION(codec, data, bound) \
  WUSHKV_ASSERT_RECONSTRUCTION(DOCTEST_REQUIRE, codec, data, bound)
#define WARN_RECONSTRUCTION(codec, data, bound) WUSHKV_ASSERT_RECONSTRUCTION(DOCTEST_WARN, codec, data, bound)

#endif  // WUSHKV_MEASURE_DOCTEST_HPP
