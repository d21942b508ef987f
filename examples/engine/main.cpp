// SPDX-License-Identifier: Apache-2.0
//
// wushkv-lm: a small engine for GGUF models that keeps its KV cache with wushkv. `wushkv-lm --help` lists
// what it does.
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "engine/verbs.hpp"

namespace {

struct Verb {
  const char* name;
  void (*run)(const std::vector<std::string>&);
  const char* summary;
};

constexpr Verb verbs[] = {
    {"calibrate", engine::calibrate, "gather statistics of a model's queries, keys and values"},
    {"build", engine::build, "make transforms from statistics"},
    {"perplexity", engine::perplexity, "measure a model on a text, through a cache"},
    {"table", engine::table, "measure transforms x quantizers x bits"},
    {"generate", engine::generate, "continue a prompt, or chat, from a cache"},
    {"needle", engine::needle, "find a fact in a long text, from a cache"},
};

void print_usage(std::FILE* to) {
  std::fputs("usage: wushkv-lm VERB …, and wushkv-lm VERB --help for its options\n\n", to);
  for (const Verb& verb : verbs) std::fprintf(to, "  %-12s %s\n", verb.name, verb.summary);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> words(argv + (argc > 0 ? 1 : 0), argv + argc);
  if (words.empty()) {
    print_usage(stderr);
    return 2;
  }
  const std::string name = words.front();
  words.erase(words.begin());
  if (name == "--help" || name == "-h") {
    print_usage(stdout);
    return std::fflush(stdout) == 0 ? 0 : 2;
  }
  try {
    for (const Verb& verb : verbs)
      if (name == verb.name) {
        verb.run(words);
        if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return 0;
        std::fprintf(stderr, "wushkv-lm: standard output cannot be written\n");
        return 2;
      }
    std::fprintf(stderr, "wushkv-lm: verb '%s' is unknown, expected one of those that --help lists\n",
                 name.c_str());
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "wushkv-lm: there is not enough memory for this model and context\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 2;
}
