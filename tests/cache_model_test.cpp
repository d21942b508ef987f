// SPDX-License-Identifier: Apache-2.0
// 10,000 random operations on a cache against a model of it: plain vectors of tokens, a boundary, and shared
// pointers for pages.
#include <map>
#include <memory>
#include <set>
#include <sstream>

#include "cache_support.hpp"
#include "wushkv/attend/attend.hpp"
#include "wushkv/cache/snapshot.hpp"

using namespace wushkv;

namespace {

constexpr Index heads = 2, group = 2, dk = 8, dv = 12;
constexpr int operations = 10000;

struct Model {
  std::vector<std::vector<float>> keys,
      values;          // transformed, all heads, in the precision that they were staged in
  Index boundary = 0;  // tokens before it are in the sink or quantized
  std::vector<std::shared_ptr<int>> pages;

  Index length() const { return static_cast<Index>(keys.size()); }
};

class Simulation {
 public:
  using Cache = PagedCache<test::KeyCodec, test::ValueCodec>;

  Simulation(const CacheOptions& options, std::uint64_t seed)
      : random_(seed),
        options_(options),
        keys_(test::any_key_codecs(random_, heads, dk)),
        values_(test::any_value_codecs(random_, heads, dv)),
        pool_(Cache::page_bytes(keys_, values_, options), 14),
        cache_(pool_, keys_, values_, options),
        attention_({heads * group, heads, dk, dv}, keys_, values_) {}

  void run() {
    for (int i = 0; i < operations; ++i) {
      step();
      REQUIRE(pool_.statistics().used == model_pages());
      for (const auto& [slot, entry] : models_) {
        REQUIRE(cache_.length(entry.id) == entry.model.length());
        REQUIRE(cache_.quantized(entry.id) == quantized(entry.model.boundary));
        REQUIRE(cache_.block_table(entry.id).size() == entry.model.pages.size());
      }
      for (const auto& [slot, entry] : models_) check(slot);
    }
    for (const auto& [slot, sequence] : models_) check(slot);
    while (!models_.empty()) release(models_.begin()->first);
    CHECK(pool_.statistics().used == 0);
    CHECK(failures_ > 100);
    MESSAGE(appends_, " appends, ", failures_, " refused for want of pages, ", forks_, " forks, ", snapshots_,
            " snapshots");
  }

 private:
  struct Entry {
    SequenceId id;
    Model model;
  };

  void step() {
    const Index what = random_.integer(0, 99);
    if (models_.empty() || (what < 6 && models_.size() < 6))
      create();
    else if (what < 45)
      append(1);
    else if (what < 60)
      append(random_.integer(2, 40));
    else if (what < 66)
      append_many();
    else if (what < 74)
      fork();
    else if (what < 88)
      truncate();
    else if (what < 94)
      snapshot();
    else
      release(pick());
  }

  int pick() {
    return std::next(models_.begin(), random_.integer(0, static_cast<Index>(models_.size()) - 1))->first;
  }

  void create() { models_[next_++] = {cache_.create(), {}}; }

  // The boundary by the specification: once recent + flush tokens wait, the oldest `flush` are quantized.
  Index boundary_after(const Model& m, Index length) const {
    Index boundary = std::max(m.boundary, std::min(options_.sink, length));
    while (length > options_.sink && length - boundary >= options_.recent + options_.flush)
      boundary += options_.flush;
    return boundary;
  }
  Index quantized(Index boundary) const { return std::max<Index>(0, boundary - options_.sink); }
  Index pages_of(Index boundary) const {
    return (quantized(boundary) + options_.page_tokens - 1) / options_.page_tokens;
  }

  std::size_t needed(const Model& m, Index count) const {
    const Index after = boundary_after(m, m.length() + count);
    std::size_t pages = static_cast<std::size_t>(pages_of(after)) - m.pages.size();
    if (writes_shared(m, after)) ++pages;
    return pages;
  }
  bool writes_shared(const Model& m, Index after) const {
    return quantized(after) > quantized(m.boundary) && quantized(m.boundary) % options_.page_tokens != 0 &&
           m.pages.back().use_count() > 1;
  }

