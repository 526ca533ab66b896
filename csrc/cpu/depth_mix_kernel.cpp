// depth_mix over separate tensors: the weighted sum of K sources, and its gradients.
//
//   out = sum_k w_k z_k,   z_k = n_k * norm_weight_k + norm_bias_k,   n_k = source k, or LN(source k)
//
// A tile of tokens goes through the sources one group after another. So a source is read in one long
// run, and the sums of the tile stay in the caches. What is the same for all tokens is computed once
// for a range of them: the factors w_k * norm_weight_k and the sum of w_k * norm_bias_k. Bytes: one
// read of every source and one write of every result. Compiled once per instruction set.
#include "tiles.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

// Sources that forward adds at once, or twice as many without norms, and tokens that backward takes
// at once: their horizontal sums overlap.
constexpr int kSources = kManyRegisters ? 4 : 2, kTokens = 2;
// Values of a tile: its sums stay in the caches while all sources pass.
constexpr int64_t kMixValues = 8192;

// The sources with one weight each; with a weight for each channel; with a norm, where the factor is
// always one for each channel.
enum class Kind { plain, channels, norm };

template <class A, int N>
DEEPFAST_INLINE vec_t<A, N> weight_at(Lanes<N> lanes, const Weights& weight, int64_t k, int64_t d) {
  const A* w = at<A>(weight.data, k * weight.width);
  return weight.per_channel ? load(lanes, w + d) : broadcast(lanes, *w);
}

// What multiplies n_k: the weight alone, or one value for each channel.
template <class A, Kind kKind>
class Factors {
 public:
  template <class Launch>
  explicit Factors(const Launch& op)
      : weight_(at<A>(op.weight.data, 0)),
        dim_(op.D),
        values_(kKind == Kind::plain ? 0 : op.K * op.D) {
    if constexpr (kKind != Kind::plain)
      for (int64_t k = 0; k < op.K; ++k)
        for_lanes<A>(dim_, [&](auto lanes, int64_t d) {
          const auto w = weight_at<A>(lanes, op.weight, k, d);
          const A* norm_weight = at<A>(op.norm_weight, k * op.D);
          store(lanes, values_ + k * dim_ + d, affine<A>(lanes, w, norm_weight, nullptr, d));
        });
  }
  template <int N>
  DEEPFAST_INLINE vec_t<A, N> at_channel(Lanes<N> lanes, int64_t k, int64_t d) const {
    if constexpr (kKind != Kind::plain) return load(lanes, values_ + k * dim_ + d);
    return broadcast(lanes, weight_[k]);
  }
  const A* row(int64_t k) const { return values_ + k * dim_; }

 private:
  const A* weight_;
  int64_t dim_;
  Scratch<A> values_;
};

// ---- forward -----------------------------------------------------------------------------------

// sums += factor_k * n_k for K sources from k0 on. The last sums plus `bias` are the result.
template <class T, int K, Kind kKind>
void add_sources(const DepthMixForward& op, const Tile& tile, int64_t k0,
                 const Factors<compute_t<T>, kKind>& factors, const compute_t<T>* bias,
                 compute_t<T>* sums) {
  using A = compute_t<T>;
  const int64_t dim = op.D;
  const bool last = k0 + K == op.K;
  for (int64_t t = tile.t0; t < tile.t1; ++t) {
    const Streams<T, K> sources(op.sources, k0, tile, t);
    Moments<A> m[K];
    if constexpr (kKind == Kind::norm) {
      moments_of_each<T, K>(sources.row, dim, static_cast<A>(op.eps), m);
      DEEPFAST_UNROLL for (int k = 0; k < K; ++k) {
        *at<A>(op.mean, (k0 + k) * op.T + t) = m[k].mean;
        *at<A>(op.rstd, (k0 + k) * op.T + t) = m[k].rstd;
      }
    }
    A* sum = sums + (t - tile.t0) * dim;
    T* out = row_of<T>(op.out, t);
    for_lanes<A>(dim, [&](auto lanes, int64_t d) {
      sources.template prefetch<decltype(lanes)::n>(d);
      auto s = k0 == 0 ? broadcast(lanes, A(0)) : load(lanes, sum + d);
      DEEPFAST_UNROLL for (int k = 0; k < K; ++k) {
        auto n = load(lanes, sources.row[k] + d);
        if constexpr (kKind == Kind::norm) n = (n - m[k].mean) * m[k].rstd;
        s += factors.at_channel(lanes, k0 + k, d) * n;
      }
      last ? store(lanes, out + d, s + load(lanes, bias + d)) : store(lanes, sum + d, s);
    });
  }
}

