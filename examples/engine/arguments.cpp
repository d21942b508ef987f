// SPDX-License-Identifier: Apache-2.0
#include "engine/arguments.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "engine/json.hpp"

namespace engine {

std::optional<std::int64_t> whole_number(std::string_view text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

std::optional<double> real_number(std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

Arguments::Arguments(std::string verb, std::string summary, std::vector<std::string> positional,
                     std::vector<Option> options)
    : verb_(std::move(verb)),
      summary_(std::move(summary)),
      positional_(std::move(positional)),
      options_(std::move(options)) {}

bool Arguments::parse(const std::vector<std::string>& words) {
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--help" || word == "-h") {
      print_help();
      return false;
    }
    if (word.size() < 2 || word[0] != '-') {
      if (found_.size() == positional_.size()) refuse("'" + word + "' came, expected no more arguments");
      found_.push_back(word);
      continue;
    }
    const std::string name = word == "-o" ? "--output" : word;
    const auto known = std::find_if(options_.begin(), options_.end(),
                                    [&](const Option& option) { return "--" + option.name == name; });
    if (known == options_.end()) refuse(word + " is unknown, expected one of those that --help lists");
    if (known->value.empty()) {
      given_.push_back({known->name, ""});
    } else {
      if (i + 1 == words.size()) refuse(word + " came without a value, expected " + known->value);
      given_.push_back({known->name, words[++i]});
      if (known->value == "FILE" && words[i].empty()) refuse(word + " is empty, expected a file's name");
    }
  }
  if (found_.size() < positional_.size()) refuse(positional_[found_.size()] + " is missing");
  return true;
}

bool Arguments::has(std::string_view name) const {
  return std::any_of(options_.begin(), options_.end(), [&](const Option& o) { return o.name == name; });
}

bool Arguments::given(std::string_view name) const {
  option(name);
  return std::any_of(given_.begin(), given_.end(), [&](const Given& g) { return g.name == name; });
}

std::string Arguments::text(std::string_view name) const {
  std::string value = option(name).fallback;
  for (const Given& g : given_)
    if (g.name == name) value = g.value;
  return value;
}

std::vector<std::string> Arguments::texts(std::string_view name) const {
  option(name);
  std::vector<std::string> values;
  for (const Given& g : given_)
    if (g.name == name) values.push_back(g.value);
  return values;
}

std::int64_t Arguments::integer(std::string_view name, std::int64_t least, std::int64_t most) const {
  return checked("--" + std::string(name) + " is", text(name), least, most);
}

std::vector<std::int64_t> Arguments::integers(std::string_view name, std::int64_t least,
                                              std::int64_t most) const {
  std::vector<std::int64_t> numbers;
  for (const std::string& part : list(name))
    numbers.push_back(checked("--" + std::string(name) + " has", part, least, most));
  return numbers;
}

std::int64_t Arguments::checked(const std::string& subject, const std::string& value, std::int64_t least,
                                std::int64_t most) const {
  const std::optional<std::int64_t> number = whole_number(value);
  if (!number || *number < least || *number > most)
    refuse(subject + " '" + value + "', expected a whole number from " + std::to_string(least) + " to " +
           std::to_string(most));
  return *number;
}

double Arguments::number(std::string_view name, double least, double most) const {
  const std::string value = text(name);
  const std::optional<double> result = real_number(value);
  if (!result || !(*result >= least && *result <= most)) {
    char range[80];
    std::snprintf(range, sizeof range, "%g to %g", least, most);
    refuse("--" + std::string(name) + " is '" + value + "', expected a number from " + range);
  }
  return *result;
}

std::vector<std::string> Arguments::list(std::string_view name) const {
  std::vector<std::string> parts{""};
  for (const char c : text(name))
    if (c == ',')
      parts.emplace_back();
    else
      parts.back() += c;
  for (const std::string& part : parts)
    if (part.empty())
      refuse("--" + std::string(name) + " is '" + text(name) +
             " with an empty part, expected parts with commas between");
  return parts;
}

void Arguments::check_outputs(const std::vector<std::string>& names) const {
  const auto same = [](const std::string& a, const std::string& b) {
    std::error_code ignored;
    if (a == b || std::filesystem::equivalent(a, b, ignored)) return true;
    // Neither may exist yet, and the same file has many spellings.
    const auto spelled = [&](const std::string& path) {
      return std::filesystem::weakly_canonical(std::filesystem::absolute(path, ignored), ignored);
    };
    return spelled(a) == spelled(b) && !spelled(a).empty();
  };
  for (const std::string& name : names) {
    if (!given(name)) continue;
    const std::string path = text(name);
    for (const std::string& read : found_)
      if (same(path, read)) refuse("--" + name + " is " + path + ", which is read, expected another file");
    for (const Given& g : given_)
      if (g.name != name && option(g.name).value == "FILE" && same(path, g.value))
        refuse("--" + name + " and --" + g.name + " are both " + path + ", expected different files");
    check_writable(path);
  }
}

const Option& Arguments::option(std::string_view name) const {
  for (const Option& option : options_)
    if (option.name == name) return option;
  throw std::logic_error("wushkv-lm: no option " + std::string(name));
}

void Arguments::refuse(const std::string& what) const {
  throw std::invalid_argument("wushkv-lm " + verb_ + ": " + what);
}

void Arguments::print_help() const {
  std::string usage = "usage: wushkv-lm " + verb_;
  for (const std::string& name : positional_) usage += " " + name;
  std::printf("%s [options]\n\n%s\n\n", usage.c_str(), summary_.c_str());
  for (const Option& option : options_) {
    const std::string left = "--" + option.name + (option.value.empty() ? "" : " " + option.value);
    std::printf("  %-24s %s", left.c_str(), option.help.c_str());
    if (!option.fallback.empty()) std::printf(" [%s]", option.fallback.c_str());
    std::printf("\n");
  }
}

}  // namespace engine
