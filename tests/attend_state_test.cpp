// SPDX-License-Identifier: Apache-2.0
#include "wushkv/attend/state.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

#include "allocation_counter.hpp"
#include "support.hpp"

using namespace wushkv;

namespace {

/// Rows with logits and values of their own, and what they come to.
struct Softmax {
  Batch<double> logits;               ///< `[rows, tokens]`
  std::vector<Batch<double>> values;  ///< a row's `[tokens, value_dim]`
  AttentionState<double> part(Index begin, Index end) const {
    AttentionState<double> state(logits.rows(), values.front().cols());
    if (begin == end) return state;
    for (Index r = 0; r < logits.rows(); ++r) {
      const auto z = logits.row(r).segment(begin, end - begin);
      state.max()[r] = z.maxCoeff();
      const Vector<double> w = (z.array() - z.maxCoeff()).exp().matrix().transpose();
      state.sum()[r] = w.sum();
      state.accumulator().row(r) =
          w.transpose() * values[static_cast<std::size_t>(r)].middleRows(begin, end - begin);
    }
    return state;
  }
};

Softmax random_rows(test::Random& random, Index rows, Index tokens, Index dim) {
  Softmax result;
  result.logits = 10 * random.batch(rows, tokens);
  for (Index r = 0; r < rows; ++r) result.values.push_back(random.batch(tokens, dim));
  return result;
}

Batch<double> outputs(const AttentionState<double>& state) {
  return state.sum().cwiseInverse().asDiagonal() * state.accumulator();
}

}  // namespace

TEST_CASE("a new state has seen nothing") {
  const AttentionState<float> state(3, 2);
  CHECK(state.rows() == 3);
  CHECK(state.value_dim() == 2);
  CHECK((state.max().array() == -std::numeric_limits<float>::infinity()).all());
  CHECK(state.sum().isZero(0));
  CHECK(state.accumulator().isZero(0));
  CHECK(AttentionState<float>().rows() == 0);
}

TEST_CASE("parts merge to the whole in any order and grouping") {
  test::Random random(420);
  for (int round = 0; round < 30; ++round) {
    const Index tokens = random.integer(1, 40);
    const Softmax rows = random_rows(random, 5, tokens, 3);
    const Batch<double> whole = outputs(rows.part(0, tokens));
    std::vector<Index> cuts = {0, tokens};
    for (Index i = random.integer(0, 7); i > 0; --i) cuts.push_back(random.integer(0, tokens));
    std::sort(cuts.begin(), cuts.end());
    std::vector<AttentionState<double>> parts;
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) parts.push_back(rows.part(cuts[i], cuts[i + 1]));
    parts.push_back(AttentionState<double>(5, 3));  // seen nothing
    while (parts.size() > 1) {                      // any two of them
      std::swap(parts.back(),
                parts[static_cast<std::size_t>(random.integer(0, static_cast<Index>(parts.size()) - 1))]);
      const AttentionState<double> last = parts.back();
      parts.pop_back();
      parts[static_cast<std::size_t>(random.integer(0, static_cast<Index>(parts.size()) - 1))].merge(last);
    }
    CHECK(test::relative_difference(outputs(parts.front()), whole) < 1e-13);
  }
}

TEST_CASE("rows without weight merge without a NaN") {
  test::Random random(421);
  const AttentionState<double> some = random_rows(random, 2, 4, 3).part(0, 4);
  AttentionState<double> state(2, 3);
  state.merge(AttentionState<double>(2, 3));
  CHECK(state.sum().isZero(0));
  CHECK((state.max().array() == -test::infinity).all());
  state.merge(some);
  CHECK(test::identical(state.accumulator(), some.accumulator()));
  CHECK(test::identical(state.max(), some.max()));
  state.merge(AttentionState<double>(2, 3));
  CHECK(test::identical(state.sum(), some.sum()));
  AttentionState<double> far = some;  // logits that vanish beside the others
  far.max().array() -= 1e6;
  far.merge(some);
  CHECK(test::identical(far.accumulator(), some.accumulator()));
}

TEST_CASE("an extra logit takes its share of the weight") {
  test::Random random(422);
  const Softmax rows = random_rows(random, 6, 5, 2);
  const std::vector<double> logits = {-3, 0.5, 40};
  AttentionState<double> state = rows.part(0, 5);
  state.add_logits(logits);
  Batch<double> expected(6, 2);
  for (Index r = 0; r < 6; ++r) {
    const Vector<double> w = rows.logits.row(r).array().exp().matrix().transpose();
    expected.row(r) = w.transpose() * rows.values[static_cast<std::size_t>(r)] /
                      (w.sum() + std::exp(logits[static_cast<std::size_t>(r % 3)]));
  }
  CHECK(test::relative_difference(outputs(state), expected) < 1e-13);
  AttentionState<double> empty(3, 2);
  empty.add_logits(logits);
  CHECK(test::identical(empty.max(), Eigen::Map<const Vector<double>>(logits.data(), 3)));
  CHECK(empty.sum().isOnes(0));
  CHECK(empty.accumulator().isZero(0));
}

TEST_CASE("a size seen before allocates nothing") {
  AttentionState<float> state(16, 64);
  const AttentionState<float> other(8, 32);
  const std::vector<float> logits(4, 1.0F);
  CHECK(test::allocations_of([&] {
          state.reset(8, 32);
          state.merge(other);
          state.add_logits(logits);
          state.reset(16, 64);
        }) == 0);
  CHECK(state.sum().isZero(0));
  CHECK(test::allocations_of([&] { state.reset(17, 64); }) > 0);
}

TEST_CASE("bad input is refused and changes nothing") {
  AttentionState<double> state(4, 2);
  CHECK_REFUSED(state.merge(AttentionState<double>(3, 2)), "other has 3 rows of 2 values, expected 4 of 2");
  CHECK_REFUSED(state.merge(AttentionState<double>(4, 3)), "other has 4 rows of 3 values");
  CHECK_REFUSED(state.reset(-1, 2), "-1 rows");
  CHECK_REFUSED(state.add_logits(std::vector<double>(3, 0.0)), "3 logits came for 4 rows");
  CHECK_REFUSED(state.add_logits(std::span<const double>()), "0 logits");
  CHECK_REFUSED(state.add_logits(std::vector<double>{0, test::nan}), "not finite");
  CHECK(state.rows() == 4);
  CHECK(state.sum().isZero(0));
}
