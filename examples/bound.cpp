// SPDX-License-Identifier: Apache-2.0
//
// The loss of codecs against its bound, on real activations: for the keys and the values of each head the
// least loss that the additive-noise model allows any transform (design.md, *Bound*), what it predicts for
// WUSH, and what is measured. The transforms are built from the very sums they are judged by, so that nothing
// but model and quantizer stands between a loss and its bound.
//
//   bound [--activations FILE] [--heads]
#include <cmath>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "activations.hpp"
#include "wushkv/calibrate/wush.hpp"
#include "wushkv/measure/measure.hpp"
#include "wushkv/quantize/quantize.hpp"

using namespace wushkv;

namespace {

// The keys or values of one KV head, with their own sums.
struct Head {
  std::string name;
  bool is_key;
  Batch<double> x;  // [tokens, dim]
  SquareMatrix<double> gram, hessian;
  double bound;  // for kappa = 1
};

Head make_head(const std::string& name, bool is_key, const Batch<double>& x, const SquareMatrix<double>& gram,
               const SquareMatrix<double>& hessian) {
  return {name, is_key, x, gram, hessian, loss_bound(loss_spectrum(gram, hessian), 1)};
}

std::vector<Head> load_heads(const std::string& path) {
  std::vector<Head> heads;
  for (const examples::Layer& layer : examples::load_layers(path)) {
    const auto& [q, k, v] = layer.evaluation;
    LayerStatistics statistics(layer.heads);
    statistics.set_output_projection(layer.w_o);
    statistics.add(q, k, v);
    const Index dk = layer.heads.key_dim, dv = layer.heads.value_dim;
    for (Index h = 0; h < layer.heads.kv_heads; ++h) {
      const HeadStatistics& sums = statistics.head(h);
      const std::string of_head = "layer " + std::to_string(layer.number) + " head " + std::to_string(h);
      heads.push_back(
          make_head(of_head + " keys", true, k.middleCols(h * dk, dk), sums.key_gram, sums.key_hessian));
      heads.push_back(make_head(of_head + " values", false, v.middleCols(h * dv, dv), sums.value_gram,
                                sums.value_hessian));
    }
  }
  return heads;
}

struct Built {
  const char* name;
  std::vector<Dense<double>> transforms;  // one a head
  std::vector<double> predicted;          // over the bound, in which kappa cancels
};

Built build(const char* name, const std::vector<Head>& heads, double damping) {
  Built built{name, {}, {}};
  for (const Head& head : heads) {
    built.transforms.push_back(wush<double>(head.gram, head.hessian, {.damping = damping}));
    built.predicted.push_back(predicted_loss(built.transforms.back(), head.gram, head.hessian, 1) /
                              head.bound);
  }
  return built;
}

const std::vector<int> widths = {2, 3, 4, 8};

// Prints, for each transform, a row of the ratios of measured loss to bound by width; with `per_head` the
// lines behind it.
template <class Make>
void print_rows(const std::vector<Head>& heads, const std::vector<Built>& all, const char* name,
                const Make& quantizer, bool per_head) {
  std::vector<std::vector<double>> means(all.size());
  std::vector<double> noise;
  for (const int bits : widths) {
    // Heads come in pairs of keys and values, which OSCAR clips apart.
    const auto kappa_of = [&](bool key) {
      return noise_factor(quantizer(bits, key), heads[key ? 0 : 1].x.cols(), Index{1} << 20);
    };
    const double key_kappa = kappa_of(true), value_kappa = kappa_of(false);
    noise.push_back(std::sqrt(key_kappa * value_kappa) * std::exp2(2 * bits));
    for (std::size_t i = 0; i < all.size(); ++i) {
      std::vector<double> ratios;
      for (std::size_t h = 0; h < heads.size(); ++h) {
        const Head& head = heads[h];
        const double bound = (head.is_key ? key_kappa : value_kappa) * head.bound;
        const Codec codec(all[i].transforms[h], quantizer(bits, head.is_key));
        const double loss = measured_loss(codec, head.x, head.hessian);
        ratios.push_back(loss / bound);
        if (per_head)
          std::printf("  %s, %s, %d bits, %s: bound %.5g, predicted %.5g, measured %.5g, %.3f of the bound\n",
                      name, all[i].name, bits, head.name.c_str(), bound, all[i].predicted[h] * bound, loss,
                      loss / bound);
      }
      means[i].push_back(geometric_mean(ratios));
    }
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::printf("%-17s  %-13s  %9.4f ", name, all[i].name, geometric_mean(all[i].predicted));
    for (const double mean : means[i]) std::printf(" %6.3f", mean);
    std::printf("  ");
    for (const double kappa : noise) std::printf(" %6.2f", kappa);
    std::printf("\n");
  }
}

void bound(const std::string& activations, bool per_head) {
  const std::vector<Head> heads = load_heads(activations);
  const std::vector<Built> built = {build("WUSH undamped", heads, 0), build("WUSH damped", heads, 1e-2)};
  std::printf("Loss of WUSH against its bound, geometric mean over the keys and values of %zu heads\n\n",
              heads.size() / 2);
  std::printf("%-17s  %-13s  %9s  %-27s   %s\n%-17s  %-13s  %9s ", "", "", "predicted",
              "measured loss / bound", "kappa 4^bits", "quantizer", "transform", "/ bound");
  for (const char* const gap : {"  ", "\n"}) {
    for (const int bits : widths) std::printf(" %d bits", bits);
    std::printf("%s", gap);
  }
  using A = Affine<double>;
  print_rows(
      heads, built, "min-max", [](int bits, bool) { return A::min_max(bits); }, per_head);
  print_rows(
      heads, built, "QuEST", [](int bits, bool) { return Quest<double>(bits); }, per_head);
  print_rows(
      heads, built, "QuEST x 1.15", [](int bits, bool) { return Quest<double>(bits, 1.15); }, per_head);
  const auto oscar = [](int bits, bool key) {
    return A::percentile(key ? oscar_key_percentile : oscar_value_percentile, bits);
  };
  print_rows(heads, built, "clipped .96 / .92", oscar, per_head);
  std::printf(
      "\nThe bound is for the quantizer's own kappa, its error on normal vectors; the prediction has the "
      "same\n"
      "kappa, so that its ratio does not depend on the width: 1 undamped, a constant above 1 damped. "
      "Measured,\n"
      "the ratio too goes to a constant as the width grows, near 1 and below it where a token's coordinates\n"
      "reach less far than a normal's. At 2 bits QuEST loses more than the model says: its levels shrink\n"
      "values, by kappa, and an error that points along the value is no independent noise. What a clip "
      "costs\n"
      "is in kappa: past a fixed clip the error does not fall with the width, and kappa 4^bits, constant for "
      "a\n"
      "range that holds all values, grows by 4 a bit; QuEST's clip widens with the width, and grows "
      "slowly.\n");
}

}  // namespace

int main(int argc, char** argv) {
  std::string activations = examples::default_activations;
  bool per_head = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    if (option == "--heads") {
      per_head = true;
    } else if (option == "--activations" && i + 1 < argc) {
      activations = argv[++i];
    } else {
      const bool help = option == "--help" || option == "-h";
      std::fputs("usage: bound [--activations FILE] [--heads]\n", help ? stdout : stderr);
      return help ? 0 : 2;
    }
  }
  try {
    bound(activations, per_head);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  return 0;
}
