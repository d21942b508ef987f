// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_ATTEND_ATTEND_HPP
#define WUSHKV_ATTEND_ATTEND_HPP

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "wushkv/attend/state.hpp"
#include "wushkv/attend/tile.hpp"
#include "wushkv/cache/identity.hpp"
#include "wushkv/cache/layout.hpp"
#include "wushkv/cache/view.hpp"
#include "wushkv/codec/codec.hpp"
#include "wushkv/core/heads.hpp"
#include "wushkv/transform/centered.hpp"

namespace wushkv {

/// How an `Attention` weighs tokens, and the bases its vectors come and go in.
struct AttendOptions {
  double scale = 0;     ///< factor of `q . k`; 0 for `1 / sqrt(key_dim)`
  double soft_cap = 0;  ///< logits z become `cap tanh(z / cap)`; 0 for none
  Index window = 0;     ///< a query at position p sees positions p - window + 1 … p only; 0 for all
  /// One a query head, or empty: logits, neither scaled nor capped, that take part in the softmax without a
  /// value (attention sinks).
  std::vector<double> sink_logits{};
  Basis query_basis = Basis::Original;  ///< Original: `T_K^-T` is applied here
  /// Original: brought back with `T_V^-1`. Transformed: `T_V` of that, what a folded W_O (and its bias) takes
  /// (`fold_values`).
  Basis output_basis = Basis::Original;
  Basis new_key_basis = Basis::Original;    ///< of new tokens' exact keys (after RoPE)
  Basis new_value_basis = Basis::Original;  ///< of new tokens' exact values; Transformed from a folded W_V
};

/// Attention of one layer straight from its quantized cache (design.md, section 3): pages are read in place
/// through a `SequenceView`, decoded tile by tile, and never copied; an online softmax in the codecs' Scalar
/// keeps what a row has seen in an `AttentionState`. Portable code: the measure of faster kernels.
///
/// Queries are `[n, query_heads * key_dim]`, outputs `[n, query_heads * value_dim]`, new tokens' keys and
/// values `[n, kv_heads * key_dim]` and `[n, kv_heads * value_dim]`, heads side by side and rows any distance
/// apart; one token is a column. Outputs must not overlap the inputs. Queries and keys come after RoPE.
///
/// Among n new tokens a query sees itself and those before it, or, with a mask (`[n * n]` bytes, row i is
/// query i's, not 0: sees), those that the mask tells: the trees of speculative decoding. Query i then stands
/// at the position of the token before the new ones plus the number of new tokens it sees, its depth in the
/// tree, and the sliding window counts in these positions. A mask of the lower triangle changes nothing.
///
/// Weights of a row sum to less than 1 where sink logits take a share; a centered value transform's mean is
/// then added with that sum, in both output bases. A row that sees nothing gives zeros (in the Transformed
/// basis, `T_V` of zeros).
///
/// Every call is const and safe at the same time as others, with a `Workspace` of its own; `decode` allocates
/// nothing once the workspace has seen its size. Bad arguments throw `std::invalid_argument` that names
/// argument, what came and what was expected, before anything but the workspace is written.
///
/// Not here, and what to do instead:
/// - Context shift (moving cached tokens to other positions): keys are kept after RoPE and transformed, and a
///   rotation of quantized transformed keys is no rotation of pairs any more. Prefill the kept tokens again,
///   or keep the first tokens as sink and let a sliding window drop the middle without renumbering.
/// - Latent attention (MLA): keys and values are one shared latent there, which has to be stored once, and
///   part of the key (the rotated one) is not part of the value. Attend in the absorbed form with an engine's
///   own kernel over a cache that holds the latent as one KV head's value under a `Codec` of its own
///   (`Codec::decode_transformed`), the small rotated key beside it unquantized. This class would store the
///   latent twice.
template <HeadCodec KeyCodec, HeadCodec ValueCodec, PageLayout Layout = TokenMajor>
class Attention {
  static_assert(std::is_same_v<typename KeyCodec::Scalar, typename ValueCodec::Scalar>,
                "wushkv: Attention takes codecs of one Scalar");

 public:
  using Scalar = typename KeyCodec::Scalar;
  using State = AttentionState<Scalar>;
  using Queries = ConstRows<Scalar>;
  using Mask = std::span<const std::uint8_t>;

