// SPDX-License-Identifier: Apache-2.0
#ifndef WUSHKV_CODEC_CODEC_HPP
#define WUSHKV_CODEC_CODEC_HPP

#include <concepts>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "wushkv/core/check.hpp"
#include "wushkv/core/scratch.hpp"
#include "wushkv/quantize/concept.hpp"
#include "wushkv/quantize/rounding.hpp"
#include "wushkv/transform/concept.hpp"

namespace wushkv {

/// The codes and parameters of a batch of tokens, one token a row, as a codec makes them.
template <Quantizer Q>
struct Encoded {
  Batch<code_t<Q>> codes;                  ///< `[tokens, head_dim]`
  std::vector<typename Q::Params> params;  ///< `[tokens, groups]`, row-major
};

/// What a codec can be put together from.
template <class T, class Q, class R>
concept CodecParts =
    Transform<T> && Quantizer<Q> && Rounding<R, Q> && std::same_as<typename T::Scalar, typename Q::Scalar>;

/// Chosen for parts that make no codec, to say which one is wrong in one line.
template <class T, class Q, class R = Nearest, int GroupSize = Dynamic>
class Codec {
  // One bare concept an assertion, so that the compiler says which member is wrong.
  static_assert(Transform<T>,
                "wushkv: a Codec's first part is no Transform, see transform/concept.hpp for what one needs");
  static_assert(Quantizer<Q>,
                "wushkv: a Codec's second part is no Quantizer, see quantize/concept.hpp for what one needs");
  static_assert(!Quantizer<Q> || Rounding<R, Q>,
                "wushkv: a Codec's third part is no Rounding for its quantizer, see quantize/rounding.hpp "
                "for what one needs");
  static_assert(!Transform<T> || !Quantizer<Q> || !Rounding<R, Q> || CodecParts<T, Q, R>,
                "wushkv: a Codec's Transform and Quantizer have different scalars");

 public:
  template <class... Parts>
  explicit Codec(Parts&&...) {}
};

template <class T, class Q>
Codec(T, Q) -> Codec<T, Q>;
template <class T, class Q>
Codec(T, Q, Index) -> Codec<T, Q>;
template <class T, class Q, class R>
Codec(T, Q, Index, R) -> Codec<T, Q, R>;

/// How one head's keys or values are kept: a transform, a quantizer applied to each group of transformed
/// coordinates, and a rounding (design.md, section 3). Group size is fixed at compile time or `Dynamic`; the
/// head dimension is the transform's.
template <class T, class Q, class R, int GroupSize>
requires CodecParts<T, Q, R>
class Codec<T, Q, R, GroupSize> {
  static_assert(GroupSize == Dynamic || GroupSize >= 1, "wushkv: a group has at least one coordinate");
  static_assert(GroupSize == Dynamic || transform_dim_v<T> == Dynamic || transform_dim_v<T> % GroupSize == 0,
                "wushkv: the group size does not divide the head dimension");

 public:
  using Scalar = typename T::Scalar;
  using Params = typename Q::Params;
  using Code = code_t<Q>;
  static constexpr int dim_at_compile_time = transform_dim_v<T>;

  /// One group over the whole head where `group_size` is left out. Throws `std::invalid_argument` if it does
  /// not divide the head dimension, or is not the fixed one.
  explicit Codec(T transform, Q quantizer, Index group_size = 0, R rounding = R())
      : transform_(std::move(transform)), quantizer_(std::move(quantizer)), rounding_(std::move(rounding)) {
    const Index dim = static_cast<Index>(transform_.dim());
    if (dim <= 0) detail::invalid_argument("Codec: transform has dimension ", dim, ", expected at least 1");
    if (group_size == 0) group_size = GroupSize != Dynamic ? GroupSize : dim;
    if (GroupSize != Dynamic && group_size != GroupSize)
      detail::invalid_argument("Codec: group_size is ", group_size, ", expected the fixed size ", GroupSize);
    if (group_size < 1 || dim % group_size != 0)
      detail::invalid_argument("Codec: group_size is ", group_size,
                               ", expected a divisor of the head dimension ", dim);
    if constexpr (requires { rounding_.dim(); })
      if (static_cast<Index>(rounding_.dim()) != dim)
        detail::invalid_argument("Codec: rounding is for dimension ", static_cast<Index>(rounding_.dim()),
                                 ", expected the transform's ", dim);
    group_size_ = group_size;
  }

  Index head_dim() const { return static_cast<Index>(transform_.dim()); }
  Index group_size() const { return GroupSize != Dynamic ? GroupSize : group_size_; }
  Index groups() const { return head_dim() / group_size(); }
  int bits() const { return static_cast<int>(quantizer_.bits()); }
  /// Storage, parameters included: `bits + parameter bits / group_size`.
  double bits_per_element() const {
    return bits() + static_cast<double>(param_bits_v<Q>) / static_cast<double>(group_size());
  }
  const T& transform() const { return transform_; }
  const Q& quantizer() const { return quantizer_; }
  const R& rounding() const { return rounding_; }

