// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TRANSFORM_TRANSFORM_HPP
#define WUSHKV_TRANSFORM_TRANSFORM_HPP

// Every transform (design.md, section 3).
#include "wushkv/transform/block_diagonal.hpp"
#include "wushkv/transform/centered.hpp"
#include "wushkv/transform/composed.hpp"
#include "wushkv/transform/concept.hpp"
#include "wushkv/transform/dense.hpp"
#include "wushkv/transform/diagonal.hpp"
#include "wushkv/transform/group_hadamard.hpp"
#include "wushkv/transform/hadamard.hpp"
#include "wushkv/transform/identity.hpp"
#include "wushkv/transform/kronecker.hpp"
#include "wushkv/transform/orthogonal.hpp"
#include "wushkv/transform/permutation.hpp"

#endif  // WUSHKV_TRANSFORM_TRANSFORM_HPP
