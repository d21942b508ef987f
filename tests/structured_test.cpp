// SPDX-License-Identifier: Apache-2.0
// Identity, Diagonal, Permutation, BlockDiagonal and Kronecker.
#include "transform_properties.hpp"
#include "wushkv/transform/block_diagonal.hpp"
#include "wushkv/transform/diagonal.hpp"
#include "wushkv/transform/hadamard.hpp"
#include "wushkv/transform/identity.hpp"
#include "wushkv/transform/kronecker.hpp"
#include "wushkv/transform/permutation.hpp"

using namespace wushkv;

namespace {

SquareMatrix<double> near_identity(test::Random& random, Index dim) {
  return SquareMatrix<double>::Identity(dim, dim) +
         random.matrix(dim) / (4 * std::sqrt(static_cast<double>(dim)));
}

// A user's transform, with nothing but what the concept asks for, and no templates.
struct Halving {
  using Scalar = double;
  Index size;
  Index dim() const { return size; }
  Vector<double> forward(const Vector<double>& x) const { return x / 2; }
  Vector<double> inverse(const Vector<double>& y) const { return 2 * y; }
  Vector<double> adjoint_inverse(const Vector<double>& q) const { return 2 * q; }
  Batch<double> forward(const Batch<double>& x) const { return x / 2; }
  Batch<double> inverse(const Batch<double>& y) const { return 2 * y; }
  Batch<double> adjoint_inverse(const Batch<double>& q) const { return 2 * q; }
};

}  // namespace

TEST_CASE_TEMPLATE("Identity", Scalar, float, double) {
  test::Random random(9);
  test::check_transform(Identity<Scalar>(20), random);
  test::check_transform(Identity<Scalar, 16>(), random);
  CHECK_REFUSED(Identity<Scalar>(0), "positive");
  CHECK_REFUSED(Identity<Scalar>(), "positive");
  CHECK_REFUSED((Identity<Scalar, 16>(8)), "fixed");
}

TEST_CASE_TEMPLATE("Diagonal", Scalar, float, double) {
  test::Random random(10);
  const Vector<double> d = Vector<double>::NullaryExpr(40, [&](Index) {
    return random.uniform(0.2, 5) * random.pick({-1, 1});
  });
  test::check_transform(Diagonal<Scalar>(d), random);
  test::check_transform(Diagonal<Scalar, 40>(d), random);
  CHECK(test::relative_difference(to_matrix(Diagonal<Scalar>(d)), SquareMatrix<double>(d.asDiagonal())) <
        1e-6);
  for (const double bad : {0.0, test::nan, test::infinity, 1e-320}) {
    Vector<double> entries = d;
    entries[7] = bad;
    CHECK_FALSE(test::message_of([&] { Diagonal<Scalar>{entries}; }).empty());
  }
  CHECK_REFUSED(Diagonal<Scalar>(Vector<double>(0)), "0 entries");
  CHECK_REFUSED((Diagonal<Scalar, 8>(d)), "expected 8 x 1");
}

TEST_CASE("Permutation") {
  test::Random random(11);
  test::check_transform(Permutation<float>({3, 0, 2, 1}), random);
  const Vector<double> x = random.vector(4);
  const Vector<double> y = Permutation<double>({3, 0, 2, 1}).forward(x);
  CHECK(test::identical(y, Vector<double>(Eigen::Vector4d(x[3], x[0], x[2], x[1]))));
  CHECK_REFUSED(Permutation<float>({0, 1, 1}), "twice");
  CHECK_REFUSED(Permutation<float>({0, 3, 1}), "expected 0 to 2");
  CHECK_REFUSED(Permutation<float>({0, -1}), "expected 0 to 1");
  CHECK_REFUSED(Permutation<float>(std::vector<Index>{}), "0 entries");
}

TEST_CASE_TEMPLATE("BlockDiagonal", Scalar, float, double) {
  test::Random random(12);
  test::check_transform(BlockDiagonal(Hadamard<Scalar>(16), 5), random);
  std::vector<Dense<Scalar>> blocks;
  for (int b = 0; b < 3; ++b) blocks.emplace_back(near_identity(random, 12));
  const BlockDiagonal<Dense<Scalar>> transform(blocks);
  test::check_transform(transform, random);
  test::check_transform(BlockDiagonal<Dense<Scalar>, 36>(blocks), random);
  SquareMatrix<Scalar> whole = SquareMatrix<Scalar>::Zero(36, 36);
  for (Index b = 0; b < 3; ++b)
    whole.block(12 * b, 12 * b, 12, 12) = blocks[static_cast<std::size_t>(b)].matrix();
  CHECK(test::identical(to_matrix(transform), whole));
  CHECK_REFUSED(BlockDiagonal<Dense<Scalar>>(std::vector<Dense<Scalar>>{}), "empty");
  CHECK_REFUSED(BlockDiagonal(Hadamard<Scalar>(8), -1), "empty");
  blocks.emplace_back(near_identity(random, 6));
  CHECK_REFUSED(BlockDiagonal<Dense<Scalar>>(blocks), "expected 12");
  CHECK_REFUSED((BlockDiagonal<Hadamard<Scalar>, 64>(Hadamard<Scalar>(8), 4)), "expected 64");
}

