// Attention over depth: a softmax over the sources of each token, and their weighted sum.
//
//   s_k = q . v_k * r_k (or given),  r_k = 1 / sqrt(mean(v_k^2) + eps), or 1 without norm
//   out = sum_k p_k v_k,  p_k = exp(s_k - most) / total,  lse = most + log total
//
//   delta = <dout, out> - dlse,  ds_k = p_k * (<dout, v_k> - delta)
//   dv_k  = p_k dout + ds_k r_k q - v_k * r_k^2 ds_k s_k / D,  dq = sum_{t,k} ds_k r_k v_k
//
// Without most and total the scores are the weights: p_k = s_k, ds_k = <dout, v_k>.
//
// Here most is the largest score and total = sum_k exp(s_k - most); with several hops the sums are
// over the hops too. The softmax is computed online (Milakov, Gimelshein 2018): each source is read
// once forward and once backward, and scores are not stored between the two. Backward takes most
// and total instead of lse: for large |lse| the difference score - lse would be too inexact.
// Compiled once per instruction set.
#include "attend.h"
#include "tiles.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

// sum_r = sum_r * kept[r] + sum_c p[c * stride + r] v_c for C sources and R rows.
template <class T, int C, int R, class A = compute_t<T>>
DEEPFAST_INLINE void add_weighted(const T* const* v, const A* p, int64_t stride, const A* kept,
                                  A* sums, int64_t sum_stride, int64_t dim) {
  // Copies, which stay in registers: a store to the sums could change p.
  A w[C][R], left[R];
  for (int r = 0; r < R; ++r) {
    left[r] = kept[r];
    for (int c = 0; c < C; ++c) w[c][r] = p[c * stride + r];
  }
  for_lanes<A>(dim, [&](auto lanes, int64_t d) {
    vec_t<A, lanes.n> x[C];
    for (int c = 0; c < C; ++c) x[c] = load(lanes, v[c] + d);
    for (int r = 0; r < R; ++r) {
      A* at_sum = sums + r * sum_stride + d;
      auto sum = load(lanes, at_sum) * left[r];
      for (int c = 0; c < C; ++c) sum += w[c][r] * x[c];
      store(lanes, at_sum, sum);
    }
  });
}

template <class T, class A = compute_t<T>>
DEEPFAST_INLINE A dot_rows(const T* row, const A* with, int64_t dim) {
  return sum_over_lanes<A, RowSum<A>>(dim,
                                      [&](auto lanes, int64_t d, auto& s) {
                                        s.add(load(lanes, row + d) * load(lanes, with + d));
                                      })
      .total();
}

// For x <= 0.
template <class A>
DEEPFAST_INLINE A exponential_of(A x) {
  return exponential<A>(Lanes<1>{}, broadcast(Lanes<1>{}, x))[0];
}

// Prefetches a row: the processor's own prefetcher does not follow so many streams.
template <class T, class Launch>
DEEPFAST_INLINE void prefetch_row(const Launch& op, int64_t t, int64_t k) {
  const auto* p = reinterpret_cast<const char*>(row_of<T>(op.sources[k], t));
  for (int64_t at = 0; at < op.D * static_cast<int64_t>(sizeof(T)); at += 64)
    __builtin_prefetch(p + at, 0, 2);
}

// Prefetches the next row: that of the next source or, after the last source, that of the first
// source for the next token.
template <class T, class Launch>
DEEPFAST_INLINE void prefetch_next(const Launch& op, int64_t t, int64_t k, int64_t end) {
  if (k + 1 < op.K)
    prefetch_row<T>(op, t, k + 1);
  else if (t + 1 < end)
    prefetch_row<T>(op, t + 1, 0);
}

// The scores of one source's row, hop by hop.
template <class T, class Launch, class A = compute_t<T>>
class Scores {
 public:
  DEEPFAST_INLINE Scores(const Launch& op, const T* row, int64_t t, int64_t k)
      : op_(op), row_(row), given_(at<A>(op.scores, (t * op.K + k) * op.H)) {
    if (op.query == nullptr) return;
    if (!op.norm) {
      first_ = dot_rows(row, at<A>(op.query, 0), op.D);
      return;
    }
    // The norm and the first hop's score in one pass.
    const A* query = at<A>(op.query, 0);
    const auto sums = sum_over_lanes<A, RowSums<A>>(op.D, [&](auto lanes, int64_t d, auto& s) {
      const auto x = load(lanes, row + d);
      s.first.add(x * x);
      s.second.add(x * load(lanes, query + d));
    });
    const A mean = sums.first.total() / static_cast<A>(op.D);
    r_ = A(1) / static_cast<A>(__builtin_sqrt(mean + static_cast<A>(op.eps)));
    first_ = sums.second.total() * r_;
  }
  // 1 / RMS, or 1 without norm.
  DEEPFAST_INLINE A r() const { return r_; }
  DEEPFAST_INLINE A operator()(int64_t h) const {
    if (given_ != nullptr) return given_[h];
    return h == 0 ? first_ : dot_rows(row_, at<A>(op_.query, h * op_.D), op_.D) * r_;
  }

