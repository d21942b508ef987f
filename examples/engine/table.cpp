// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "engine/evaluation.hpp"
#include "engine/progress.hpp"
#include "engine/session.hpp"
#include "engine/transform_source.hpp"
#include "engine/verbs.hpp"

namespace engine {
namespace {

struct Row {
  std::string name;   // in JSON, as the study's file has it
  std::string label;  // for people
  std::string codec;  // without its bits
};

const std::vector<Row> default_rows = {
    {"none+minmax", "none + min-max", "none+minmax"},
    {"hadamard+quest", "Hadamard + QuEST", "hadamard+quest"},
    {"oscar+quest", "OSCAR + QuEST", "oscar+quest"},
    {"wush+quest", "WUSH + QuEST", "wush+quest"},
    {"random+lloyd (TurboQuant-style)", "random + Lloyd-Max (TurboQuant-style)", "random+lloyd"},
    {"hadamard+percentile", "Hadamard + percentile affine", "hadamard+percentile"},
    {"oscar+percentile", "OSCAR + percentile affine", "oscar+percentile"},
    {"wush+percentile", "WUSH + percentile affine (paper)", "paper"},
    {"wush+percentile tuned", "WUSH + percentile affine, tuned", "wush+percentile+tuned"},
    {"joint+quest", "joint + QuEST", "joint+quest"},
    {"joint+affine search", "joint + affine, search", "joint+minmax+search"},
    {"wush+quest feedback", "WUSH + QuEST, feedback", "wush+quest+feedback"},
    {"joint+quest feedback", "joint + QuEST, feedback", "joint+quest+feedback"},
    {"joint+affine feedback search", "joint + affine, feedback, search (best)", "best"},
};

/// The default rows, or those of `--codecs`, under their own names.
std::vector<Row> rows_of(const Arguments& arguments) {
  if (!arguments.given("codecs")) return default_rows;
  std::vector<Row> rows;
  for (const std::string& codec : arguments.list("codecs")) {
    if (!parse_codec(codec + ":2").quantizes())
      arguments.refuse("--codecs has '" + codec + "', expected codecs that have bits, without them");
    if (std::any_of(rows.begin(), rows.end(), [&](const Row& row) { return row.codec == codec; }))
      arguments.refuse("--codecs has '" + codec + "' twice, expected different ones");
    rows.push_back({codec, codec, codec});
  }
  return rows;
}

struct Cell {
  std::vector<double> layers;
  double geometric_mean = 0, perplexity = 0, second_half_perplexity = 0, bits_per_element = 0,
         cache_fraction = 0;
};

struct Column {
  int bits = 0;
  std::vector<Cell> cells;
};

/// What all measurements share.
struct Bench {
  Session& session;
  Transformer& transformer;
  TransformSource& source;
  const std::vector<Row>& rows;
  const std::vector<std::vector<Token>>& texts;
  Index context, batch;
  Progress& progress;
};

/// One width: the modules' errors of all rows from the same exact passes, then each row's perplexity.
Column measure(const Bench& bench, int bits) {
  const ModelConfig& config = bench.session.model.config;
  Column column{bits, std::vector<Cell>(bench.rows.size())};
  std::vector<ReadyCache> caches;
  std::vector<Probe> probes;
  for (const Row& row : bench.rows) {
    const CodecChoice choice = parse_codec(row.codec + ":" + std::to_string(bits));
    CacheSettings settings = bench.source.settings(choice);
    settings.capacity = bench.context;
    caches.push_back(open_cache(bench.session.model, bench.source, choice, settings));
    probes.push_back({caches.back().path()});
  }
  CacheSettings unquantized;
  unquantized.capacity = bench.context;
  const std::unique_ptr<KvCache> exact = make_cache(config.heads, config.layers, {}, unquantized);
  for (const std::vector<Token>& text : bench.texts) {
    module_errors(bench.transformer, text, *exact, probes, bench.batch);
    bench.progress.advance(2);
  }
  for (std::size_t r = 0; r < bench.rows.size(); ++r) {
    Cell& cell = column.cells[r];
    Likelihood sum;
    for (const std::vector<Token>& text : bench.texts) {
      sum += likelihood(bench.transformer, text, caches[r].path(), bench.batch);
      bench.progress.advance();
    }
    const CacheUsage usage = caches[r].cache->usage();
    cell.layers = relative_errors(probes[r]);
    cell.geometric_mean = wushkv::geometric_mean(cell.layers);
    cell.perplexity = sum.perplexity();
    cell.second_half_perplexity = sum.late_perplexity();
    cell.bits_per_element = usage.bits_per_element;
    cell.cache_fraction = static_cast<double>(usage.bytes()) / static_cast<double>(usage.bf16_bytes);
  }
  return column;
}

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

/// Rows of cells, the first of them the head; aligned with spaces, or as Markdown.
std::string lay_out(const std::vector<std::vector<std::string>>& lines, bool markdown) {
  std::vector<std::size_t> widths(lines.front().size(), 0);
  for (const auto& line : lines)
    for (std::size_t c = 0; c < line.size(); ++c) widths[c] = std::max(widths[c], line[c].size());
  std::string out;
  for (std::size_t l = 0; l < lines.size(); ++l) {
    if (markdown) out += "|";
    for (std::size_t c = 0; c < lines[l].size(); ++c) {
      const std::string space(widths[c] - lines[l][c].size(), ' ');
      const std::string cell = c == 0 ? lines[l][c] + space : space + lines[l][c];
      out += markdown ? " " + cell + " |" : (c == 0 ? "" : "  ") + cell;
    }
    out += "\n";
    if (!markdown || l > 0) continue;
    for (std::size_t c = 0; c < widths.size(); ++c) out += c == 0 ? "|---|" : "---:|";
    out += "\n";
  }
  return out;
}

std::vector<std::vector<std::string>> lines_of(const std::vector<Row>& rows,
                                               const std::vector<Column>& columns,
                                               const Likelihood& unquantized) {
  std::vector<std::vector<std::string>> lines{{"transform + quantizer"}};
  for (const Column& column : columns)
    for (const char* what : {" bits: error", "perplexity"})
      lines.front().push_back((what[0] == ' ' ? std::to_string(column.bits) : "") + what);
  lines.push_back({"unquantized"});
  for (std::size_t c = 0; c < columns.size(); ++c) {
    lines.back().push_back("0");
    lines.back().push_back(fixed(unquantized.perplexity(), 2));
  }
  for (std::size_t r = 0; r < rows.size(); ++r) {
    lines.push_back({rows[r].label});
    for (const Column& column : columns) {
      lines.back().push_back(fixed(column.cells[r].geometric_mean, 4));
      lines.back().push_back(fixed(column.cells[r].perplexity, 2));
    }
  }
  return lines;
}

Json json_of(const std::vector<Row>& rows, const std::vector<Column>& columns, const Likelihood& unquantized,
             Index layers) {
  Json numbers = Json::array(), error = Json::object();
  for (Index l = 0; l < layers; ++l) numbers.push(l);
  for (const Column& column : columns) {
    Json cells = Json::object();
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const Cell& cell = column.cells[r];
      cells.set(rows[r].name, Json::object()
                                  .set("layers", Json::array_of(cell.layers))
                                  .set("geometric_mean", cell.geometric_mean)
                                  .set("perplexity", cell.perplexity)
                                  .set("second_half_perplexity", cell.second_half_perplexity)
                                  .set("bits_per_element", cell.bits_per_element)
                                  .set("of_bf16_bytes", cell.cache_fraction));
    }
    error.set(std::to_string(column.bits), cells);
  }
  return Json::object()
      .set("layers", numbers)
      .set("unquantized", Json::object()
                              .set("perplexity", unquantized.perplexity())
                              .set("second_half_perplexity", unquantized.late_perplexity())
                              .set("predictions", unquantized.predictions))
      .set("error", error);
}

std::vector<int> widths_of(const Arguments& arguments) {
  std::vector<int> widths;
  for (const std::int64_t bits : arguments.integers("bits", 1, 8)) {
    const int width = static_cast<int>(bits);
    if (std::find(widths.begin(), widths.end(), width) != widths.end())
      arguments.refuse("--bits has '" + std::to_string(width) + "' twice, expected different numbers");
    widths.push_back(width);
  }
  return widths;
}

}  // namespace

