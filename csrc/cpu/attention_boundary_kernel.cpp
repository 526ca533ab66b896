// A boundary whose row attends over depth, one token at a time. See attend_kernel.cpp for the
// formulas: the older states' mean with its softmax's statistics comes in as `partial`, and the
// states of the row's own block join it here. Compiled once per instruction set.
#include "boundary.h"
#include "exp.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

template <class T, class A = compute_t<T>>
DEEPFAST_INLINE A dot_row(const T* row, const A* with, int64_t dim) {
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

// x = sum_k p_k v_k of one token; `p` has room for the near states. Stores the row's statistics.
template <class T>
DEEPFAST_INLINE void attend_near(const AttentionBoundary& op, int64_t t, compute_t<T>* p,
                                 compute_t<T>* x) {
  using A = compute_t<T>;
  const Boundary& f = op.base;
  const bool joins = f.partial.data != nullptr;
  const A* query = at<A>(op.query, 0);
  A most = joins && op.softmax ? *at<A>(op.partial_most, t) : -__builtin_inf();
  const A before = most;
  for (int64_t j = 0; j < f.near; ++j) {
    p[j] = dot_row(row_of<T>(f.source[j], t), query, f.dim) * *at<A>(op.rstd[j], t);
    if (op.bias != nullptr) p[j] += *at<A>(op.bias[j], 0);
    most = p[j] > most ? p[j] : most;
  }
  A kept = joins ? A(1) : A(0);
  if (op.softmax) {
    A total = 0;
    if (joins) total = kept = *at<A>(op.partial_total, t) * exponential_of(before - most);
    for (int64_t j = 0; j < f.near; ++j) total += p[j] = exponential_of(p[j] - most);
    const A scale = A(1) / total;
    kept *= scale;
    for (int64_t j = 0; j < f.near; ++j) p[j] *= scale;
    *at<A>(op.most, t) = most;
    *at<A>(op.total, t) = total;
  } else {
    for (int64_t j = 0; j < f.near; ++j) p[j] = p[j] <= A(0) ? A(0) : p[j];
  }
  for_lanes<A>(f.dim, [&](auto lanes, int64_t d) {
    auto sum = broadcast(lanes, A(0));
    if (joins) sum += load(lanes, row_of<T>(f.partial, t) + d) * kept;
    for (int64_t j = 0; j < f.near; ++j) sum += p[j] * load(lanes, row_of<T>(f.source[j], t) + d);
    store(lanes, x + d, sum);
  });
}

template <class T>
void forward(const AttentionBoundary& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  const Boundary& f = op.base;
  Scratch<A> row(f.dim), mixed(f.dim), p(f.near);
  for (int64_t t = begin; t < end; ++t) {
    if (f.branch.data != nullptr) {
      push<T>(f, t, row);
      // Of the rounded state, which is what every row reads.
      const T* state = row_of<T>(f.state, t);
      const auto squares = sum_over_lanes<A, RowSum<A>>(f.dim, [&](auto lanes, int64_t d, auto& s) {
        const auto v = load(lanes, state + d);
        s.add(v * v);
      });
      const A mean = squares.total() / static_cast<A>(f.dim);
      *at<A>(op.own_rstd, t) =
          A(1) / static_cast<A>(__builtin_sqrt(mean + static_cast<A>(op.eps)));
    }
    attend_near<T>(op, t, p, mixed);
    store_output<T>(f, t, mixed);
  }
}

// What row i of the pulls, with gradient g, adds to u, the gradient of the state v.
template <class T>
DEEPFAST_INLINE void pull_attention(const AttentionBoundaryGrad& op, int64_t i, int64_t t,
                                    int64_t chunk, const compute_t<T>* g, const compute_t<T>* v,
                                    compute_t<T>* u) {
  using A = compute_t<T>;
  const int64_t dim = op.base.forward.dim;
  const A *query = at<A>(op.pull_query[i], 0), rstd = *at<A>(op.forward.own_rstd, t);
  const auto sums = sum_over_lanes<A, RowSums<A>>(dim, [&](auto lanes, int64_t d, auto& s) {
    const auto x = load(lanes, v + d);
    s.first.add(x * load(lanes, query + d));
    s.second.add(x * load(lanes, g + d));
  });
  const A raw = sums.first.total() * rstd, slope = sums.second.total();
  const A score = op.pull_bias == nullptr ? raw : raw + *at<A>(op.pull_bias[i], 0);
  A p = score <= A(0) ? A(0) : score, ds = score <= A(0) ? A(0) : slope;
  if (op.forward.softmax) {
    // Rounding can make the score larger than the largest one by its last digit.
    const A below = score - *at<A>(op.pull_most[i], t);
    p = exponential_of(below > A(0) ? A(0) : below) / *at<A>(op.pull_total[i], t);
    ds = p * (slope - *at<A>(op.pull_delta[i], t));
  }
  const A c = ds * rstd, back = c * rstd * raw / static_cast<A>(dim);
  const int64_t place = chunk * op.base.pulls + i;
  if (op.dbias != nullptr) *at<A>(op.dbias, place) += ds;
  A* dquery = at<A>(op.dquery, place * dim);
  for_lanes<A>(dim, [&](auto lanes, int64_t d) {
    const auto x = load(lanes, v + d);
    store(lanes, u + d,
          load(lanes, u + d) + p * load(lanes, g + d) + c * load(lanes, query + d) - back * x);
    if (dquery != nullptr) store(lanes, dquery + d, load(lanes, dquery + d) + c * x);
  });
}

template <class T>
void backward(const AttentionBoundaryGrad& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  const BoundaryGrad& b = op.base;
  const Boundary& f = b.forward;
  const int64_t dim = f.dim;
  Scratch<A> g(dim), x(dim), n(dim), v(dim), u(dim), p(f.near);
  for (int64_t t = begin; t < end; ++t) {
    if (b.dout.data != nullptr || op.forward.softmax) attend_near<T>(op.forward, t, p, x);
    memcpy(n.get(), x.get(), dim * sizeof(A));
    output_gradient<T>(b, t, chunk, n, g);
    // The state is read before the gradient is stored: the gradient may overwrite a slot of its
    // buffer.
    load_row(row_of<T>(f.state, t), v.get(), dim);
    T* stored = row_of<T>(b.grad, t);
    store_row(g.get(), stored, dim);
    // The rounded gradient, which later boundaries read.
    load_row(stored, g.get(), dim);
    if (op.forward.softmax) *at<A>(op.delta, t) = dot_row(g.get(), x.get(), dim);
    if (b.pulled.data != nullptr)
      load_row(row_of<T>(b.pulled, t), u.get(), dim);
    else
      memset(u.get(), 0, dim * sizeof(A));
    for (int64_t i = 0; i < b.pulls; ++i) {
      if (i > 0 || !b.own_row_reads) load_row(row_of<T>(b.pull_grad[i], t), g.get(), dim);
      pull_attention<T>(op, i, t, chunk, g, v, u);
    }
    push_gradient<T>(b, t, chunk, v, u);
  }
}

}  // namespace

void attention_boundary_forward(const AttentionBoundary& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.base.storage, [&](auto type) { forward<decltype(type)>(op, begin, end); });
}

void attention_boundary_backward(const AttentionBoundaryGrad& op, int64_t begin, int64_t end,
                                 int64_t chunk) {
  with_storage(op.base.forward.storage,
               [&](auto type) { backward<decltype(type)>(op, begin, end, chunk); });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