  /// Working memory of one call at a time; grows to what the calls need and can serve any `Attention` of this
  /// type.
  class Workspace {
    friend class Attention;
    std::vector<Scalar> queries;               ///< `[kv_heads, n, group, key_dim]`, transformed and scaled
    std::vector<Scalar> new_keys, new_values;  ///< `[kv_heads, n, dim]`, transformed
    std::vector<Index> positions;              ///< of the queries
    detail::TileBuffer<KeyCodec> keys;
    detail::TileBuffer<ValueCodec> values;
    std::vector<Scalar> scores;         ///< `[rows, tokens]` of a tile: logits, then weights
    std::vector<std::uint8_t> visible;  ///< `[queries, tokens]` of a tile
    std::vector<Scalar> rescale;        ///< of a block's rows
    std::vector<Scalar> weighted;       ///< `[rows, value_dim]`: a tile's share of the outputs
    std::vector<Scalar> finished;       ///< `[n, value_dim]`
    std::vector<Scalar> shares;         ///< of a head's rows: their weights' sums
    State state;
  };

  /// `keys` and `values` hold one codec a KV head; they are kept. Throws `std::invalid_argument` for heads
  /// and codecs that do not fit each other, options out of range, and a soft cap or sink logits with
  /// key-centered codecs: the constant that centering adds to a query's logits then no longer drops out of
  /// the softmax.
  Attention(const AttentionHeads& heads, std::vector<KeyCodec> keys, std::vector<ValueCodec> values,
            const AttendOptions& options = {}, Layout = Layout())
      : heads_(heads), keys_(std::move(keys)), values_(std::move(values)), options_(options) {
    detail::check_heads(heads_);
    check_codecs("keys", keys_, heads_.key_dim);
    check_codecs("values", values_, heads_.value_dim);
    check_options();
    scale_ = static_cast<Scalar>(options_.scale != 0 ? options_.scale
                                                     : 1 / std::sqrt(static_cast<double>(heads_.key_dim)));
    for (const double logit : options_.sink_logits) sink_logits_.push_back(static_cast<Scalar>(logit));
    for (const ValueCodec& codec : values_) value_origins_.push_back(origin(codec));
    identity_ = cache_identity<Layout>(keys_, values_);
  }

  const AttentionHeads& heads() const { return heads_; }
  const AttendOptions& options() const { return options_; }
  const std::vector<KeyCodec>& key_codecs() const { return keys_; }
  const std::vector<ValueCodec>& value_codecs() const { return values_; }
  /// What `SequenceView::identity` must be: `cache_identity` of layout and codecs.
  std::uint64_t identity() const { return identity_; }

  /// The last token's query against the whole sequence, its own key and value, which are in the view already,
  /// included. `q` is a column of `query_heads * key_dim`, `out` one of `query_heads * value_dim`.
  void decode(const SequenceView& view, const Eigen::Ref<const Vector<Scalar>>& q,
              Eigen::Ref<Vector<Scalar>> out, Workspace& workspace) const {
    const Eigen::Map<const Batch<Scalar>> query(q.data(), 1, q.size());
    Eigen::Map<Batch<Scalar>> to(out.data(), 1, out.size());
    decode(std::span<const SequenceView>(&view, 1), query, to, workspace);
  }

  /// The same for many sequences: row i of `q` and `out` belongs to view i.
  void decode(std::span<const SequenceView> views, const Queries& q, Rows<Scalar> out,
              Workspace& workspace) const {
    const auto count = static_cast<Index>(views.size());
    check_queries(q, count);
    check_output(out, count);
    for (const SequenceView& view : views) {
      check_view(view);
      if (view.length() < 1) detail::invalid_argument("Attention: view has 0 tokens, expected at least one");
      const Index last = view.length() - 1;
      detail::check_readable(view, options_.window > 0 ? std::max<Index>(0, last - options_.window + 1) : 0,
                             last + 1);
    }
    reset(workspace.state, count);
    for (Index i = 0; i < count; ++i) {
      const SequenceView& view = views[static_cast<std::size_t>(i)];
      const Pass pass = make_pass(1, view.length() - 1, {}, i, workspace);
      prepare_queries(q.middleRows(i, 1), workspace);
      accumulate_cached(pass, view, 0, view.length(), workspace.state, workspace);
    }
    check_sums(workspace.state);
    for (Index i = 0; i < count; ++i) write_outputs(workspace.state, i, 1, out, workspace);
  }

