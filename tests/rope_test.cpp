// SPDX-License-Identifier: Apache-2.0
#include "wushkv/rope/rope.hpp"

#include <doctest/doctest.h>

#include <Eigen/Geometry>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support.hpp"
#include "wushkv/io/safetensors.hpp"
#include "wushkv/rope/scaling.hpp"

namespace {

using namespace wushkv;
using test::Random;

template <class Scalar>
constexpr double tolerance() {
  return 64 * static_cast<double>(std::numeric_limits<Scalar>::epsilon());
}

std::vector<Index> random_positions(Random& random, Index count, Index end) {
  std::vector<Index> positions(static_cast<std::size_t>(count));
  for (Index& position : positions) position = random.integer(0, end - 1);
  return positions;
}

RopeScaling random_scaling(Random& random) {
  const double factor = 1 + static_cast<double>(random.integer(0, 70)) / 10;
  switch (random.integer(0, 4)) {
    case 0:
      return RopeLinear{factor};
    case 1:
      return RopeNtkAware{factor};
    case 2:
      return RopeYarn{.factor = factor, .original_max_position = 512};
    case 3:
      return RopeLlama3{.factor = factor, .original_max_position = 1024};
    default:
      return RopeDefault{};
  }
}

/// A random case: dimensions, frequencies, values and positions.
template <class Scalar>
struct Case {
  explicit Case(unsigned seed) : random(seed) {
    rotary_dim = 2 * random.integer(2, 48);
    head_dim = rotary_dim + (random.integer(0, 1) == 0 ? 0 : random.integer(1, 40));
    heads = random.integer(1, 3);
    tokens = random.integer(1, 12);
    pairs = random.integer(0, 1) == 0 ? RopePairs::Half : RopePairs::Interleaved;
    frequencies = rope_frequencies(rotary_dim, std::pow(10.0, static_cast<double>(random.integer(3, 6))),
                                   random_scaling(random));
    x = random.batch<Scalar>(tokens, heads * head_dim);
    positions = random_positions(random, tokens, max_position);
  }
  Rope<Scalar> rope() const { return {head_dim, max_position, frequencies, pairs}; }

  Random random;
  Index rotary_dim, head_dim, heads, tokens;
  Index max_position = 600;
  RopePairs pairs;
  RopeFrequencies frequencies;
  Batch<Scalar> x;
  std::vector<Index> positions;
};

template <class Scalar>
Batch<Scalar> rotated(const Rope<Scalar>& rope, const Batch<Scalar>& x, const std::vector<Index>& positions) {
  Batch<Scalar> y(x.rows(), x.cols());
  rope.apply_to(x, positions, y);
  return y;
}

template <class A, class B>
double distance(const A& a, const B& b) {
  return (a.template cast<double>() - b.template cast<double>()).cwiseAbs().maxCoeff();
}

/// One head by the definition, in double.
Vector<double> rotate_by_definition(Vector<double> x, Index position, const RopeFrequencies& frequencies,
                                    RopePairs pairs) {
  const auto count = static_cast<Index>(frequencies.inv_freq.size());
  for (Index i = 0; i < count; ++i) {
    const double angle = static_cast<double>(position) * frequencies.inv_freq[static_cast<std::size_t>(i)];
    const Index a = pairs == RopePairs::Half ? i : 2 * i;
    const Index b = pairs == RopePairs::Half ? i + count : 2 * i + 1;
    const Eigen::Vector2d pair(x[a], x[b]);
    const Eigen::Vector2d turned = frequencies.attention_factor * (Eigen::Rotation2Dd(angle) * pair);
    x[a] = turned[0];
    x[b] = turned[1];
  }
  return x;
}

struct ReferenceKind {
  std::string name;
  RopeScaling scaling;
};

const std::array<ReferenceKind, 5>& reference_kinds() {
  static const std::array<ReferenceKind, 5> kinds{{
      {"default", RopeDefault{}},
      {"linear", RopeLinear{4}},
      {"ntk", RopeNtkAware{4}},
      {"yarn", RopeYarn{.factor = 4, .original_max_position = 2048}},
      {"llama3", RopeLlama3{}},
  }};
  return kinds;
}

SafetensorsFile reference() { return SafetensorsFile(test::data("rope.safetensors")); }

template <class Scalar>
double reference_error(const SafetensorsFile& file, const RopeFrequencies& frequencies,
                       const std::string& prefix, RopePairs pairs) {
  const Batch<double> x = file.matrix<double>("x");
  const Batch<double> expected =
      file.matrix<double>(prefix + (pairs == RopePairs::Half ? ".half" : ".interleaved"));
  const Vector<double> stored = file.vector<double>("positions");
  std::vector<std::int32_t> positions;
  for (const double position : stored) positions.push_back(static_cast<std::int32_t>(position));
  const Rope<Scalar> rope(x.cols(), static_cast<Index>(stored.maxCoeff()) + 1, frequencies, pairs);
  Batch<Scalar> y = x.cast<Scalar>();
  rope.apply(y, positions);
  return distance(y, expected) / expected.cwiseAbs().maxCoeff();
}

RopeFrequencies stored_frequencies(const SafetensorsFile& file, const std::string& prefix) {
  const Vector<double> inv_freq = file.vector<double>(prefix + ".inv_freq");
  return {{inv_freq.begin(), inv_freq.end()}, file.vector<double>(prefix + ".factor")[0]};
}

}  // namespace