  /// Encodes one token `x`, a column of `head_dim` values, any expression, to `codes` (`head_dim`) and
  /// `params` (`groups`). Allocates nothing if the transform and rounding do not. Throws
  /// `std::invalid_argument` for a wrong shape, a value that is not finite, or one that overflows when
  /// transformed; nothing is written then.
  template <class X>
  void encode(const Eigen::MatrixBase<X>& x, std::span<Code> codes, std::span<Params> params) const {
    static_assert(is_token_v<X>, "wushkv: encode to spans takes one token, a column");
    detail::check_shape("Codec: x", x, head_dim(), 1);
    check_token_spans(codes.size(), params.size());
    detail::Scratch<Scalar> in_scratch(head_dim()), out_scratch(head_dim());
    Eigen::Map<Vector<Scalar>> in(in_scratch.data(), head_dim()), y(out_scratch.data(), head_dim());
    in = x;  // in place: a strided column would make the transform allocate
    detail::check_finite("Codec: x", in);
    wushkv::forward_to(transform_, in, y);
    encode_transformed(std::span<const Scalar>(y.data(), codes.size()), codes, params);
  }

  /// Encodes a token that is transformed already (`y = T x`); shapes and errors as for `encode`.
  void encode_transformed(std::span<const Scalar> y, std::span<Code> codes, std::span<Params> params) const {
    encode_transformed(y, 1, codes, params);
  }

  /// The same for `tokens` tokens, one after the other in each span; their codes are those of each by itself.
  void encode_transformed(std::span<const Scalar> y, Index tokens, std::span<Code> codes,
                          std::span<Params> params) const {
    if (tokens < 0 || tokens > static_cast<Index>(y.size()) ||
        static_cast<Index>(y.size()) != tokens * head_dim())
      detail::invalid_argument("Codec: y has ", y.size(), " values, expected the head dimension ", head_dim(),
                               " for each of ", tokens, " tokens");
    check_token_spans(codes.size(), params.size(), tokens);
    if (!all_finite(y.data(), static_cast<Index>(y.size()))) [[unlikely]]
      detail::invalid_argument(
          "Codec: a transformed value is not finite; x overflows the transform's scalar");
    if constexpr (BatchRounding<R, Q>) {
      if (tokens > 1) return rounding_.encode_batch(quantizer_, y, tokens, group_size(), codes, params);
    }
    const auto dim = static_cast<std::size_t>(head_dim()), per_token = static_cast<std::size_t>(groups());
    for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t)
      rounding_.encode(quantizer_, y.subspan(t * dim, dim), group_size(), codes.subspan(t * dim, dim),
                       params.subspan(t * per_token, per_token));
  }

  /// Encodes a batch `[tokens, head_dim]`. Throws as for one token; zero tokens give an empty result.
  template <class X>
  Encoded<Q> encode(const Eigen::MatrixBase<X>& x) const {
    static_assert(!is_token_v<X>, "wushkv: encode takes a batch, one token a row; transpose a column");
    detail::check_shape("Codec: x", x, x.rows(), head_dim());
    detail::check_finite("Codec: x", x);
    Batch<Scalar, dim_at_compile_time> y(x.rows(), head_dim());
    if (x.rows() > 0) wushkv::forward_to(transform_, x.derived(), y);
    Encoded<Q> result;
    result.codes.resize(x.rows(), head_dim());
    result.params.resize(static_cast<std::size_t>(x.rows() * groups()));
    encode_transformed({y.data(), static_cast<std::size_t>(y.size())}, x.rows(),
                       {result.codes.data(), static_cast<std::size_t>(result.codes.size())}, result.params);
    return result;
  }

  /// The transformed coordinates that codes stand for, `T x` up to the rounding: what attention over the
  /// cache reads.
  void decode_transformed(std::span<const Code> codes, std::span<const Params> params,
                          std::span<Scalar> y) const {
    check_token_spans(codes.size(), params.size());
    if (static_cast<Index>(y.size()) != head_dim())
      detail::invalid_argument("Codec: y has room for ", y.size(), " values, expected the head dimension ",
                               head_dim());
    const auto size = static_cast<std::size_t>(group_size());
    for (std::size_t i = 0; i < codes.size(); ++i)
      y[i] = static_cast<Scalar>(quantizer_.decode(codes[i], params[i / size]));
  }

  /// One token in original coordinates: `T^-1` of `decode_transformed`, to the column `x` of `head_dim`
  /// values. Throws `std::invalid_argument` for wrong sizes.
  template <class X>
  void decode(std::span<const Code> codes, std::span<const Params> params, X&& x) const {
    detail::check_shape("Codec: x", x, head_dim(), 1);
    detail::Scratch<Scalar> scratch(head_dim());
    decode_transformed(codes, params,
                       std::span<Scalar>(scratch.data(), static_cast<std::size_t>(head_dim())));
    const Eigen::Map<const Vector<Scalar>> y(scratch.data(), head_dim());
    wushkv::inverse_to(transform_, y, x);
  }

