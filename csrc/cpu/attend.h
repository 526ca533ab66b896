// Attention over depth: products and weighted sums of a few rows of several matrices, and the two
// directions of a block of rows against its sources.
#pragma once

#include "ahead.h"
#include "exp.h"

namespace deepfast {
namespace DEEPFAST_ISA {

// Sources of a group, and rows (or sources against rows) of a group, whose products fill the
// registers.
constexpr int kGroup = 4, kAcross = kVectorBytes == 64 ? 4 : 2;

// Weighted sums of a group: as many as the registers hold.
constexpr int kSums = kVectorBytes == 64 ? 8 : 4;

template <class Launch>
DEEPFAST_INLINE bool is_softmax(const Launch& op) {
  return op.kind == Launch::Kind::softmax;
}

template <int N>
struct Count {
  static constexpr int n = N;
};

// Calls f(Count, i) for groups of N from `first` to `last`, then for single ones.
template <int N, class F>
DEEPFAST_INLINE void for_groups(int64_t first, int64_t last, const F& f) {
  int64_t i = first;
  for (; i + N <= last; i += N) f(Count<N>{}, i);
  for (; i < last; ++i) f(Count<1>{}, i);
}
template <int N, class F>
DEEPFAST_INLINE void for_groups(int64_t count, const F& f) {
  for_groups<N>(0, count, f);
}

// sum[i][j] += a_i * b_j, a vector of channels. The rows `ahead`, which may be null, are brought to the
// level-2 cache meanwhile.
template <class A, int N, int I, int J, class X, class Y>
DEEPFAST_INLINE void multiply_channels(Lanes<N> lanes, const X* const* a, const Y* const* b,
                                       int64_t d, const X* const* ahead, vec_t<A, N> (&sum)[I][J]) {
  vec_t<A, N> x[I];
  DEEPFAST_UNROLL for (int i = 0; i < I; ++i) x[i] = load(lanes, a[i] + d);
  if (ahead != nullptr)
    DEEPFAST_UNROLL for (int i = 0; i < I; ++i) __builtin_prefetch(ahead[i] + d, 0, 2);
  DEEPFAST_UNROLL for (int j = 0; j < J; ++j) {
    const auto y = load(lanes, b[j] + d);
    DEEPFAST_UNROLL for (int i = 0; i < I; ++i) sum[i][j] += x[i] * y;
  }
}

// products[i * next_a + j * next_b] = <a_i, b_j> for I times J rows of dim channels.
template <class A, int I, int J, class X, class Y>
DEEPFAST_INLINE void multiply_rows(const X* const* a, const Y* const* b, int64_t dim, A* products,
                                   int64_t next_a, int64_t next_b,
                                   const X* const* ahead = nullptr) {
  constexpr int N = kLanes<A>;
  constexpr Lanes<N> lanes;
  // Few products have several sums each: an addition waits for the one before it.
  constexpr int kParts = I * J < 8 ? 8 / (I * J) : 1;
  vec_t<A, N> parts[kParts][I][J] = {};
  auto& sum = parts[0];
  int64_t d = 0;
  for (; d + kParts * N <= dim; d += kParts * N)
    DEEPFAST_UNROLL for (int p = 0; p < kParts; ++p)
        multiply_channels<A, N, I, J>(lanes, a, b, d + p * N, ahead, parts[p]);
  for (; d + N <= dim; d += N) multiply_channels<A, N, I, J>(lanes, a, b, d, ahead, sum);
  DEEPFAST_UNROLL for (int p = 1; p < kParts; ++p) DEEPFAST_UNROLL for (int i = 0; i < I; ++i)
      DEEPFAST_UNROLL for (int j = 0; j < J; ++j) sum[i][j] += parts[p][i][j];
  // Whole vectors of products are summed together.
  constexpr int kWhole = I * J % N == 0 ? I * J / N : 0;
  vec_t<A, N> totals[kWhole + 1];
  DEEPFAST_UNROLL for (int k = 0; k < kWhole; ++k) totals[k] =
      sums_of_lanes<A, N>(&sum[0][0] + k * N);
  DEEPFAST_UNROLL for (int i = 0; i < I; ++i) DEEPFAST_UNROLL for (int j = 0; j < J; ++j) {
    A total = kWhole > 0 ? totals[(i * J + j) / N][(i * J + j) % N] : sum_lanes<A, N>(sum[i][j]);
    for (int64_t e = d; e < dim; ++e)
      total += load(Lanes<1>{}, a[i] + e)[0] * load(Lanes<1>{}, b[j] + e)[0];
    products[i * next_a + j * next_b] = total;
  }
}

// ---- batches of tokens ---------------------------------------------------------------------------

// Tokens are taken a few at a time. One vector then has a value of each token: a softmax over the
// sources has no sum over lanes.
template <class A>
constexpr int kBatch = kLanes<A> > 8 ? 8 : kLanes<A>;
template <class A>
using OfTokens = vec_t<A, kBatch<A>>;

// Values of n tokens; lanes behind them are 1, by which one can divide.
template <class A>
DEEPFAST_INLINE OfTokens<A> load_tokens(const A* p, int64_t n) {
  auto values = broadcast(Lanes<kBatch<A>>{}, A(1));
  if (n == kBatch<A>)
    memcpy(&values, p, sizeof(values));
  else
    memcpy(&values, p, n * sizeof(A));
  return values;
}
template <class A>
DEEPFAST_INLINE void store_tokens(A* p, int64_t n, OfTokens<A> values) {
  if (n == kBatch<A>)
    memcpy(p, &values, sizeof(values));
  else
    memcpy(p, &values, n * sizeof(A));
}

// What is read again for each result should come from the level-2 cache.
constexpr int64_t kCached = 256 << 10;

// Calls f(t, n) for batches whose `rows` rows of each token fit into the cache.
template <class T, class F>
DEEPFAST_INLINE void for_batches(int64_t begin, int64_t end, int64_t rows, int64_t dim,
                                 const F& f) {
  constexpr int64_t kMost = kBatch<compute_t<T>>;
  const int64_t bytes = rows * dim * static_cast<int64_t>(sizeof(T));
  const int64_t fit = bytes > 0 ? kCached / bytes : kMost;
  const int64_t most = fit < 1 ? 1 : fit < kMost ? fit : kMost;
  for (int64_t t = begin; t < end; t += most) f(t, end - t < most ? end - t : most);
}

// Calls f(t, n, first, last) for batches and, of each, for parts [first, last) of its `rows` rows. So
// many rows as there are layers do not fit into the cache, and a batch of fewer tokens would leave
// lanes empty. The parts have about the same size, because each reads and writes all results.
template <class T, class F>
DEEPFAST_INLINE void for_parts(int64_t begin, int64_t end, int64_t rows, int64_t dim, const F& f) {
  constexpr int64_t kTokens = kBatch<compute_t<T>>;
  const int64_t fit = kCached / (kTokens * dim * static_cast<int64_t>(sizeof(T)));
  const int64_t most = fit < kGroup ? kGroup : fit / kGroup * kGroup;
  const int64_t parts = (rows + most - 1) / most;
  const int64_t groups = parts > 0 ? (rows + parts * kGroup - 1) / (parts * kGroup) : 0;
  const int64_t part = groups * kGroup < rows ? groups * kGroup : rows;
  for_batches<T>(begin, end, part, dim, [&](int64_t t, int64_t n) {
    int64_t first = 0, last;
    do {
      last = first + part < rows ? first + part : rows;
      f(t, n, first, last);
      first = last;
    } while (first < rows);
  });
}

// Rows of a few of `count` matrices for one token, and those to bring to the cache meanwhile: the ones
// kGroup further, behind the last matrix those of the next batch.
template <class T, int Group>
struct GroupRows {
  const T *row[Group], *ahead[Group];

