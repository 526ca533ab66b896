// A boundary whose row attends over depth, one token at a time. See attend_kernel.cpp for the
// formulas: the older states' mean with its softmax's statistics comes in as `partial`, and the
// states of the row's own block join it here. Compiled once per instruction set.
#include "attend.h"
#include "boundary.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

// Prefetches a row: the processor's own prefetcher does not follow a stream for every state.
template <class T>
DEEPFAST_INLINE void prefetch_row(const T* row, int64_t dim) {
  const auto* p = reinterpret_cast<const char*>(row);
  for (int64_t at = 0; at < dim * static_cast<int64_t>(sizeof(T)); at += 64)
    __builtin_prefetch(p + at, 0, 3);
}

// One token's near states and their weights.
template <class T, class A = compute_t<T>>
struct Near {
  explicit Near(int64_t count) : v(count), p(padded<A>(count)) {}
  Scratch<const T*> v;
  Scratch<A> p;
};

// x += sum_j p_j v_j over `count` rows, V vectors of N channels at d.
template <int N, int V, class T, class A = compute_t<T>>
DEEPFAST_INLINE void add_registers(const Near<T>& near, int64_t count, A* x, int64_t d) {
  constexpr Lanes<N> lanes;
  vec_t<A, N> sum[V];
  for (int i = 0; i < V; ++i) sum[i] = load(lanes, x + d + i * N);
  for (int64_t j = 0; j < count; ++j) {
    const T* v = near.v[j] + d;
    const A p = near.p[j];
    for (int i = 0; i < V; ++i) sum[i] += p * load(lanes, v + i * N);
  }
  for (int i = 0; i < V; ++i) store(lanes, x + d + i * N, sum[i]);
}

// Entry 0, 1 or 2 of a row's statistics: the largest score, the sum of exponentials, <g, x>.
template <class A, class Launch>
DEEPFAST_INLINE A* stat_of(const Launch& op, int64_t row, int64_t entry, int64_t t) {
  return at<A>(op.stats, (row * 3 + entry) * op.T + t);
}

// x = sum_k p_k v_k of one token. Stores the row's statistics.
template <class T, class Launch>
DEEPFAST_INLINE void attend_near(const Launch& op, int64_t t, int64_t end, const Near<T>& near,
                                 compute_t<T>* x) {
  using A = compute_t<T>;
  constexpr int N = kLanes<A>;
  constexpr Lanes<N> lanes;
  const bool joins = op.partial.data != nullptr, softmax = is_softmax(op);
  const int64_t count = op.near.count;
  const A* query = at<A>(op.query, op.k * op.D);
  const A* bias = at<A>(op.bias, op.k * op.R);
  A* p = near.p;
  for (int64_t j = 0; j < count; ++j) {
    near.v[j] = row_of<T>(op.states, op.near[j], t);
    if (t + 1 < end) prefetch_row(row_of<T>(op.states, op.near[j], t + 1), op.D);
  }
  for_groups<kGroup>(count, [&](auto group, int64_t j) {
    multiply_rows<A, 1, group.n>(&query, near.v.get() + j, op.D, p + j, 0);
  });
  A most = joins && softmax ? *at<A>(op.partial_stats, t) : -__builtin_inf();
  const A before = most;
  for (int64_t j = 0; j < count; ++j) {
    p[j] *= *at<A>(op.source_rstd, op.near[j] * op.T + t);
    if (bias != nullptr) p[j] += bias[op.near[j]];
    most = p[j] > most ? p[j] : most;
  }
  A kept = joins ? A(1) : A(0);
  if (softmax) {
    for (int64_t j = count; j < padded<A>(count); ++j) p[j] = -__builtin_inf();
    auto sum = broadcast(lanes, A(0));
    for (int64_t j = 0; j < count; j += N) {
      const auto e = exponential<A>(lanes, load(lanes, p + j) - most);
      store(lanes, p + j, e);
      sum += e;
    }
    A total = sum_lanes<A, N>(sum);
    if (joins) {
      const auto old = exponential<A>(Lanes<1>{}, broadcast(Lanes<1>{}, before - most));
      kept = *at<A>(op.partial_stats, op.T + t) * old[0];
      total += kept;
    }
    const A scale = A(1) / total;
    kept *= scale;
    for (int64_t j = 0; j < count; ++j) p[j] *= scale;
    *stat_of<A>(op, op.k, 0, t) = most;
    *stat_of<A>(op, op.k, 1, t) = total;
  } else {
    for (int64_t j = 0; j < count; ++j) p[j] = p[j] <= A(0) ? A(0) : p[j];
  }
  if (joins)
    for_lanes<A>(op.D, [&](auto width, int64_t d) {
      store(width, x + d, load(width, row_of<T>(op.partial, t) + d) * kept);
    });
  else
    memset(x, 0, op.D * sizeof(A));
  int64_t d = 0;
  for (; d + 4 * N <= op.D; d += 4 * N) add_registers<N, 4>(near, count, x, d);
  for (; d + N <= op.D; d += N) add_registers<N, 1>(near, count, x, d);
  for (; d < op.D; ++d) add_registers<1, 1>(near, count, x, d);
}

template <class T>
void forward(const AttentionBoundaryForward& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  Scratch<A> row(op.D), mixed(op.D);
  const Near<T> near(op.near.count);
  for (int64_t t = begin; t < end; ++t) {
    if (op.branch.data != nullptr) {
      load_push<T>(op, t, row);
      T* state = row_of<T>(op.states, op.k, t);
      store_row(row.get(), state, op.D);
      // Of the rounded state, which is what every row reads.
      const auto squares = sum_over_lanes<A, RowSum<A>>(op.D, [&](auto lanes, int64_t d, auto& s) {
        const auto v = load(lanes, state + d);
        s.add(v * v);
      });
      const A mean = squares.total() / static_cast<A>(op.D);
      *at<A>(op.source_rstd, op.k * op.T + t) =
          A(1) / static_cast<A>(__builtin_sqrt(mean + static_cast<A>(op.eps)));
    }
    attend_near<T>(op, t, end, near, mixed);
    store_output<T, 1>(op, t, mixed);
  }
}

