// SPDX-License-Identifier: Apache-2.0
// Attention over pages against exact attention over the tokens that they decode to.
#include "wushkv/attend/attend.hpp"

#include <set>
#include <string>

#include "attend_pages.hpp"
#include "attention_reference.hpp"
#include "wushkv/measure/attention.hpp"

using namespace wushkv;
using Eigen::bfloat16;
using Eigen::half;

namespace {

struct Shape {
  Index key_dim, value_dim, group_size, gqa;
};

/// What the sweep has been through, and the worst difference.
struct Seen {
  std::set<Index> dims, groups, gqa, lengths;
  std::set<int> bits;
  double worst = 0;
};

std::vector<Index> group_sizes(Index dim) {
  std::vector<Index> sizes;
  for (Index size = 16; size <= dim; ++size)
    if (dim % size == 0) sizes.push_back(size);
  return sizes;
}

template <class Q>
Q quantizer(int bits) {
  if constexpr (requires { Q::min_max(bits); })
    return Q::min_max(bits);
  else
    return Q(bits);
}

template <class Q>
std::vector<Codec<Dense<float>, Q>> codecs(test::Random& random, Index heads, Index dim, int bits,
                                           Index group_size) {
  std::vector<Codec<Dense<float>, Q>> result;
  for (Index h = 0; h < heads; ++h)
    result.emplace_back(test::well_conditioned(random, dim), quantizer<Q>(bits), group_size);
  return result;
}

/// Exact attention over what the pages decode to, in original coordinates: row i is the output of a decode
/// step at length i + 1.
template <class Pages>
Batch<double> exact(const AttentionHeads& heads, const Batch<float>& q, const Pages& pages,
                    const AttentionOptions& options = {}) {
  return attention(heads, q.cast<double>().eval(), pages.keys.original, pages.values.original, options);
}

/// Decode at every length from 1 to three pages and one token, and chunked prefill over all of it.
template <class KeyQuantizer, class ValueQuantizer, class Layout>
void check_equality(test::Random& random, const Shape& shape, int bits, Seen& seen) {
  const Index kv_heads = random.integer(1, 2), n = 3 * 16 + 1;
  const AttentionHeads heads{kv_heads * shape.gqa, kv_heads, shape.key_dim, shape.value_dim};
  const auto value_sizes = group_sizes(shape.value_dim);
  const Index value_group = shape.value_dim % shape.group_size == 0 ? shape.group_size : value_sizes.front();
  const auto keys = codecs<KeyQuantizer>(random, kv_heads, shape.key_dim, bits, shape.group_size);
  const auto values = codecs<ValueQuantizer>(random, kv_heads, shape.value_dim, 9 - bits, value_group);
  const Attention attend(heads, keys, values, {}, Layout());
  using Attend = std::remove_const_t<decltype(attend)>;
  typename Attend::Workspace workspace;

  const Batch<float> q = random.batch<float>(n, heads.query_heads * shape.key_dim),
                     k = random.batch<float>(n, kv_heads * shape.key_dim),
                     v = random.batch<float>(n, kv_heads * shape.value_dim);
  const test::Pages<typename decltype(keys)::value_type, typename decltype(values)::value_type, Layout> plain(
      keys, values, k, v, {.heads_outside = bits % 2 == 0}),
      windows(keys, values, k, v, {.sink = bits, .recent = 20 - 2 * bits, .heads_outside = bits % 2 == 1});

  const Batch<double> expected = exact(heads, q, plain);
  Batch<float> out(n, heads.query_heads * shape.value_dim);
  for (Index length = 1; length <= n; ++length) {
    SequenceView view = plain.view();
    view.pages.tokens = length;
    Vector<float> token(out.cols());
    attend.decode(view, q.row(length - 1).transpose(), token, workspace);
    out.row(length - 1) = token.transpose();
    seen.lengths.insert(length);
  }
  seen.worst = std::max(seen.worst, test::relative_difference(out, expected));
  attend.prefill(plain.view(), q, out, workspace);
  seen.worst = std::max(seen.worst, test::relative_difference(out, expected));
  attend.prefill(windows.view(), q, out, workspace);
  seen.worst = std::max(seen.worst, test::relative_difference(out, exact(heads, q, windows)));

  seen.dims.insert({shape.key_dim, shape.value_dim});
  seen.groups.insert({shape.group_size, value_group});
  seen.gqa.insert(shape.gqa);
  seen.bits.insert(bits);
}

/// All bit widths and, over the calls with `offset` 0 … 3, every head dimension and group size.
template <class KeyQuantizer, class ValueQuantizer, class Layout>
void sweep(int offset, Seen& seen) {
  test::Random random(static_cast<std::uint64_t>(400 + offset));
  const std::vector<std::pair<Index, Index>> dims = {{64, 64},   {80, 80},   {96, 96},  {112, 112},
                                                     {128, 128}, {192, 128}, {256, 256}};
  const std::vector<Index> gqa = {1, 3, 4, 8, 7};
  // Every dimension with every width; one group over the head half of the time, every smaller one among the
  // other half.
  std::size_t at = static_cast<std::size_t>(offset);
  for (const auto& [key_dim, value_dim] : dims) {
    const auto sizes = group_sizes(key_dim);
    for (int bits = 1; bits <= 8; ++bits, ++at)
      check_equality<KeyQuantizer, ValueQuantizer, Layout>(
          random,
          {key_dim, value_dim, bits % 2 == 0 ? key_dim : sizes[at / 2 % sizes.size()], gqa[at % gqa.size()]},
          bits, seen);
  }
  CAPTURE(offset);
  CHECK(seen.worst < 1e-5);
}

}  // namespace