TEST_CASE("inverse frequencies agree with the reference") {
  const SafetensorsFile file = reference();
  double worst = 0;
  for (const auto& [name, scaling] : reference_kinds())
    for (const Index rotary_dim : {64, 32}) {
      const RopeFrequencies ours = rope_frequencies(rotary_dim, 10000, scaling);
      const RopeFrequencies theirs = stored_frequencies(file, name + ".rot" + std::to_string(rotary_dim));
      REQUIRE(ours.inv_freq.size() == theirs.inv_freq.size());
      for (std::size_t i = 0; i < ours.inv_freq.size(); ++i)
        worst = std::max(worst, std::abs(ours.inv_freq[i] / theirs.inv_freq[i] - 1));
      worst = std::max(worst, std::abs(ours.attention_factor / theirs.attention_factor - 1));
    }
  MESSAGE("inverse frequencies, relative: ", worst);
  CHECK(worst <= 1e-14);
}

TEST_CASE("rotated values agree with the reference") {
  const SafetensorsFile file = reference();
  double stored_double = 0, own_double = 0, own_float = 0;
  for (const auto& [name, scaling] : reference_kinds())
    for (const Index rotary_dim : {64, 32})
      for (const RopePairs pairs : {RopePairs::Half, RopePairs::Interleaved}) {
        const std::string prefix = name + ".rot" + std::to_string(rotary_dim);
        const RopeFrequencies theirs = stored_frequencies(file, prefix);
        const RopeFrequencies ours = rope_frequencies(rotary_dim, 10000, scaling);
        stored_double = std::max(stored_double, reference_error<double>(file, theirs, prefix, pairs));
        own_double = std::max(own_double, reference_error<double>(file, ours, prefix, pairs));
        own_float = std::max(own_float, reference_error<float>(file, ours, prefix, pairs));
      }
  MESSAGE("rotated values: ", stored_double, " (file's frequencies), ", own_double, " (own), ", own_float,
          " (own, float)");
  CHECK(stored_double <= 1e-12);
  CHECK(own_double <= 1e-10);
  CHECK(own_float <= 2e-6);
}