  DEEPFAST_INLINE GroupRows(const T* const* matrices, int64_t count, int64_t first, int64_t t,
                            int64_t batch, int64_t stride) {
    DEEPFAST_UNROLL for (int i = 0; i < Group; ++i) {
      row[i] = matrices[first + i] + t * stride;
      int64_t next = first + i + kGroup, token = next < count ? t : t + batch;
      while (next >= count) next -= count;
      ahead[i] = matrices[next] + token * stride;
    }
  }
};

// Calls f(Count<results>, i, lanes, Count<vectors>, d) for blocks of sums that fill the registers.
template <class A, class F>
DEEPFAST_INLINE void for_blocks(int64_t first, int64_t last, int64_t dim, const F& f) {
  constexpr int N = kLanes<A>;
  // Inlined early. Else GCC keeps what f refers to in memory, and each store loads its address anew.
  const auto sums = [&](auto group, int64_t i) __attribute__((always_inline)) {
    constexpr Count<group.n == 1 ? 4 : 2> vectors;
    int64_t d = 0;
    for (; d + vectors.n * N <= dim; d += vectors.n * N) f(group, i, Lanes<N>{}, vectors, d);
    for (; d + N <= dim; d += N) f(group, i, Lanes<N>{}, Count<1>{}, d);
    for (; d < dim; ++d) f(group, i, Lanes<1>{}, Count<1>{}, d);
  };
  int64_t i = first;
  if constexpr (kSums > kGroup)
    for (; i + kSums <= last; i += kSums) sums(Count<kSums>{}, i);
  for_groups<kGroup>(i, last, sums);
}

// sum[j][v] += weight(j) * row[v], V vectors at `row`.
template <class A, int N, int J, int V, class X, class Weight>
DEEPFAST_INLINE void add_products(Lanes<N> lanes, const X* row, const Weight& weight,
                                  vec_t<A, N> (&sum)[J][V]) {
  vec_t<A, N> x[V];
  DEEPFAST_UNROLL for (int v = 0; v < V; ++v) x[v] = load(lanes, row + v * N);
  DEEPFAST_UNROLL for (int j = 0; j < J; ++j) {
    const A w = weight(j);
    DEEPFAST_UNROLL for (int v = 0; v < V; ++v) sum[j][v] += w * x[v];
  }
}

// Rows of attention over sources, a batch of tokens at a time:
//   s = <q_r, v_k> rstd_k + b[r, k]         p = softmax over k, or relu(s)
//   x_r = kept_r before_r + sum_k p_rk v_k
// where before_r is the result over other sources, whose share of the softmax is kept_r.
template <class T>
class Attend {
  using A = compute_t<T>;
  static constexpr int N = kBatch<A>;

