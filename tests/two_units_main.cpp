// SPDX-License-Identifier: Apache-2.0
// Linked with two_units_other.cpp: a function of the library that is not inline would be defined twice.
#include "wushkv/measure/doctest.hpp"
#include "wushkv/wushkv.hpp"

double other_unit();

int main() { return wushkv::lloyd_max_levels(1).level[1] == other_unit() ? 0 : 1; }
