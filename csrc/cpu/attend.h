// Products and weighted sums of a few rows of several matrices, for attention over depth.
#pragma once

#include "exp.h"
#include "rows.h"

namespace deepfast {
namespace DEEPFAST_ISA {

// Sources of a group, and rows (or sources against rows) of a group, whose products fill the
// registers.
constexpr int kGroup = 4, kAcross = kVectorBytes == 64 ? 4 : 2;

template <class Launch>
DEEPFAST_INLINE bool is_softmax(const Launch& op) {
  return op.kind == Launch::Kind::softmax;
}

template <int N>
struct Count {
  static constexpr int n = N;
};

// Calls f(Count, i) for groups of N, then for single ones.
template <int N, class F>
DEEPFAST_INLINE void for_groups(int64_t count, const F& f) {
  int64_t i = 0;
  for (; i + N <= count; i += N) f(Count<N>{}, i);
  for (; i < count; ++i) f(Count<1>{}, i);
}

// The least multiple of the lanes that is at least n.
template <class A>
DEEPFAST_INLINE int64_t padded(int64_t n) {
  return (n + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
}

// products[i * stride + j] = <a_i, b_j> for I times J rows of dim channels.
template <class A, int I, int J, class X, class Y>
DEEPFAST_INLINE void multiply_rows(const X* const* a, const Y* const* b, int64_t dim, A* products,
                                   int64_t stride) {
  constexpr int N = kLanes<A>;
  constexpr Lanes<N> lanes;
  vec_t<A, N> sum[I][J] = {};
  int64_t d = 0;
  for (; d + N <= dim; d += N) {
    vec_t<A, N> x[I];
    for (int i = 0; i < I; ++i) x[i] = load(lanes, a[i] + d);
    for (int j = 0; j < J; ++j) {
      const auto y = load(lanes, b[j] + d);
      for (int i = 0; i < I; ++i) sum[i][j] += x[i] * y;
    }
  }
  for (int i = 0; i < I; ++i)
    for (int j = 0; j < J; ++j) {
      A total = sum_lanes<A, N>(sum[i][j]);
      for (int64_t e = d; e < dim; ++e)
        total += load(Lanes<1>{}, a[i] + e)[0] * load(Lanes<1>{}, b[j] + e)[0];
      products[i * stride + j] = total;
    }
}

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

// u_j += sum_l p_lj g_l + c_lj q_l and, where dq is not null, dq_l += sum_j c_lj v_j, for L rows
// and J sources.
template <class T, int L, int J, class G, class A = compute_t<T>>
DEEPFAST_INLINE void pull_weighted(const G* const* g, const A* const* q, A* dq, const T* const* v,
                                   const A* p, const A* c, int64_t stride, A* u, int64_t u_stride,
                                   int64_t dim) {
  A w[L][J], s[L][J];
  for (int l = 0; l < L; ++l)
    for (int j = 0; j < J; ++j) w[l][j] = p[l * stride + j], s[l][j] = c[l * stride + j];
  for_lanes<A>(dim, [&](auto lanes, int64_t d) {
    vec_t<A, lanes.n> b_v[J], b_u[J];
    for (int j = 0; j < J; ++j) {
      b_v[j] = load(lanes, v[j] + d);
      b_u[j] = load(lanes, u + j * u_stride + d);
    }
    for (int l = 0; l < L; ++l) {
      const auto b_g = load(lanes, g[l] + d);
      const auto b_q = load(lanes, q[l] + d);
      for (int j = 0; j < J; ++j) b_u[j] += w[l][j] * b_g + s[l][j] * b_q;
      if (dq == nullptr) continue;
      auto sum = load(lanes, dq + l * dim + d);
      for (int j = 0; j < J; ++j) sum += s[l][j] * b_v[j];
      store(lanes, dq + l * dim + d, sum);
    }
    for (int j = 0; j < J; ++j) store(lanes, u + j * u_stride + d, b_u[j]);
  });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
