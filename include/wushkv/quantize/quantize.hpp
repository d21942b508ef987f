// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_QUANTIZE_QUANTIZE_HPP
#define WUSHKV_QUANTIZE_QUANTIZE_HPP

// Every quantizer, rounding and packing (design.md, section 3).
#include "wushkv/quantize/affine.hpp"
#include "wushkv/quantize/compact_affine.hpp"
#include "wushkv/quantize/concept.hpp"
#include "wushkv/quantize/feedback.hpp"
#include "wushkv/quantize/lloyd_max.hpp"
#include "wushkv/quantize/log8.hpp"
#include "wushkv/quantize/packing.hpp"
#include "wushkv/quantize/pass_through.hpp"
#include "wushkv/quantize/quest.hpp"
#include "wushkv/quantize/rounding.hpp"
#include "wushkv/quantize/sensitivity.hpp"
#include "wushkv/quantize/step_search.hpp"
#include "wushkv/quantize/uniform.hpp"

#endif  // WUSHKV_QUANTIZE_QUANTIZE_HPP
