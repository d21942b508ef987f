// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_WUSHKV_HPP
#define WUSHKV_WUSHKV_HPP

// Everything but the assertions for doctest (measure/doctest.hpp).
#include "wushkv/attend/attend.hpp"
#include "wushkv/attend/state.hpp"
#include "wushkv/cache/layout.hpp"
#include "wushkv/cache/page_pool.hpp"
#include "wushkv/cache/paged_cache.hpp"
#include "wushkv/cache/snapshot.hpp"
#include "wushkv/cache/view.hpp"
#include "wushkv/calibrate/calibrate.hpp"
#include "wushkv/codec/codec.hpp"
#include "wushkv/codec/identity.hpp"
#include "wushkv/core/version.hpp"
#include "wushkv/io/safetensors.hpp"
#include "wushkv/io/statistics.hpp"
#include "wushkv/io/transforms.hpp"
#include "wushkv/measure/measure.hpp"
#include "wushkv/quantize/quantize.hpp"
#include "wushkv/recipe/recipes.hpp"
#include "wushkv/recipe/tune.hpp"
#include "wushkv/rope/key_transform.hpp"
#include "wushkv/rope/rms_norm.hpp"
#include "wushkv/rope/rope.hpp"
#include "wushkv/rope/scaling.hpp"
#include "wushkv/transform/transform.hpp"

#endif  // WUSHKV_WUSHKV_HPP