  /// A batch in transformed coordinates, `[tokens, head_dim]`. Throws `std::invalid_argument` for codes and
  /// parameters that are not of one batch.
  Batch<Scalar, dim_at_compile_time> decode_transformed(const Encoded<Q>& encoded) const {
    const Index tokens = encoded.codes.rows();
    detail::check_shape("Codec: codes", encoded.codes, tokens, head_dim());
    if (static_cast<Index>(encoded.params.size()) != tokens * groups())
      detail::invalid_argument("Codec: params has ", encoded.params.size(), " entries, expected ",
                               tokens * groups());
    Batch<Scalar, dim_at_compile_time> y(tokens, head_dim());
    const auto dim = static_cast<std::size_t>(head_dim()), per_token = static_cast<std::size_t>(groups());
    for (Index t = 0; t < tokens; ++t)
      decode_transformed(
          std::span<const Code>(encoded.codes.row(t).data(), dim),
          std::span<const Params>(encoded.params.data() + static_cast<std::size_t>(t) * per_token, per_token),
          std::span<Scalar>(y.row(t).data(), dim));
    return y;
  }

  /// A batch in original coordinates, `[tokens, head_dim]`; errors as for `decode_transformed`.
  Batch<Scalar, dim_at_compile_time> decode(const Encoded<Q>& encoded) const {
    const Batch<Scalar, dim_at_compile_time> y = decode_transformed(encoded);
    Batch<Scalar, dim_at_compile_time> x(y.rows(), head_dim());
    if (y.rows() > 0) wushkv::inverse_to(transform_, y, x);
    return x;
  }

  /// What comes back of a batch `[tokens, head_dim]` once it has been through the cache; errors as for
  /// `encode`.
  template <class X>
  Batch<Scalar, dim_at_compile_time> reconstruct(const Eigen::MatrixBase<X>& x) const {
    return decode(encode(x));
  }

 private:
  void check_token_spans(std::size_t codes, std::size_t params, Index tokens = 1) const {
    if (static_cast<Index>(codes) != tokens * head_dim())
      detail::invalid_argument("Codec: codes has ", codes, " entries, expected the head dimension ",
                               head_dim(), " for each of ", tokens, " tokens");
    if (static_cast<Index>(params) != tokens * groups())
      detail::invalid_argument("Codec: params has ", params, " entries, expected one a group, ", groups(),
                               " for each of ", tokens, " tokens");
  }

  T transform_;
  Q quantizer_;
  [[no_unique_address]] R rounding_;
  Index group_size_ = 0;
};

/// What the cache, attention and the measures ask of a codec; `Codec` is one, and so is a user's own type
/// with these members.
template <class C>
concept HeadCodec = requires(const C& codec, const Batch<typename C::Scalar>& batch,
                             std::span<const typename C::Scalar> y, std::span<typename C::Code> codes,
                             std::span<typename C::Params> params,
                             std::span<const typename C::Code> given_codes,
                             std::span<const typename C::Params> given_params,
                             std::span<typename C::Scalar> out) {
  { codec.head_dim() } -> std::convertible_to<Index>;
  { codec.group_size() } -> std::convertible_to<Index>;
  { codec.groups() } -> std::convertible_to<Index>;
  { codec.bits() } -> std::convertible_to<int>;
  { codec.reconstruct(batch) } -> std::convertible_to<Batch<typename C::Scalar>>;
  codec.encode_transformed(y, codes, params);
  codec.decode_transformed(given_codes, given_params, out);
  requires Transform<std::remove_cvref_t<decltype(codec.transform())>>;
  requires Quantizer<std::remove_cvref_t<decltype(codec.quantizer())>>;
};

namespace detail {

/// `tokens` transformed tokens, one after the other in each span, through a codec that may take one at a
/// time.
template <HeadCodec C>
void encode_tokens(const C& codec, std::span<const typename C::Scalar> y, Index tokens,
                   std::span<typename C::Code> codes, std::span<typename C::Params> params) {
  if constexpr (requires { codec.encode_transformed(y, tokens, codes, params); }) {
    codec.encode_transformed(y, tokens, codes, params);
  } else {
    const auto dim = static_cast<std::size_t>(codec.head_dim()),
               groups = static_cast<std::size_t>(codec.groups());
    for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t)
      codec.encode_transformed(y.subspan(t * dim, dim), codes.subspan(t * dim, dim),
                               params.subspan(t * groups, groups));
  }
}

}  // namespace detail

}  // namespace wushkv

#endif  // WUSHKV_CODEC_CODEC_HPP
