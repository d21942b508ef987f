// SPDX-License-Identifier: Apache-2.0
#include "wushkv/codec/codec.hpp"

#include "support.hpp"
#include "wushkv/quantize/quantize.hpp"
#include "wushkv/transform/dense.hpp"
#include "wushkv/transform/hadamard.hpp"
#include "wushkv/transform/identity.hpp"

using namespace wushkv;

namespace {

template <class Scalar>
Dense<Scalar> any_dense(test::Random& random, Index dim) {
  return Dense<Scalar>(SquareMatrix<double>::Identity(dim, dim) +
                       random.matrix(dim) / (4 * std::sqrt(static_cast<double>(dim))));
}

// Transform, quantize each group, decode, transform back: by the definition, in the codec's scalar.
template <class Codec, class Scalar = typename Codec::Scalar>
Batch<Scalar> by_definition(const Codec& codec, const Batch<Scalar>& x) {
  Batch<Scalar> y = codec.transform().forward(x);
  const auto& quantizer = codec.quantizer();
  for (Index t = 0; t < y.rows(); ++t)
    for (Index at = 0; at < y.cols(); at += codec.group_size()) {
      const Vector<Scalar> group = y.row(t).segment(at, codec.group_size()).transpose();
      const auto params = quantizer.fit(group);
      for (Index i = 0; i < group.size(); ++i)
        y(t, at + i) = quantizer.decode(quantizer.encode(group[i], params), params);
    }
  return codec.transform().inverse(y);
}

}  // namespace

TEST_CASE_TEMPLATE("a codec does what its parts say, for every group size, bits and storage", Scalar, float,
                   double) {
  test::Random random(70);
  for (int round = 0; round < 20; ++round) {
    const Index dim = random.pick({16, 64, 80, 96}), group = random.pick({Index{4}, Index{16}, dim});
    const int bits = static_cast<int>(random.integer(1, 8));
    const Batch<Scalar> x = random.batch<Scalar>(random.integer(1, 7), dim);
    const Codec dense(any_dense<Scalar>(random, dim), Quest<Scalar, Dynamic, Eigen::half>(bits), group);
    CHECK(test::identical(dense.reconstruct(x), by_definition(dense, x)));
    const Codec affine(Hadamard<Scalar>(dim), Affine<Scalar, Dynamic, Eigen::bfloat16>::percentile(.96, bits),
                       group);
    CHECK(test::identical(affine.reconstruct(x), by_definition(affine, x)));
  }
}

TEST_CASE("more bits, less error") {
  test::Random random(71);
  const Batch<double> x = random.batch(200, 64);
  double previous = 1;
  for (int bits = 1; bits <= 8; ++bits) {
    const Codec codec(Hadamard<double>(64), Quest<double>(bits));
    const double error = (codec.reconstruct(x) - x).squaredNorm() / x.squaredNorm();
    CHECK(error < 0.45 * previous);
    previous = error;
  }
  CHECK(previous < 1e-4);
}

TEST_CASE("token and batch forms give the same codes; fixed and dynamic sizes too") {
  test::Random random(72);
  const Dense<float> transform = any_dense<float>(random, 64);
  const Codec dynamic(transform, Quest<float>(3), 16);
  const Codec<Dense<float, 64>, Quest<float, 3>, Nearest, 16> fixed(transform.cast<float, 64>(),
                                                                    Quest<float, 3>());
  const Batch<float> x = random.batch<float>(9, 64);
  const auto encoded = dynamic.encode(x);
  CHECK(test::relative_difference(fixed.reconstruct(x), dynamic.reconstruct(x)) < 1e-6);
  std::vector<std::uint8_t> codes(64);
  std::vector<Quest<float>::Params> params(4);
  for (Index t = 0; t < 9; ++t) {
    const Vector<float> token = x.row(t).transpose();
    dynamic.encode(token, codes, params);
    // A product of one row may sum in another order than that of many: a code may differ at a boundary only.
    int differing = 0;
    for (Index i = 0; i < 64; ++i)
      differing += codes[static_cast<std::size_t>(i)] != encoded.codes(t, i) ? 1 : 0;
    CHECK(differing <= 1);
    Vector<float> back(64);
    dynamic.decode(codes, params, back);
    if (differing == 0)
      CHECK(test::relative_difference(back, dynamic.reconstruct(x).row(t).transpose()) < 1e-5);
  }
}