 public:
  template <class Launch>
  Attend(const Launch& op, const Indices& rows, const Indices& sources)
      : softmax_(is_softmax(op)),
        rows_(rows.count),
        sources_(sources.count),
        dim_(op.D),
        T_(op.T),
        stride_(op.states.row_stride),
        state_(sources_),
        query_(rows_),
        rstd_(sources_),
        bias_(op.bias == nullptr ? 0 : sources_ * rows_),
        p_(sources_ * rows_ * N),
        kept_(rows_ * N),
        biased_(op.bias != nullptr) {
    for (int64_t k = 0; k < sources_; ++k) {
      state_[k] = row_of<T>(op.states, sources[k], 0);
      rstd_[k] = at<A>(op.source_rstd, sources[k] * op.T);
      for (int64_t r = 0; biased_ && r < rows_; ++r)
        bias_[k * rows_ + r] = *at<A>(op.bias, rows[r] * op.R + sources[k]);
    }
    for (int64_t r = 0; r < rows_; ++r) query_[r] = at<A>(op.query, rows[r] * op.D);
    memset(p_.get(), 0, sources_ * rows_ * N * sizeof(A));
  }

  // The weights of tokens [t, t + n) for sources [first, last). `joins`: whether there are results
  // over other sources. before(r) and after(r): of row r (T) the largest scores, and behind them (T)
  // the sums of the exponentials.
  template <class Before, class After>
  DEEPFAST_INLINE void weigh(int64_t t, int64_t n, int64_t first, int64_t last, bool joins,
                             const Before& before, const After& after) {
    first_ = first, last_ = last;
    for_groups<kGroup>(first, last, [&](auto group, int64_t k) {
      for (int64_t i = 0; i < n; ++i) {
        const GroupRows<T, group.n> v(state_, sources_, k, t + i, n, stride_);
        for_groups<kAcross>(rows_, [&](auto across, int64_t r) {
          multiply_rows<A, group.n, across.n>(v.row, query_.get() + r, dim_, weight(k, r) + i,
                                              rows_ * N, N, r == 0 ? v.ahead : nullptr);
        });
      }
    });
    for (int64_t r = 0; r < rows_; ++r)
      softmax_ ? normalise(t, n, r, joins, before, after) : rectify(t, n, r);
  }

