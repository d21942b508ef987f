// SPDX-License-Identifier: Apache-2.0
#include "wushkv/calibrate/build.hpp"
#include "wushkv/io/transforms.hpp"

#include "support.hpp"
#include "temporary_file.hpp"
#include "wushkv/calibrate/build.hpp"

using namespace wushkv;

namespace {

ModelTransforms any_transforms(test::Random& random) {
  const AttentionHeads heads{4, 2, 16, 8};
  LayerStatistics statistics(heads);
  statistics.set_output_projection(random.batch(32, 20));
  statistics.add(random.batch(50, 64), random.batch(50, 32), random.batch(50, 16));
  BuildOptions blocks;
  blocks.key_bits = 2;
  blocks.key_group_size = 4;
  return {{build_transforms(statistics), build_transforms(statistics, blocks)}, transform_metadata(blocks)};
}

}  // namespace

TEST_CASE("transforms come back bit for bit, with their metadata") {
  test::Random random(180);
  const ModelTransforms transforms = any_transforms(random);
  const test::TemporaryFile file("transforms.safetensors");
  save_transforms(file.path(), transforms);
  const ModelTransforms back = load_transforms(file.path());
  REQUIRE(back.layers.size() == 2);
  CHECK(back.layers[1].keys[0].linear.block_count() == 4);
  CHECK(back.layers[1].values[0].linear.block_count() == 1);
  for (std::size_t l = 0; l < 2; ++l)
    for (std::size_t h = 0; h < 2; ++h) {
      CHECK(test::identical(to_matrix(back.layers[l].keys[h].linear),
                            to_matrix(transforms.layers[l].keys[h].linear)));
      CHECK(test::identical(to_matrix(back.layers[l].values[h].linear),
                            to_matrix(transforms.layers[l].values[h].linear)));
      CHECK(test::identical(back.layers[l].keys[h].linear.blocks()[0].inverse_matrix(),
                            transforms.layers[l].keys[h].linear.blocks()[0].inverse_matrix()));
    }
  CHECK(back.metadata.at("construction") == "wush");
  CHECK(back.metadata.at("damping") == "0.01");
  CHECK(back.metadata.at("bits_k") == "2");
  CHECK(back.metadata.count("bits_v") == 0);
  CHECK(back.metadata.at("convention") == "column");
}

TEST_CASE("tensors have the names, shapes and orientation that the header documents") {
  test::Random random(181);
  const ModelTransforms transforms = any_transforms(random);
  const test::TemporaryFile path("transforms.safetensors");
  save_transforms(path.path(), transforms);
  const SafetensorsFile file(path.path());
  const auto& key = transforms.layers[1].keys[1].linear.blocks()[2];
  const auto& value = transforms.layers[1].values[1].linear.blocks()[0];
  CHECK(test::identical(file.matrix<double>("k.1", {2, 4, 4, 4}).middleRows(4 * (4 + 2), 4), key.matrix()));
  CHECK(test::identical(file.matrix<double>("k_inv.1", {2, 4, 4, 4}).middleRows(4 * (4 + 2), 4),
                        key.inverse_matrix()));
  CHECK(test::identical(file.matrix<double>("v_t.1", {2, 1, 8, 8}).middleRows(8, 8),
                        value.matrix().transpose()));
  CHECK(test::identical(file.matrix<double>("v_inv_t.1", {2, 1, 8, 8}).middleRows(8, 8),
                        value.inverse_matrix().transpose()));
}

TEST_CASE("a file in the row convention, single precision, gives the same transforms") {
  test::Random random(182);
  const ModelTransforms transforms = any_transforms(random);
  SafetensorsWriter writer;
  writer.set_metadata("format", "wushkv-transforms-1");
  writer.set_metadata("layers", "1");
  writer.set_metadata("convention", "row");
  const auto add = [&](const char* name, const std::vector<HeadTransform>& heads, bool inverse,
                       bool transpose) {
    const Index d = heads[0].linear.dim();
    Batch<float> rows(2 * d, d);
    for (Index h = 0; h < 2; ++h) {
      const Dense<double>& block = heads[static_cast<std::size_t>(h)].linear.blocks()[0];
      const SquareMatrix<double> matrix = inverse ? block.inverse_matrix() : block.matrix();
      rows.middleRows(h * d, d) =
          (transpose ? SquareMatrix<double>(matrix.transpose()) : matrix).cast<float>();
    }
    writer.add(name, {2, 1, d, d}, rows);
  };
  add("k.0", transforms.layers[0].keys, false, true);
  add("k_inv.0", transforms.layers[0].keys, true, true);
  add("v_t.0", transforms.layers[0].values, false, false);
  add("v_inv_t.0", transforms.layers[0].values, true, false);
  const ModelTransforms back = load_transforms(SafetensorsFile::from_bytes(writer.bytes()));
  for (std::size_t h = 0; h < 2; ++h) {
    CHECK(test::relative_difference(to_matrix(back.layers[0].keys[h].linear),
                                    to_matrix(transforms.layers[0].keys[h].linear)) < 1e-6);
    CHECK(test::relative_difference(to_matrix(back.layers[0].values[h].linear),
                                    to_matrix(transforms.layers[0].values[h].linear)) < 1e-6);
  }
}

