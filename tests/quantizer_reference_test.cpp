// SPDX-License-Identifier: Apache-2.0
// Against tests/data/quantizers.safetensors: float64 outputs of design.md's formulas, computed independently.
#include <string>

#include "support.hpp"
#include "wushkv/io/safetensors.hpp"
#include "wushkv/quantize/quantize.hpp"

using namespace wushkv;

namespace {

// Rows 0 and 1 (all zero, constant) may be coded in any form that decodes to the right value.
constexpr Index first_coded_row = 2;

struct Difference {
  Index codes = 0, values = 0, off_boundary = 0, by_more_than_one = 0;
  double worst_value = 0, worst_params = 0;
};

template <class Q, class Distance>
void compare_row(const Q& quantizer, const Vector<typename Q::Scalar>& group, Index row,
                 const Batch<std::int64_t>& codes, const Batch<double>& values, Distance boundary_distance,
                 Difference& difference) {
  const auto params = quantizer.fit(group);
  const double largest = static_cast<double>(group.cwiseAbs().maxCoeff());
  for (Index i = 0; i < group.size(); ++i) {
    const auto code = static_cast<std::int64_t>(quantizer.encode(group[i], params));
    const double value = static_cast<double>(quantizer.decode(static_cast<std::uint8_t>(code), params));
    ++difference.values;
    if (row >= first_coded_row && code != codes(row, i)) {
      ++difference.codes;
      if (std::abs(code - codes(row, i)) > 1) ++difference.by_more_than_one;
      if (boundary_distance(static_cast<double>(group[i]), row) > 1e-4) ++difference.off_boundary;
      continue;
    }
    const double error = std::abs(value - values(row, i));
    difference.worst_value = std::max(difference.worst_value, largest > 0 ? error / largest : error);
  }
}

// How far x / step is from a whole number, where codes change.
double to_whole(double x) { return std::abs(x - std::round(x)); }

template <class Scalar>
Difference compare_all(const SafetensorsView& file) {
  Difference total;
  for (const Index d : {64, 128}) {
    const std::string dim = std::to_string(d);
    const Batch<Scalar> x = file.matrix<Scalar>("x" + dim);
    for (int bits = 1; bits <= 8; ++bits) {
      const std::string name = "quest.d" + dim + ".b" + std::to_string(bits);
      const auto codes = file.matrix<std::int64_t>(name + ".code");
      const auto values = file.matrix<double>(name + ".value"), steps = file.matrix<double>(name + ".step");
      const Quest<Scalar> quest(bits);
      for (Index row = 0; row < x.rows(); ++row) {
        compare_row(
            quest, x.row(row).transpose(), row, codes, values,
            [&](double value, Index r) { return to_whole(value / steps(r, 0)); }, total);
        const double step = static_cast<double>(quest.fit(Vector<Scalar>(x.row(row).transpose())).step);
        total.worst_params =
            std::max(total.worst_params, std::abs(step - steps(row, 0)) / std::max(steps(row, 0), 1e-300));
      }
    }
    for (const int bits : {1, 2, 3, 4, 8})
      for (const int percent : {0, 92, 96}) {
        const std::string name =
            "affine.d" + dim + ".b" + std::to_string(bits) + ".k" + std::to_string(percent);
        const auto codes = file.matrix<std::int64_t>(name + ".code");
        const auto values = file.matrix<double>(name + ".value"),
                   scales = file.matrix<double>(name + ".scale"), zeros = file.matrix<double>(name + ".zero");
        const auto affine = Affine<Scalar>::percentile(percent / 100.0, bits);
        for (Index row = 0; row < x.rows(); ++row) {
          compare_row(
              affine, x.row(row).transpose(), row, codes, values,
              [&](double value, Index r) { return to_whole(value / scales(r, 0) + zeros(r, 0) + 0.5); },
              total);
          if (row < first_coded_row) continue;
          const auto params = affine.fit(Vector<Scalar>(x.row(row).transpose()));
          total.worst_params =
              std::max(total.worst_params, std::abs(static_cast<double>(params.scale) / scales(row, 0) - 1));
          total.worst_params =
              std::max(total.worst_params, std::abs(static_cast<double>(params.zero) - zeros(row, 0)) /
                                               std::max(1.0, std::abs(zeros(row, 0))));
        }
      }
  }
  return total;
}

}  // namespace

TEST_CASE("double: codes equal, values and parameters within 1e-9") {
  const SafetensorsFile file(test::data("quantizers.safetensors"));
  const Difference difference = compare_all<double>(file);
  CHECK(difference.values == 24 * (64 + 128) * (8 + 15));
  CHECK(difference.codes == 0);
  CHECK(difference.worst_value < 1e-9);
  CHECK(difference.worst_params < 1e-9);
}

TEST_CASE("float: at most one code in 10,000 differs, by one, at a boundary; the rest within 1e-5") {
  const SafetensorsFile file(test::data("quantizers.safetensors"));
  const Difference difference = compare_all<float>(file);
  MESSAGE(difference.codes, " of ", difference.values, " codes differ, values by up to ",
          difference.worst_value);
  CHECK(difference.codes * 10000 <= difference.values);
  CHECK(difference.by_more_than_one == 0);
  CHECK(difference.off_boundary == 0);
  CHECK(difference.worst_value < 1e-5);
}

TEST_CASE("OSCAR's quartered bytes of 2-bit codes") {
  const SafetensorsFile file(test::data("quantizers.safetensors"));
  for (const Index d : {64, 128})
    for (const int percent : {0, 92, 96}) {
      const std::string name = "affine.d" + std::to_string(d) + ".b2.k" + std::to_string(percent);
      const auto codes = file.matrix<std::uint8_t>(name + ".code"),
                 quartered = file.matrix<std::uint8_t>(name + ".quartered");
      const auto size = static_cast<std::size_t>(d);
      for (Index row = 0; row < codes.rows(); ++row) {
        std::vector<std::uint8_t> bytes(size / 4), back(size);
        pack_quartered({codes.row(row).data(), size}, bytes);
        CHECK(std::equal(bytes.begin(), bytes.end(), quartered.row(row).data()));
        unpack_quartered(bytes, back);
        CHECK(std::equal(back.begin(), back.end(), codes.row(row).data()));
      }
    }
}
