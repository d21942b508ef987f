// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_EXAMPLES_ENGINE_VERBS_HPP
#define WUSHKV_EXAMPLES_ENGINE_VERBS_HPP

#include <string>
#include <vector>

namespace engine {

// What `wushkv-lm` does. Each takes the words after its name and throws for whatever is wrong
// with them, or with the files they name.
void calibrate(const std::vector<std::string>& words);
void build(const std::vector<std::string>& words);
void perplexity(const std::vector<std::string>& words);
void table(const std::vector<std::string>& words);
void generate(const std::vector<std::string>& words);
void needle(const std::vector<std::string>& words);

}  // namespace engine

#endif  // WUSHKV_EXAMPLES_ENGINE_VERBS_HPP