 private:
  const Launch& op_;
  const T* row_;
  const A* given_;
  A first_ = 0, r_ = 1;
};

// ---- given weights -----------------------------------------------------------------------------

// Values of a tile of each operand.
constexpr int64_t kTileValues = 2048;

// The sums with the scores as weights, a few tokens and sources at a time.
template <class T>
void mix_rows(const DepthAttentionForward& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  const int64_t dim = op.D, hops = op.H, tokens = tile_tokens(dim, kTileValues);
  Scratch<A> sums(tokens * hops * dim), kept(hops);
  for (int64_t h = 0; h < hops; ++h) kept[h] = 1;
  for_tiles(begin, end, tokens, [&](const Tile& tile) {
    memset(sums.get(), 0, tokens * hops * dim * sizeof(A));
    for_groups<kGroup>(op.K, [&](auto group, int64_t k) {
      for (int64_t t = tile.t0; t < tile.t1; ++t) {
        const Streams<T, group.n> states(op.sources, k, tile, t);
        states.prefetch_row(dim);
        const A* weight = at<A>(op.scores, (t * op.K + k) * hops);
        A* sum = sums + (t - tile.t0) * hops * dim;
        for_groups<kAcross>(hops, [&](auto across, int64_t h) {
          add_weighted<T, group.n, across.n>(states.row, weight + h, hops, kept.get(),
                                             sum + h * dim, dim, dim);
        });
      }
    });
    for (int64_t r = tile.t0 * hops; r < tile.t1 * hops; ++r)
      store_row(sums + (r - tile.t0 * hops) * dim, at<T>(op.out, r * op.D), dim);
  });
}

// Gradients of mix_rows.
template <class T>
class PullTokens {
  using A = compute_t<T>;

 public:
  explicit PullTokens(const DepthAttentionBackward& op)
      : op_(op),
        tokens_(tile_tokens(op.D, kTileValues)),
        dout_(tokens_ * op.H * op.D),
        u_(kGroup * op.D),
        weight_(op.H * kGroup),
        g_(op.H) {
    for (int c = 0; c < kGroup; ++c) kept_[c] = 1;
  }

  void run(int64_t begin, int64_t end) {
    const int64_t hops = op_.H, dim = op_.D;
    for_tiles(begin, end, tokens_, [&](const Tile& tile) {
      for (int64_t r = tile.t0 * hops; r < tile.t1 * hops; ++r)
        load_row(row_of<T>(op_.dout, r), dout_ + (r - tile.t0 * hops) * dim, dim);
      for_groups<kGroup>(op_.K, [&](auto group, int64_t k) {
        for (int64_t t = tile.t0; t < tile.t1; ++t) {
          for (int64_t h = 0; h < hops; ++h) g_[h] = dout_ + ((t - tile.t0) * hops + h) * dim;
          if (op_.dscores != nullptr) weight_grads<group.n>(tile, t, k);
          if (op_.dsources.count > 0) source_grads<group.n>(tile, t, k);
        }
      });
    });
  }

 private:
  template <int C>
  DEEPFAST_INLINE void weight_grads(const Tile& tile, int64_t t, int64_t k) {
    const Streams<T, C> states(op_.sources, k, tile, t);
    states.prefetch_row(op_.D);
    const T* const* v = states.row;
    A* ds = at<A>(op_.dscores, (t * op_.K + k) * op_.H);
    for_groups<kAcross>(op_.H, [&](auto across, int64_t h) {
      multiply_rows<A, C, across.n>(v, g_.get() + h, op_.D, ds + h, op_.H, 1);
    });
  }

  template <int C>
  DEEPFAST_INLINE void source_grads(const Tile& tile, int64_t t, int64_t k) {
    const A* weight = at<A>(op_.scores, (t * op_.K + k) * op_.H);
    for (int c = 0; c < C; ++c)
      for (int64_t h = 0; h < op_.H; ++h) weight_[h * kGroup + c] = weight[c * op_.H + h];
    memset(u_.get(), 0, C * op_.D * sizeof(A));
    for_groups<kAcross>(op_.H, [&](auto across, int64_t h) {
      add_weighted<A, across.n, C>(g_.get() + h, weight_ + h * kGroup, kGroup, kept_, u_.get(),
                                   op_.D, op_.D);
    });
    for (int c = 0; c < C; ++c) store_row(u_ + c * op_.D, row_of<T>(op_.dsources[k + c], t), op_.D);
  }

  const DepthAttentionBackward& op_;
  const int64_t tokens_;
  Scratch<A> dout_, u_, weight_;
  Scratch<const A*> g_;
  A kept_[kGroup];
};

// ---- softmax -----------------------------------------------------------------------------------