TEST_CASE("attention over pages equals attention over the decoded tokens within 1e-5") {
  Seen seen;
  sweep<Quest<float, Dynamic, half>, Affine<float, Dynamic, half>, TokenMajor>(0, seen);
  sweep<Affine<float, Dynamic, bfloat16>, LloydMax<float, Dynamic, bfloat16>, TokenInterleaved<>>(1, seen);
  sweep<LloydMax<float>, Quest<float, Dynamic, bfloat16>, TokenMajor>(2, seen);
  sweep<LloydMax<float, Dynamic, half>, Quest<float>, TokenInterleaved<>>(3, seen);
  CHECK(seen.dims == std::set<Index>{64, 80, 96, 112, 128, 192, 256});
  CHECK(seen.gqa == std::set<Index>{1, 3, 4, 7, 8});
  CHECK(seen.bits.size() == 8);
  CHECK(seen.lengths.size() == 49);
  for (const Index size : {16, 24, 32, 48, 64, 80, 96, 112, 128, 192, 256})
    CHECK(seen.groups.count(size) == 1);
  MESSAGE("largest difference, relative to the largest output: " << seen.worst);
}

namespace {

/// The outputs of attention.safetensors by decode at each length, and by prefill.
template <class Stored>
void check_reference(const test::PageOptions& pages_options, double tolerance) {
  using FileCodec = Codec<Hadamard<float>, PassThrough<float, Stored>>;
  const test::AttentionReference file;
  const std::vector<FileCodec> codecs(2, FileCodec(Hadamard<float>(16), PassThrough<float, Stored>()));
  const Batch<float> q = file.q.cast<float>(), k = file.k.cast<float>(), v = file.v.cast<float>();
  struct Case {
    std::string name;
    AttendOptions options;
  };
  for (const Case& c : {Case{"output", {}}, Case{"output.softcap20", {.soft_cap = 20}},
                        Case{"output.window8", {.window = 8}}}) {
    CAPTURE(c.name);
    const Attention attend(file.heads, codecs, codecs, c.options);
    typename decltype(attend)::Workspace workspace;
    Batch<float> all(40, 96), steps(40, 96);
    const test::Pages<FileCodec, FileCodec> pages(codecs, codecs, k, v, pages_options);
    attend.prefill(pages.view(), q, all, workspace);
    for (Index i = 0; i < 40; ++i) {
      const test::Pages<FileCodec, FileCodec> part(codecs, codecs, k.topRows(i + 1), v.topRows(i + 1),
                                                   pages_options);
      const std::vector<SequenceView> views = {part.view()};
      attend.decode(views, q.middleRows(i, 1), steps.middleRows(i, 1), workspace);
    }
    const Batch<double> expected = file.side_by_side(c.name);
    const double worst =
        std::max(test::relative_difference(all, expected), test::relative_difference(steps, expected));
    CHECK(worst < tolerance);
    MESSAGE(c.name << ": " << worst);
  }
}

}  // namespace

TEST_CASE("attention.safetensors through a float pass-through codec within 2e-6") {
  check_reference<float>({}, 2e-6);
}

TEST_CASE("attention.safetensors through BF16 windows only within 1e-2") {
  check_reference<float>({.sink = 64, .recent = 256}, 1e-2);
  check_reference<float>({.sink = 4, .recent = 256}, 1e-2);
}
