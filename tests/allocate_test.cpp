// SPDX-License-Identifier: Apache-2.0
#include "wushkv/calibrate/allocate.hpp"

#include "support.hpp"

using namespace wushkv;

namespace {

const std::vector<int> all_widths = {1, 2, 3, 4, 5, 6, 7, 8};

SideLosses side(test::Random& random, const std::vector<int>& widths, Index elements, bool falling) {
  SideLosses result{{}, elements};
  double loss = std::pow(10.0, random.uniform(-3, 3));
  for (std::size_t i = 0; i < widths.size(); ++i) {
    result.by_width.push_back(loss);
    loss *= falling ? random.uniform(0.1, 0.95) : std::pow(10.0, random.uniform(-1, 0.5));
  }
  return result;
}

std::vector<LayerLosses> random_layers(test::Random& random, const std::vector<int>& widths, Index count,
                                       bool falling = true) {
  const int kind = static_cast<int>(random.integer(0, count > 8 ? 1 : 2));
  const auto elements = [&](bool keys) -> Index {
    if (kind == 0) return 64;
    if (kind == 1) return keys ? random.pick<Index>({64, 192}) : random.pick<Index>({64, 128});
    return random.integer(1, 30);
  };
  std::vector<LayerLosses> layers;
  for (Index l = 0; l < count; ++l)
    layers.push_back(
        {side(random, widths, elements(true), falling), side(random, widths, elements(false), falling)});
  return layers;
}

struct Cost {
  double bits = 0, elements = 0, log_loss = 0;
  double average() const { return bits / elements; }
};

/// By the definitions, from the widths' places in the list.
Cost cost(const std::vector<LayerLosses>& layers, const std::vector<LayerBits>& bits,
          const std::vector<int>& widths) {
  const auto place = [&](int width) {
    return static_cast<std::size_t>(std::find(widths.begin(), widths.end(), width) - widths.begin());
  };
  Cost sum;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const auto& [keys, values] = layers[l];
    const double nk = static_cast<double>(keys.elements), nv = static_cast<double>(values.elements);
    sum.bits += nk * bits[l].keys + nv * bits[l].values;
    sum.elements += nk + nv;
    sum.log_loss +=
        std::log(keys.by_width.at(place(bits[l].keys)) + values.by_width.at(place(bits[l].values)));
  }
  return sum;
}

std::vector<int> random_widths(test::Random& random) {
  std::vector<int> widths;
  while (widths.empty())
    for (const int width : all_widths)
      if (random.integer(0, 2) > 0) widths.push_back(width);
  return widths;
}

/// The least log loss within the budget, by trying everything.
double brute_force(const std::vector<LayerLosses>& layers, double average, const std::vector<int>& widths) {
  std::vector<LayerBits> bits(layers.size());
  double least = test::infinity;
  const std::size_t pairs = widths.size() * widths.size();
  std::size_t combinations = 1;
  for (std::size_t l = 0; l < layers.size(); ++l) combinations *= pairs;
  for (std::size_t c = 0; c < combinations; ++c) {
    std::size_t rest = c;
    for (LayerBits& layer : bits) {
      layer = {widths[rest % pairs / widths.size()], widths[rest % widths.size()]};
      rest /= pairs;
    }
    const Cost sum = cost(layers, bits, widths);
    if (sum.average() <= average * (1 + 1e-12)) least = std::min(least, sum.log_loss);
  }
  return least;
}

}  // namespace

TEST_CASE("what is reported is what the widths come to, never over budget") {
  test::Random random(940);
  for (int round = 0; round < 200; ++round) {
    const std::vector<int> widths = random_widths(random);
    const auto layers = random_layers(random, widths, random.integer(1, 12), random.pick({true, false}));
    const double budget = random.uniform(widths.front(), 9);
    const BitAllocation allocation = allocate_bits(layers, budget, widths);
    REQUIRE(allocation.layers.size() == layers.size());
    const Cost sum = cost(layers, allocation.layers, widths);
    CHECK(sum.average() <= budget * (1 + 1e-12));
    CHECK(allocation.average_bits == doctest::Approx(sum.average()).epsilon(1e-12));
    CHECK(allocation.log_loss == doctest::Approx(sum.log_loss).epsilon(1e-9));
  }
}