TEST_CASE("scaling kinds keep to their definitions where the reference does not look") {
  SUBCASE("a factor of one changes nothing") {
    const RopeFrequencies plain = rope_frequencies(48, 5e5);
    for (const RopeScaling& scaling : {RopeScaling(RopeLinear{1}), RopeScaling(RopeNtkAware{1}),
                                       RopeScaling(RopeYarn{.factor = 1, .original_max_position = 100}),
                                       RopeScaling(RopeLlama3{.factor = 1})}) {
      const RopeFrequencies scaled = rope_frequencies(48, 5e5, scaling);
      CHECK(scaled.attention_factor == 1);
      for (std::size_t i = 0; i < plain.inv_freq.size(); ++i)
        CHECK(scaled.inv_freq[i] == doctest::Approx(plain.inv_freq[i]).epsilon(1e-14));
    }
  }
  SUBCASE("NTK-aware: the first pair is kept, the last interpolated by the factor") {
    const RopeFrequencies plain = rope_frequencies(64, 1e4), ntk = rope_frequencies(64, 1e4, RopeNtkAware{8});
    CHECK(ntk.inv_freq.front() == 1);
    CHECK(ntk.inv_freq.back() == doctest::Approx(plain.inv_freq.back() / 8).epsilon(1e-13));
  }
  SUBCASE("YaRN: the attention factor can be given, and is 1 for factors below 1") {
    RopeYarn yarn{.factor = 4, .original_max_position = 2048};
    CHECK(rope_frequencies(64, 1e4, yarn).attention_factor == doctest::Approx(0.1 * std::log(4.0) + 1));
    yarn.attention_factor = 0.75;
    CHECK(rope_frequencies(64, 1e4, yarn).attention_factor == 0.75);
    CHECK(
        rope_frequencies(64, 1e4, RopeYarn{.factor = 0.5, .original_max_position = 2048}).attention_factor ==
        1);
  }
  SUBCASE("YaRN: a linear ramp from kept to interpolated, its ends rounded outwards on request") {
    const RopeFrequencies plain = rope_frequencies(64, 1e4);
    const double trained = 4096;
    const auto turns = [&](double index) {
      return trained * std::pow(1e4, -index / 32) / (2 * 3.14159265358979323846);
    };
    RopeYarn yarn{.factor = 4, .original_max_position = trained};
    yarn.beta_fast = turns(8.4);
    yarn.beta_slow = turns(24.2);
    const auto check_ramp = [&](double low, double high) {
      const RopeFrequencies ramp = rope_frequencies(64, 1e4, yarn);
      for (std::size_t i = 0; i < 32; ++i) {
        const double part = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
        CHECK(ramp.inv_freq[i] == doctest::Approx(plain.inv_freq[i] * (1 - part + part / 4)).epsilon(1e-12));
      }
    };
    check_ramp(8, 25);
    yarn.truncate = false;
    check_ramp(8.4, 24.2);
  }
  SUBCASE("YaRN: a ramp without width is a step") {
    RopeYarn yarn{.factor = 4, .original_max_position = 4, .beta_fast = 32, .beta_slow = 1};
    const RopeFrequencies step = rope_frequencies(64, 1e4, yarn);
    for (std::size_t i = 1; i < 32; ++i)
      CHECK(step.inv_freq[i] == doctest::Approx(std::pow(1e4, -static_cast<double>(i) / 32) / 4));
  }
  SUBCASE("Llama 3: between kept and interpolated, monotone") {
    const RopeFrequencies plain = rope_frequencies(128, 5e5),
                          llama = rope_frequencies(128, 5e5, RopeLlama3{});
    CHECK(llama.inv_freq.front() == plain.inv_freq.front());
    CHECK(llama.inv_freq.back() == doctest::Approx(plain.inv_freq.back() / 8).epsilon(1e-14));
    for (std::size_t i = 1; i < 64; ++i) CHECK(llama.inv_freq[i] < llama.inv_freq[i - 1]);
  }
}