  void grow(Model& m, const Batch<float>& k, const Batch<float>& v) {
    const Index after = boundary_after(m, m.length() + k.rows());
    if (writes_shared(m, after)) m.pages.back() = std::make_shared<int>(0);
    while (static_cast<Index>(m.pages.size()) < pages_of(after)) m.pages.push_back(std::make_shared<int>(0));
    m.boundary = after;
    for (Index t = 0; t < k.rows(); ++t) {
      m.keys.emplace_back(k.row(t).begin(), k.row(t).end());
      m.values.emplace_back(v.row(t).begin(), v.row(t).end());
    }
  }

  // What the cache stages: the same products on the same rows.
  template <class Codecs>
  static Batch<float> transformed(const Codecs& codecs, const Batch<float>& x) {
    Batch<float> y(x.rows(), x.cols());
    if (x.rows() == 0) return y;
    const Index d = codecs.front().head_dim();
    for (Index h = 0; h < heads; ++h)
      wushkv::forward_to(codecs[static_cast<std::size_t>(h)].transform(), x.middleCols(h * d, d),
                         y.middleCols(h * d, d));
    return y;
  }

  void append(Index count) {
    Entry& entry = models_[pick()];
    const Batch<float> k = random_.batch<float>(count, heads * dk),
                       v = random_.batch<float>(count, heads * dv);
    const bool fits = needed(entry.model, count) <= pool_.free_pages();
    const CacheStatus status = cache_.try_append(entry.id, k, v);
    REQUIRE(static_cast<bool>(status) == fits);
    ++appends_;
    if (!fits) {
      ++failures_;
      REQUIRE(status.code() == CacheStatus::Code::PoolExhausted);
      return;
    }
    grow(entry.model, transformed(keys_, k), transformed(values_, v));
  }

