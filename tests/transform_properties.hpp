// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TESTS_TRANSFORM_PROPERTIES_HPP
#define WUSHKV_TESTS_TRANSFORM_PROPERTIES_HPP

#include "support.hpp"
#include "wushkv/transform/concept.hpp"

namespace test {

inline Batch<double> products(const Batch<double>& a, const Batch<double>& b) { return a * b.transpose(); }

/// What every transform of the library must do. `tolerance` is relative and for double; floats get theirs
/// from epsilon.
template <wushkv::Transform T>
void check_transform(const T& transform, Random& random, double tolerance = 1e-11) {
  using Scalar = typename T::Scalar;
  if (std::is_same_v<Scalar, float>) tolerance *= 5e8;
  const Index dim = transform.dim(), tokens = random.integer(1, 9);
  CAPTURE(dim);
  CAPTURE(tokens);
  const Batch<Scalar> x = random.batch<Scalar>(tokens, dim), q = random.batch<Scalar>(tokens, dim);
  const Batch<Scalar> y = transform.forward(x), z = transform.adjoint_inverse(q);

  {
    INFO("inverse undoes forward, and forward inverse");
    CHECK(relative_difference(transform.inverse(y), x) < tolerance);
    CHECK(relative_difference(transform.forward(transform.inverse(x)), x) < tolerance);
  }
  if constexpr (wushkv::is_linear_v<T>) {
    {
      INFO("inner products are kept: (T k) . (T^-T q) = k . q");
      CHECK(relative_difference_of(products(as_doubles(y), as_doubles(z)),
                                   products(as_doubles(x), as_doubles(q))) <
            tolerance * std::sqrt(static_cast<double>(dim)));
    }
    {
      INFO("the matrix says the same");
      CHECK(relative_difference_of(products(as_doubles(x), as_doubles(wushkv::to_matrix(transform))),
                                   as_doubles(y)) < tolerance);
    }
  }
  {
    INFO("a token and a row of a batch give the same");
    for (Index t = 0; t < tokens; ++t) {
      const Vector<Scalar> token = x.row(t).transpose(), query = q.row(t).transpose();
      CHECK(relative_difference(transform.forward(token), y.row(t).transpose()) < tolerance);
      CHECK(relative_difference(transform.inverse(transform.forward(token)), token) < tolerance);
      CHECK(relative_difference(transform.adjoint_inverse(query), z.row(t).transpose()) < tolerance);
    }
  }
  {
    INFO("any storage: rows far apart, column-major, strided, expressions");
    Batch<Scalar> wide = random.batch<Scalar>(tokens, 3 * dim + 5);
    wide.middleCols(dim + 2, dim) = x;
    CHECK(test::identical(transform.forward(wide.middleCols(dim + 2, dim)), y));
    const Eigen::Matrix<Scalar, Eigen::Dynamic, Eigen::Dynamic> column_major = x;
    CHECK(test::identical(transform.forward(column_major), y));
    CHECK(relative_difference(transform.forward(Scalar(2) * x), transform.forward((x + x).eval())) <
          tolerance);
    Batch<Scalar> out = random.batch<Scalar>(tokens, 3 * dim);
    const Batch<Scalar> before = out;
    transform.forward_to(wide.middleCols(dim + 2, dim), out.middleCols(dim, dim));
    CHECK(test::identical(out.middleCols(dim, dim), y));
    CHECK(test::identical(out.leftCols(dim), before.leftCols(dim)));
    CHECK(test::identical(out.rightCols(dim), before.rightCols(dim)));
    const Vector<Scalar> token = x.row(0).transpose();
    CHECK(relative_difference(transform.forward(column_major.row(0).transpose()), transform.forward(token)) <
          tolerance);
  }
  {
    INFO("one token allocates nothing");
    const Vector<Scalar> token = x.row(0).transpose();
    Vector<Scalar> a(dim), b(dim), c(dim);
    Eigen::internal::set_is_malloc_allowed(false);
    transform.forward_to(token, a);
    transform.inverse_to(a, b);
    transform.adjoint_inverse_to(token, c);
    Eigen::internal::set_is_malloc_allowed(true);
    CHECK(relative_difference(b, token) < tolerance);
  }
  {
    INFO("no tokens are no error");
    CHECK(transform.forward(Batch<Scalar>(0, dim)).rows() == 0);
  }
  {
    INFO("bad input is refused, and the result left alone");
    Batch<Scalar> bad = x, out = q;
    bad(tokens - 1, dim - 1) = static_cast<Scalar>(random.pick({nan, infinity, -infinity}));
    CHECK_REFUSED(transform.forward(bad), "not finite");
    CHECK_REFUSED(transform.inverse(bad), "not finite");
    CHECK_REFUSED(transform.adjoint_inverse(bad), "not finite");
    CHECK_REFUSED(transform.forward(Vector<Scalar>(bad.row(tokens - 1).transpose())), "not finite");
    CHECK_REFUSED(transform.forward_to(bad, out), "not finite");
    CHECK(test::identical(out, q));
    CHECK_REFUSED(transform.forward(random.batch<Scalar>(2, dim + 1)), "expected");
    CHECK_REFUSED(transform.forward(random.vector<Scalar>(dim + 1)), "expected");
    Batch<Scalar> small(tokens, dim + 1);
    CHECK_REFUSED(transform.forward_to(x, small), "expected");
    CHECK_REFUSED(transform.forward_to(out, out), "overlaps");
  }
}

}  // namespace test

#endif  // WUSHKV_TESTS_TRANSFORM_PROPERTIES_HPP
