// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iostream>

#include "engine/evaluation.hpp"
#include "engine/progress.hpp"
#include "engine/sampler.hpp"
#include "engine/session.hpp"
#include "engine/transform_source.hpp"
#include "engine/unicode.hpp"
#include "engine/verbs.hpp"

namespace engine {
namespace {

/// To standard output at once, whatever bytes they are.
void write(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

std::span<const float> last_row(const Batch<float>& batch) {
  return {batch.row(batch.rows() - 1).data(), static_cast<std::size_t>(batch.cols())};
}

/// One conversation, or one text, on one cache.
class Conversation {
 public:
  Conversation(Transformer& transformer, const Tokenizer& tokenizer, const CachePath& path,
               const SamplerOptions& options, Index prefill)
      : transformer_(transformer), tokenizer_(tokenizer), path_(path), sampler_(options), prefill_(prefill) {
    for (const char* end : {"<|im_end|>", "<|endoftext|>"})
      if (const std::optional<Token> token = tokenizer.find(end)) ends_.push_back(*token);
    if (tokenizer.vocabulary().eos) ends_.push_back(*tokenizer.vocabulary().eos);
  }

  /// Tokens that go before what is generated next.
  void add(const std::vector<Token>& tokens) {
    waiting_.insert(waiting_.end(), tokens.begin(), tokens.end());
  }
  bool empty() const { return waiting_.empty() && path_.cache->length(0) == 0; }
  /// Whether the model ended its last turn by itself, with the token that does that.
  bool has_ended(Token end) const { return !waiting_.empty() && waiting_.back() == end; }

  /// Throws unless what waits fits the context.
  void check_room() const {
    if (room() >= 0) return;
    const Index most = std::min(path_.cache->capacity(), transformer_.context());
    throw std::invalid_argument("wushkv-lm generate: the text would have " + std::to_string(most - room()) +
                                " tokens, expected at most the context's " + std::to_string(most));
  }

  /// Continues by up to `most` tokens, to standard output as they come; returns them.
  std::vector<Token> continue_text(Index most) {
    std::vector<Token> generated;
    Utf8Stream stream;
    double begin = seconds();
    const auto prompt = static_cast<double>(waiting_.size());
    Token next = sampler_.sample(last_row(step()));
    prefill_seconds_ += seconds() - begin;
    prefill_tokens_ += prompt;
    begin = seconds();
    while (true) {
      waiting_.push_back(next);
      if (std::find(ends_.begin(), ends_.end(), next) != ends_.end()) break;
      generated.push_back(next);
      write(stream.push(tokenizer_.piece(next)));
      if (static_cast<Index>(generated.size()) == most || room() < 1) break;
      next = sampler_.sample(last_row(step()));
      decode_tokens_ += 1;
    }
    write(stream.finish() + "\n");
    decode_seconds_ += seconds() - begin;
    return generated;
  }

  double prefill_speed() const { return prefill_tokens_ / std::max(prefill_seconds_, 1e-9); }
  double decode_speed() const { return decode_tokens_ / std::max(decode_seconds_, 1e-9); }

 private:
  Index room() const {
    return std::min(path_.cache->capacity(), transformer_.context()) - path_.cache->length(0) -
           static_cast<Index>(waiting_.size());
  }

  /// Puts what waits into the cache, `prefill_` tokens at a time; the logits after its last token.
  Batch<float> step() {
    check_room();
    Batch<float> logits;
    const std::span<const Token> tokens(waiting_);
    for (std::size_t begin = 0; begin < tokens.size(); begin += static_cast<std::size_t>(prefill_)) {
      const std::span<const Token> part =
          tokens.subspan(begin, std::min(tokens.size() - begin, static_cast<std::size_t>(prefill_)));
      const KvCache::Part count{0, static_cast<Index>(part.size())};
      const Batch<float>& hidden = transformer_.forward(part, {&count, 1}, path_);
      if (begin + part.size() == tokens.size()) logits = transformer_.logits(hidden.bottomRows(1));
    }
    waiting_.clear();
    return logits;
  }

  Transformer& transformer_;
  const Tokenizer& tokenizer_;
  CachePath path_;
  Sampler sampler_;
  Index prefill_;
  std::vector<Token> ends_, waiting_;
  double prefill_seconds_ = 0, prefill_tokens_ = 0, decode_seconds_ = 0, decode_tokens_ = 0;
};

/// A user's turn as ChatML, which SmolLM2 and Qwen3 both speak, without their default system prompts. The
/// user's text is taken as text: no token in it can end the turn.
void add_turn(Conversation& conversation, bool first, const Tokenizer& tokenizer, const std::string& system,
              const std::string& user) {
  const auto marker = [&](const std::string& text) { conversation.add(tokenizer.encode(text, true)); };
  if (first) {
    if (!system.empty()) {
      marker("<|im_start|>system\n");
      conversation.add(tokenizer.encode(system));
      marker("<|im_end|>\n");
    }
  } else {
    // A turn that was cut short is ended for the model.
    marker(conversation.has_ended(*tokenizer.find("<|im_end|>")) ? "\n" : "<|im_end|>\n");
  }
  marker("<|im_start|>user\n");
  conversation.add(tokenizer.encode(user));
  marker("<|im_end|>\n<|im_start|>assistant\n");
}

}  // namespace

void generate(const std::vector<std::string>& words) {
  Arguments arguments(
      "generate",
      "Continues a prompt, or chats, with the model's keys and values in a cache of any codec. Prompts "
      "beyond the\n"
      "first continue the conversation on the same cache.",
      {"MODEL"},
      joined({{{"prompt", "TEXT", "what to continue; may be given more than once"},
               {"chat", "", "the prompts are a user's turns in a conversation"},
               {"interactive", "", "chat, with turns from standard input, one a line"},
               {"system", "TEXT", "the conversation's system prompt, none if not given"},
               {"codec", "NAME", "float, bf16, or as wush+quest:2 (with --stats)", "bf16"},
               {"tokens", "N", "at most so many a turn", "200"},
               {"context", "N", "tokens in all, 0 for the model's", "0"},
               {"temperature", "X", "0 for the likeliest token", "0"},
               {"top-k", "N", "only the N likeliest, 0 for all", "0"},
               {"top-p", "X", "only the likeliest with this much probability together", "1"},
               {"min-p", "X", "only those so likely, relative to the likeliest", "0"},
               {"seed", "N", "of the samples", "0"},
               {"prefill", "N", "tokens a step of a prompt", "512"},
               {"cached-prefill", "", "new tokens see each other as the cache has them"}},
              transform_options(),
              quantizer_options(),
              window_options("64", "256"),
              common_options()}));
  if (!arguments.parse(words)) return;
  const std::vector<std::string> prompts = arguments.texts("prompt");
  const bool interactive = arguments.given("interactive"), chat = interactive || arguments.given("chat");
  if (prompts.empty() && !interactive) arguments.refuse("--prompt TEXT is missing (or --interactive)");
  const CodecChoice choice = parse_codec(arguments.text("codec"));
  SamplerOptions sampling;
  sampling.temperature = arguments.number("temperature", 0, 100);
  sampling.top_k = static_cast<int>(arguments.integer("top-k", 0, 1 << 30));
  sampling.top_p = arguments.number("top-p", 0, 1);
  sampling.min_p = arguments.number("min-p", 0, 1);
  sampling.seed = static_cast<std::uint64_t>(arguments.integer("seed", 0, std::int64_t{1} << 62));
  const Index most = arguments.integer("tokens", 1, 1 << 30),
              prefill = arguments.integer("prefill", 1, 1 << 30);
  arguments.check_outputs({"json"});
  if (arguments.given("system") && !chat) arguments.refuse("--system came, expected --chat with it");

  Session session(arguments);
  Index context = arguments.integer("context", 0, 1 << 30);
  if (context == 0) context = session.model.config.context;
  if (chat && (!session.tokenizer.find("<|im_start|>") || !session.tokenizer.find("<|im_end|>")))
    arguments.refuse("the model has no tokens <|im_start|> and <|im_end|>, expected them for a chat");
  Transformer transformer(session.model, context, session.threads);
  TransformSource source(session.model, arguments, session.threads);
  source.check_use({choice});
  CacheSettings settings = source.settings(choice);
  settings.capacity = context;
  settings.new_tokens = arguments.given("cached-prefill") ? NewTokens::Cached : NewTokens::Exact;
  const ReadyCache cache = open_cache(session.model, source, choice, settings);
  Conversation conversation(transformer, session.tokenizer, cache.path(), sampling, prefill);

  Json turns = Json::array();
  std::size_t turn_count = 0;
  const auto turn = [&](const std::string& prompt) {
    const bool first = conversation.empty();
    // In a chat the first marker may be what goes before a text.
    if (first && !(chat && session.prefix() == session.tokenizer.encode("<|im_start|>", true)))
      conversation.add(session.prefix());
    if (chat)
      add_turn(conversation, first, session.tokenizer, arguments.text("system"), prompt);
    else
      conversation.add(session.tokenizer.encode(prompt));
    if (conversation.empty()) arguments.refuse("--prompt is empty, expected text");
    conversation.check_room();
    if (!chat) write(prompt);
    const std::vector<Token> tokens = conversation.continue_text(most);
    ++turn_count;
    turns.push(Json::object()
                   .set("prompt", prompt)
                   .set("text", session.tokenizer.decode(tokens))
                   .set("tokens", Json::array_of(tokens)));
  };
  for (const std::string& prompt : prompts) turn(prompt);
  const char* const prompt_sign = isatty(STDIN_FILENO) != 0 ? "> " : "";
  std::string line;
  while (interactive && (std::fputs(prompt_sign, stderr), std::getline(std::cin, line))) {
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    try {
      turn(line);
    } catch (const std::invalid_argument& full) {
      std::fprintf(stderr, "%s\n", full.what());  // the conversation so far still counts
      break;
    }
  }
  if (interactive && *prompt_sign != 0) std::fputs("\n", stderr);

  const CacheUsage usage = cache.cache->usage();
  if (turn_count > 0)
    std::fprintf(stderr,
                 "prefill %.1f and generation %.1f tokens a second; cache %s: %zu tokens in %zu bytes (%zu "
                 "in windows), "
                 "%.3f of BF16's %zu\n",
                 conversation.prefill_speed(), conversation.decode_speed(), choice.name.c_str(), usage.tokens,
                 usage.bytes(), usage.window_bytes,
                 static_cast<double>(usage.bytes()) / static_cast<double>(usage.bf16_bytes),
                 usage.bf16_bytes);
  write_json(arguments.text("json"), Json::object()
                                         .set("codec", choice.name)
                                         .set("turns", turns)
                                         .set("prefill_tokens_per_second", conversation.prefill_speed())
                                         .set("tokens_per_second", conversation.decode_speed())
                                         .set("cache_tokens", usage.tokens)
                                         .set("cache_bytes", usage.bytes())
                                         .set("bf16_bytes", usage.bf16_bytes));
}

}  // namespace engine