  /// Chunked prefill over cached keys and values, as quality is measured: the n queries are the last n tokens
  /// of the view. `n` is at least 1 and at most the view's length.
  void prefill(const SequenceView& view, const Queries& q, Rows<Scalar> out, Workspace& workspace,
               Mask mask = {}) const {
    const Index n = check_new_tokens(q, mask);
    check_output(out, n);
    check_view(view);
    if (n > view.length())
      detail::invalid_argument("Attention: q has ", n, " tokens, expected at most the view's ",
                               view.length());
    const Pass pass = make_pass(n, view.length() - n, mask, 0, workspace);
    check_readable(pass, view, 0, view.length());
    prepare_queries(q, workspace);
    reset(workspace.state, n);
    accumulate_cached(pass, view, 0, view.length(), workspace.state, workspace);
    check_sums(workspace.state);
    write_outputs(workspace.state, 0, n, out, workspace);
  }

  /// Chunked prefill with the new tokens' exact keys and values, as engines do: the n new tokens follow the
  /// view's, which may have none, and are not in it yet.
  void prefill(const SequenceView& view, const Queries& q, const ConstRows<Scalar>& k,
               const ConstRows<Scalar>& v, Rows<Scalar> out, Workspace& workspace, Mask mask = {}) const {
    const Index n = check_new_tokens(q, k, v, mask);
    check_output(out, n);
    check_view(view);
    const Pass pass = make_pass(n, view.length(), mask, 0, workspace);
    check_readable(pass, view, 0, view.length());
    prepare_queries(q, workspace);
    prepare_new_tokens(k, v, workspace);
    reset(workspace.state, n);
    accumulate_cached(pass, view, 0, view.length(), workspace.state, workspace);
    accumulate_exact(pass, n, workspace.state, workspace);
    check_sums(workspace.state);
    write_outputs(workspace.state, 0, n, out, workspace);
  }

  /// Makes `state` that of `n` queries that have seen nothing.
  void reset(State& state, Index n) const { state.reset(n * heads_.query_heads, heads_.value_dim); }

  /// Adds to `state`, which `reset` gave its shape, what queries at positions `first`, `first + 1`, … see of
  /// the view's tokens `[begin, end)`: one part of `decode` (n = 1, `first = length - 1`), of `prefill` over
  /// cached tokens (`first = length - n`) or of that with exact ones (`first = length`). Parts of a sequence
  /// may go to one state or to several that are merged. The mask is of the tokens from `first` on.
  void accumulate(const SequenceView& view, const Queries& q, Index first, Index begin, Index end,
                  State& state, Workspace& workspace, Mask mask = {}) const {
    const Index n = check_new_tokens(q, mask);
    check_state(state, n);
    check_view(view);
    check_first(first);
    if (begin < 0 || begin > end || end > view.length())
      detail::invalid_argument("Attention: tokens ", begin, " to ", end,
                               " asked for, expected a part of the view's ", view.length());
    const Pass pass = make_pass(n, first, mask, 0, workspace);
    check_readable(pass, view, begin, end);
    prepare_queries(q, workspace);
    accumulate_cached(pass, view, begin, end, state, workspace);
  }

  /// Adds what queries see of the new tokens' exact keys and values; `first` is the position of the first of
  /// these, the length of the cache. The n queries are those of the last n new tokens, so that the queries of
  /// a long prefill can be shared out to threads; the mask is of these n.
  void accumulate_new(const Queries& q, const ConstRows<Scalar>& k, const ConstRows<Scalar>& v, Index first,
                      State& state, Workspace& workspace, Mask mask = {}) const {
    const Index n = check_new_tokens(q, mask), earlier = k.rows() - n;
    if (earlier < 0)
      detail::invalid_argument("Attention: k has ", k.rows(), " rows, expected at least q's ", n);
    check_new_keys(k, v, k.rows());
    check_state(state, n);
    check_first(first);
    const Pass pass = make_pass(n, first + earlier, mask, 0, workspace);
    prepare_queries(q, workspace);
    prepare_new_tokens(k, v, workspace);
    accumulate_exact(pass, k.rows(), state, workspace);
  }

  /// Turns a state into outputs, `[n, query_heads * value_dim]`: adds the sink logits (which the state must
  /// not have yet), divides, and changes the basis. The state stays as it is.
  void finish(const State& state, Rows<Scalar> out, Workspace& workspace) const {
    check_state(state, state.rows() / heads_.query_heads);
    check_output(out, state.rows() / heads_.query_heads);
    write_outputs(state, 0, out.rows(), out, workspace);
  }

 private:
  using ConstTile = Eigen::Map<const Batch<Scalar>, 0, Eigen::OuterStride<>>;

  /// Tokens of a KV head decoded at once, and rows (queries x heads of the group) that take part in a matrix
  /// product: keys, values, logits and outputs then stay in the second-level cache.
  static constexpr Index tile_tokens = 64, block_rows = 64;

