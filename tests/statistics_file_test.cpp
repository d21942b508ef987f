// SPDX-License-Identifier: Apache-2.0
#include "wushkv/io/statistics.hpp"

#include "support.hpp"
#include "temporary_file.hpp"

using namespace wushkv;

namespace {

std::vector<LayerStatistics> any_layers(test::Random& random) {
  std::vector<LayerStatistics> layers;
  for (const AttentionHeads& heads : {AttentionHeads{4, 2, 6, 5}, AttentionHeads{3, 3, 4, 4}}) {
    layers.emplace_back(heads);
    if (layers.size() == 1) layers.back().set_output_projection(random.batch(20, 11));
    for (int i = 0; i < 3; ++i)
      layers.back().add(random.batch(7, heads.query_heads * heads.key_dim),
                        random.batch(7, heads.kv_heads * heads.key_dim),
                        random.batch(7, heads.kv_heads * heads.value_dim));
  }
  return layers;
}

}  // namespace

TEST_CASE("statistics come back bit for bit") {
  test::Random random(170);
  const std::vector<LayerStatistics> layers = any_layers(random);
  const test::TemporaryFile file("statistics.safetensors");
  save_statistics(file.path(), layers);
  const std::vector<LayerStatistics> back = load_statistics(file.path());
  REQUIRE(back.size() == 2);
  for (std::size_t l = 0; l < 2; ++l) {
    CHECK(back[l].heads() == layers[l].heads());
    CHECK(back[l].tokens() == 21);
    CHECK(back[l].sequences() == 3);
    CHECK(back[l].has_output_projection() == (l == 0));
    CHECK(test::identical(back[l].key_sigma(), layers[l].key_sigma()));
    CHECK(test::identical(back[l].value_sigma(), layers[l].value_sigma()));
    for (Index h = 0; h < layers[l].heads().kv_heads; ++h) {
      CHECK(test::identical(back[l].head(h).key_gram, layers[l].head(h).key_gram));
      CHECK(test::identical(back[l].head(h).key_hessian, layers[l].head(h).key_hessian));
      CHECK(test::identical(back[l].head(h).value_gram, layers[l].head(h).value_gram));
      CHECK(test::identical(back[l].head(h).value_hessian, layers[l].head(h).value_hessian));
      CHECK(test::identical(back[l].head(h).value_sigma, layers[l].head(h).value_sigma));
    }
  }
  // Runs that ended apart merge from their files.
  std::vector<LayerStatistics> twice = load_statistics(file.path());
  twice[0].merge(back[0]);
  CHECK(test::identical(twice[0].head(1).key_gram, 2 * layers[0].head(1).key_gram));
}

TEST_CASE("another file, or a broken one, is refused") {
  test::Random random(171);
  const std::vector<LayerStatistics> layers = any_layers(random);
  CHECK_REFUSED(save_statistics("unused", {}), "0 layers");
  const test::TemporaryFile file("statistics.safetensors");
  save_statistics(file.path(), layers);
  const auto changed = [&](auto&& change) {
    const SafetensorsFile read(file.path());
    SafetensorsWriter writer;
    for (const auto& [key, value] : read.metadata()) writer.set_metadata(key, value);
    change(writer, read);
    const SafetensorsFile broken = SafetensorsFile::from_bytes(writer.bytes());
    std::string message = test::message_of<FileError>([&] { static_cast<void>(load_statistics(broken)); });
    return message;
  };
  const auto copy_but = [](SafetensorsWriter& writer, const SafetensorsFile& read,
                           const std::string& left_out) {
    for (const std::string& name : read.names())
      if (name != left_out) writer.add(name, read.tensor(name));
  };
  CHECK(changed([&](auto& w, const auto& r) { copy_but(w, r, ""); }).empty());
  CHECK(changed([&](auto& w, const auto& r) { copy_but(w, r, "H_V.1"); }).find("H_V.1") != std::string::npos);
  CHECK(changed([&](auto& w, const auto& r) {
          copy_but(w, r, "H_K.0");
          w.add("H_K.0", {2, 5, 6}, Batch<double>::Zero(10, 6));
        }).find("expected [2, 6, 6]") != std::string::npos);
  CHECK(changed([&](auto& w, const auto& r) {
          copy_but(w, r, "");
          w.set_metadata("format", "other");
        }).find("'other'") != std::string::npos);
  for (const char* layers_text : {"0", "-1", "x", "2x", "", "99999999999999999999", "3"})
    CHECK_FALSE(changed([&](auto& w, const auto& r) {
                  copy_but(w, r, "");
                  w.set_metadata("layers", layers_text);
                }).empty());
  CHECK(changed([&](auto& w, const auto& r) {
          copy_but(w, r, "M_K.0");
          w.add("M_K.0", {Index{1} << 40, 0, 5}, std::vector<double>{});
        }).find("which no layer has") != std::string::npos);
  for (const std::int64_t query_heads : {0, -4, 3}) {
    const std::vector<std::int64_t> counts = {query_heads, 21, 3, 1};
    CHECK(changed([&](auto& w, const auto& r) {
            copy_but(w, r, "counts.0");
            w.add("counts.0", {4}, counts);
          }).find("which no layer has") != std::string::npos);
  }
  CHECK(changed([&](auto& w, const auto& r) {
          copy_but(w, r, "Sigma_V.1");
          w.add("Sigma_V.1", {4, 4}, Batch<double>::Constant(4, 4, test::nan));
        }).find("Sigma_V.1") != std::string::npos);
  const SafetensorsFile no_metadata = SafetensorsFile::from_bytes(SafetensorsWriter().bytes());
  CHECK(test::message_of<FileError>([&] {
          static_cast<void>(load_statistics(no_metadata));
        }).find("'format' is missing") != std::string::npos);
}

TEST_CASE("sums that no sequence gives are refused") {
  const AttentionHeads heads{2, 2, 3, 3};
  const LayerStatistics::Sums good = LayerStatistics(heads).sums();
  const auto refused = [&](auto&& change) {
    LayerStatistics::Sums sums = good;
    change(sums);
    return test::message_of([&] { LayerStatistics(heads, sums); });
  };
  CHECK(refused([](auto&) {}).empty());
  CHECK(refused([](auto& s) { s.heads.pop_back(); }).find("1 KV heads, expected 2") != std::string::npos);
  CHECK(refused([](auto& s) { s.tokens = -1; }).find("-1 tokens") != std::string::npos);
  CHECK(refused([](auto& s) { s.sequences = 1; }).find("1 sequences") != std::string::npos);
  CHECK(refused([](auto& s) { s.key_sigma(0, 0) = test::nan; }).find("not finite") != std::string::npos);
  CHECK(refused([](auto& s) { s.heads[1].value_gram.resize(4, 4); }).find("expected 3 x 3") !=
        std::string::npos);
}