TEST_CASE("the optimum, by trying everything on small cases") {
  test::Random random(941);
  for (int round = 0; round < 150; ++round) {
    std::vector<int> widths =
        random.pick<std::vector<int>>({{2, 3, 4}, {1, 2, 8}, {2, 4}, {3}, {1, 2, 3, 4}});
    const auto layers = random_layers(random, widths, random.integer(1, widths.size() > 3 ? 2 : 4),
                                      random.pick({true, false}));
    const double budget = random.uniform(widths.front(), widths.back() + 1);
    CHECK(allocate_bits(layers, budget, widths).log_loss ==
          doctest::Approx(brute_force(layers, budget, widths)).epsilon(1e-9));
  }
}

TEST_CASE("the budget is used up to less than one step") {
  test::Random random(942);
  for (int round = 0; round < 100; ++round) {
    const auto layers = random_layers(random, all_widths, random.integer(1, 20));
    const double budget = random.uniform(1, 8);
    const BitAllocation allocation = allocate_bits(layers, budget);
    const Cost sum = cost(layers, allocation.layers, all_widths);
    const double left = budget * sum.elements - sum.bits;
    for (std::size_t l = 0; l < layers.size(); ++l) {
      if (allocation.layers[l].keys < 8) CHECK(left < static_cast<double>(layers[l].keys.elements));
      if (allocation.layers[l].values < 8) CHECK(left < static_cast<double>(layers[l].values.elements));
    }
  }
}

TEST_CASE("no uniform and no random allocation of the same budget is better") {
  test::Random random(943);
  for (int round = 0; round < 20; ++round) {
    const auto layers = random_layers(random, all_widths, random.integer(2, 30), random.pick({true, false}));
    std::vector<LayerBits> bits(layers.size());
    const auto check = [&] {
      const Cost sum = cost(layers, bits, all_widths);
      CHECK(allocate_bits(layers, sum.average()).log_loss <= sum.log_loss + 1e-9);
    };
    for (const int b : all_widths) {
      std::fill(bits.begin(), bits.end(), LayerBits{b, b});
      check();
    }
    for (int draw = 0; draw < 10; ++draw) {
      for (LayerBits& layer : bits)
        layer = {static_cast<int>(random.integer(1, 8)), static_cast<int>(random.integer(1, 8))};
      check();
    }
  }
}

TEST_CASE("a larger budget is never worse, and a layer's scale drops out") {
  test::Random random(944);
  for (int round = 0; round < 15; ++round) {
    auto layers = random_layers(random, all_widths, random.integer(1, 15), random.pick({true, false}));
    double last = test::infinity;
    for (double budget = 1; budget <= 8.5; budget += random.uniform(0.01, 1)) {
      const double loss = allocate_bits(layers, budget).log_loss;
      CHECK(loss <= last);
      last = loss;
    }
    const double budget = random.uniform(1, 8);
    const BitAllocation before = allocate_bits(layers, budget);
    for (auto& [keys, values] : layers) {
      const double scale = std::ldexp(1.0, static_cast<int>(random.integer(-900, 900)));
      for (double& loss : keys.by_width) loss *= scale;
      for (double& loss : values.by_width) loss *= scale;
    }
    const BitAllocation after = allocate_bits(layers, budget);
    CHECK(cost(layers, after.layers, all_widths).log_loss ==
          doctest::Approx(cost(layers, before.layers, all_widths).log_loss).epsilon(1e-9));
  }
}

TEST_CASE("known cases") {
  // Keys lose more: the third bit is theirs. 2.5 bits a layer of equal sides.
  const std::vector<int> widths = {2, 3};
  const LayerLosses layer{{{4, 1}, 64}, {{2, 1}, 64}};
  CHECK(allocate_bits(std::vector(3, layer), 2.5, widths).layers ==
        std::vector<LayerBits>(3, LayerBits{3, 2}));
  CHECK(allocate_bits(std::vector(3, layer), 2, widths).layers == std::vector<LayerBits>(3, LayerBits{2, 2}));
  CHECK(allocate_bits(std::vector(3, layer), 100, widths).layers ==
        std::vector<LayerBits>(3, LayerBits{3, 3}));
  // A wider code that loses more is not bought, whatever the budget.
  const LayerLosses odd{{{1, 2}, 10}, {{1, 0.5}, 10}};
  CHECK(allocate_bits(std::vector{odd}, 3, widths).layers.front() == LayerBits{2, 3});
  // 2.3 bits of ten elements are 23, whatever a double makes of it.
  const LayerLosses uneven{{{4, 1}, 3}, {{1, 1}, 7}};
  CHECK(allocate_bits(std::vector{uneven}, 2.3, widths).layers.front() == LayerBits{3, 2});
  // The largest and the smallest doubles, and a side that loses nothing.
  const double most = std::numeric_limits<double>::max(), least = std::numeric_limits<double>::denorm_min();
  const LayerLosses extreme{{{most, least}, 1}, {{most, least}, 1}}, zero{{{2, 1}, 1}, {{0, 0}, 1}};
  CHECK(is_finite(allocate_bits(std::vector{extreme, zero}, 2, widths).log_loss));
  CHECK(allocate_bits(std::vector{extreme, zero}, 3, widths).layers.front() == LayerBits{3, 3});
}