  /// The queries of a call, and what they may see.
  struct Pass {
    Index queries = 0;
    Index first = 0;   ///< the place of the first query's token in the sequence
    Index window = 0;  ///< 0 for none
    const Index* positions = nullptr;
    const std::uint8_t* mask = nullptr;
    Index state_offset = 0;  ///< the first query's place in the state

    /// The first token that a query may see.
    Index lowest() const {
      if (window == 0) return 0;
      // Places among the new tokens are no positions where a mask tells who sees whom: all of them may be
      // needed.
      return std::max<Index>(0,
                             std::min(first, *std::min_element(positions, positions + queries) - window + 1));
    }
    bool sees(Index query, Index token) const {
      const Index among_new = token - first;
      if (among_new >= queries) return false;
      if (among_new >= 0 && (mask != nullptr ? mask[query * queries + among_new] == 0 : among_new > query))
        return false;
      const Index position = among_new >= 0 ? positions[among_new] : token;
      return window == 0 || position > positions[query] - window;
    }
  };

  struct Tile {
    ConstTile keys, values;
    Index first;  ///< the place of its first token in the sequence
    Index tokens() const { return keys.rows(); }
  };

  // ---- checks

  template <class Codec>
  void check_codecs(const char* name, const std::vector<Codec>& codecs, Index dim) const {
    if (static_cast<Index>(codecs.size()) != heads_.kv_heads)
      detail::invalid_argument("Attention: ", name, " has ", codecs.size(),
                               " codecs, expected one a KV head, ", heads_.kv_heads);
    for (const Codec& codec : codecs)
      if (codec.head_dim() != dim)
        detail::invalid_argument("Attention: a codec of ", name, " has head dimension ", codec.head_dim(),
                                 ", expected ", dim);
  }

  void check_options() const {
    // In the scalar that computes: a cap that vanishes there would divide by zero.
    if (!is_finite(static_cast<Scalar>(options_.scale)) ||
        (options_.scale != 0 && static_cast<Scalar>(options_.scale) == Scalar(0)))
      detail::invalid_argument("Attention: scale is ", options_.scale, ", expected a finite number");
    const Scalar cap = static_cast<Scalar>(options_.soft_cap);
    if (!(options_.soft_cap >= 0) || !is_finite(cap) ||
        (cap < std::numeric_limits<Scalar>::min() && options_.soft_cap != 0))
      detail::invalid_argument("Attention: soft_cap is ", options_.soft_cap,
                               ", expected 0 or a positive number");
    if (options_.window < 0)
      detail::invalid_argument("Attention: window is ", options_.window,
                               ", expected 0 or a number of tokens");
    const auto logits = static_cast<Index>(options_.sink_logits.size());
    if (logits != 0 && logits != heads_.query_heads)
      detail::invalid_argument("Attention: sink_logits has ", logits, " entries, expected one a query head, ",
                               heads_.query_heads);
    for (const double logit : options_.sink_logits)
      if (!is_finite(static_cast<Scalar>(logit)))
        detail::invalid_argument("Attention: sink_logits has the value ", logit, ", expected finite numbers");
    if (options_.soft_cap == 0 && logits == 0) return;
    for (const KeyCodec& codec : keys_)
      if (is_key_centered(codec))
        detail::invalid_argument("Attention: ", logits != 0 ? "sink_logits" : "soft_cap",
                                 " came with a key codec that is centered, expected one that is linear: the "
                                 "shift of its logits does not cancel");
  }

  /// By type, and by what it does for a user's own transform.
  static bool is_key_centered(const KeyCodec& codec) {
    using T = std::remove_cvref_t<decltype(codec.transform())>;
    return detail::is_centered_v<T> || origin(codec).size() > 0;
  }

  /// Where the transform takes zeros; empty for a linear one.
  template <class Codec>
  static Vector<Scalar> origin(const Codec& codec) {
    const Vector<Scalar> zeros = Vector<Scalar>::Zero(codec.head_dim());
    const Vector<Scalar> at = codec.transform().forward(zeros);
    return at.isZero(Scalar(0)) ? Vector<Scalar>() : at;
  }