template <class T, Kind kKind>
void forward(const DepthMixForward& op, const Factors<compute_t<T>, kKind>& factors, int64_t begin,
             int64_t end) {
  using A = compute_t<T>;
  const int64_t dim = op.D, tokens = tile_tokens(dim, kMixValues);
  Scratch<A> bias(dim), sums(tokens * dim);
  memset(bias.get(), 0, dim * sizeof(A));
  if (op.norm_bias != nullptr)
    for (int64_t k = 0; k < op.K; ++k)
      for_lanes<A>(dim, [&](auto lanes, int64_t d) {
        const auto w = weight_at<A>(lanes, op.weight, k, d);
        store(lanes, bias + d,
              load(lanes, bias + d) + w * load(lanes, at<A>(op.norm_bias, k * dim) + d));
      });
  for_tiles(begin, end, tokens, [&](const Tile& tile) {
    constexpr int kMost = kKind == Kind::norm ? kSources : 2 * kSources;
    int64_t k = 0;
    for (; k + kMost <= op.K; k += kMost)
      add_sources<T, kMost, kKind>(op, tile, k, factors, bias, sums);
    if constexpr (kMost > kSources)
      for (; k + kSources <= op.K; k += kSources)
        add_sources<T, kSources, kKind>(op, tile, k, factors, bias, sums);
    for (; k < op.K; ++k) add_sources<T, 1, kKind>(op, tile, k, factors, bias, sums);
  });
}

// ---- backward ----------------------------------------------------------------------------------

// Sums over the tokens of a range: of g, and for each source of g * n, per channel or in all.
template <class A>
struct TokenSums {
  A *grad, *products, *dots;
};

// The gradient of source k for R tokens from t on, with g of these tokens:
//   dn = factor * g,  dsource = dn, or rstd * (dn - mean(dn) - n * mean(dn * n))
template <class T, int R, Kind kKind>
DEEPFAST_INLINE void source_gradient(const DepthMixBackward& op, int64_t k, int64_t t,
                                     const Matrix& next,
                                     const Factors<compute_t<T>, kKind>& factors,
                                     const compute_t<T>* g, const TokenSums<compute_t<T>>& sums,
                                     bool past_caches) {
  using A = compute_t<T>;
  const int64_t dim = op.D;
  const bool wanted = op.dsources.count > 0;
  const T *x[R], *ahead[R];
  T* dx[R];
  A mean[R], rstd[R];
  DEEPFAST_UNROLL for (int r = 0; r < R; ++r) {
    x[r] = row_of<T>(op.sources[k], t + r);
    ahead[r] = row_of<T>(next, t + r);
    dx[r] = wanted ? row_of<T>(op.dsources[k], t + r) : nullptr;
    if constexpr (kKind == Kind::norm) {
      mean[r] = *at<A>(op.mean, k * op.T + t + r);
      rstd[r] = *at<A>(op.rstd, k * op.T + t + r);
    }
    past_caches &= can_stream(dx[r]);
  }
  const auto normalised = [&](auto lanes, int r, int64_t d) {
    const auto n = load(lanes, x[r] + d);
    if constexpr (kKind == Kind::norm) return (n - mean[r]) * rstd[r];
    return n;
  };
  const auto put = [&](auto lanes, int r, int64_t d, auto value) {
    if (!wanted) return;
    past_caches ? stream(lanes, dx[r] + d, value) : store(lanes, dx[r] + d, value);
  };
  A* products = sums.products == nullptr ? nullptr : sums.products + k * dim;
  if constexpr (kKind == Kind::norm) {
    norm_gradient<A, R>(
        dim, {factors.row(k), products, nullptr}, false, rstd,
        [&](auto lanes, int r, int64_t d) {
          __builtin_prefetch(ahead[r] + d, 0, 2);
          return load(lanes, g + r * dim + d);
        },
        normalised, put);
    return;
  }
  const auto totals = sum_over_lanes<A, RowSum<A>, 2>(dim, [&](auto lanes, int64_t d, auto& total) {
    const auto factor = factors.at_channel(lanes, k, d);
    auto product = broadcast(lanes, A(0));
    DEEPFAST_UNROLL for (int r = 0; r < R; ++r) {
      __builtin_prefetch(ahead[r] + d, 0, 2);
      const auto own = load(lanes, g + r * dim + d);
      product += own * normalised(lanes, r, d);
      put(lanes, r, d, own * factor);
    }
    if constexpr (kKind == Kind::plain)
      total.add(product);
    else if (products != nullptr)
      store(lanes, products + d, load(lanes, products + d) + product);
  });
  if constexpr (kKind == Kind::plain) sums.dots[k] += totals.total();
}

