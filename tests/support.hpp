// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TESTS_SUPPORT_HPP
#define WUSHKV_TESTS_SUPPORT_HPP

#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <random>
#include <string>

#include "wushkv/core/types.hpp"

#if defined(NDEBUG) && defined(EIGEN_RUNTIME_NO_MALLOC)
#error "the tests need Eigen's assertions: they are what catches an allocation on a hot path"
#endif

namespace test {

using wushkv::Batch;
using wushkv::Index;
using wushkv::SquareMatrix;
using wushkv::Vector;

inline constexpr double nan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double infinity = std::numeric_limits<double>::infinity();

inline std::string data(const std::string& name) { return std::string(WUSHKV_TEST_DATA "/") + name; }

/// The directory of reference files that are too large for tests/data, empty where it is not there.
inline std::string shared(const std::string& name) {
  const char* const set = std::getenv("WUSHKV_SHARED");
  const std::filesystem::path path = std::filesystem::path(set != nullptr ? set : WUSHKV_SHARED_DIR) / name;
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored) ? path.string() : std::string();
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : generator_(seed) {}

  double normal() { return std::normal_distribution<double>()(generator_); }
  double uniform(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(generator_);
  }
  Index integer(Index low, Index high) { return std::uniform_int_distribution<Index>(low, high)(generator_); }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[static_cast<std::size_t>(integer(0, static_cast<Index>(choices.size()) - 1))];
  }

  template <class Scalar = double>
  Batch<Scalar> batch(Index rows, Index cols) {
    return Batch<Scalar>::NullaryExpr(rows, cols,
                                      [this](Index, Index) { return static_cast<Scalar>(normal()); });
  }
  template <class Scalar = double>
  Vector<Scalar> vector(Index size) {
    return Vector<Scalar>::NullaryExpr(size, [this](Index) { return static_cast<Scalar>(normal()); });
  }
  SquareMatrix<double> matrix(Index dim) { return batch(dim, dim); }
  /// Well conditioned, symmetric, positive definite, with eigenvalues over about two decades.
  SquareMatrix<double> definite(Index dim) {
    const SquareMatrix<double> a = matrix(dim);
    return (a * a.transpose() + 0.05 * static_cast<double>(dim) * SquareMatrix<double>::Identity(dim, dim)) *
           uniform(0.1, 10);
  }

 private:
  std::mt19937_64 generator_;
};

/// One function for all types, so that every comparison in a test does not instantiate its own arithmetic.
inline double relative_difference_of(const Batch<double>& a, const Batch<double>& b) {
  if (a.rows() != b.rows() || a.cols() != b.cols()) return infinity;
  if (a.size() == 0) return 0;
  const double largest = b.cwiseAbs().maxCoeff();
  const double difference = (a - b).cwiseAbs().maxCoeff();
  return largest > 0 ? difference / largest : difference;
}

template <class A>
Batch<double> as_doubles(const Eigen::DenseBase<A>& a) {
  Batch<double> result(a.rows(), a.cols());
  for (Index i = 0; i < a.rows(); ++i)
    for (Index j = 0; j < a.cols(); ++j) result(i, j) = static_cast<double>(a.derived().coeff(i, j));
  return result;
}

/// Largest difference relative to the largest entry of `expected`.
template <class A, class B>
double relative_difference(const Eigen::DenseBase<A>& actual, const Eigen::DenseBase<B>& expected) {
  return relative_difference_of(as_doubles(actual.derived().eval()), as_doubles(expected.derived().eval()));
}

/// Same shape and same values.
template <class A, class B>
bool identical(const Eigen::DenseBase<A>& a, const Eigen::DenseBase<B>& b) {
  const Batch<double> left = as_doubles(a.derived().eval()), right = as_doubles(b.derived().eval());
  return left.rows() == right.rows() && left.cols() == right.cols() && left == right;
}

/// The message of the exception that `call` throws, empty if it throws none.
template <class Error = std::invalid_argument, class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace test

/// `call` must throw `std::invalid_argument` with `part` in its message.
#define CHECK_REFUSED(call, part)                                                                        \
  do {                                                                                                   \
    const std::string refusal_text = test::message_of([&] { static_cast<void>(call); });                 \
    CHECK_MESSAGE(refusal_text.find(part) != std::string::npos, #call " gave '" << refusal_text << "'"); \
  } while (false)

#endif  // WUSHKV_TESTS_SUPPORT_HPP