  void check_queries(const Queries& q, Index n) const {
    detail::check_shape("Attention: q", q, n, heads_.query_heads * heads_.key_dim);
    detail::check_finite("Attention: q", q);
  }
  Index check_new_tokens(const Queries& q, Mask mask) const {
    const Index n = q.rows();
    if (n < 1) detail::invalid_argument("Attention: q has 0 tokens, expected at least one");
    check_queries(q, n);
    if (!mask.empty() && static_cast<Index>(mask.size()) != n * n)
      detail::invalid_argument("Attention: mask has ", mask.size(), " entries, expected none or ", n, " x ",
                               n);
    return n;
  }
  Index check_new_tokens(const Queries& q, const ConstRows<Scalar>& k, const ConstRows<Scalar>& v,
                         Mask mask) const {
    const Index n = check_new_tokens(q, mask);
    check_new_keys(k, v, n);
    return n;
  }
  void check_new_keys(const ConstRows<Scalar>& k, const ConstRows<Scalar>& v, Index n) const {
    detail::check_shape("Attention: k", k, n, heads_.kv_heads * heads_.key_dim);
    detail::check_shape("Attention: v", v, n, heads_.kv_heads * heads_.value_dim);
    detail::check_finite("Attention: k", k);
    detail::check_finite("Attention: v", v);
  }
  void check_output(const Rows<Scalar>& out, Index n) const {
    detail::check_shape("Attention: out", out, n, heads_.query_heads * heads_.value_dim);
  }
  void check_state(const State& state, Index n) const {
    if (state.rows() != n * heads_.query_heads || state.value_dim() != heads_.value_dim)
      detail::invalid_argument("Attention: state has ", state.rows(), " rows of ", state.value_dim(),
                               " values, expected ", n, " queries x ", heads_.query_heads, " heads of ",
                               heads_.value_dim);
    check_sums(state);
  }
  /// Queries and new tokens are finite: an engine's own pages or states can bring this about, or products q .
  /// k past the scalar's range.
  static void check_sums(const State& state) {
    detail::check_finite("Attention: a row's sum (by the cache, the state, or a q . k that overflows)",
                         state.sum());
    detail::check_finite("Attention: an accumulator (by the cache, the state, or values that overflow)",
                         state.accumulator());
  }
  static void check_first(Index first) {
    if (first < 0 || first > Index{1} << 60)
      detail::invalid_argument("Attention: first is ", first, ", expected the first query's position");
  }
  void check_view(const SequenceView& view) const {
    constexpr Index most = Index{1} << 60;
    for (const Index tokens : {view.sink.tokens, view.pages.tokens, view.recent.tokens})
      if (tokens > most)
        detail::invalid_argument("Attention: view has a part of ", tokens, " tokens, expected at most ",
                                 most);
    using KeyQuantizer = std::remove_cvref_t<decltype(keys_.front().quantizer())>;
    using ValueQuantizer = std::remove_cvref_t<decltype(values_.front().quantizer())>;
    if (view.pages.tokens > 0 &&
        ((param_bits_v < KeyQuantizer >> 0 && view.pages.keys.params == nullptr) ||
         (param_bits_v < ValueQuantizer >> 0 && view.pages.values.params == nullptr)))
      detail::invalid_argument("Attention: view.pages has ", view.pages.tokens,
                               " tokens and a null pointer, expected parameters of keys and values");
    if (view.identity != identity_)
      detail::invalid_argument("Attention: view.identity is ", hexadecimal(view.identity), ", expected ",
                               hexadecimal(identity_),
                               ": it was written with other codecs or another layout");
    if (view.sink.tokens < 0 || view.pages.tokens < 0 || view.recent.tokens < 0)
      detail::invalid_argument("Attention: view has ", view.sink.tokens, " + ", view.pages.tokens, " + ",
                               view.recent.tokens, " tokens, expected no negative number");
  }
  static std::string hexadecimal(std::uint64_t value) {
    char digits[16];
    return "0x" + std::string(digits, std::to_chars(digits, digits + sizeof digits, value, 16).ptr);
  }
  void check_readable(const Pass& pass, const SequenceView& view, Index begin, Index end) const {
    detail::check_readable(view, std::max(begin, pass.lowest()), std::min(end, pass.first + pass.queries));
  }

  // ---- preparation

  Pass make_pass(Index n, Index first, Mask mask, Index state_offset, Workspace& workspace) const {
    workspace.positions.resize(static_cast<std::size_t>(n));
    for (Index i = 0; i < n; ++i) {
      Index position = first + i;
      if (!mask.empty()) {
        const auto row = mask.begin() + i * n;
        position = first - 1 + (n - std::count(row, row + n, std::uint8_t{0}));
      }
      workspace.positions[static_cast<std::size_t>(i)] = position;
    }
    return {
        n,           first, options_.window, workspace.positions.data(), mask.empty() ? nullptr : mask.data(),
        state_offset};
  }

  /// `x` and `y` are rows of one head. One token goes through the transform's token form, which does not
  /// allocate.
  template <class X, class Y, class Apply>
  static void apply_rows(const X& x, Y& y, Apply apply) {
    if (x.rows() == 1) {
      const Eigen::Map<const Vector<Scalar>> from(x.data(), x.cols());
      Eigen::Map<Vector<Scalar>> to(y.data(), y.cols());
      apply(from, to);
    } else {
      apply(x, y);
    }
  }