TEST_CASE("frequencies refuse settings that cannot be right") {
  const auto refuse = [](Index rotary_dim, double base, const RopeScaling& scaling, const char* part) {
    CHECK_REFUSED(rope_frequencies(rotary_dim, base, scaling), part);
  };
  refuse(0, 1e4, RopeDefault{}, "rotary_dim is 0");
  refuse(-2, 1e4, RopeDefault{}, "rotary_dim is -2");
  refuse(63, 1e4, RopeDefault{}, "rotary_dim is 63");
  refuse(2, 1e4, RopeNtkAware{4}, "rotary_dim is 2");
  for (const double bad : {0.0, -1.0, test::nan, test::infinity}) {
    refuse(64, bad, RopeDefault{}, "base is");
    refuse(64, 1e4, RopeLinear{bad}, "factor is");
    refuse(64, 1e4, RopeNtkAware{bad}, "factor is");
    refuse(64, 1e4, RopeYarn{.factor = bad, .original_max_position = 1}, "factor is");
    refuse(64, 1e4, RopeYarn{.factor = 4, .original_max_position = bad}, "original_max_position is");
    refuse(64, 1e4, RopeYarn{.factor = 4, .original_max_position = 1, .beta_fast = bad}, "beta_fast is");
    refuse(64, 1e4, RopeYarn{.factor = 4, .original_max_position = 1, .beta_slow = bad}, "beta_slow is");
    refuse(64, 1e4, RopeYarn{.factor = 4, .original_max_position = 1, .attention_factor = bad},
           "attention_factor is");
    refuse(64, 1e4, RopeLlama3{.factor = bad}, "factor is");
    refuse(64, 1e4, RopeLlama3{.low_freq_factor = bad}, "low_freq_factor is");
    refuse(64, 1e4, RopeLlama3{.high_freq_factor = bad}, "high_freq_factor is");
    refuse(64, 1e4, RopeLlama3{.original_max_position = bad}, "original_max_position is");
  }
  refuse(64, 1e4, RopeLinear{}, "factor is 0");
  refuse(64, 1e4, RopeYarn{.factor = 4}, "original_max_position is 0");
  refuse(64, 1e4, RopeYarn{.factor = 4, .original_max_position = 1, .beta_fast = 1, .beta_slow = 2},
         "beta_fast is 1");
  refuse(64, 1, RopeYarn{.factor = 4, .original_max_position = 1}, "base is 1");
  refuse(64, 1e4, RopeLlama3{.low_freq_factor = 4}, "high_freq_factor is 4");
  refuse(64, 1e4, RopeLlama3{.low_freq_factor = 5}, "high_freq_factor is 4");
  refuse(64, 1e300, RopeNtkAware{1e300}, "frequency of 0");
  refuse(64, 1, RopeLinear{1e-310}, "frequency of inf");
}

TEST_CASE_TEMPLATE("rotation follows its definition", Scalar, float, double) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    const Case<Scalar> c(seed);
    const Batch<Scalar> y = rotated(c.rope(), c.x, c.positions);
    for (Index t = 0; t < c.tokens; ++t)
      for (Index h = 0; h < c.heads; ++h) {
        const Vector<double> head =
            c.x.row(t).segment(h * c.head_dim, c.head_dim).transpose().template cast<double>();
        const Vector<double> expected =
            rotate_by_definition(head, c.positions[static_cast<std::size_t>(t)], c.frequencies, c.pairs);
        CHECK(distance(y.row(t).segment(h * c.head_dim, c.head_dim).transpose(), expected) <=
              tolerance<Scalar>());
      }
  }
}

TEST_CASE_TEMPLATE("rotation keeps norms up to the attention factor", Scalar, float, double) {
  for (unsigned seed = 100; seed < 140; ++seed) {
    const Case<Scalar> c(seed);
    const Batch<Scalar> y = rotated(c.rope(), c.x, c.positions);
    for (Index t = 0; t < c.tokens; ++t)
      for (Index h = 0; h < c.heads; ++h) {
        const double before = c.x.row(t).segment(h * c.head_dim, c.rotary_dim).template cast<double>().norm();
        const double after = y.row(t).segment(h * c.head_dim, c.rotary_dim).template cast<double>().norm();
        CHECK(after == doctest::Approx(before * c.frequencies.attention_factor).epsilon(tolerance<Scalar>()));
      }
  }
}

