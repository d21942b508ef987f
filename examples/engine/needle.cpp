// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <sstream>
#include <stdexcept>

#include "engine/evaluation.hpp"
#include "engine/progress.hpp"
#include "engine/sampler.hpp"
#include "engine/session.hpp"
#include "engine/transform_source.hpp"
#include "engine/verbs.hpp"

namespace engine {
namespace {

constexpr int key_digits = 6;

/// A long text with a pass key in it, and the question after it, answered.
struct Haystack {
  std::vector<Token> text;    // filler, the fact somewhere in it, and the question
  std::vector<Token> answer;  // the key, a token or more
  std::size_t given = 0;      // tokens of the answer that stand for the key's first half
};

/// The filler over and over, and where its paragraphs begin.
struct Filler {
  std::vector<Token> tokens;
  std::vector<Index> begins;
};

Filler make_filler(const Tokenizer& tokenizer, const std::string& text, Index length) {
  Filler filler;
  while (static_cast<Index>(filler.tokens.size()) < length)
    for (std::size_t begin = 0; begin < text.size();) {
      std::size_t end = text.find("\n\n", begin);
      end = end == std::string::npos ? text.size() : end + 2;
      const std::vector<Token> tokens = tokenizer.encode(std::string_view(text).substr(begin, end - begin));
      filler.begins.push_back(static_cast<Index>(filler.tokens.size()));
      filler.tokens.insert(filler.tokens.end(), tokens.begin(), tokens.end());
      begin = end;
    }
  return filler;
}

/// `length` tokens in all, the fact after the share `depth` of the filler: between two paragraphs, if there
/// is a place within a twentieth of the filler.
Haystack make_haystack(const Session& session, const Filler& filler, Index length, double depth,
                       const std::string& key) {
  const Tokenizer& tokenizer = session.tokenizer;
  const std::string said = "The pass key is ";
  const std::vector<Token> prefix = session.prefix(),
                           fact = tokenizer.encode("Remember this. " + said + key + ". " + key +
                                                   " is the pass key.\n\n"),
                           question =
                               tokenizer.encode("\n\nQuestion: what is the pass key?\nAnswer: " + said),
                           first = tokenizer.encode(key.substr(0, key_digits / 2)),
                           second = tokenizer.encode(key.substr(key_digits / 2));
  const auto size = [](const auto&... tokens) { return static_cast<Index>((tokens.size() + ...)); };
  const Index room = length - size(prefix, fact, question, first, second);
  if (room < 1)
    throw std::invalid_argument("wushkv-lm needle: --lengths has " + std::to_string(length) +
                                ", expected at least " + std::to_string(length - room + 1));
  const Index wanted = static_cast<Index>(std::llround(depth * static_cast<double>(room)));
  Index at = wanted, nearest = room / 20 + 1;
  for (const Index begin : filler.begins) {
    const Index far = std::abs(begin - wanted);
    if (begin > room || far >= nearest) continue;
    at = begin;
    nearest = far;
  }
  Haystack h;
  h.text = prefix;
  h.text.insert(h.text.end(), filler.tokens.begin(), filler.tokens.begin() + at);
  h.text.insert(h.text.end(), fact.begin(), fact.end());
  h.text.insert(h.text.end(), filler.tokens.begin() + at, filler.tokens.begin() + room);
  h.text.insert(h.text.end(), question.begin(), question.end());
  h.given = first.size();
  h.answer = first;
  h.answer.insert(h.answer.end(), second.begin(), second.end());
  return h;
}

/// What came of the haystacks of one depth and length under one codec.
struct Score {
  double right = 0;       // keys that the likeliest tokens spell; their share in the end
  double likelihood = 0;  // log-likelihood of the second half given the first, nats a token
  int trials = 0;
};

void answer(Transformer& transformer, const CachePath& path, const Haystack& haystack, Index prefill,
            Score& score) {
  path.cache->truncate(0, 0);
  std::span<const Token> text(haystack.text);
  // The last step is the question's end and the answer: each of its tokens is predicted from those before.
  const std::size_t last = std::min<std::size_t>(text.size(), 8);
  for (std::size_t begin = 0, end = text.size() - last; begin < end;) {
    const std::size_t count = std::min(end - begin, static_cast<std::size_t>(prefill));
    const KvCache::Part part{0, static_cast<Index>(count)};
    transformer.forward(text.subspan(begin, count), {&part, 1}, path);
    begin += count;
  }
  std::vector<Token> tail(text.end() - static_cast<std::ptrdiff_t>(last), text.end());
  tail.insert(tail.end(), haystack.answer.begin(), haystack.answer.end());
  const KvCache::Part part{0, static_cast<Index>(tail.size())};
  const Batch<float>& hidden = transformer.forward(tail, {&part, 1}, path);
  const auto digits = static_cast<Index>(haystack.answer.size());
  const Batch<float> logits = transformer.logits(hidden.middleRows(hidden.rows() - digits - 1, digits));
  bool right = true;
  double likelihood = 0;
  for (std::size_t i = 0; i < haystack.answer.size(); ++i) {
    const std::span<const float> row(logits.row(static_cast<Index>(i)).data(),
                                     static_cast<std::size_t>(logits.cols()));
    right = right && likeliest(row) == haystack.answer[i];
    if (i >= haystack.given) likelihood += log_probability(row, haystack.answer[i]);
  }
  score.right += right ? 1 : 0;
  score.likelihood += likelihood / static_cast<double>(haystack.answer.size() - haystack.given);
  ++score.trials;
}

struct Grid {
  std::vector<CodecChoice> codecs;
  std::vector<Index> lengths;
  std::vector<double> depths;
  std::vector<Score> scores;  // [codec, length, depth]