TEST_CASE("BlockDiagonal takes a user's transform that has no forward_to") {
  test::Random random(13);
  const BlockDiagonal<Halving> transform(Halving{4}, 3);
  const Batch<double> x = random.batch(5, 12);
  CHECK(test::identical(transform.forward(x), x / 2));
  CHECK(test::identical(transform.inverse(x), 2 * x));
  const Vector<double> q = random.vector(12);
  CHECK(test::identical(transform.adjoint_inverse(q), 2 * q));
}

namespace {

// Says it has four coordinates, returns three.
struct Liar : Halving {
  Vector<double> forward(const Vector<double>& x) const { return x.head(3); }
  Batch<double> forward(const Batch<double>& x) const { return x.leftCols(3); }
};

}  // namespace

TEST_CASE("a user's transform that returns another shape is caught") {
  test::Random random(18);
  const Liar liar{{4}};
  Vector<double> token = random.vector(4), out(4);
  Batch<double> batch = random.batch(2, 4), rows(2, 4);
  CHECK_REFUSED(forward_to(liar, token, out), "is 3 x 1, expected 4 x 1");
  CHECK_REFUSED(forward_to(liar, batch, rows), "is 2 x 3, expected 2 x 4");
  CHECK_REFUSED(forward_to(liar, batch, out), "expected 2 x 4");
}

TEST_CASE("one row read again and again is read, and not written") {
  const Vector<double> row = Vector<double>::LinSpaced(8, 0, 7);
  const Eigen::Map<const Batch<double>, 0, Eigen::OuterStride<>> repeated(row.data(), 4, 8,
                                                                          Eigen::OuterStride<>(0));
  Batch<double> y(4, 8);
  Identity<double>(8).forward_to(repeated, y);
  CHECK(test::identical(y, repeated));
  forward_to(Identity<double>(8), repeated, y);
  CHECK(test::identical(y, repeated));
  Vector<double> target = row;
  Eigen::Map<Batch<double>, 0, Eigen::OuterStride<>> into_one(target.data(), 4, 8, Eigen::OuterStride<>(0));
  CHECK_REFUSED(Identity<double>(8).forward_to(y, into_one), "rows in one place");
}

TEST_CASE("overlapping rows are refused, neighbouring slices of one buffer are not") {
  Batch<double> wide = Batch<double>::Ones(5, 40);
  const Identity<double> transform(8);
  for (const Index shift : {0, 1, 7})
    CHECK_REFUSED(transform.forward_to(wide.middleCols(10, 8), wide.middleCols(10 + shift, 8)), "overlaps");
  CHECK_REFUSED(transform.forward_to(wide.middleCols(10, 8), wide.middleCols(5, 8)), "overlaps");
  transform.forward_to(wide.leftCols(8), wide.middleCols(8, 8));
  transform.forward_to(wide.rightCols(8), wide.leftCols(8));
  Vector<double> line = Vector<double>::Ones(20);
  CHECK_REFUSED(transform.forward_to(line.head(8), line.segment(3, 8)), "overlaps");
  transform.forward_to(line.head(8), line.segment(8, 8));
}

TEST_CASE_TEMPLATE("Kronecker is the Kronecker product of its factors", Scalar, float, double) {
  test::Random random(14);
  for (const auto& [rows, cols] : {std::pair<Index, Index>{8, 8}, {8, 16}, {3, 20}, {1, 6}}) {
    const SquareMatrix<double> a = near_identity(random, rows), b = near_identity(random, cols);
    const Kronecker<Scalar> transform{Dense<Scalar>(a), Dense<Scalar>(b)};
    test::check_transform(transform, random);
    SquareMatrix<double> product(rows * cols, rows * cols);
    for (Index i = 0; i < rows; ++i)
      for (Index j = 0; j < rows; ++j) product.block(i * cols, j * cols, cols, cols) = a(i, j) * b;
    CHECK(test::relative_difference(to_matrix(transform), product) < 1e-6);
  }
  const Dense<Scalar> eight(near_identity(random, 8));
  CHECK(Kronecker<Scalar, 64>(eight, eight).dim() == 64);
  CHECK_REFUSED((Kronecker<Scalar, 32>(eight, eight)), "expected 32");
}
