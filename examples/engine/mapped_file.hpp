// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_MAPPED_FILE_HPP
#define WUSHKV_EXAMPLES_ENGINE_MAPPED_FILE_HPP

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <system_error>
#include <utility>

#include "wushkv/core/error.hpp"

namespace engine {

/// A file's bytes, read by the operating system as they are used: a model starts at once, and processes that
/// run the same model share its memory. The file must not shrink meanwhile, as for any mapping.
class MappedFile {
 public:
  MappedFile() = default;  // of no file: no bytes

  explicit MappedFile(const std::filesystem::path& path) {
    const Descriptor file(path);
    struct stat status {};
    if (::fstat(file.number, &status) != 0) fail(path, "cannot be read: ", reason());
    if (!S_ISREG(status.st_mode)) fail(path, "is not a regular file");
    if (status.st_size == 0) fail(path, "is empty");
    if (std::cmp_greater(status.st_size, std::numeric_limits<std::size_t>::max()))
      fail(path, "has ", status.st_size, " bytes, more than memory addresses reach");
    const auto size = static_cast<std::size_t>(status.st_size);
    void* const at = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.number, 0);
    if (at == MAP_FAILED) fail(path, "cannot be mapped: ", reason());
    bytes_ = {static_cast<const std::byte*>(at), size};
  }

  MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~MappedFile() {
    if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  template <class... Parts>
  [[noreturn]] static void fail(const std::filesystem::path& path, const Parts&... parts) {
    wushkv::detail::file_error("file ", path.string(), " ", parts...);
  }
  static std::string reason() { return std::generic_category().message(errno); }

  /// The mapping outlives it.
  struct Descriptor {
    // O_NONBLOCK: a pipe without a writer would make open wait; a regular file does not care.
    explicit Descriptor(const std::filesystem::path& path)
        : number(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
      if (number < 0) fail(path, "cannot be opened: ", reason());
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() { ::close(number); }
    int number;
  };

  std::span<const std::byte> bytes_;
};

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_MAPPED_FILE_HPP