template <class T>
void forward_rows(const DepthAttentionForward& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  constexpr A kNone = -__builtin_inf();
  const int64_t dim = op.D, hops = op.H;
  Scratch<A> sum(hops * dim), most(hops), total(hops);
  for (int64_t t = begin; t < end; ++t) {
    memset(sum.get(), 0, hops * dim * sizeof(A));
    for (int64_t h = 0; h < hops; ++h) most[h] = kNone, total[h] = 0;
    for (int64_t k = 0; k < op.K; ++k) {
      const T* row = row_of<T>(op.sources[k], t);
      prefetch_next<T>(op, t, k, end);
      const Scores<T, DepthAttentionForward> scores(op, row, t, k);
      for (int64_t h = 0; h < hops; ++h) {
        const A s = scores(h);
        // Its weight is 0 whatever the others are; the difference of two such scores would be NaN.
        if (s == kNone) continue;
        const bool rises = s > most[h];
        const A kept = rises ? exponential_of(most[h] - s) : A(1);
        // 1 where the score is a new maximum, but NaN for +inf, for which weights are undefined.
        const A p = rises ? A(1) + (s - s) : exponential_of(s - most[h]);
        if (rises) most[h] = s;
        total[h] = total[h] * kept + p;
        A* row_sum = sum + h * dim;
        for_lanes<A>(dim, [&](auto lanes, int64_t d) {
          store(lanes, row_sum + d, load(lanes, row_sum + d) * kept + p * load(lanes, row + d));
        });
      }
    }
    for (int64_t h = 0; h < hops; ++h) {
      const A scale = A(1) / total[h];
      const A* row_sum = sum + h * dim;
      T* out = at<T>(op.out, (t * hops + h) * op.D);
      for_lanes<A>(dim, [&](auto lanes, int64_t d) {
        store(lanes, out + d, load(lanes, row_sum + d) * scale);
      });
      *at<A>(op.most, t * hops + h) = most[h];
      *at<A>(op.total, t * hops + h) = total[h];
      // The logarithm of an infinite sum is infinite.
      *at<A>(op.lse, t * hops + h) =
          most[h] == -kNone
              ? most[h]
              : most[h] + static_cast<A>(__builtin_log(static_cast<double>(total[h])));
    }
  }
}

template <class T>
void backward_rows(const DepthAttentionBackward& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  const int64_t dim = op.D, hops = op.H;
  const A* query = at<A>(op.query, 0);
  A* dquery = at<A>(op.dquery, chunk * hops * dim);
  // Per hop: dout and q in the compute type side by side, p_k, and ds_k r_k.
  Scratch<A> dout(hops * dim), delta(hops), p(hops), c(hops);
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t h = 0; h < hops; ++h) {
      load_row(row_of<T>(op.dout, t * hops + h), dout + h * dim, dim);
      delta[h] = dot_rows(at<T>(op.out, (t * hops + h) * op.D), dout + h * dim, dim);
      if (op.dlse != nullptr) delta[h] -= *at<A>(op.dlse, t * hops + h);
    }
    for (int64_t k = 0; k < op.K; ++k) {
      const T* row = row_of<T>(op.sources[k], t);
      prefetch_next<T>(op, t, k, end);
      const Scores<T, DepthAttentionBackward> scores(op, row, t, k);
      A slope = 0;
      for (int64_t h = 0; h < hops; ++h) {
        const A s = scores(h);
        p[h] = exponential_of(s - *at<A>(op.most, t * hops + h)) / *at<A>(op.total, t * hops + h);
        const A ds = p[h] * (dot_rows(row, dout + h * dim, dim) - delta[h]);
        c[h] = ds * scores.r();
        slope += ds * s;
        if (op.dscores != nullptr) *at<A>(op.dscores, (t * op.K + k) * hops + h) = ds;
        if (dquery != nullptr) {
          A* target = dquery + h * dim;
          for_lanes<A>(dim, [&](auto lanes, int64_t d) {
            store(lanes, target + d, load(lanes, target + d) + c[h] * load(lanes, row + d));
          });
        }
      }
      if (op.dsources.count == 0) continue;
      // Given scores, and rows without a norm, add no gradient of their own.
      const A back = op.norm ? slope * scores.r() * scores.r() / static_cast<A>(dim) : A(0);
      T* target = row_of<T>(op.dsources[k], t);
      for_lanes<A>(dim, [&](auto lanes, int64_t d) {
        auto u = broadcast(lanes, A(0));
        if (op.norm) u -= back * load(lanes, row + d);
        for (int64_t h = 0; h < hops; ++h) {
          u += p[h] * load(lanes, dout + h * dim + d);
          if (query != nullptr) u += c[h] * load(lanes, query + h * dim + d);
        }
        store(lanes, target + d, u);
      });
    }
  }
}

}  // namespace

void depth_attention_forward(const DepthAttentionForward& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto type) {
    using T = decltype(type);
    op.most == nullptr ? mix_rows<T>(op, begin, end) : forward_rows<T>(op, begin, end);
  });
}

void depth_attention_backward(const DepthAttentionBackward& op, int64_t begin, int64_t end,
                              int64_t chunk) {
  with_storage(op.storage, [&](auto type) {
    using T = decltype(type);
    op.most == nullptr ? PullTokens<T>(op).run(begin, end)
                       : backward_rows<T>(op, begin, end, chunk);
  });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