  // Calls put(lanes, r, d, x) with x_r of token t + i over the sources of `weigh`; before(lanes, r, d)
  // has the results over other sources.
  template <class Before, class Put>
  DEEPFAST_INLINE void mix(int64_t t, int64_t i, bool joins, const Before& before, const Put& put) {
    const int64_t token = (t + i) * stride_;
    for_blocks<A>(0, rows_, dim_, [&](auto group, int64_t r, auto lanes, auto vectors, int64_t d) {
      constexpr int J = group.n, V = vectors.n;
      vec_t<A, lanes.n> sum[J][V] = {};
      if (joins)
        DEEPFAST_UNROLL for (int j = 0; j < J; ++j) DEEPFAST_UNROLL for (int v = 0; v < V; ++v)
            sum[j][v] = before(lanes, r + j, d + v * lanes.n) * kept_[(r + j) * N + i];
      for (int64_t k = first_; k < last_; ++k)
        add_products<A>(
            lanes, state_[k] + token + d, [&](int j) { return weight(k, r + j)[i]; }, sum);
      DEEPFAST_UNROLL for (int j = 0; j < J; ++j) DEEPFAST_UNROLL for (int v = 0; v < V; ++v)
          put(lanes, r + j, d + v * lanes.n, sum[j][v]);
    });
  }

 private:
  // Of every token, first <q_r, v_k> and then p.
  DEEPFAST_INLINE A* weight(int64_t k, int64_t r) const { return p_ + (k * rows_ + r) * N; }

  DEEPFAST_INLINE OfTokens<A> score(int64_t t, int64_t n, int64_t k, int64_t r) const {
    const auto s = load(Lanes<N>{}, weight(k, r)) * load_tokens(rstd_[k] + t, n);
    return biased_ ? s + bias_[k * rows_ + r] : s;
  }
  DEEPFAST_INLINE void rectify(int64_t t, int64_t n, int64_t r) {
    const auto zero = broadcast(Lanes<N>{}, A(0));
    for (int64_t k = first_; k < last_; ++k) {
      const auto s = score(t, n, k, r);
      // NaN stays NaN.
      store(Lanes<N>{}, weight(k, r), s <= zero ? zero : s);
    }
    store(Lanes<N>{}, kept_ + r * N, zero + A(1));
  }
  template <class Before, class After>
  DEEPFAST_INLINE void normalise(int64_t t, int64_t n, int64_t r, bool joins, const Before& before,
                                 const After& after) {
    constexpr Lanes<N> lanes;
    auto first = broadcast(lanes, A(-__builtin_inf()));
    if (joins) first = load_tokens<A>(before(r) + t, n);
    auto most = first;
    for (int64_t k = first_; k < last_; ++k) {
      const auto s = score(t, n, k, r);
      store(lanes, weight(k, r), s);
      most = s > most ? s : most;
    }
    auto kept = broadcast(lanes, A(0));
    if (joins) kept = load_tokens<A>(before(r) + T_ + t, n) * exponential<A>(lanes, first - most);
    auto total = kept;
    for (int64_t k = first_; k < last_; ++k) {
      const auto e = exponential<A>(lanes, load(lanes, weight(k, r)) - most);
      store(lanes, weight(k, r), e);
      total += e;
    }
    const auto scale = A(1) / total;
    store(lanes, kept_ + r * N, kept * scale);
    for (int64_t k = first_; k < last_; ++k)
      store(lanes, weight(k, r), load(lanes, weight(k, r)) * scale);
    store_tokens<A>(after(r) + t, n, most);
    store_tokens<A>(after(r) + T_ + t, n, total);
  }