TEST_CASE("queries see the transformed cache as they would the original one") {
  test::Random random(73);
  const Codec codec(any_dense<double>(random, 32), Quest<double>(4), 8);
  const Batch<double> k = random.batch(10, 32), q = random.batch(5, 32);
  const auto encoded = codec.encode(k);
  const Batch<double> there =
      codec.transform().adjoint_inverse(q) * codec.decode_transformed(encoded).transpose();
  CHECK(test::relative_difference(there, q * codec.decode(encoded).transpose()) < 1e-12);
}

TEST_CASE("storage is counted with its parameters") {
  CHECK(Codec(Identity<float>(64), Quest<float, 2, Eigen::half>()).bits_per_element() == 2.25);
  CHECK(Codec(Identity<float>(128), Affine<float, 3, Eigen::bfloat16>::min_max(), 32).bits_per_element() ==
        4);
  CHECK(Codec(Identity<float>(64), PassThrough<float>()).bits_per_element() == 16);
  CHECK(Codec(Identity<float>(64), LloydMax<float, 4>(), 16).bits_per_element() == 6);
}

TEST_CASE("one token allocates nothing") {
  test::Random random(74);
  const Codec codec(any_dense<float>(random, 128), Affine<float, 2, Eigen::half>::percentile(.96), 32);
  const Vector<float> token = random.vector<float>(128);
  Vector<float> back(128);
  std::vector<std::uint8_t> codes(128);
  std::vector<Affine<float, 2, Eigen::half>::Params> params(4);
  Eigen::internal::set_is_malloc_allowed(false);
  codec.encode(token, codes, params);
  codec.decode(codes, params, back);
  Eigen::internal::set_is_malloc_allowed(true);
  CHECK((back - token).norm() < token.norm());
}

TEST_CASE("strided batches and no tokens") {
  test::Random random(75);
  const Codec codec(Hadamard<float>(32), Quest<float>(4));
  const Batch<float> wide = random.batch<float>(6, 100);
  const Batch<float> copy = wide.middleCols(40, 32);
  CHECK(test::identical(codec.reconstruct(wide.middleCols(40, 32)), codec.reconstruct(copy)));
  CHECK(test::identical(codec.reconstruct(Eigen::MatrixXf(copy)), codec.reconstruct(copy)));
  CHECK(codec.reconstruct(Batch<float>(0, 32)).rows() == 0);
}

TEST_CASE("bad input is refused and writes nothing") {
  test::Random random(76);
  CHECK_REFUSED(Codec(Identity<float>(64), Quest<float>(2), 24),
                "group_size is 24, expected a divisor of the head dimension 64");
  CHECK_REFUSED(Codec(Identity<float>(64), Quest<float>(2), 128), "group_size is 128");
  CHECK_REFUSED(Codec(Identity<float>(64), Quest<float>(2), -1), "group_size is -1");
  CHECK_REFUSED((Codec<Identity<float>, Quest<float>, Nearest, 16>(Identity<float>(64), Quest<float>(2), 32)),
                "fixed size 16");
  const Codec codec(Identity<float>(8), Quest<float>(2), 4);
  Batch<float> x = random.batch<float>(3, 8);
  CHECK_REFUSED(codec.encode(random.batch<float>(3, 9)), "3 x 9, expected 3 x 8");
  for (const double bad : {test::nan, test::infinity, -test::infinity})
    for (Index i = 0; i < x.size(); ++i) {
      Batch<float> broken = x;
      broken.data()[i] = static_cast<float>(bad);
      CHECK_REFUSED(codec.encode(broken), "not finite");
    }
  std::vector<std::uint8_t> codes(8, 77), few(7);
  std::vector<Quest<float>::Params> params(2, {-1}), one(1);
  Vector<float> token = random.vector<float>(8);
  CHECK_REFUSED(codec.encode(token, few, params), "codes has 7 entries, expected the head dimension 8");
  CHECK_REFUSED(codec.encode(token, codes, one), "params has 1 entries, expected one a group, 2");
  CHECK_REFUSED(codec.encode(random.vector<float>(9), codes, params), "expected 8 x 1");
  token[7] = static_cast<float>(test::nan);
  CHECK_REFUSED(codec.encode(token, codes, params), "not finite");
  CHECK(codes == std::vector<std::uint8_t>(8, 77));
  CHECK(params[0].step == -1);
  auto encoded = codec.encode(x);
  encoded.params.pop_back();
  CHECK_REFUSED(codec.decode(encoded), "params has 5 entries, expected 6");
  // Finite, but T x is not.
  const Codec huge(Dense<float>(1e20 * SquareMatrix<double>::Identity(8, 8)), Quest<float>(2));
  CHECK_REFUSED(huge.encode(Batch<float>::Constant(1, 8, 1e30F)), "overflows");
}