  /// To `workspace.queries`: a KV head's queries lie together, so that they are the rows of a product.
  template <class Q>
  void prepare_queries(const Q& q, Workspace& workspace) const {
    const Index n = q.rows(), dim = heads_.key_dim, group = heads_.queries_per_kv_head();
    workspace.queries.resize(static_cast<std::size_t>(n * heads_.query_heads * dim));
    for (Index head = 0; head < heads_.query_heads; ++head) {
      const Index kv_head = head / group;
      Scalar* const begin = workspace.queries.data() + (kv_head * n * group + head % group) * dim;
      Eigen::Map<Batch<Scalar>, 0, Eigen::OuterStride<>> to(begin, n, dim, Eigen::OuterStride<>(group * dim));
      const ConstTile from(q.data() + head * dim, n, dim, Eigen::OuterStride<>(q.outerStride()));
      if (options_.query_basis == Basis::Transformed)
        to = from;
      else
        apply_rows(from, to, [&](const auto& x, auto& y) {
          wushkv::adjoint_inverse_to(keys_[static_cast<std::size_t>(kv_head)].transform(), x, y);
        });
    }
    for (Scalar& x : workspace.queries) x *= scale_;
    if (!all_finite(workspace.queries.data(), static_cast<Index>(workspace.queries.size())))
      detail::invalid_argument("Attention: q overflows when it is transformed and scaled");
  }

  template <class Codec>
  static void prepare_side(const char* name, const std::vector<Codec>& codecs, Basis basis,
                           const ConstRows<Scalar>& x, std::vector<Scalar>& prepared) {
    const Index n = x.rows(), dim = x.cols() / static_cast<Index>(codecs.size());
    prepared.resize(static_cast<std::size_t>(x.size()));
    for (Index head = 0; head < static_cast<Index>(codecs.size()); ++head) {
      const ConstTile from(x.data() + head * dim, n, dim, Eigen::OuterStride<>(x.outerStride()));
      Eigen::Map<Batch<Scalar>> to(prepared.data() + head * n * dim, n, dim);
      if (basis == Basis::Transformed)
        to = from;
      else
        apply_rows(from, to, [&](const auto& in, auto& out) {
          wushkv::forward_to(codecs[static_cast<std::size_t>(head)].transform(), in, out);
        });
    }
    if (!all_finite(prepared.data(), x.size()))
      detail::invalid_argument("Attention: ", name, " overflows when it is transformed");
  }

  void prepare_new_tokens(const ConstRows<Scalar>& k, const ConstRows<Scalar>& v,
                          Workspace& workspace) const {
    prepare_side("k", keys_, options_.new_key_basis, k, workspace.new_keys);
    prepare_side("v", values_, options_.new_value_basis, v, workspace.new_values);
  }

  // ---- tokens into states

  /// Each tile is decoded once a KV head and serves all queries of its group.
  void accumulate_cached(const Pass& pass, const SequenceView& view, Index begin, Index end, State& state,
                         Workspace& workspace) const {
    begin = std::max(begin, pass.lowest());
    end = std::min(end, pass.first + pass.queries);
    const detail::ViewSide key_side = detail::key_side(view), value_side = detail::value_side(view);
    for (Index head = 0; head < heads_.kv_heads; ++head) {
      const KeyCodec& key_codec = keys_[static_cast<std::size_t>(head)];
      const ValueCodec& value_codec = values_[static_cast<std::size_t>(head)];
      workspace.keys.resize(key_codec, tile_tokens);
      workspace.values.resize(value_codec, tile_tokens);
      for (Index at = begin; at < end; at += tile_tokens) {
        const Index count = std::min(tile_tokens, end - at);
        detail::read_tile<Layout>(key_codec, view, key_side, head, at, count, workspace.keys);
        detail::read_tile<Layout>(value_codec, view, value_side, head, at, count, workspace.values);
        absorb(pass, head, make_tile(workspace.keys.values.data(), workspace.values.values.data(), at, count),
               state, workspace);
      }
    }
  }

  /// `n` new tokens, of which the pass has the last ones' queries.
  void accumulate_exact(const Pass& pass, Index n, State& state, Workspace& workspace) const {
    const Index first = pass.first + pass.queries - n;
    for (Index head = 0; head < heads_.kv_heads; ++head)
      for (Index at = 0; at < n; at += tile_tokens)
        absorb(pass, head,
               make_tile(workspace.new_keys.data() + (head * n + at) * heads_.key_dim,
                         workspace.new_values.data() + (head * n + at) * heads_.value_dim, first + at,
                         std::min(tile_tokens, n - at)),
               state, workspace);
  }