  void append_many() {
    std::vector<SequenceId> ids;
    std::vector<Index> counts;
    std::vector<Model*> models;
    Index rows = 0;
    for (auto& [slot, entry] : models_) {
      ids.push_back(entry.id);
      counts.push_back(random_.integer(0, 5));
      models.push_back(&entry.model);
      rows += counts.back();
    }
    const Batch<float> k = random_.batch<float>(rows, heads * dk), v = random_.batch<float>(rows, heads * dv);
    // A page that several of the call share and write is copied by all, but by the last if nobody else holds
    // it.
    std::size_t pages = 0;
    std::map<const int*, long> writers;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const Model& m = *models[i];
      pages += needed(m, counts[i]);
      const Index after = boundary_after(m, m.length() + counts[i]);
      if (writes_shared(m, after) && ++writers[m.pages.back().get()] == m.pages.back().use_count()) --pages;
    }
    const bool fits = pages <= pool_.free_pages();
    REQUIRE(static_cast<bool>(cache_.try_append(ids, counts, k, v)) == fits);
    if (!fits) {
      ++failures_;
      return;
    }
    Index row = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const Batch<float> its_k = k.middleRows(row, counts[i]), its_v = v.middleRows(row, counts[i]);
      grow(*models[i], transformed(keys_, its_k), transformed(values_, its_v));
      row += counts[i];
    }
  }

  void fork() {
    if (models_.size() >= 8) return;
    const Entry& from = models_[pick()];
    Entry copy{cache_.fork(from.id), from.model};
    models_[next_++] = std::move(copy);
    ++forks_;
  }

  void truncate() {
    Entry& entry = models_[pick()];
    Model& m = entry.model;
    const Index length = random_.integer(0, 2) == 0 ? random_.integer(0, m.length())
                                                    : std::max<Index>(0, m.length() - random_.integer(0, 12));
    cache_.truncate(entry.id, length);
    m.keys.resize(static_cast<std::size_t>(length));
    m.values.resize(static_cast<std::size_t>(length));
    m.boundary = std::min(m.boundary, length);
    m.pages.resize(static_cast<std::size_t>(pages_of(m.boundary)));
  }

  void snapshot() {
    if (models_.size() >= 8) return;
    const Entry& from = models_[pick()];
    std::stringstream stream;
    save_sequence(cache_, from.id, stream);
    if (from.model.pages.size() > pool_.free_pages()) {
      REQUIRE_FALSE(test::message_of<PoolExhausted>([&] { load_sequence(cache_, stream); }).empty());
      ++failures_;
      return;
    }
    Entry copy{load_sequence(cache_, stream), from.model};
    for (auto& page : copy.model.pages) page = std::make_shared<int>(0);
    models_[next_++] = std::move(copy);
    ++snapshots_;
  }

  void release(int slot) {
    cache_.release(models_[slot].id);
    models_.erase(slot);
  }

  std::size_t model_pages() const {
    std::set<const int*> pages;
    for (const auto& [slot, entry] : models_)
      for (const auto& page : entry.model.pages) pages.insert(page.get());
    return pages.size();
  }

  // What the model says a head's tokens are, transformed: BF16 in windows, through BF16 and the codec
  // elsewhere.
  template <class Codec>
  Batch<float> expected(const Codec& codec, const Model& m, const std::vector<std::vector<float>>& tokens,
                        Index head) const {
    const Index d = codec.head_dim();
    const bool direct = options_.recent == 0 && options_.flush == 1;
    Batch<float> rows(m.length(), d);
    for (Index t = 0; t < m.length(); ++t) {
      const bool is_quantized = t >= options_.sink && t < m.boundary;
      for (Index i = 0; i < d; ++i) {
        const float y = tokens[static_cast<std::size_t>(t)][static_cast<std::size_t>(head * d + i)];
        rows(t, i) = is_quantized && direct ? y : static_cast<float>(Eigen::bfloat16(y));
      }
      if (!is_quantized) continue;
      std::vector<typename Codec::Code> codes(static_cast<std::size_t>(d));
      std::vector<typename Codec::Params> params(static_cast<std::size_t>(codec.groups()));
      codec.encode_transformed({rows.row(t).data(), codes.size()}, codes, params);
      codec.decode_transformed(codes, params, {rows.row(t).data(), codes.size()});
    }
    return rows;
  }

  void check(int slot) {
    const Entry& entry = models_[slot];
    const Model& m = entry.model;
    const Vector<float> q = random_.vector<float>(heads * group * dk);
    Vector<float> output(heads * group * dv);
    if (m.length() > 0) attention_.decode(cache_.view(entry.id), q, output, workspace_);
    for (Index h = 0; h < heads; ++h) {
      const Batch<float> k = expected(keys_[static_cast<std::size_t>(h)], m, m.keys, h),
                         v = expected(values_[static_cast<std::size_t>(h)], m, m.values, h);
      REQUIRE(test::identical(test::contents<true>(cache_, entry.id, h), k));
      REQUIRE(test::identical(test::contents<false>(cache_, entry.id, h), v));
      for (Index g = h * group; g < (h + 1) * group && m.length() > 0; ++g) {
        const Vector<float> query =
            keys_[static_cast<std::size_t>(h)].transform().adjoint_inverse(q.segment(g * dk, dk));
        Vector<double> weights = (k * query).cast<double>() / std::sqrt(static_cast<double>(dk));
        weights = (weights.array() - weights.maxCoeff()).exp();
        const Vector<double> stored = v.cast<double>().transpose() * weights / weights.sum();
        const Vector<float> exact =
            values_[static_cast<std::size_t>(h)].transform().inverse(Vector<float>(stored.cast<float>()));
        REQUIRE(test::relative_difference(output.segment(g * dv, dv), exact) < 1e-5);
      }
    }
  }

  test::Random random_;
  CacheOptions options_;
  std::vector<test::KeyCodec> keys_;
  std::vector<test::ValueCodec> values_;
  PagePool pool_;
  Cache cache_;
  Attention<test::KeyCodec, test::ValueCodec> attention_;
  Attention<test::KeyCodec, test::ValueCodec>::Workspace workspace_;
  std::map<int, Entry> models_;
  int next_ = 0, appends_ = 0, failures_ = 0, forks_ = 0, snapshots_ = 0;
};

}  // namespace

TEST_CASE("10,000 operations with windows") {
  Simulation({.page_tokens = 16, .sink = 5, .recent = 7, .flush = 3}, 330).run();
}

TEST_CASE("10,000 operations without windows") {
  Simulation({.page_tokens = 16, .sink = 0, .recent = 0, .flush = 1}, 331).run();
}

TEST_CASE("10,000 operations with a sink and flushes longer than a page") {
  Simulation({.page_tokens = 4, .sink = 3, .recent = 0, .flush = 6}, 332).run();
}