TEST_CASE_TEMPLATE("inner products depend on the difference of positions only", Scalar, float, double) {
  for (unsigned seed = 200; seed < 240; ++seed) {
    Case<Scalar> c(seed);
    const Rope<Scalar> rope = c.rope();
    const Vector<Scalar> k = c.random.template vector<Scalar>(c.head_dim);
    const Vector<Scalar> q = c.random.template vector<Scalar>(c.head_dim);
    const Index p = c.random.integer(0, 199), r = c.random.integer(0, 199), shift = c.random.integer(0, 400);
    const auto logit = [&](Index key, Index query) {
      Vector<Scalar> roped_k(c.head_dim), roped_q(c.head_dim);
      rope.apply_to(k, key, roped_k);
      rope.apply_to(q, query, roped_q);
      return roped_k.template cast<double>().dot(roped_q.template cast<double>());
    };
    const double scale = k.template cast<double>().norm() * q.template cast<double>().norm();
    // The angle's own rounding grows with the position: 600 radians hold 1e-13 in double.
    CHECK(std::abs(logit(p, r) - logit(p + shift, r + shift)) <= 16 * tolerance<Scalar>() * scale);
  }
}

TEST_CASE_TEMPLATE("inverse undoes the rotation, and rotations add up", Scalar, float, double) {
  for (unsigned seed = 300; seed < 340; ++seed) {
    Case<Scalar> c(seed);
    const Rope<Scalar> rope = c.rope();
    Batch<Scalar> y = rotated(rope, c.x, c.positions);
    Batch<Scalar> back(c.x.rows(), c.x.cols());
    rope.inverse_to(y, c.positions, back);
    CHECK(distance(back, c.x) <= tolerance<Scalar>());
    rope.inverse(y, c.positions);
    CHECK(y == back);

    Vector<Scalar> token = c.x.row(0).transpose(), token_back(c.x.cols());
    rope.apply(token, 17);
    rope.inverse_to(token, 17, token_back);
    rope.inverse(token, 17);
    CHECK(token == token_back);
    CHECK(distance(token, c.x.row(0).transpose()) <= tolerance<Scalar>());

    const RopeFrequencies plain = rope_frequencies(c.rotary_dim, 1e4);
    const Rope<Scalar> unscaled(c.head_dim, 600, plain, c.pairs);
    Vector<Scalar> twice = c.x.row(0).transpose(), once = twice;
    unscaled.apply(twice, 123);
    unscaled.apply(twice, 321);
    unscaled.apply(once, 444);
    CHECK(distance(twice, once) <= 16 * tolerance<Scalar>());
  }
}

TEST_CASE_TEMPLATE("half and interleaved pairs differ by a permutation", Scalar, float, double) {
  for (unsigned seed = 400; seed < 430; ++seed) {
    const Case<Scalar> c(seed);
    const Rope<Scalar> half(c.head_dim, c.max_position, c.frequencies, RopePairs::Half);
    const Rope<Scalar> interleaved(c.head_dim, c.max_position, c.frequencies, RopePairs::Interleaved);
    const auto to_interleaved = [&](const Batch<Scalar>& x) {
      Batch<Scalar> y = x;
      for (Index h = 0; h < c.heads; ++h)
        for (Index i = 0; i < c.rotary_dim / 2; ++i) {
          y.col(h * c.head_dim + 2 * i) = x.col(h * c.head_dim + i);
          y.col(h * c.head_dim + 2 * i + 1) = x.col(h * c.head_dim + i + c.rotary_dim / 2);
        }
      return y;
    };
    CHECK(distance(to_interleaved(rotated(half, c.x, c.positions)),
                   rotated(interleaved, to_interleaved(c.x), c.positions)) <= tolerance<Scalar>());
  }
}

TEST_CASE_TEMPLATE("position 0 and the coordinates that are not rotated pass through", Scalar, float,
                   double) {
  for (unsigned seed = 500; seed < 530; ++seed) {
    const Case<Scalar> c(seed);
    const Batch<Scalar> y = rotated(c.rope(), c.x, c.positions);
    for (Index h = 0; h < c.heads; ++h) {
      const Index rest = c.head_dim - c.rotary_dim, begin = h * c.head_dim + c.rotary_dim;
      CHECK(y.middleCols(begin, rest) == c.x.middleCols(begin, rest));
    }
    const Rope<Scalar> plain(c.head_dim, 1, rope_frequencies(c.rotary_dim, 1e4), c.pairs);
    CHECK(rotated(plain, c.x, std::vector<Index>(c.positions.size(), 0)) == c.x);
  }
}