  Tile make_tile(const Scalar* keys, const Scalar* values, Index first, Index count) const {
    return {ConstTile(keys, count, heads_.key_dim, Eigen::OuterStride<>(heads_.key_dim)),
            ConstTile(values, count, heads_.value_dim, Eigen::OuterStride<>(heads_.value_dim)), first};
  }

  void absorb(const Pass& pass, Index head, const Tile& tile, State& state, Workspace& workspace) const {
    const Index group = heads_.queries_per_kv_head(), per_block = std::max<Index>(1, block_rows / group);
    workspace.rescale.resize(static_cast<std::size_t>(per_block * group));
    for (Index from = 0; from < pass.queries; from += per_block) {
      const Index queries = std::min(per_block, pass.queries - from);
      if (!mark_visible(pass, tile, from, queries, workspace)) continue;
      score(pass, head, tile, from, queries, workspace);
      for (Index i = 0; i < queries; ++i)
        for (Index g = 0; g < group; ++g)
          weigh(tile, i, i * group + g, state_row(pass, from + i, head, g), state, workspace);
      gather(pass, head, tile, from, queries, state, workspace);
    }
  }

  Index state_row(const Pass& pass, Index query, Index head, Index g) const {
    return (pass.state_offset + query) * heads_.query_heads + head * heads_.queries_per_kv_head() + g;
  }

  /// Whether a query of the block sees a token of the tile, and which ones.
  static bool mark_visible(const Pass& pass, const Tile& tile, Index from, Index queries,
                           Workspace& workspace) {
    workspace.visible.resize(static_cast<std::size_t>(queries * tile.tokens()));
    bool any = false;
    std::uint8_t* flag = workspace.visible.data();
    for (Index i = from; i < from + queries; ++i)
      for (Index t = tile.first; t < tile.first + tile.tokens(); ++t) {
        const bool seen = pass.sees(i, t);
        *flag++ = seen;
        any |= seen;
      }
    return any;
  }

  /// The logits of a block against a tile, `[queries * group, tokens]`. A single query goes without Eigen's
  /// matrix product, which may allocate.
  void score(const Pass& pass, Index head, const Tile& tile, Index from, Index queries,
             Workspace& workspace) const {
    const Index group = heads_.queries_per_kv_head(), rows = queries * group, dim = heads_.key_dim;
    workspace.scores.resize(static_cast<std::size_t>(rows * tile.tokens()));
    const Scalar* const begin = workspace.queries.data() + (head * pass.queries + from) * group * dim;
    const Eigen::Map<const Batch<Scalar>> q(begin, rows, dim);
    Eigen::Map<Batch<Scalar>> scores(workspace.scores.data(), rows, tile.tokens());
    if (pass.queries == 1) {
      for (Index t = 0; t < tile.tokens(); ++t)
        for (Index row = 0; row < rows; ++row) scores(row, t) = tile.keys.row(t).dot(q.row(row));
    } else {
      scores.noalias() = q * tile.keys.transpose();
    }
    if (options_.soft_cap > 0) {
      const Scalar cap = static_cast<Scalar>(options_.soft_cap);
      for (Scalar& z : workspace.scores) z = cap * std::tanh(z / cap);
    }
  }

  /// One row's step of the online softmax: its logits become weights exp(z − m) under the new maximum m.
  void weigh(const Tile& tile, Index query, Index block_row, Index row, State& state,
             Workspace& workspace) const {
    constexpr Scalar largest = std::numeric_limits<Scalar>::max();
    const Index tokens = tile.tokens();
    Scalar* const scores = workspace.scores.data() + block_row * tokens;
    const std::uint8_t* const visible = workspace.visible.data() + query * tokens;
    bool any = false;
    Scalar top = -largest;
    for (Index t = 0; t < tokens; ++t) {
      if (visible[t] == 0) continue;
      any = true;
      scores[t] = std::clamp(scores[t], -largest, largest);  // a product that overflowed
      top = std::max(top, scores[t]);
    }
    Scalar& sum = state.sum()[row];
    Scalar& max = state.max()[row];
    if (any && sum != Scalar(0)) top = std::max(top, max);
    Scalar rescale = 1, added = 0;
    if (any) rescale = sum != Scalar(0) ? std::exp(max - top) : Scalar(0);
    for (Index t = 0; t < tokens; ++t) {
      scores[t] = visible[t] != 0 ? std::exp(scores[t] - top) : Scalar(0);
      added += scores[t];
    }
    if (any) max = top;
    sum = rescale * sum + added;
    workspace.rescale[static_cast<std::size_t>(block_row)] = rescale;
  }

