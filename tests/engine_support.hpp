// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TESTS_ENGINE_SUPPORT_HPP
#define WUSHKV_TESTS_ENGINE_SUPPORT_HPP

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include "support.hpp"

namespace test {

/// The GGUF file of SmolLM2-135M-Instruct: WUSHKV_MODEL in the environment, or where get_model.sh puts it.
/// Empty, with a message that ctest takes for a skipped test, if there is none.
inline std::string model() {
  const char* const set = std::getenv("WUSHKV_MODEL");
  const std::string path = set != nullptr ? set : WUSHKV_TEST_MODEL;
  std::error_code ignored;
  if (std::filesystem::is_regular_file(path, ignored)) return path;
  MESSAGE("skipped: no model (examples/engine/get_model.sh fetches it)");
  return {};
}

}  // namespace test

#endif  // WUSHKV_TESTS_ENGINE_SUPPORT_HPP