TEST_CASE("layers of very different sizes: the front is thinned, and loses little by it") {
  // Every bit of every element saves the same, so that no choice is dominated: 3^18 of them.
  test::Random random(945);
  const std::vector<int> widths = {2, 3, 4};
  std::vector<LayerLosses> layers;
  double elements = 0;
  for (int l = 0; l < 18; ++l) {
    const double keys = static_cast<double>(random.integer(100000, 900000));
    layers.push_back({{{1, std::exp(-1e-6 * keys), std::exp(-2e-6 * keys)}, static_cast<Index>(keys)},
                      {{1e-30, 1e-30, 1e-30}, 1}});
    elements += keys + 1;
  }
  double last = test::infinity;
  for (const double budget : {2.0, 2.01, 2.5, 2.500001, 3.3, 4.0}) {
    const BitAllocation allocation = allocate_bits(layers, budget, widths);
    const Cost sum = cost(layers, allocation.layers, widths);
    CHECK(sum.average() <= budget * (1 + 1e-12));
    CHECK(allocation.log_loss == doctest::Approx(sum.log_loss).epsilon(1e-9));
    CHECK(allocation.log_loss <= last);
    last = allocation.log_loss;
    if (budget > 2.1) CHECK(sum.log_loss < -1e-6 * elements * (budget - 2 - 0.005));
  }
}

TEST_CASE("bad input is refused") {
  const std::vector<int> two = {2, 3};
  const LayerLosses good{{{2, 1}, 64}, {{2, 1}, 64}};
  const auto with = [&](auto change) {
    std::vector<LayerLosses> layers(2, good);
    change(layers[1]);
    return layers;
  };
  CHECK_REFUSED(allocate_bits(std::vector<LayerLosses>(), 2, two), "0 layers");
  CHECK_REFUSED(allocate_bits(std::vector{good}, 2, std::vector<int>()), "0 widths");
  CHECK_REFUSED(allocate_bits(std::vector{good}, 2, std::vector{0, 2}), "widths has 0 at place 0");
  CHECK_REFUSED(allocate_bits(std::vector{good}, 2, std::vector{2, 9}), "widths has 9 at place 1");
  CHECK_REFUSED(allocate_bits(std::vector{good}, 2, std::vector{2, 2}), "ascending");
  CHECK_REFUSED(allocate_bits(std::vector{good}, 1.9, two), "average_bits is 1.9");
  CHECK_REFUSED(allocate_bits(std::vector{good}, test::nan, two), "average_bits");
  CHECK_REFUSED(allocate_bits(std::vector{good}, test::infinity, two), "average_bits");
  CHECK_REFUSED(allocate_bits(std::vector{good}, 2), "have 2 losses, expected one a width, 8");
  CHECK_REFUSED(allocate_bits(with([](LayerLosses& l) { l.values.by_width.pop_back(); }), 2, two),
                "values of layer 1 have 1 losses");
  CHECK_REFUSED(allocate_bits(with([](LayerLosses& l) { l.keys.by_width[1] = -1; }), 2, two),
                "keys of layer 1 have a loss -1");
  CHECK_REFUSED(allocate_bits(with([](LayerLosses& l) { l.keys.by_width[0] = test::nan; }), 2, two),
                "a loss");
  CHECK_REFUSED(allocate_bits(with([](LayerLosses& l) { l.keys.elements = 0; }), 2, two),
                "keys of layer 1 have 0 elements");
  CHECK_REFUSED(
      allocate_bits(with([](LayerLosses& l) { l.keys.by_width[1] = l.values.by_width[1] = 0; }), 2, two),
      "layer 1 has a loss of 0 for keys and values at once");
}
