// Everything between two layers' matrix products, a few tokens at a time. In order: residual and
// dropout, the source's layer-norm, the write of the state, the recent states' share of the mix, and
// the next layer's first layer-norm. Each operand is read once and each result is written once.
// Backward recomputes the mix from the states, so it is not stored. `partial` is the sum over the
// states before the block, from mix_rows in mix_rows_kernel.cpp.
#include "boundary.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

// Tokens that are taken at once: their horizontal sums overlap, and they share what they load of the
// parameters.
constexpr int kTokens = 2;
// Rows whose gradients are pulled at once.
constexpr int kPulled = 4;

// A near source and its weight.
template <class T>
struct Source {
  State<T> state;
  const compute_t<T>* weight;
};

template <class T, class Launch>
void find_sources(const Launch& op, Source<T>* sources) {
  using A = compute_t<T>;
  for (int64_t i = 0; i < op.near.count; ++i) {
    const int64_t j = op.near[i];
    sources[i] = {state_of<T>(op, j), weight_of<A>(op.weight, op.k, j, op.R)};
  }
}

// x = partial + sum over the near sources of W[k, j] z_j, V vectors of channels at a time. The sum
// stays in registers over all sources.
template <class T, int N, int V, bool PerChannel, class Launch>
DEEPFAST_INLINE void mix_near_registers(const Launch& op, const Source<T>* sources, int64_t t,
                                        int64_t d, compute_t<T>* x) {
  using A = compute_t<T>;
  constexpr Lanes<N> lanes;
  vec_t<A, N> sum[V];
  for (int v = 0; v < V; ++v)
    sum[v] = op.partial.data != nullptr
                 ? load_ahead(lanes, row_of<A>(op.partial, t) + d + v * N, op.partial.row_stride)
                 : vec_t<A, N>{};
  for (int64_t i = 0; i < op.near.count; ++i) {
    const State<T>& state = sources[i].state;
    const T* n = state.n + t * op.states.row_stride + d;
    const A* weight = sources[i].weight;
    for (int v = 0; v < V; ++v) {
      const auto w = PerChannel ? load(lanes, weight + d + v * N) : broadcast(lanes, *weight);
      sum[v] += w * affine(lanes, load_ahead(lanes, n + v * N, op.states.row_stride),
                           state.norm_weight, state.norm_bias, d + v * N);
    }
  }
  for (int v = 0; v < V; ++v) store(lanes, x + d + v * N, sum[v]);
}

template <class T, bool PerChannel, class Launch>
DEEPFAST_INLINE void mix_near_row(const Launch& op, const Source<T>* sources, int64_t t,
                                  compute_t<T>* x) {
  constexpr int N = kLanes<compute_t<T>>, V = 4;
  int64_t d = 0;
  for (; d + V * N <= op.D; d += V * N)
    mix_near_registers<T, N, V, PerChannel>(op, sources, t, d, x);
  for (; d + N <= op.D; d += N) mix_near_registers<T, N, 1, PerChannel>(op, sources, t, d, x);
  for (; d < op.D; ++d) mix_near_registers<T, 1, 1, PerChannel>(op, sources, t, d, x);
}

template <class T, class Launch>
DEEPFAST_INLINE void mix_near(const Launch& op, const Source<T>* sources, int64_t t,
                              compute_t<T>* x) {
  op.weight.per_channel ? mix_near_row<T, true>(op, sources, t, x)
                        : mix_near_row<T, false>(op, sources, t, x);
}

// y, normalised or not, into its slot.
template <class T, int R>
DEEPFAST_SHARED void push(const BoundaryForward& op, int64_t t, compute_t<T>* rows) {
  using A = compute_t<T>;
  const A* row[R];
  DEEPFAST_UNROLL for (int r = 0; r < R; ++r) {
    load_push<T>(op, t + r, rows + r * op.D);
    row[r] = rows + r * op.D;
  }
  Moments<A> m[R] = {};
  if (op.norm_source)
    moments_of_each<A, R>(row, op.D, static_cast<A>(op.source_eps), m, op.source_rms);
  DEEPFAST_UNROLL for (int r = 0; r < R; ++r) {
    T* state = row_of<T>(op.states, op.k, t + r);
    if (!op.norm_source) {
      store_row_ahead(row[r], state, op.D, op.states.row_stride);
      continue;
    }
    for_lanes<A>(op.D, [&](auto lanes, int64_t d) {
      store_ahead(lanes, state + d, (load(lanes, row[r] + d) - m[r].mean) * m[r].rstd,
                  op.states.row_stride);
    });
    *at<A>(op.source_rstd, t + r) = m[r].rstd;
  }
}

