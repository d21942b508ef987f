// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CORE_ERROR_HPP
#define WUSHKV_CORE_ERROR_HPP

#include <charconv>
#include <concepts>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>

#if defined(__cpp_exceptions) || defined(__EXCEPTIONS) || defined(_CPPUNWIND)
#define WUSHKV_HAS_EXCEPTIONS 1
#else
#define WUSHKV_HAS_EXCEPTIONS 0
#endif

namespace wushkv {

/// A file or a byte stream that is not what it claims to be (design.md, section 4).
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Called with the message of a failed check when the library is compiled without exceptions. It must not
/// return; the program is aborted if it does.
using FailureHandler = void (*)(const char* message);

namespace detail {

inline void print_failure(const char* message) { std::fprintf(stderr, "wushkv: %s\n", message); }

inline FailureHandler& failure_handler() {
  static FailureHandler handler = &print_failure;
  return handler;
}

}  // namespace detail

/// Replaces the handler that failed checks call when compiled with `-fno-exceptions`; null restores the
/// default, which prints the message to stderr. Returns the previous handler. Not synchronized: set it before
/// any other call.
inline FailureHandler set_failure_handler(FailureHandler handler) {
  FailureHandler previous = detail::failure_handler();
  detail::failure_handler() = handler != nullptr ? handler : &detail::print_failure;
  return previous;
}

namespace detail {

template <class Error>
[[noreturn]] void raise(const std::string& message) {
#if WUSHKV_HAS_EXCEPTIONS
  throw Error(message);
#else
  failure_handler()(message.c_str());
  std::abort();
#endif
}

inline void append_to(std::string& out, std::string_view text) { out.append(text); }
inline void append_to(std::string& out, const char* text) { out.append(text); }
inline void append_to(std::string& out, const std::string& text) { out.append(text); }

inline void append_to(std::string& out, char c) { out.push_back(c); }

template <class Number>
requires std::is_arithmetic_v<Number>
void append_to(std::string& out, Number value) {
  char buffer[40];
  std::to_chars_result end{};
  if constexpr (std::integral<Number>)
    end = std::to_chars(buffer, buffer + sizeof buffer, +value);  // + takes a bool or a byte for a number
  else
    end = std::to_chars(buffer, buffer + sizeof buffer, static_cast<double>(value),
                        std::chars_format::general, 9);
  out.append(buffer, end.ptr);
}

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::string out;
  (append_to(out, parts), ...);
  return out;
}

/// Throws `std::invalid_argument` whose message is the parts put together: name the argument, what came, what
/// was expected.
template <class... Parts>
[[noreturn]] void invalid_argument(const Parts&... parts) {
  raise<std::invalid_argument>(concat(parts...));
}

template <class... Parts>
[[noreturn]] void file_error(const Parts&... parts) {
  raise<FileError>(concat(parts...));
}

}  // namespace detail
}  // namespace wushkv

#endif  // WUSHKV_CORE_ERROR_HPP
