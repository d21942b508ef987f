// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TESTS_TEMPORARY_FILE_HPP
#define WUSHKV_TESTS_TEMPORARY_FILE_HPP

#include <filesystem>
#include <random>
#include <string>

namespace test {

/// A path in a directory of its own, which is removed at the end.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& name) {
    std::random_device device;
    directory_ = std::filesystem::temp_directory_path() /
                 ("wushkv-test-" + std::to_string(device()) + "-" + std::to_string(device()));
    std::filesystem::create_directory(directory_);
    path_ = directory_ / name;
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path directory_, path_;
};

}  // namespace test

#endif  // WUSHKV_TESTS_TEMPORARY_FILE_HPP
