// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CORE_VERSION_HPP
#define WUSHKV_CORE_VERSION_HPP

// CMakeLists.txt reads the version from here.
#define WUSHKV_VERSION_MAJOR 0
#define WUSHKV_VERSION_MINOR 1
#define WUSHKV_VERSION_PATCH 0

#endif  // WUSHKV_CORE_VERSION_HPP