// What the rows of the block add to u, the gradient of one token's state v.
template <class T>
class Pulls {
  using A = compute_t<T>;

 public:
  Pulls(const AttentionBoundaryBackward& op, int64_t chunk)
      : op_(op),
        count_(op.pull_rows.count),
        query_(count_),
        grad_(count_),
        p_(padded<A>(count_)),
        c_(padded<A>(count_)),
        dquery_(at<A>(op.dquery, chunk * count_ * op.D)),
        dbias_(at<A>(op.dbias, chunk * count_)) {
    for (int64_t i = 0; i < count_; ++i) query_[i] = at<A>(op.query, op.pull_rows[i] * op.D);
    // Padding lanes hold numbers.
    for (int64_t i = count_; i < padded<A>(count_); ++i) p_[i] = c_[i] = A(0);
  }

  DEEPFAST_INLINE void add(int64_t t, int64_t end, const A* v, A* u) {
    const int64_t dim = op_.D;
    for (int64_t i = 0; i < count_; ++i) {
      grad_[i] = row_of<T>(op_.grads, op_.pull_slots[i], t);
      // The first row's gradient is the one that this pass stores.
      if (i > 0 && t + 1 < end) prefetch_row(row_of<T>(op_.grads, op_.pull_slots[i], t + 1), dim);
    }
    for_groups<kGroup>(count_, [&](auto group, int64_t i) {
      multiply_rows<A, 1, group.n>(&v, query_.get() + i, dim, p_ + i, 0);
      multiply_rows<A, 1, group.n>(&v, grad_.get() + i, dim, c_ + i, 0);
    });
    const A rstd = *at<A>(op_.source_rstd, op_.k * op_.T + t);
    const A back = weights(t, rstd) * rstd * rstd / static_cast<A>(dim);
    for_groups<kGroup>(count_, [&](auto group, int64_t i) {
      pull_weighted<A, group.n, 1>(grad_.get() + i, query_.get() + i,
                                   dquery_ == nullptr ? nullptr : dquery_ + i * dim, &v, p_ + i,
                                   c_ + i, 1, u, dim, dim);
    });
    for_lanes<A>(dim, [&](auto lanes, int64_t d) {
      store(lanes, u + d, load(lanes, u + d) - back * load(lanes, v + d));
    });
  }

 private:
  // Turns <q, v> and <g, v> of every row into p and c = ds rstd; returns sum ds <q, n>.
  DEEPFAST_INLINE A weights(int64_t t, A rstd) {
    A slope = 0;
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t row = op_.pull_rows[i];
      const A raw = p_[i] * rstd;
      const A score = op_.bias == nullptr ? raw : raw + *at<A>(op_.bias, row * op_.R + op_.k);
      A p = score <= A(0) ? A(0) : score, ds = score <= A(0) ? A(0) : c_[i];
      if (is_softmax(op_)) {
        // Rounding can make the score larger than the largest one by its last digit.
        const A below = score - *stat_of<A>(op_, row, 0, t);
        const auto e =
            exponential<A>(Lanes<1>{}, broadcast(Lanes<1>{}, below > A(0) ? A(0) : below));
        p = e[0] / *stat_of<A>(op_, row, 1, t);
        ds = p * (c_[i] - *stat_of<A>(op_, row, 2, t));
      }
      if (dbias_ != nullptr) dbias_[i] += ds;
      slope += ds * raw;
      p_[i] = p;
      c_[i] = ds * rstd;
    }
    return slope;
  }

  const AttentionBoundaryBackward& op_;
  const int64_t count_;
  Scratch<const A*> query_;
  Scratch<const T*> grad_;
  Scratch<A> p_, c_;
  A *dquery_, *dbias_;
};

template <class T>
void backward(const AttentionBoundaryBackward& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  const int64_t dim = op.D;
  Scratch<A> g(dim), x(dim), v(dim), u(dim);
  const Near<T> near(op.near.count);
  Pulls<T> pulls(op, chunk);
  for (int64_t t = begin; t < end; ++t) {
    if (op.dout.data != nullptr || is_softmax(op)) attend_near<T>(op, t, end, near, x);
    output_gradient<T, 1>(op, t, chunk, x, g);
    // The state is read before the gradient is stored: the gradient may overwrite a slot of its
    // buffer.
    load_row(row_of<T>(op.states, op.k, t), v.get(), dim);
    T* stored = row_of<T>(op.grads, op.grad_slot, t);
    store_row(g.get(), stored, dim);
    if (is_softmax(op)) {
      // Of the rounded gradient, which is what the boundaries read.
      const A* mixed = x;
      A* delta = stat_of<A>(op, op.k, 2, t);
      multiply_rows<A, 1, 1>(&stored, &mixed, dim, delta, 0);
    }
    load_pulled<T>(op, t, u);
    pulls.add(t, end, v, u);
    store_push_gradient<T>(op, t, u);
  }
}

}  // namespace

void attention_boundary_forward(const AttentionBoundaryForward& op, int64_t begin, int64_t end,
                                int64_t) {
  with_storage(op.storage, [&](auto type) { forward<decltype(type)>(op, begin, end); });
}

void attention_boundary_backward(const AttentionBoundaryBackward& op, int64_t begin, int64_t end,
                                 int64_t chunk) {
  with_storage(op.storage, [&](auto type) { backward<decltype(type)>(op, begin, end, chunk); });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