// The gradients of the parameters of source k:
//   dweight = sum g * z,  dnorm_weight = w * sum g * n,  dnorm_bias = w * sum g
template <class A>
void parameter_gradients(const DepthMixBackward& op, int64_t k, int64_t chunk,
                         const TokenSums<A>& sums) {
  const int64_t dim = op.D, row = (chunk * op.K + k) * dim;
  const A *norm_weight = at<A>(op.norm_weight, k * dim), *norm_bias = at<A>(op.norm_bias, k * dim);
  A *dnorm_weight = at<A>(op.dnorm_weight, row), *dnorm_bias = at<A>(op.dnorm_bias, row);
  A* dweight = at<A>(op.dweight.data, (chunk * op.K + k) * op.weight.width);
  const A* products = sums.products == nullptr ? nullptr : sums.products + k * dim;
  RowSum<A> dot;
  for_lanes<A>(dim, [&](auto lanes, int64_t d) {
    const auto w = weight_at<A>(lanes, op.weight, k, d), g = load(lanes, sums.grad + d);
    auto product = broadcast(lanes, A(0));
    if (products != nullptr) product = load(lanes, products + d);
    if (dnorm_weight != nullptr) store(lanes, dnorm_weight + d, w * product);
    if (dnorm_bias != nullptr) store(lanes, dnorm_bias + d, w * g);
    auto own = affine<A>(lanes, product, norm_weight, nullptr, d);
    if (norm_bias != nullptr) own += g * load(lanes, norm_bias + d);
    if (op.weight.per_channel && dweight != nullptr) store(lanes, dweight + d, own);
    dot.add(own);
  });
  if (!op.weight.per_channel && dweight != nullptr) *dweight = dot.total() + sums.dots[k];
}

template <class T, Kind kKind>
void backward(const DepthMixBackward& op, const Factors<compute_t<T>, kKind>& factors,
              int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  const int64_t dim = op.D, tokens = tile_tokens(dim, kMixValues);
  const bool of_products =
      kKind != Kind::plain && (op.dweight.data != nullptr || op.dnorm_weight != nullptr);
  const int64_t products = of_products ? op.K * dim : 0;
  Scratch<A> g(tokens * dim), values(dim + op.K + products);
  memset(values.get(), 0, (dim + op.K + products) * sizeof(A));
  const TokenSums<A> sums{values, of_products ? values + dim + op.K : nullptr, values + dim};
  const bool past_caches = op.K * op.T * dim * static_cast<int64_t>(sizeof(T)) >= kStreamBytes;
  for_tiles(begin, end, tokens, [&](const Tile& tile) {
    for (int64_t t = tile.t0; t < tile.t1; ++t) {
      load_row(row_of<T>(op.dout, t), g + (t - tile.t0) * dim, dim);
      add_row(g + (t - tile.t0) * dim, sums.grad, dim);
    }
    for (int64_t k = 0; k < op.K; ++k) {
      const Matrix& next = op.sources[k + 1 < op.K ? k + 1 : k];
      int64_t t = tile.t0;
      for (; t + kTokens <= tile.t1; t += kTokens)
        source_gradient<T, kTokens, kKind>(op, k, t, next, factors, g + (t - tile.t0) * dim, sums,
                                           past_caches);
      for (; t < tile.t1; ++t)
        source_gradient<T, 1, kKind>(op, k, t, next, factors, g + (t - tile.t0) * dim, sums,
                                     past_caches);
    }
  });
  if (past_caches) end_stream();
  if (op.dweight.data == nullptr && op.dnorm_weight == nullptr && op.dnorm_bias == nullptr) return;
  for (int64_t k = 0; k < op.K; ++k) parameter_gradients<A>(op, k, chunk, sums);
}

// Calls f(storage type, what is of the kind) for the operands of a launch.
template <class Launch, class F>
DEEPFAST_INLINE void with_kind(const Launch& op, const F& f) {
  with_storage(op.storage, [&](auto type) {
    using T = decltype(type);
    if (op.norm)
      f(Factors<compute_t<T>, Kind::norm>(op), type);
    else if (op.weight.per_channel)
      f(Factors<compute_t<T>, Kind::channels>(op), type);
    else
      f(Factors<compute_t<T>, Kind::plain>(op), type);
  });
}

}  // namespace

void depth_mix_forward(const DepthMixForward& op, int64_t begin, int64_t end, int64_t) {
  with_kind(op, [&](const auto& factors, auto type) {
    forward<decltype(type)>(op, factors, begin, end);
  });
}

void depth_mix_backward(const DepthMixBackward& op, int64_t begin, int64_t end, int64_t chunk) {
  with_kind(op, [&](const auto& factors, auto type) {
    backward<decltype(type)>(op, factors, begin, end, chunk);
  });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
