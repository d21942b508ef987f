// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_SESSION_HPP
#define WUSHKV_EXAMPLES_ENGINE_SESSION_HPP

#include <string>
#include <vector>

#include "engine/arguments.hpp"
#include "engine/json.hpp"
#include "engine/model.hpp"
#include "engine/threads.hpp"

namespace engine {

// What the verbs share: options, and a model that is ready to run.

/// `--threads` and `--json`.
std::vector<Option> common_options();
/// What `--threads` says, one a core for 0.
int thread_count(const Arguments& arguments);
std::vector<Option> joined(std::vector<std::vector<Option>> parts);

/// The English text that comes with the program.
std::string default_text();

/// A model, its tokenizer and threads to run it.
struct Session {
  explicit Session(const Arguments& arguments);

  /// `count` texts of `length` tokens each (`cut_texts`) of a file, of the text that comes with this program
  /// if `path` is empty. Each begins with what the model wants before a text. Throws `std::invalid_argument`
  /// if there are too few tokens.
  std::vector<std::vector<Token>> texts_of(const std::string& path, Index length, Index count) const;
  /// What goes before a text.
  std::vector<Token> prefix() const;
  /// The token that the model's own texts begin with: what sets documents apart, or the model's own choice.
  Token first_token() const;

  Model model;
  Tokenizer tokenizer;
  Threads threads;
};

/// The most memory that this process has had, in bytes.
std::size_t peak_memory();

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_SESSION_HPP