  std::size_t index(std::size_t codec, std::size_t length, std::size_t depth) const {
    return (codec * lengths.size() + length) * depths.size() + depth;
  }
  Score& at(std::size_t codec, std::size_t length, std::size_t depth) {
    return scores[index(codec, length, depth)];
  }
  const Score& at(std::size_t codec, std::size_t length, std::size_t depth) const {
    return scores[index(codec, length, depth)];
  }
  Score mean(std::size_t codec, std::size_t length) const {
    Score sum;
    for (std::size_t d = 0; d < depths.size(); ++d) {
      sum.right += at(codec, length, d).right / static_cast<double>(depths.size());
      sum.likelihood += at(codec, length, d).likelihood / static_cast<double>(depths.size());
    }
    return sum;
  }
};

void print_table(const Grid& grid) {
  for (std::size_t l = 0; l < grid.lengths.size(); ++l) {
    std::printf(
        "%lld tokens: keys found of %d a depth, and log-likelihood of the second half (nats a token)\n",
        static_cast<long long>(grid.lengths[l]), grid.at(0, l, 0).trials);
    std::printf("%-20s", "codec");
    for (const double depth : grid.depths) std::printf("  %8.0f %%     ", 100 * depth);
    std::printf("  all       against %s\n", grid.codecs.front().name.c_str());
    for (std::size_t c = 0; c < grid.codecs.size(); ++c) {
      std::printf("%-20s", grid.codecs[c].name.c_str());
      for (std::size_t d = 0; d < grid.depths.size(); ++d)
        std::printf("  %4.0f %% %7.3f", 100 * grid.at(c, l, d).right, grid.at(c, l, d).likelihood);
      const Score mean = grid.mean(c, l);
      std::printf("  %4.0f %% %7.3f  %+.3f\n", 100 * mean.right, mean.likelihood,
                  mean.likelihood - grid.mean(0, l).likelihood);
    }
    std::printf("\n");
  }
}

/// A heat map: a panel a length, a row a codec, a column a depth; dark where the key's second half is likely.
std::string draw(const Grid& grid) {
  constexpr int cell = 56, high = 30, left = 150, top = 46;
  const int panel = static_cast<int>(grid.depths.size()) * cell + 40;
  const int width = left + panel * static_cast<int>(grid.lengths.size());
  const int height = top + high * static_cast<int>(grid.codecs.size()) + 40;
  std::ostringstream svg;
  svg << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << width << "\" height=\"" << height
      << "\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" "
         "fill=\"white\"/>\n";
  const auto text = [&](int x, int y, const char* anchor, const std::string& what,
                        const char* fill = "black") {
    svg << "<text x=\"" << x << "\" y=\"" << y << "\" text-anchor=\"" << anchor << "\" fill=\"" << fill
        << "\">" << what << "</text>\n";
  };
  for (std::size_t l = 0; l < grid.lengths.size(); ++l) {
    const int x0 = left + static_cast<int>(l) * panel;
    text(x0, 16, "start", std::to_string(grid.lengths[l]) + " tokens, depth of the key:");
    for (std::size_t d = 0; d < grid.depths.size(); ++d)
      text(x0 + static_cast<int>(d) * cell + cell / 2, 36, "middle",
           std::to_string(std::lround(100 * grid.depths[d])) + " %");
    for (std::size_t c = 0; c < grid.codecs.size(); ++c) {
      const int y = top + static_cast<int>(c) * high;
      if (l == 0) text(left - 10, y + 20, "end", grid.codecs[c].name);
      for (std::size_t d = 0; d < grid.depths.size(); ++d) {
        const Score& score = grid.at(c, l, d);
        const double p = std::exp(score.likelihood);
        const auto shade = [&](double light, double dark) { return std::lround(light + (dark - light) * p); };
        svg << "<rect x=\"" << x0 + static_cast<int>(d) * cell << "\" y=\"" << y << "\" width=\"" << cell - 2
            << "\" height=\"" << high - 2 << "\" fill=\"rgb(" << shade(250, 20) << ',' << shade(245, 90)
            << ',' << shade(235, 130) << ")\"/>\n";
        text(x0 + static_cast<int>(d) * cell + cell / 2 - 1, y + 19, "middle",
             std::to_string(std::lround(100 * score.right)) + " %", p > 0.5 ? "white" : "black");
      }
    }
  }
  text(left, height - 14, "start",
       "shade: probability a token of the key's second half, given the first; number: keys found");
  svg << "</svg>\n";
  return svg.str();
}

Json json_of(const Grid& grid) {
  Json results = Json::array();
  for (std::size_t c = 0; c < grid.codecs.size(); ++c)
    for (std::size_t l = 0; l < grid.lengths.size(); ++l)
      for (std::size_t d = 0; d < grid.depths.size(); ++d)
        results.push(Json::object()
                         .set("codec", grid.codecs[c].name)
                         .set("length", grid.lengths[l])
                         .set("depth", grid.depths[d])
                         .set("trials", grid.at(c, l, d).trials)
                         .set("found", grid.at(c, l, d).right)
                         .set("log_likelihood", grid.at(c, l, d).likelihood));
  return Json::object().set("results", results);
}

}  // namespace

void needle(const std::vector<std::string>& words) {
  Arguments arguments(
      "needle",
      "Buries a random pass key at each depth of a long text and asks for it, from a cache of each codec. A "
      "model\n"
      "too small to answer can still copy: so the likelihood of the key's second half, given the first, is\n"
      "measured too, against that of the first codec.",
      {"MODEL"},
      joined({{{"text", "FILE", "the filler; without, the text that comes with the program"},
               {"codecs", "LIST", "what to compare",
                "bf16,oscar+quest:4,oscar+quest:3,oscar+quest:2,wush+quest:4,wush+quest:3,wush+quest:2"},
               {"lengths", "LIST", "tokens in all", "2048,4096"},
               {"depths", "LIST", "where the key is, in percent", "0,25,50,75,100"},
               {"trials", "N", "keys a depth", "1"},
               {"seed", "N", "of the keys", "0"},
               {"prefill", "N", "tokens a step", "512"},
               {"cached-prefill", "", "new tokens see each other as the cache has them"},
               {"svg", "FILE", "draw the result there"}},
              transform_options(),
              quantizer_options(),
              window_options("64", "256"),
              common_options()}));
  if (!arguments.parse(words)) return;
  Grid grid;
  for (const std::string& name : arguments.list("codecs")) grid.codecs.push_back(parse_codec(name));
  for (const Index length : arguments.integers("lengths", 1, 1 << 30)) grid.lengths.push_back(length);
  for (const Index percent : arguments.integers("depths", 0, 100))
    grid.depths.push_back(static_cast<double>(percent) / 100);
  grid.scores.resize(grid.codecs.size() * grid.lengths.size() * grid.depths.size());
  const std::int64_t trials = arguments.integer("trials", 1, 1 << 20);
  const Index prefill = arguments.integer("prefill", 1, 1 << 30);
  const auto seed = static_cast<std::uint64_t>(arguments.integer("seed", 0, std::int64_t{1} << 62));
  arguments.check_outputs({"svg", "json"});

  Session session(arguments);
  const Index longest = *std::max_element(grid.lengths.begin(), grid.lengths.end());
  Transformer transformer(session.model, longest, session.threads);
  TransformSource source(session.model, arguments, session.threads);
  source.check_use(grid.codecs);
  const std::string file = arguments.text("text"), text = read_text(file.empty() ? default_text() : file);
  if (text.empty()) arguments.refuse("the filler is empty, expected some text");
  const Filler filler = make_filler(session.tokenizer, text, longest);
  // What could fail later fails now: every length, and every codec.
  for (const Index length : grid.lengths)
    make_haystack(session, filler, length, 0, std::string(key_digits, '0'));
  for (const CodecChoice& choice : grid.codecs) check_opens(session.model, source, choice);

  double total = 0;
  for (const Index length : grid.lengths) total += static_cast<double>(length) * static_cast<double>(length);
  Progress progress("needle", total * static_cast<double>(grid.codecs.size() * grid.depths.size()) *
                                  static_cast<double>(trials));
  for (std::size_t c = 0; c < grid.codecs.size(); ++c) {
    CacheSettings settings = source.settings(grid.codecs[c]);
    settings.capacity = longest;
    settings.new_tokens = arguments.given("cached-prefill") ? NewTokens::Cached : NewTokens::Exact;
    const ReadyCache cache = open_cache(session.model, source, grid.codecs[c], settings);
    std::mt19937_64 random(seed);
    for (std::size_t l = 0; l < grid.lengths.size(); ++l)
      for (std::size_t d = 0; d < grid.depths.size(); ++d)
        for (std::int64_t t = 0; t < trials; ++t) {
          std::string key;
          for (int i = 0; i < key_digits; ++i) key += static_cast<char>('0' + random() % 10);
          const Haystack haystack = make_haystack(session, filler, grid.lengths[l], grid.depths[d], key);
          answer(transformer, cache.path(), haystack, prefill, grid.at(c, l, d));
          progress.advance(static_cast<double>(grid.lengths[l]) * static_cast<double>(grid.lengths[l]));
        }
  }
  progress.clear();
  for (Score& score : grid.scores) {
    score.right /= score.trials;
    score.likelihood /= score.trials;
  }
  print_table(grid);
  if (arguments.given("svg")) write_text(arguments.text("svg"), draw(grid));
  write_json(arguments.text("json"), json_of(grid));
}

}  // namespace engine
