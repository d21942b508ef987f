// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_WUSHKV_HPP
#define WUSHKV_WUSHKV_HPP

// Everything but the assertions for doctest (measure/doctest.hpp).
#include "wushkv/calibrate/calibrate.hpp"
#include "wushkv/codec/codec.hpp"
#include "wushkv/core/version.hpp"
#include "wushkv/io/safetensors.hpp"
#include "wushkv/io/statistics.hpp"
#include "wushkv/io/transforms.hpp"
#include "wushkv/measure/measure.hpp"
#include "wushkv/quantize/quantize.hpp"
#include "wushkv/transform/transform.hpp"

#endif  // WUSHKV_WUSHKV_HPP
