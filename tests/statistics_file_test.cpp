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

namespace {

const AttentionHeads gathered_heads{4, 2, 6, 5};

LayerStatistics gathered(test::Random& random, Index sample, int sequences = 3) {
  LayerStatistics layer(gathered_heads);
  layer.set_output_projection(random.batch(20, 11));
  layer.gather_attention({.scale = 0.3, .soft_cap = 20, .window = 5});
  if (sample > 0) layer.keep_sample(sample, 4);
  for (int i = 0; i < sequences; ++i)
    layer.add(random.batch(7, 24), random.batch(7, 12), random.batch(7, 10));
  return layer;
}

}  // namespace

TEST_CASE("attention-aware sums and samples come back bit for bit, where there are some") {
  test::Random random(172);
  LayerStatistics only_sample(gathered_heads);
  only_sample.keep_sample(100);
  only_sample.add(random.batch(7, 24), random.batch(7, 12), random.batch(7, 10));
  const std::vector<LayerStatistics> layers = {gathered(random, 10), LayerStatistics(gathered_heads),
                                               gathered(random, 0), gathered(random, 10, 0), only_sample};
  const test::TemporaryFile file("statistics.safetensors");
  save_statistics(file.path(), layers);
  const std::vector<LayerStatistics> back = load_statistics(file.path());
  REQUIRE(back.size() == layers.size());
  for (std::size_t l = 0; l < layers.size(); ++l) {
    CAPTURE(l);
    const auto &attention = back[l].attention(), &expected = layers[l].attention();
    REQUIRE(attention.has_value() == expected.has_value());
    for (Index h = 0; h < 2 && attention; ++h)
      for (const auto& [a, b] :
           {std::pair{attention->keys(h), expected->keys(h)}, {attention->values(h), expected->values(h)}}) {
        CHECK(test::identical(a.hessian, b.hessian));
        CHECK(test::identical(a.weighted_gram, b.weighted_gram));
        CHECK(test::identical(a.weighted_sum, b.weighted_sum));
        CHECK(a.weight == b.weight);
      }
    if (attention) {
      CHECK(attention->options() == expected->options());
      CHECK(attention->tokens() == expected->tokens());
      CHECK(attention->sequences() == expected->sequences());
    }
    const TokenSample &sample = back[l].sample(), &kept = layers[l].sample();
    CHECK(sample.capacity() == kept.capacity());
    CHECK(sample.first_sequence() == kept.first_sequence());
    CHECK(sample.priorities() == kept.priorities());
    CHECK(test::identical(sample.keys(), kept.keys()));
    CHECK(test::identical(sample.values(), kept.values()));
    CHECK(test::identical(sample.key_weights(), kept.key_weights()));
    CHECK(test::identical(sample.value_weights(), kept.value_weights()));
  }
  CHECK(back[0].sample().size() == 10);
  CHECK(back[4].sample().size() == 7);
  const SafetensorsFile read(file.path());
  CHECK(test::identical(read.matrix<double>("HA_V.0", {2, 5, 5}).bottomRows(5),
                        layers[0].attention()->values(1).hessian));
  CHECK(read.tensor("sample_K.0").shape() == TensorShape{10, 2, 6});
  CHECK_FALSE(read.contains("sample_K.2"));
  CHECK_FALSE(read.contains("HA_K.1"));
}

TEST_CASE("damaged attention-aware sums and samples are refused") {
  test::Random random(173);
  const test::TemporaryFile file("statistics.safetensors");
  save_statistics(file.path(), {gathered(random, 10)});
  const SafetensorsFile read(file.path());
  const auto message = [&](const std::string& name, auto&& add) {
    SafetensorsWriter writer;
    for (const auto& [key, value] : read.metadata()) writer.set_metadata(key, value);
    for (const std::string& other : read.names())
      if (other != name + ".0") writer.add(other, read.tensor(other));
    add(writer);
    const SafetensorsFile broken = SafetensorsFile::from_bytes(writer.bytes());
    return test::message_of<FileError>([&] { static_cast<void>(load_statistics(broken)); });
  };
  CHECK(message("none", [](auto&) {}).empty());
  // Each part needs all of its tensors, in their shapes, and finite.
  for (const std::string name :
       {"HA_K", "HA_V", "MA_K", "MA_V", "SA_K", "SA_V", "WA_K", "WA_V", "attention", "attention_mask",
        "sample_K", "sample_V", "sample_w_K", "sample_w_V", "sample_priority", "sample_counts"}) {
    CAPTURE(name);
    const TensorView tensor = read.tensor(name + ".0");
    CHECK(message(name, [](auto&) {}).find(name + ".0") != std::string::npos);
    CHECK(message(name, [&](auto& w) {
            w.add(name + ".0", TensorShape{1, 1}, std::vector<double>{0});
          }).find(name + ".0") != std::string::npos);
    if (tensor.dtype() == DType::I64) continue;
    for (const double bad : {test::nan, test::infinity})
      CHECK(message(name, [&](auto& w) {
              w.add(name + ".0", tensor.shape(),
                    std::vector<double>(static_cast<std::size_t>(tensor.size()), bad));
            }).find(name + ".0\" has a value that is not finite") != std::string::npos);
  }
  for (const std::string name : {"WA_K", "WA_V", "sample_w_K", "sample_w_V"}) {
    const TensorShape shape = read.tensor(name + ".0").shape();
    CHECK(message(name, [&](auto& w) {
            w.add(name + ".0", shape, std::vector<double>(static_cast<std::size_t>(shape.size()), -1));
          }).find("negative weight") != std::string::npos);
  }
  using Numbers = std::vector<std::int64_t>;
  const auto with = [&](const std::string& name, const auto& values) {
    return message(
        name, [&](auto& w) { w.add(name + ".0", TensorShape{static_cast<Index>(values.size())}, values); });
  };
  CHECK(with("attention", std::vector<double>{1, -1}).find("soft cap is -1") != std::string::npos);
  for (const Numbers& mask : {Numbers{2, 0}, {-1, 0}, {1, -1}})
    CHECK(with("attention_mask", mask).find("which no layer has") != std::string::npos);
  for (const Numbers& counts : {Numbers{9, 0}, {-1, 0}, {10, -1}})
    CHECK(with("sample_counts", counts).find("10 tokens of 21 with a capacity of") != std::string::npos);
  CHECK(with("sample_counts", Numbers{std::int64_t{1} << 62, 0}).empty());
  Numbers priorities(10, 5);
  CHECK(with("sample_priority", priorities).empty());
  priorities[9] = 4;
  CHECK(with("sample_priority", priorities).find("ascending order of priority") != std::string::npos);
  CHECK(with("counts", Numbers{4, 9, 3, 1}).find("10 tokens of 9") != std::string::npos);
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