template <class T>
void forward(const BoundaryForward& op, int64_t begin, int64_t end) {
  Scratch<compute_t<T>> rows(kTokens * op.D);
  Scratch<Source<T>> sources(op.near.count);
  find_sources<T>(op, sources.get());
  const auto tokens = [&](auto count, int64_t t) {
    if (op.branch.data != nullptr) push<T, count.n>(op, t, rows);
    for (int r = 0; r < count.n; ++r) mix_near<T>(op, sources.get(), t + r, rows + r * op.D);
    store_output<T, count.n>(op, t, rows);
  };
  int64_t t = begin;
  for (; t + kTokens <= end; t += kTokens) tokens(Lanes<kTokens>{}, t);
  for (; t < end; ++t) tokens(Lanes<1>{}, t);
}

// u += weight * g and dweight += <g, z> for P rows from the i-th on of those that read the state, and
// R tokens. Per channel dweight += g * z goes to the chunk's sums, else <g, z> to `dots`: summed for
// each call, because behind a norm it is near 0 for each token while its terms are not.
template <class T, int R, int P, class G>
DEEPFAST_SHARED void pull(const BoundaryBackward& op, int64_t chunk, int64_t i,
                          const G* const (&grads)[P][R], const compute_t<T>* n, double* dots,
                          compute_t<T>* u) {
  using A = compute_t<T>;
  const int64_t dim = op.D;
  const bool per_channel = op.weight.per_channel;
  const A *norm_weight = at<A>(op.norm_weight, op.k * dim),
          *norm_bias = at<A>(op.norm_bias, op.k * dim);
  const A* weight[P];
  A* dweight[P];
  RowSum<A> dot[P];
  DEEPFAST_UNROLL for (int p = 0; p < P; ++p) {
    weight[p] = weight_of<A>(op.weight, op.pull_rows[i + p], op.k, op.R);
    dweight[p] = at<A>(op.dweight.data, (chunk * op.pull_rows.count + i + p) * op.weight.width);
  }
  for_lanes<A>(dim, [&](auto lanes, int64_t d) {
    vec_t<A, lanes.n> z[R], sum[R];
    DEEPFAST_UNROLL for (int r = 0; r < R; ++r) {
      z[r] = affine(lanes, load(lanes, n + r * dim + d), norm_weight, norm_bias, d);
      sum[r] = load(lanes, u + r * dim + d);
    }
    DEEPFAST_UNROLL for (int p = 0; p < P; ++p) {
      const auto w = per_channel ? load(lanes, weight[p] + d) : broadcast(lanes, *weight[p]);
      auto product = broadcast(lanes, A(0));
      DEEPFAST_UNROLL for (int r = 0; r < R; ++r) {
        const auto g = load_ahead(lanes, grads[p][r] + d, op.grads.row_stride);
        sum[r] += w * g;
        product += g * z[r];
      }
      if (!per_channel)
        dot[p].add(product);
      else if (dweight[p] != nullptr)
        store(lanes, dweight[p] + d, load(lanes, dweight[p] + d) + product);
    }
    DEEPFAST_UNROLL for (int r = 0; r < R; ++r) store(lanes, u + r * dim + d, sum[r]);
  });
  DEEPFAST_UNROLL for (int p = 0; p < P; ++p) dots[i + p] += dot[p].total();
}

template <class T, int R, int P>
DEEPFAST_INLINE void pull_stored(const BoundaryBackward& op, int64_t t, int64_t chunk, int64_t i,
                                 const compute_t<T>* n, double* dots, compute_t<T>* u) {
  const T* grads[P][R];
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) grads[p][r] = row_of<T>(op.grads, op.pull_slots[i + p], t + r);
  pull<T, R, P>(op, chunk, i, grads, n, dots, u);
}

template <class T, int R>
DEEPFAST_INLINE void pull_all(const BoundaryBackward& op, int64_t t, int64_t chunk,
                              const compute_t<T>* g, const compute_t<T>* n, double* dots,
                              compute_t<T>* u) {
  int64_t i = 0;
  // This row's gradient is still in scratch memory, in full precision.
  if (op.pull_rows.count > 0 && op.pull_rows[0] == op.k) {
    const compute_t<T>* own[1][R];
    for (int r = 0; r < R; ++r) own[0][r] = g + r * op.D;
    pull<T, R, 1>(op, chunk, i++, own, n, dots, u);
  }
  for (; i + kPulled <= op.pull_rows.count; i += kPulled)
    pull_stored<T, R, kPulled>(op, t, chunk, i, n, dots, u);
  for (; i < op.pull_rows.count; ++i) pull_stored<T, R, 1>(op, t, chunk, i, n, dots, u);
}

