// SPDX-License-Identifier: Apache-2.0
#include "wushkv/measure/doctest.hpp"
#include "wushkv/wushkv.hpp"

double other_unit();
double other_unit() { return wushkv::lloyd_max_levels(1).level[1]; }