TEST_CASE("learned transforms come in by name, in either convention") {
  test::Random random(183);
  const SquareMatrix<double> rotation = random_rotation_matrix(16, 3), dense = random.definite(16),
                             a = random.definite(2), b = random.definite(4);
  SafetensorsWriter writer;
  writer.add("R", Batch<float>(rotation.cast<float>()));
  writer.add("T", Batch<double>(dense));
  writer.add("A", Batch<double>(a));
  writer.add("B", Batch<double>(b));
  writer.add("R16", Batch<Eigen::bfloat16>(rotation.cast<Eigen::bfloat16>()));
  writer.add("wide", random.batch(3, 4));
  writer.add("line", random.vector(4));
  const SafetensorsFile file = SafetensorsFile::from_bytes(writer.bytes());
  CHECK(test::relative_difference(load_orthogonal<float>(file, "R").matrix(), rotation) < 1e-6);
  CHECK(test::relative_difference(load_orthogonal<float>(file, "R", VectorConvention::Row).matrix(),
                                  rotation.transpose()) < 1e-6);
  CHECK_REFUSED(load_orthogonal<float>(file, "R16"), "off by");
  CHECK(load_orthogonal<float>(file, "R16", VectorConvention::Column, 1e-2).dim() == 16);
  CHECK(test::identical(load_dense<double>(file, "T").matrix(), dense));
  const Kronecker<double> kronecker = load_kronecker<double>(file, "A", "B");
  CHECK(kronecker.dim() == 8);
  CHECK(test::identical(kronecker.a().matrix(), a));
  const auto refused = [](auto&& call) { return test::message_of<std::exception>(call); };
  CHECK(refused([&] { load_dense<float>(file, "none"); }).find("none") != std::string::npos);
  CHECK(refused([&] { load_dense<float>(file, "wide"); }).find("expected [3, 3]") != std::string::npos);
  CHECK(refused([&] { load_dense<float>(file, "line"); }).find("expected [?, ?]") != std::string::npos);
  CHECK(refused([&] { load_orthogonal<float>(file, "T"); }).find("off by") != std::string::npos);
}

