// SPDX-License-Identifier: Apache-2.0
//
// A researcher's own quantizer and own transform, plugged into the library's codec and unit-tested. Neither
// has a base class: each is a struct with the members that the concept names, and a missing one is a compile
// error that says so.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <random>

#include "wushkv/codec/codec.hpp"
#include "wushkv/measure/doctest.hpp"
#include "wushkv/quantize/storage.hpp"
#include "wushkv/transform/composed.hpp"
#include "wushkv/transform/hadamard.hpp"

using namespace wushkv;

// Three levels, -t, 0 and t: a 2-bit code that leaves its fourth value unused. t is the best for a Gaussian
// group.
struct Ternary {
  using Scalar = float;
  struct Params {
    Eigen::half t;  // as stored: encode has to see what decode will
  };
  static constexpr int bits() { return 2; }
  Params fit(const GroupView<float>& group) const {
    const float rms = std::sqrt(group.squaredNorm() / static_cast<float>(group.size()));
    return {saturate_cast<Eigen::half>(1.224F * rms)};  // finite, whatever the group holds
  }
  std::uint8_t encode(float x, const Params& params) const {
    const float half = static_cast<float>(params.t) / 2;
    return x < -half ? 0 : x <= half ? 1 : 2;
  }
  float decode(std::uint8_t code, const Params& params) const {
    return (static_cast<float>(code) - 1) * static_cast<float>(params.t);
  }
};

// Flips the sign of every other channel: a stand-in for any invertible map. The same code serves a token (a
// column) and a batch (one token a row), since a diagonal map acts on coefficients.
struct Alternate {
  using Scalar = float;
  Index size;
  Index dim() const { return size; }
  Vector<float> forward(const Vector<float>& x) const { return x.cwiseProduct(signs()); }
  Batch<float> forward(const Batch<float>& x) const { return x * signs().asDiagonal(); }
  auto inverse(const auto& y) const { return forward(y); }          // its own inverse
  auto adjoint_inverse(const auto& q) const { return forward(q); }  // and orthogonal
  Vector<float> signs() const {
    return Vector<float>::NullaryExpr(size, [](Index i) { return i % 2 == 0 ? 1.0F : -1.0F; });
  }
};

Batch<float> heavy_tailed(Index tokens, Index dim) {
  std::mt19937 generator(1);
  std::student_t_distribution<float> student(4);
  return Batch<float>::NullaryExpr(tokens, dim, [&](Index, Index) { return student(generator); });
}

TEST_CASE("the quantizer keeps a Gaussian group to its theoretical error") {
  // Through a Hadamard transform, heavy tails look Gaussian; three levels leave 0.19 of a unit normal's
  // energy.
  const Codec codec(Hadamard<float>(64), Ternary());
  CHECK_RECONSTRUCTION(codec, heavy_tailed(500, 64), 0.21);
  CHECK(codec.bits_per_element() == 2.25);
}

TEST_CASE("the transform is one") {
  const Batch<float> x = heavy_tailed(3, 64);
  const Alternate transform{64};
  CHECK((transform.inverse(transform.forward(x)) - x).norm() == 0);
  const Batch<float> logits = transform.forward(x) * transform.adjoint_inverse(x).transpose();
  CHECK((logits - x * x.transpose()).norm() < 1e-4 * logits.norm());
}

TEST_CASE("both together, and with the library's own") {
  const Codec codec(Composed(Hadamard<float>(64), Alternate{64}), Ternary(), 32);
  CHECK_RECONSTRUCTION(codec, heavy_tailed(500, 64), 0.21);
}