  /// Adds the weighted values of a tile to the block's accumulators.
  void gather(const Pass& pass, Index head, const Tile& tile, Index from, Index queries, State& state,
              Workspace& workspace) const {
    const Index group = heads_.queries_per_kv_head(), rows = queries * group;
    const Eigen::Map<const Batch<Scalar>> weights(workspace.scores.data(), rows, tile.tokens());
    auto accumulator = state.accumulator();
    if (pass.queries == 1) {
      for (Index row = 0; row < rows; ++row) {
        auto sums = accumulator.row(state_row(pass, from, head, row));
        sums *= workspace.rescale[static_cast<std::size_t>(row)];
        for (Index t = 0; t < tile.tokens(); ++t)
          if (workspace.visible[static_cast<std::size_t>(t)] != 0)
            sums += weights(row, t) * tile.values.row(t);
      }
      return;
    }
    workspace.weighted.resize(static_cast<std::size_t>(rows * heads_.value_dim));
    Eigen::Map<Batch<Scalar>> weighted(workspace.weighted.data(), rows, heads_.value_dim);
    weighted.noalias() = weights * tile.values;
    for (Index row = 0; row < rows; ++row) {
      auto sums = accumulator.row(state_row(pass, from + row / group, head, row % group));
      sums = workspace.rescale[static_cast<std::size_t>(row)] * sums + weighted.row(row);
    }
  }

  // ---- states into outputs

  /// Queries `[offset, offset + n)` of the state to the same rows of `out`.
  void write_outputs(const State& state, Index offset, Index n, Rows<Scalar>& out,
                     Workspace& workspace) const {
    const Index dim = heads_.value_dim;
    workspace.finished.resize(static_cast<std::size_t>(n * dim));
    workspace.shares.resize(static_cast<std::size_t>(n));
    Eigen::Map<Batch<Scalar>> rows(workspace.finished.data(), n, dim);
    for (Index head = 0; head < heads_.query_heads; ++head) {
      for (Index i = 0; i < n; ++i)
        workspace.shares[static_cast<std::size_t>(i)] = normalize(state, offset + i, head, rows.row(i));
      auto to = out.block(offset, head * dim, n, dim);
      if (options_.output_basis == Basis::Transformed) {
        to = rows;
        continue;
      }
      const ValueCodec& codec = values_[static_cast<std::size_t>(head / heads_.queries_per_kv_head())];
      apply_rows(rows, to, [&](const auto& y, auto& x) { wushkv::inverse_to(codec.transform(), y, x); });
      for (Index i = 0; i < n; ++i)
        if (workspace.shares[static_cast<std::size_t>(i)] == Scalar(0)) to.row(i).setZero();
    }
  }

  /// A row's output in the stored basis, and the sum of its values' weights: 1, or less with a sink logit.
  /// `T_V` of the output Σ a v is Σ a T_V(v) plus the rest of the weight times `T_V(0)`.
  template <class Row>
  Scalar normalize(const State& state, Index query, Index head, Row&& to) const {
    const Index row = query * heads_.query_heads + head;
    const Scalar sum = state.sum()[row];
    Scalar factor = sum != Scalar(0) ? 1 / sum : Scalar(0), share = sum != Scalar(0) ? Scalar(1) : Scalar(0);
    if (!sink_logits_.empty()) {
      const detail::ExtraLogit<Scalar> joined(state.max()[row], sum,
                                              sink_logits_[static_cast<std::size_t>(head)]);
      factor = joined.rescale / joined.sum;
      share = sum * factor;
    }
    to = factor * state.accumulator().row(row);
    const Vector<Scalar>& shift =
        value_origins_[static_cast<std::size_t>(head / heads_.queries_per_kv_head())];
    if (shift.size() > 0 && share != Scalar(1)) to += (1 - share) * shift.transpose();
    return share;
  }

  AttentionHeads heads_;
  std::vector<KeyCodec> keys_;
  std::vector<ValueCodec> values_;
  AttendOptions options_;
  Scalar scale_ = 0;
  std::vector<Scalar> sink_logits_;
  std::vector<Vector<Scalar>> value_origins_;  ///< `T_V(0)` of each KV head, empty where it is zero
  std::uint64_t identity_ = 0;
};

}  // namespace wushkv

#endif  // WUSHKV_ATTEND_ATTEND_HPP