TEST_CASE("means and sensitivities come back, and are optional") {
  test::Random random(185);
  const AttentionHeads heads{4, 2, 16, 8};
  LayerStatistics statistics(heads);
  statistics.set_output_projection(random.batch(32, 20));
  statistics.gather_attention();
  statistics.add(random.batch(50, 64), random.batch(50, 32), random.batch(50, 16));
  const BuildOptions options{.construction = Construction::Joint, .key_group_size = 4, .exponent = 0.75};
  const ModelTransforms transforms{{build_transforms(statistics, options),
                                    build_transforms(LayerStatistics(heads), {Construction::Random})},
                                   transform_metadata(options)};
  const test::TemporaryFile path("transforms.safetensors");
  save_transforms(path.path(), transforms);
  const ModelTransforms back = load_transforms(path.path());
  CHECK(back.metadata.at("construction") == "joint");
  CHECK(back.metadata.at("damping") == "0.01");
  CHECK(back.metadata.at("exponent") == "0.75");
  for (std::size_t h = 0; h < 2; ++h) {
    const LayerTransforms &joint = back.layers[0], &expected = transforms.layers[0];
    CHECK_FALSE(joint.keys[h].is_linear());
    CHECK(test::identical(joint.keys[h].mean, expected.keys[h].mean));
    CHECK(test::identical(joint.values[h].mean, expected.values[h].mean));
    CHECK(test::identical(joint.keys[h].sensitivity, expected.keys[h].sensitivity));
    CHECK(test::identical(joint.values[h].sensitivity, expected.values[h].sensitivity));
    for (const HeadTransform& plain : {back.layers[1].keys[h], back.layers[1].values[h]}) {
      CHECK(plain.is_linear());
      CHECK(plain.mean.size() == plain.linear.dim());
      CHECK_FALSE(plain.has_sensitivity());
    }
  }
  const SafetensorsFile file(path.path());
  CHECK(test::identical(file.matrix<double>("k_mean.0", {2, 16}).row(1).transpose(),
                        transforms.layers[0].keys[1].mean));
  CHECK(test::identical(file.matrix<double>("v_sensitivity.0", {2, 8, 8}).bottomRows(8),
                        transforms.layers[0].values[1].sensitivity));
  CHECK_FALSE(file.contains("k_mean.1"));
  CHECK_FALSE(file.contains("v_sensitivity.1"));

  const auto message = [&](const std::string& name, const TensorShape& shape, const Batch<double>& values) {
    SafetensorsWriter writer;
    for (const auto& [k, v] : file.metadata()) writer.set_metadata(k, v);
    for (const std::string& other : file.names())
      if (other != name) writer.add(other, file.tensor(other));
    if (values.size() > 0) writer.add(name, shape, values);
    const SafetensorsFile changed = SafetensorsFile::from_bytes(writer.bytes());
    return test::message_of<FileError>([&] { static_cast<void>(load_transforms(changed)); });
  };
  for (const std::string side : {"k", "v"}) {
    const Index d = side == "k" ? 16 : 8;
    CHECK(message(side + "_mean.0", {}, {}).empty());
    CHECK(message(side + "_sensitivity.0", {}, {}).empty());
    CHECK(message(side + "_mean.0", {2, d - 1}, Batch<double>::Zero(2, d - 1)).find("expected [2, ") !=
          std::string::npos);
    CHECK(message(side + "_mean.0", {2, d}, Batch<double>::Constant(2, d, test::nan)).find("not finite") !=
          std::string::npos);
    CHECK(message(side + "_sensitivity.0", {1, d, d}, Batch<double>::Zero(d, d)).find("expected [2, ") !=
          std::string::npos);
    CHECK(message(side + "_sensitivity.0", {2, d, d}, Batch<double>::Constant(2 * d, d, test::infinity))
              .find("not finite") != std::string::npos);
  }
  const auto refused = [&](auto&& change) {
    ModelTransforms broken = transforms;
    change(broken.layers[0]);
    return test::message_of([&] { save_transforms(path.path(), broken); });
  };
  CHECK(refused([](auto& l) { l.keys[1].mean.resize(3); }).find("mean of k.0 is 3 x 1") != std::string::npos);
  CHECK(refused([](auto& l) { l.values[0].mean[2] = test::nan; }).find("mean of v.0") != std::string::npos);
  CHECK(refused([](auto& l) { l.keys[0].sensitivity.resize(2, 2); }).find("sensitivity of k.0 is 2 x 2") !=
        std::string::npos);
  CHECK(refused([](auto& l) { l.keys[1].sensitivity(0, 0) = test::nan; }).find("not finite") !=
        std::string::npos);
  CHECK(refused([](auto& l) {
          l.values[1].sensitivity.resize(0, 0);
        }).find("1 heads of v.0 have a sensitivity, expected none or all 2") != std::string::npos);
}