// The gradient of the pushed y from u, that of z, in place.
template <class T, int R>
DEEPFAST_SHARED void source_gradient(const BoundaryBackward& op, int64_t t, int64_t chunk,
                                     const compute_t<T>* n, compute_t<T>* u) {
  using A = compute_t<T>;
  const int64_t dim = op.D;
  const Affine<A> norm{at<A>(op.norm_weight, op.k * dim), at<A>(op.dnorm_weight, chunk * dim),
                       at<A>(op.dnorm_bias, chunk * dim)};
  const auto u_of = [&](auto lanes, int r, int64_t d) { return load(lanes, u + r * dim + d); };
  const auto n_of = [&](auto lanes, int r, int64_t d) { return load(lanes, n + r * dim + d); };
  const auto put = [&](auto lanes, int r, int64_t d, auto value) {
    store(lanes, u + r * dim + d, value);
  };
  if (op.norm_source) {
    A rstd[R];
    for (int r = 0; r < R; ++r) rstd[r] = *at<A>(op.source_rstd, t + r);
    norm_gradient<A, R>(dim, norm, op.source_rms, rstd, u_of, n_of, put);
    return;
  }
  for (int r = 0; r < R; ++r)
    for_lanes<A>(dim, [&](auto lanes, int64_t d) {
      const auto own = u_of(lanes, r, d);
      if (norm.dweight != nullptr)
        store(lanes, norm.dweight + d, load(lanes, norm.dweight + d) + own * n_of(lanes, r, d));
      if (norm.dbias != nullptr) store(lanes, norm.dbias + d, load(lanes, norm.dbias + d) + own);
      put(lanes, r, d, affine<A>(lanes, own, norm.weight, nullptr, d));
    });
}

template <class T>
void backward(const BoundaryBackward& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  const int64_t dim = op.D, pulls = op.pull_rows.count;
  Scratch<A> x(kTokens * dim), g(kTokens * dim), u(kTokens * dim);
  Scratch<double> dots(pulls);
  for (int64_t i = 0; i < pulls; ++i) dots[i] = 0;
  Scratch<Source<T>> sources(op.near.count);
  find_sources<T>(op, sources.get());
  const auto tokens = [&](auto count, int64_t t) {
    constexpr int R = count.n;
    if (op.dout.data != nullptr)
      for (int r = 0; r < R; ++r) mix_near<T>(op, sources.get(), t + r, x + r * dim);
    output_gradient<T, R>(op, t, chunk, x, g);
    A* n = x;
    for (int r = 0; r < R; ++r) {
      // The state is read before the gradient is stored: the gradient may overwrite a slot of its
      // buffer.
      load_row_ahead(row_of<T>(op.states, op.k, t + r), n + r * dim, dim, op.states.row_stride);
      store_row_ahead(g + r * dim, row_of<T>(op.grads, op.grad_slot, t + r), dim,
                      op.grads.row_stride);
      load_pulled<T>(op, t + r, u + r * dim);
    }
    pull_all<T, R>(op, t, chunk, g, n, dots, u);
    source_gradient<T, R>(op, t, chunk, n, u);
    for (int r = 0; r < R; ++r) store_push_gradient<T>(op, t + r, u + r * dim);
  };
  int64_t t = begin;
  for (; t + kTokens <= end; t += kTokens) tokens(Lanes<kTokens>{}, t);
  for (; t < end; ++t) tokens(Lanes<1>{}, t);
  if (op.weight.per_channel || op.dweight.data == nullptr) return;
  for (int64_t i = 0; i < pulls; ++i)
    *at<A>(op.dweight.data, chunk * pulls + i) = static_cast<A>(dots[i]);
}

}  // namespace

void boundary_forward(const BoundaryForward& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto type) { forward<decltype(type)>(op, begin, end); });
}

void boundary_backward(const BoundaryBackward& op, int64_t begin, int64_t end, int64_t chunk) {
  with_storage(op.storage, [&](auto type) { backward<decltype(type)>(op, begin, end, chunk); });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