  bool softmax_;
  int64_t rows_, sources_, dim_, T_, stride_;
  int64_t first_ = 0, last_ = 0;  // the sources of `weigh`
  Scratch<const T*> state_;       // at token 0
  Scratch<const A*> query_, rstd_;
  Scratch<A> bias_, p_, kept_;
  bool biased_;
};

// The transpose: what rows l add to the gradients of sources j, with n_j = v_j rstd_j:
//   u_j += sum_l p_lj g_l + ds_lj rstd_j (q_l - n_j <q_l, n_j> / D)
//   dq_l += sum_j ds_lj n_j,  db_lj += ds_lj,  ds_lj = p_lj (<g_l, v_j> - delta_l)
template <class T>
class Pull {
  using A = compute_t<T>;
  static constexpr int N = kBatch<A>;

 public:
  template <class Launch>
  Pull(const Launch& op, const Indices& rows, const Indices& slots, const Indices& sources,
       int64_t chunk)
      : softmax_(is_softmax(op)),
        rows_(rows.count),
        sources_(sources.count),
        dim_(op.D),
        T_(op.T),
        stride_(op.grads.row_stride),
        grad_(rows_),
        query_(rows_),
        stats_(rows_),
        rstd_(sources_),
        bias_(rows_ * sources_),
        p_(rows_ * sources_ * N),
        c_(rows_ * sources_ * N),
        back_(sources_ * N),
        dquery_(at<A>(op.dquery, chunk * rows_ * op.D)),
        dbias_(at<A>(op.dbias, chunk * rows_ * sources_)) {
    for (auto* zero : {&p_, &c_}) memset(zero->get(), 0, rows_ * sources_ * N * sizeof(A));
    for (int64_t j = 0; j < sources_; ++j) rstd_[j] = at<A>(op.source_rstd, sources[j] * op.T);
    for (int64_t l = 0; l < rows_; ++l) {
      grad_[l] = row_of<T>(op.grads, slots[l], 0);
      query_[l] = at<A>(op.query, rows[l] * op.D);
      stats_[l] = at<A>(op.stats, rows[l] * 3 * op.T);
      for (int64_t j = 0; j < sources_; ++j)
        bias_[l * sources_ + j] =
            op.bias == nullptr ? A(0) : *at<A>(op.bias, rows[l] * op.R + sources[j]);
    }
  }

  // The weights of tokens [t, t + n) for rows [first, last). v[i * sources + j]: the row of source j
  // for token t + i.
  template <class V>
  DEEPFAST_INLINE void weigh(int64_t t, int64_t n, int64_t first, int64_t last, const V* const* v) {
    first_ = first, last_ = last;
    for_groups<kGroup>(first, last, [&](auto group, int64_t l) {
      for (int64_t i = 0; i < n; ++i) {
        const GroupRows<T, group.n> g(grad_, rows_, l, t + i, n, stride_);
        for_groups<kAcross>(sources_, [&](auto across, int64_t j) {
          const V* const* of = v + i * sources_ + j;
          const int64_t pair = at_pair(l, j) + i, next = sources_ * N;
          multiply_rows<A, group.n, across.n>(query_.get() + l, of, dim_, p_ + pair, next, N);
          multiply_rows<A, group.n, across.n>(g.row, of, dim_, c_ + pair, next, N,
                                              j == 0 ? g.ahead : nullptr);
        });
      }
    });
    for (int64_t j = 0; j < sources_; ++j)
      softmax_ ? weigh_source<true>(t, n, j) : weigh_source<false>(t, n, j);
    if (dquery_ == nullptr) return;
    for_blocks<A>(
        first, last, dim_, [&](auto group, int64_t l, auto lanes, auto vectors, int64_t d) {
          constexpr int J = group.n, V_ = vectors.n;
          vec_t<A, lanes.n> sum[J][V_];
          const auto dquery = [&](int r, int v) {
            return dquery_ + (l + r) * dim_ + d + v * lanes.n;
          };
          DEEPFAST_UNROLL for (int r = 0; r < J; ++r) DEEPFAST_UNROLL for (int v = 0; v < V_; ++v)
              sum[r][v] = load(lanes, dquery(r, v));
          for (int64_t i = 0; i < n; ++i)
            for (int64_t j = 0; j < sources_; ++j)
              add_products<A>(
                  lanes, v[i * sources_ + j] + d, [&](int r) { return c_[at_pair(l + r, j) + i]; },
                  sum);
          DEEPFAST_UNROLL for (int r = 0; r < J; ++r) DEEPFAST_UNROLL for (int v = 0; v < V_; ++v)
              store(lanes, dquery(r, v), sum[r][v]);
        });
  }