TEST_CASE_TEMPLATE("every form gives the same bits", Scalar, float, double) {
  for (unsigned seed = 600; seed < 640; ++seed) {
    Case<Scalar> c(seed);
    const Rope<Scalar> rope = c.rope();
    const Batch<Scalar> y = rotated(rope, c.x, c.positions);

    Batch<Scalar> in_place = c.x;
    rope.apply(in_place, c.positions);
    CHECK(in_place == y);
    in_place = c.x;
    rope.apply_to(in_place, c.positions, in_place);
    CHECK(in_place == y);

    // Slices of wide buffers, whose other columns stay as they are.
    const Index width = c.x.cols(), pitch = width + c.random.integer(1, 9),
                begin = c.random.integer(0, pitch - width);
    Batch<Scalar> wide = Batch<Scalar>::Constant(c.tokens, pitch, 7), wide_out = wide;
    wide.middleCols(begin, width) = c.x;
    rope.apply_to(wide.middleCols(begin, width), c.positions, wide_out.middleCols(begin, width));
    rope.apply(wide.middleCols(begin, width), c.positions);
    CHECK(wide == wide_out);
    CHECK(wide.middleCols(begin, width) == y);
    wide.middleCols(begin, width).setConstant(7);
    CHECK(wide == Batch<Scalar>::Constant(c.tokens, pitch, 7));

    // Token by token, in another order, head by head, and with other integers.
    std::vector<std::int32_t> narrow(c.positions.begin(), c.positions.end());
    for (Index t = 0; t < c.tokens; ++t) {
      const Index position = c.positions[static_cast<std::size_t>(t)];
      Vector<Scalar> token = c.x.row(t).transpose(), out(width);
      rope.apply_to(token, position, out);
      rope.apply(token, position);
      CHECK(token == out);
      CHECK(token == y.row(t).transpose());
      Batch<Scalar> row = c.x.row(t);
      rope.apply(row.row(0).transpose(), position);
      CHECK(row == y.row(t));
    }
    const Batch<Scalar> reversed = c.x.colwise().reverse();
    CHECK(rotated(rope, reversed, {c.positions.rbegin(), c.positions.rend()}) == y.colwise().reverse());
    for (Index h = 0; h < c.heads; ++h) {
      Batch<Scalar> head = c.x.middleCols(h * c.head_dim, c.head_dim);
      rope.apply(head, std::span<const std::int32_t>(narrow));
      CHECK(head == y.middleCols(h * c.head_dim, c.head_dim));
    }
  }
}

TEST_CASE("an empty batch is fine, and a fixed-size one") {
  const Rope<float> rope(4, 8, rope_frequencies(4, 1e4));
  Batch<float> empty(0, 4);
  rope.apply(empty, std::vector<int>());
  Batch<float, 4> fixed = Batch<float, 4>::Ones(2, 4);
  Batch<float> dynamic = fixed;
  rope.apply(fixed, std::array<int, 2>{3, 5});
  rope.apply(dynamic, std::array<int, 2>{3, 5});
  CHECK(fixed == dynamic);
  CHECK(rope.head_dim() == 4);
  CHECK(rope.rotary_dim() == 4);
  CHECK(rope.max_position() == 8);
  CHECK(rope.pairs() == RopePairs::Half);
  CHECK(rope.frequencies().inv_freq == rope_frequencies(4, 1e4).inv_freq);
}