void table(const std::vector<std::string>& words) {
  Arguments arguments(
      "table",
      "Measures every transform and quantizer at every width: the attention modules' "
      "relative squared errors\n"
      "(geometric mean over the layers, each with exact inputs) and perplexity, every new "
      "token seen as the cache\n"
      "has it. Statistics come from --stats, --calibrate-on or the model's own samples.",
      {"MODEL"},
      joined({{{"text", "FILE", "the text; without, one that comes with the program"},
               {"calibrate-on", "FILE", "gather statistics from this text first"},
               {"sequences", "N", "of calibration", "8"},
               {"length", "N", "tokens of each", "1024"},
               {"codecs", "LIST", "rows, as oscar+percentile+tuned,best; without, one of each"},
               {"bits", "LIST", "widths", "4,3,2"},
               {"context", "N", "tokens of a chunk", "1024"},
               {"chunks", "N", "chunks of the text, 0 for all", "2"},
               {"markdown", "FILE", "write the table there as Markdown"}},
              {statistics_option()},
              quantizer_options(),
              window_options("0", "0"),
              common_options()}));
  if (!arguments.parse(words)) return;
  const std::vector<int> widths = widths_of(arguments);
  const std::vector<Row> rows = rows_of(arguments);
  const Index context = arguments.integer("context", 3, 1 << 30),
              chunks = arguments.integer("chunks", 0, 1 << 30);
  const Index length = arguments.integer("length", 1, 1 << 30),
              sequences = arguments.integer("sequences", 1, 1 << 20);
  arguments.check_outputs({"json", "markdown"});
  const bool calibrated = arguments.given("stats");
  if (calibrated && arguments.given("calibrate-on"))
    arguments.refuse("--stats and --calibrate-on came, expected one of them");

  Session session(arguments);
  Transformer transformer(session.model, calibrated ? context : std::max(context, length), session.threads);
  const std::vector<std::vector<Token>> texts = session.texts_of(arguments.text("text"), context, chunks);
  TransformSource source(session.model, arguments, session.threads);
  if (!source.has_statistics()) {
    std::vector<std::vector<Token>> calibration;
    if (arguments.given("calibrate-on")) {
      calibration = session.texts_of(arguments.text("calibrate-on"), length, sequences);
    } else {
      Progress progress("sampling", static_cast<double>(length));
      calibration = own_samples(transformer, session.first_token(), sequences, length, 0,
                                [&](Index) { progress.advance(); });
    }
    Progress progress("calibrating", static_cast<double>(length * sequences));
    source.set_statistics(gather_statistics(
        transformer, calibration, [&](Index count) { progress.advance(static_cast<double>(count)); }));
  }

  const auto passes = static_cast<double>(texts.size() * (1 + widths.size() * (rows.size() + 2)));
  Progress progress("table", passes);
  const Bench bench{session,
                    transformer,
                    source,
                    rows,
                    texts,
                    context,
                    arguments.integer("recent", 0, 1 << 30) > 0 ? 32 : 0,
                    progress};
  // What fails, such as a Hadamard transform of an odd dimension, fails now.
  std::vector<CodecChoice> choices;
  for (const Row& row : rows)
    for (const int bits : widths) choices.push_back(parse_codec(row.codec + ":" + std::to_string(bits)));
  source.check_use(choices);
  for (const CodecChoice& choice : choices) check_opens(session.model, source, choice);
  Likelihood unquantized;
  {
    const CodecChoice choice = parse_codec("float");
    CacheSettings settings;
    settings.capacity = context;
    const ReadyCache cache = open_cache(session.model, source, choice, settings);
    for (const std::vector<Token>& text : texts) {
      unquantized += likelihood(transformer, text, cache.path(), 0);
      progress.advance();
    }
  }
  std::vector<Column> columns;
  for (const int bits : widths) columns.push_back(measure(bench, bits));
  progress.clear();

  const std::vector<std::vector<std::string>> lines = lines_of(rows, columns, unquantized);
  std::printf("%zu x %lld tokens, windows %s/%s, %.0f s\n\n%s", texts.size(), static_cast<long long>(context),
              arguments.text("sink").c_str(), arguments.text("recent").c_str(), progress.elapsed(),
              lay_out(lines, false).c_str());
  if (arguments.given("markdown")) write_text(arguments.text("markdown"), lay_out(lines, true));
  write_json(arguments.text("json"), json_of(rows, columns, unquantized, session.model.config.layers));
}

}  // namespace engine