  // Calls put(lanes, j, d, u) for token t + i with what the rows of `weigh` add; before(lanes, j, d)
  // is what u_j was, and v that of weigh for this token.
  template <class V, class Before, class Put>
  DEEPFAST_INLINE void add(int64_t t, int64_t i, const V* const* v, const Before& before,
                           const Put& put) const {
    const int64_t token = (t + i) * stride_;
    for_blocks<A>(
        0, sources_, dim_, [&](auto group, int64_t j, auto lanes, auto vectors, int64_t d) {
          constexpr int J = group.n, V_ = vectors.n;
          vec_t<A, lanes.n> sum[J][V_];
          DEEPFAST_UNROLL for (int s = 0; s < J; ++s) DEEPFAST_UNROLL for (int w = 0; w < V_; ++w)
              sum[s][w] = before(lanes, j + s, d + w * lanes.n);
          for (int64_t l = first_; l < last_; ++l) {
            add_products<A>(
                lanes, grad_[l] + token + d, [&](int s) { return p_[at_pair(l, j + s) + i]; }, sum);
            add_products<A>(
                lanes, query_[l] + d, [&](int s) { return c_[at_pair(l, j + s) + i]; }, sum);
          }
          DEEPFAST_UNROLL for (int s = 0; s < J; ++s) DEEPFAST_UNROLL for (int w = 0; w < V_; ++w) {
            const int64_t at = d + w * lanes.n;
            put(lanes, j + s, at, sum[s][w] - back_[(j + s) * N + i] * load(lanes, v[j + s] + at));
          }
        });
  }

 private:
  DEEPFAST_INLINE int64_t at_pair(int64_t l, int64_t j) const { return (l * sources_ + j) * N; }

  // Turns <q_l, v_j> and <g_l, v_j> into p_lj and c_lj = ds_lj rstd_j.
  template <bool Softmax>
  DEEPFAST_INLINE void weigh_source(int64_t t, int64_t n, int64_t j) {
    constexpr Lanes<N> lanes;
    const auto zero = broadcast(lanes, A(0));
    const auto rstd = load_tokens<A>(rstd_[j] + t, n);
    auto slope = zero;
    for (int64_t l = first_; l < last_; ++l) {
      A *raw = p_ + at_pair(l, j), *dot = c_ + at_pair(l, j);
      const auto scaled = load(lanes, raw) * rstd, score = scaled + bias_[l * sources_ + j];
      OfTokens<A> p, ds;
      if constexpr (Softmax) {
        const A* stats = stats_[l] + t;
        // Rounding can make the score larger than the largest one by its last digit.
        const auto below = score - load_tokens<A>(stats, n);
        p = exponential<A>(lanes, below > zero ? zero : below) / load_tokens<A>(stats + T_, n);
        ds = p * (load(lanes, dot) - load_tokens<A>(stats + 2 * T_, n));
      } else {
        p = score <= zero ? zero : score;
        ds = score <= zero ? zero : load(lanes, dot);
      }
      slope += ds * scaled;
      store(lanes, raw, p);
      store(lanes, dot, ds * rstd);
      for (int64_t i = 0; dbias_ != nullptr && i < n; ++i) dbias_[l * sources_ + j] += ds[i];
    }
    store(lanes, back_ + j * N, slope * rstd * rstd / static_cast<A>(dim_));
  }

  bool softmax_;
  int64_t rows_, sources_, dim_, T_, stride_;
  int64_t first_ = 0, last_ = 0;  // the rows of `weigh`
  Scratch<const T*> grad_;        // at token 0
  Scratch<const A*> query_, stats_, rstd_;
  Scratch<A> bias_, p_, c_, back_;
  A *dquery_, *dbias_;
};

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
