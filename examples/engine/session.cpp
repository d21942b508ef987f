// SPDX-License-Identifier: Apache-2.0
#include "engine/session.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <stdexcept>
#include <thread>

#include "engine/evaluation.hpp"

#ifndef WUSHKV_EXAMPLE_DATA  // set by the build
#define WUSHKV_EXAMPLE_DATA "examples/data"
#endif

namespace engine {

int thread_count(const Arguments& arguments) {
  const auto count = static_cast<int>(arguments.integer("threads", 0, 1024));
  return count > 0 ? count : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::vector<Option> common_options() {
  return {{"threads", "N", "threads, 0 for one a core", "0"},
          {"json", "FILE", "write the results there as well"}};
}

std::vector<Option> joined(std::vector<std::vector<Option>> parts) {
  std::vector<Option> all;
  for (std::vector<Option>& part : parts)
    all.insert(all.end(), std::move_iterator(part.begin()), std::move_iterator(part.end()));
  return all;
}

std::string default_text() { return WUSHKV_EXAMPLE_DATA "/english.txt"; }

Session::Session(const Arguments& arguments)
    : model(load_model(arguments.positional(0))),
      tokenizer(model.vocabulary),
      threads(thread_count(arguments)) {}

std::vector<std::vector<Token>> Session::texts_of(const std::string& path, Index length, Index count) const {
  const std::string file = path.empty() ? default_text() : path;
  const std::vector<Token> tokens = tokenizer.encode(read_text(file));
  if (tokens.empty()) throw std::invalid_argument("wushkv-lm: the text " + file + " is empty, expected some");
  return cut_texts(tokens, prefix(), length, count);
}

std::vector<Token> Session::prefix() const {
  const Vocabulary& vocabulary = model.vocabulary;
  return vocabulary.add_bos && vocabulary.bos ? std::vector<Token>{*vocabulary.bos} : std::vector<Token>{};
}

Token Session::first_token() const {
  // Documents were set apart by it where there is one; a chat model's own choice begins a conversation.
  if (const std::optional<Token> between = tokenizer.find("<|endoftext|>")) return *between;
  if (model.vocabulary.bos) return *model.vocabulary.bos;
  return model.vocabulary.eos.value_or(0);
}

std::size_t peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::size_t>(usage.ru_maxrss) * 1024;
}

}  // namespace engine