TEST_CASE("a table cannot be built from what makes no sense") {
  const RopeFrequencies good = rope_frequencies(8, 1e4);
  const auto refuse = [](Index head_dim, Index length, const RopeFrequencies& frequencies, const char* part) {
    CHECK_REFUSED(Rope<float>(head_dim, length, frequencies), part);
    CHECK_REFUSED(Rope<double>(head_dim, length, frequencies), part);
  };
  refuse(7, 10, good, "inv_freq has 4 entries");
  refuse(0, 10, good, "inv_freq has 4 entries");
  refuse(-8, 10, good, "inv_freq has 4 entries");
  refuse(8, 10, RopeFrequencies{}, "inv_freq is empty");
  refuse(8, 0, good, "max_position is 0");
  refuse(8, -1, good, "max_position is -1");
  refuse(8, std::numeric_limits<Index>::max() / 4, good, "max_position is");
  for (const double bad : {test::nan, test::infinity, -test::infinity, 1e308})
    refuse(8, 10, RopeFrequencies{{1, bad}, 1}, "inv_freq has the value");
  for (const double bad : {test::nan, test::infinity, 0.0, -1.0, 1e-200, 1e200})
    refuse(8, 10, RopeFrequencies{{1, 0.1}, bad}, "attention_factor is");
}

TEST_CASE_TEMPLATE("calls refuse bad input and write nothing", Scalar, float, double) {
  const Rope<Scalar> rope(8, 16, rope_frequencies(6, 1e4));
  const std::vector<int> positions{1, 15, 0};
  Batch<Scalar> x = Batch<Scalar>::Ones(3, 16), out = Batch<Scalar>::Constant(3, 16, 5);
  const auto refuse_batch = [&](const std::vector<int>& at, const char* part) {
    const Batch<Scalar> before = x;
    CHECK_REFUSED(rope.apply(x, at), part);
    CHECK_REFUSED(rope.inverse(x, at), part);
    CHECK_REFUSED(rope.apply_to(x, at, out), part);
    CHECK_REFUSED(rope.inverse_to(x, at, out), part);
    CHECK(std::memcmp(before.data(), x.data(), sizeof(Scalar) * static_cast<std::size_t>(x.size())) == 0);
    CHECK(out == Batch<Scalar>::Constant(out.rows(), out.cols(), 5));
  };
  refuse_batch({1, 2}, "positions has 2 entries, expected one for each of 3 tokens");
  refuse_batch({1, 2, 3, 4}, "positions has 4 entries");
  refuse_batch({1, 2, 16}, "position is 16, expected 0 to 15");
  refuse_batch({1, 2, -1}, "position is -1, expected 0 to 15");
  for (const double bad : {test::nan, test::infinity, -test::infinity})
    for (const Index where :
         {Index{0}, x.size() - 1}) {  // the last one is not rotated, and refused all the same
      x.data()[where] = static_cast<Scalar>(bad);
      refuse_batch(positions, "not finite");
      x.data()[where] = 1;
    }

  Batch<Scalar> narrow = Batch<Scalar>::Ones(3, 12), nothing(3, 0), short_out(2, 16);
  CHECK_REFUSED(rope.apply(narrow, positions), "12 coordinates a token");
  CHECK_REFUSED(rope.apply(nothing, positions), "0 coordinates a token");
  CHECK_REFUSED(rope.apply_to(x, positions, short_out), "out is 2 x 16, expected 3 x 16");
  CHECK_REFUSED(rope.apply_to(x, positions, out.leftCols(8)), "out is 3 x 8, expected 3 x 16");

  Vector<Scalar> token = Vector<Scalar>::Ones(8), token_out = Vector<Scalar>::Constant(8, 5), odd(9);
  CHECK_REFUSED(rope.apply(token, 16), "position is 16, expected 0 to 15");
  CHECK_REFUSED(rope.apply(token, -1), "position is -1, expected 0 to 15");
  CHECK_REFUSED(rope.apply_to(token, 1, token_out.head(7)), "out is 7 x 1, expected 8 x 1");
  CHECK_REFUSED(rope.apply(odd, 1), "9 coordinates a token");
  CHECK(token == Vector<Scalar>::Ones(8));
  token[7] = static_cast<Scalar>(test::nan);
  CHECK_REFUSED(rope.apply(token, 1), "not finite");
  CHECK_REFUSED(rope.apply_to(token, 1, token_out), "not finite");
  CHECK_REFUSED(rope.inverse(token, 1), "not finite");
  CHECK(token_out == Vector<Scalar>::Constant(8, 5));
}