TEST_CASE("bad input is refused") {
  test::Random random(184);
  const ModelTransforms good = any_transforms(random);
  const test::TemporaryFile file("transforms.safetensors");
  CHECK_REFUSED(save_transforms(file.path(), {}), "0 layers");
  ModelTransforms uneven = good;
  uneven.layers[0].values.pop_back();
  CHECK_REFUSED(save_transforms(file.path(), uneven), "2 key and 1 value transforms");
  ModelTransforms mixed = good;
  mixed.layers[0].keys[1] = good.layers[1].keys[1];
  CHECK_REFUSED(save_transforms(file.path(), mixed), "mixes heads");
  CHECK_FALSE(std::filesystem::exists(file.path()));
  save_transforms(file.path(), good);
  const auto message = [&](const std::string& key, const std::string& value, const std::string& left_out = "",
                           const std::string& swap = "") {
    const SafetensorsFile read(file.path());
    SafetensorsWriter writer;
    for (const auto& [k, v] : read.metadata()) writer.set_metadata(k, v);
    if (!key.empty()) writer.set_metadata(key, value);
    for (const std::string& name : read.names())
      if (name != left_out) writer.add(name, read.tensor(name == swap ? "k.0" : name));
    const SafetensorsFile broken = SafetensorsFile::from_bytes(writer.bytes());
    return test::message_of<FileError>([&] { static_cast<void>(load_transforms(broken)); });
  };
  CHECK(message("", "").empty());
  CHECK(message("format", "wushkv-statistics-1").find("expected 'wushkv-transforms-1'") != std::string::npos);
  CHECK(message("convention", "diagonal").find("'diagonal', expected 'column' or 'row'") !=
        std::string::npos);
  CHECK(message("", "", "v_t.1").find("v_t.1") != std::string::npos);
  CHECK(message("", "", "", "k_inv.0").find("no finite pair of inverses") != std::string::npos);
  CHECK(message("layers", "3").find("k.2") != std::string::npos);
  SafetensorsWriter empty;
  empty.set_metadata("format", "wushkv-transforms-1");
  empty.set_metadata("layers", "1");
  empty.set_metadata("convention", "column");
  empty.add("k.0", {Index{1} << 31, 1, Index{1} << 31, 0}, std::vector<double>{});
  const SafetensorsFile file_of_nothing = SafetensorsFile::from_bytes(empty.bytes());
  CHECK(test::message_of<FileError>([&] {
          static_cast<void>(load_transforms(file_of_nothing));
        }).find("square matrices") != std::string::npos);
}

TEST_CASE("tuned parameters come back, and what is no parameter is refused") {
  test::Random random(870);
  const auto head = [&] { return HeadTransform(BlockTransform(Dense<double>(random.definite(4)), 1)); };
  ModelTransforms transforms{{{{head(), head()}, {head(), head()}}}, {}};
  auto& keys = transforms.layers[0].keys;
  for (std::size_t h = 0; h < 2; ++h)
    keys[h].tuned = {{"quest:2", 1.1 + static_cast<double>(h)}, {"odd name", .9}};
  const test::TemporaryFile file("tuned.safetensors");
  save_transforms(file.path(), transforms);
  const ModelTransforms back = load_transforms(file.path());
  for (std::size_t h = 0; h < 2; ++h) {
    CHECK(back.layers[0].keys[h].tuned == keys[h].tuned);
    CHECK(back.layers[0].values[h].tuned.empty());
  }
  const auto refused = [&](const char* part) {
    CHECK_REFUSED(save_transforms(file.path(), transforms), part);
  };
  keys[1].tuned["quest:2"] = 0;
  refused("tuned");
  keys[1].tuned["quest:2"] = test::nan;
  refused("tuned");
  keys[1].tuned["quest:2"] = test::infinity;
  refused("tuned");
  keys[1].tuned.erase("quest:2");
  refused("tuned for 1 and 2");
  keys[1].tuned["quest:3"] = 1;
  refused("k.0 head 1 is not tuned for 'quest:2', expected the same names for all heads");
  keys[1].tuned.erase("quest:3");
  keys[0].tuned.clear();
  refused("tuned for 1 and 0");
  // As files, with a writer of one's own.
  for (const Vector<double>& bad :
       {Vector<double>(Vector<double>::Zero(1)), Vector<double>(Vector<double>::Constant(1, -1)),
        Vector<double>(Vector<double>::Constant(1, test::nan)),
        Vector<double>(Vector<double>::Constant(1, test::infinity)), Vector<double>(Vector<double>::Ones(2)),
        Vector<double>(0)}) {
    SafetensorsWriter writer;
    writer.set_metadata("format", "wushkv-transforms-1");
    writer.set_metadata("layers", "1");
    writer.set_metadata("convention", "column");
    const Batch<double> identity = Batch<double>::Identity(2, 2);
    for (const char* name : {"k.0", "k_inv.0", "v_t.0", "v_inv_t.0"})
      writer.add(name, TensorShape{1, 1, 2, 2}, identity);
    writer.add("v_tuned.0:quest:2", bad);
    writer.save(file.path());
    CHECK(test::message_of<FileError>([&] { load_transforms(file.path()); }).find("v_tuned.0:quest:2") !=
          std::string::npos);
  }
}
