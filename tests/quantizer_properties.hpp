// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_TESTS_QUANTIZER_PROPERTIES_HPP
#define WUSHKV_TESTS_QUANTIZER_PROPERTIES_HPP

#include <cmath>
#include <vector>

#include "support.hpp"
#include "wushkv/core/check.hpp"
#include "wushkv/quantize/concept.hpp"

namespace test {

template <class Q>
Vector<typename Q::Scalar> decoded(const Q& quantizer, const Vector<typename Q::Scalar>& group) {
  const auto params = quantizer.fit(group);
  Vector<typename Q::Scalar> result(group.size());
  for (Index i = 0; i < group.size(); ++i)
    result[i] = quantizer.decode(quantizer.encode(group[i], params), params);
  return result;
}

/// Groups of every kind that data has: normal, heavy-tailed, shifted, single values.
template <class Scalar>
Vector<Scalar> any_group(Random& random) {
  Vector<double> group = random.vector(random.integer(1, 130));
  switch (random.integer(0, 3)) {
    case 0:
      break;
    case 1:
      group = group.array().cube();
      break;
    case 2:
      group.array() += random.uniform(-20, 20);
      break;
    default:
      group[random.integer(0, group.size() - 1)] *= 100;
  }
  return (group * std::pow(10.0, random.uniform(-1, 1))).cast<Scalar>();
}

/// Groups that are no error and must decode to finite values: zero, constant, one outlier, denormal, huge,
/// tiny.
template <class Scalar>
std::vector<Vector<Scalar>> degenerate_groups() {
  using Limits = std::numeric_limits<Scalar>;
  std::vector<Vector<Scalar>> groups;
  const auto constant = [&](Scalar value) { groups.push_back(Vector<Scalar>::Constant(64, value)); };
  for (const Scalar value : {Scalar(0), Scalar(3.5), Scalar(-3.5), Scalar(1e-8), Scalar(-7e4), Scalar(1e30),
                             Scalar(-1e-30), Limits::denorm_min(), Limits::max(), Limits::lowest()})
    constant(value);
  for (const Scalar outlier : {Scalar(1e3), Scalar(-1e6), Scalar(1e30), Limits::max()}) {
    constant(Scalar(0.25));
    groups.back()[5] = outlier;
    constant(Scalar(0));
    groups.back()[63] = outlier;
  }
  constant(Limits::max());
  groups.back()[0] = Limits::lowest();
  constant(Limits::denorm_min());
  for (Index i = 0; i < 64; i += 3) groups.back()[i] = -Scalar(i) * Limits::denorm_min();
  constant(Scalar(1000));
  for (Index i = 0; i < 64; ++i) groups.back()[i] += static_cast<Scalar>(i) * Scalar(1e-3);
  return groups;
}

/// `reach`: parameters' storage holds groups of ordinary size times 2^±reach.
template <wushkv::Quantizer Q>
void check_quantizer(const Q& quantizer, Random& random, int reach = 20) {
  using Scalar = typename Q::Scalar;
  const int bits = static_cast<int>(quantizer.bits());
  CAPTURE(bits);
  bool in_range = true, repeats = true, equivariant = true;
  for (int round = 0; round < 60; ++round) {
    const Vector<Scalar> group = any_group<Scalar>(random);
    const auto params = quantizer.fit(group);
    // Exact for powers of two.
    const Scalar factor = std::ldexp(Scalar(1), static_cast<int>(random.integer(-reach, reach)));
    const auto scaled = quantizer.fit(Vector<Scalar>(factor * group));
    for (const Scalar x : group) {
      const auto code = quantizer.encode(x, params);
      in_range &= static_cast<std::uint64_t>(code) < (std::uint64_t{1} << bits);
      repeats &= quantizer.encode(quantizer.decode(code, params), params) == code;
      const auto scaled_code = quantizer.encode(factor * x, scaled);
      if (bits <= 8)
        equivariant &= scaled_code == code;
      else if (std::abs(x) < Scalar(1e-3))
        continue;  // a pass-through has no scale of its own: what is denormal in its type is no multiple
      equivariant &= quantizer.decode(scaled_code, scaled) == factor * quantizer.decode(code, params);
    }
  }
  CHECK_MESSAGE(in_range, "codes are below 2^bits");
  CHECK_MESSAGE(repeats, "a decoded value encodes to its code");
  CHECK_MESSAGE(equivariant, "powers of two scale through");

  bool finite = true, bounded = true;
  for (const Vector<Scalar>& group : degenerate_groups<Scalar>()) {
    const Vector<Scalar> back = decoded(quantizer, group);
    finite &= wushkv::all_finite(back);
    const double largest = static_cast<double>(group.cwiseAbs().maxCoeff());
    if (largest == 0) continue;
    const Vector<double> x = group.template cast<double>() / largest,
                         y = back.template cast<double>() / largest;
    // One outlier among zeros is where levels around the root mean square lose most, and percentiles lose all
    // of it. Parameters that leave the range of their storage may lose more.
    const bool ordinary = largest > 1e-3 && largest < 1e5;
    bounded &= (y - x).squaredNorm() <= (bits >= 8 && ordinary ? 1.0001 : 4) * x.squaredNorm();
  }
  CHECK_MESSAGE(finite, "degenerate groups decode to finite values");
  CHECK_MESSAGE(bounded, "and not far from themselves");

  // What is not finite is refused, not spread.
  Vector<Scalar> broken = random.vector<Scalar>(16);
  for (const double bad : {nan, infinity, -infinity}) {
    if (bits > 8) break;  // a pass-through has nothing to fit
    broken[random.integer(0, 15)] = static_cast<Scalar>(bad);
    CHECK_REFUSED(quantizer.fit(broken), "not finite");
  }
  CHECK(decoded(quantizer, Vector<Scalar>::Zero(64)).isZero(0));
}

}  // namespace test

#endif  // WUSHKV_TESTS_QUANTIZER_PROPERTIES_HPP
