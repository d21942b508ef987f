// SPDX-License-Identifier: Apache-2.0
// What the concepts accept and reject. That a rejected type fails with one error is checked in rejected/.
#include <cstdint>

#include "support.hpp"
#include "wushkv/codec/codec.hpp"
#include "wushkv/quantize/quantize.hpp"
#include "wushkv/transform/transform.hpp"

using namespace wushkv;

namespace {

struct RightTransform {
  using Scalar = float;
  Index dim() const { return 4; }
  Vector<float> forward(const Vector<float>& x) const { return x; }
  Vector<float> inverse(const Vector<float>& x) const { return x; }
  Vector<float> adjoint_inverse(const Vector<float>& x) const { return x; }
  Batch<float> forward(const Batch<float>& x) const { return x; }
  Batch<float> inverse(const Batch<float>& x) const { return x; }
  Batch<float> adjoint_inverse(const Batch<float>& x) const { return x; }
};
struct NoScalar : RightTransform {
  using Scalar = void;
};
struct IntegerScalar : RightTransform {
  using Scalar = int;
};
struct NoBatch {
  using Scalar = float;
  Index dim() const { return 4; }
  Vector<float> forward(const Vector<float>& x) const { return x; }
  Vector<float> inverse(const Vector<float>& x) const { return x; }
  Vector<float> adjoint_inverse(const Vector<float>& x) const { return x; }
};
struct NoInverse : RightTransform {
  void inverse(int) const;  // hides both
};
struct NotConst : RightTransform {
  Index dim() { return 4; }
};

struct RightQuantizer {
  using Scalar = float;
  struct Params {
    float scale;
  };
  static constexpr int bits() { return 1; }
  Params fit(const GroupView<float>& group) const { return {group.cwiseAbs().mean()}; }
  std::uint8_t encode(float x, const Params&) const { return x < 0 ? 0 : 1; }
  float decode(std::uint8_t code, const Params& params) const {
    return code == 0 ? -params.scale : params.scale;
  }
};
struct SignedCode : RightQuantizer {
  int encode(float, const Params&) const { return 0; }
};
struct FitOfAnother : RightQuantizer {
  int fit(const GroupView<float>&) const { return 0; }
};
struct OwningParams : RightQuantizer {
  struct Params {
    std::string text;
  };
};
struct NoBits : RightQuantizer {
  void bits() const;
};

struct RightRounding {
  void encode(const RightQuantizer&, std::span<const float>, Index, std::span<std::uint8_t>,
              std::span<RightQuantizer::Params>) const {}
};
struct ForNoQuantizer {
  void encode(int) const {}
};

static_assert(Transform<RightTransform> && Transform<Identity<float>> && Transform<Hadamard<double, 64>> &&
              Transform<Dense<float>> && Transform<Orthogonal<double>> && Transform<Diagonal<float>> &&
              Transform<Permutation<float>> && Transform<Kronecker<double>> &&
              Transform<BlockDiagonal<Hadamard<float>>> &&
              Transform<Composed<Hadamard<float>, Dense<float>>> && Transform<Centered<Dense<float>>>);
static_assert(!Transform<int> && !Transform<NoScalar> && !Transform<IntegerScalar> && !Transform<NoBatch> &&
              !Transform<NoInverse> && !Transform<NotConst>);

static_assert(Quantizer<RightQuantizer> && Quantizer<Quest<float>> &&
              Quantizer<Quest<double, 3, Eigen::half>> && Quantizer<Affine<float, 8>> &&
              Quantizer<LloydMax<double>> && Quantizer<PassThrough<float>>);
static_assert(!Quantizer<int> && !Quantizer<SignedCode> && !Quantizer<FitOfAnother> &&
              !Quantizer<OwningParams> && !Quantizer<NoBits>);
// Storage types are those of design.md.
template <class Storage>
constexpr bool storable = requires {
  typename Quest<float, 2, Storage>;
};
static_assert(storable<double> && storable<float> && storable<Eigen::half> && storable<Eigen::bfloat16>);
static_assert(!storable<int> && !storable<long double>);

static_assert(Rounding<Nearest, RightQuantizer> && Rounding<RightRounding, RightQuantizer>);
static_assert(!Rounding<ForNoQuantizer, RightQuantizer> && !Rounding<RightRounding, Quest<double>> &&
              !Rounding<Nearest, int>);

static_assert(CodecParts<RightTransform, RightQuantizer, Nearest> &&
              CodecParts<RightTransform, RightQuantizer, RightRounding>);
static_assert(!CodecParts<RightTransform, Quest<double>, Nearest>, "one scalar for both");
static_assert(!CodecParts<NoBatch, RightQuantizer, Nearest> &&
              !CodecParts<RightTransform, SignedCode, Nearest> &&
              !CodecParts<RightTransform, RightQuantizer, ForNoQuantizer>);

}  // namespace

TEST_CASE("a user's minimal types make a working codec") {
  const Codec<RightTransform, RightQuantizer> codec{RightTransform{}, RightQuantizer{}};
  Batch<float> x(2, 4);
  x << 1, -1, 3, -3, 0, 8, 0, 0;
  Batch<float> expected(2, 4);
  expected << 2, -2, 2, -2, 2, 2, 2, 2;
  CHECK(test::identical(codec.reconstruct(x), expected));
  CHECK(codec.bits_per_element() == 1 + 32.0 / 4);
}
