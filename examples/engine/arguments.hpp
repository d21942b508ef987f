// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_ARGUMENTS_HPP
#define WUSHKV_EXAMPLES_ENGINE_ARGUMENTS_HPP

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace engine {

/// The whole number that all of `text` is; none if it is something else.
std::optional<std::int64_t> whole_number(std::string_view text);
/// A number, nothing for any other text.
std::optional<double> real_number(std::string_view text);

/// An option of a verb. `value` is the name of its argument in the help, empty for a flag; `fallback` what it
/// is without being given.
struct Option {
  std::string name, value, help, fallback{};
};

/// The command line of one verb: positional arguments, all needed, and options `--name value` in any order.
/// Throws `std::invalid_argument`, with one sentence, for anything else.
class Arguments {
 public:
  Arguments(std::string verb, std::string summary, std::vector<std::string> positional,
            std::vector<Option> options);

  /// Reads what follows the verb. Returns false if that asks for help, which is then on stdout.
  bool parse(const std::vector<std::string>& words);

  const std::string& positional(std::size_t index) const { return found_.at(index); }
  /// Whether the verb has the option.
  bool has(std::string_view name) const;
  /// Whether the option was given.
  bool given(std::string_view name) const;
  /// The option's value, its fallback if it was not given.
  std::string text(std::string_view name) const;
  /// All values of an option that may be given more than once.
  std::vector<std::string> texts(std::string_view name) const;
  std::int64_t integer(std::string_view name, std::int64_t least, std::int64_t most) const;
  double number(std::string_view name, double least, double most) const;
  /// The numbers of a list.
  std::vector<std::int64_t> integers(std::string_view name, std::int64_t least, std::int64_t most) const;
  /// The value cut at commas.
  std::vector<std::string> list(std::string_view name) const;
  /// Makes sure, before the work, that the options that name files to write can be written and name none that
  /// is read.
  void check_outputs(const std::vector<std::string>& names) const;
  /// Throws with the verb's name in front.
  [[noreturn]] void refuse(const std::string& what) const;

 private:
  struct Given {
    std::string name, value;
  };
  std::int64_t checked(const std::string& subject, const std::string& value, std::int64_t least,
                       std::int64_t most) const;
  const Option& option(std::string_view name) const;
  void print_help() const;

  std::string verb_, summary_;
  std::vector<std::string> positional_, found_;
  std::vector<Option> options_;
  std::vector<Given> given_;
};

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_ARGUMENTS_HPP
