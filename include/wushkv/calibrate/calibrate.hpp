// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CALIBRATE_CALIBRATE_HPP
#define WUSHKV_CALIBRATE_CALIBRATE_HPP

// Statistics, constructions and folding (design.md, section 3).
#include "wushkv/calibrate/allocate.hpp"
#include "wushkv/calibrate/attention_statistics.hpp"
#include "wushkv/calibrate/build.hpp"
#include "wushkv/calibrate/construction.hpp"
#include "wushkv/calibrate/fold.hpp"
#include "wushkv/calibrate/layer_transforms.hpp"
#include "wushkv/calibrate/loss_spectrum.hpp"
#include "wushkv/calibrate/predict.hpp"
#include "wushkv/calibrate/rotations.hpp"
#include "wushkv/calibrate/statistics.hpp"
#include "wushkv/calibrate/token_sample.hpp"
#include "wushkv/calibrate/wush.hpp"

#endif  // WUSHKV_CALIBRATE_CALIBRATE_HPP
