// Everything between two layers' matrix products, one token at a time. In order: residual and
// dropout, the source's layer-norm, the write of the state, the recent states' share of the mix, and
// the next layer's first layer-norm. Each operand is read once and each result is written once.
// Backward recomputes the mix from the states, so it is not stored. `partial` is the sum over the
// states before the block, from mix_rows in mix_rows_kernel.cpp.
#include "boundary.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

// A near source, with its addresses computed once for all tokens.
template <class T>
struct Source {
  const T* state;  // at token 0
  const compute_t<T>*norm_weight, *norm_bias, *weight;
};

template <class T, class Launch>
void find_sources(const Launch& op, Source<T>* sources) {
  using A = compute_t<T>;
  for (int64_t i = 0; i < op.near.count; ++i) {
    const int64_t j = op.near[i];
    sources[i] = {row_of<T>(op.states, j, 0), at<A>(op.norm_weight, j * op.D),
                  at<A>(op.norm_bias, j * op.D), weight_of<A>(op.weight, op.k, j, op.R)};
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
    sum[v] = op.partial.data != nullptr ? load(lanes, row_of<T>(op.partial, t) + d + v * N)
                                        : vec_t<A, N>{};
  for (int64_t i = 0; i < op.near.count; ++i) {
    const T* n = sources[i].state + t * op.states.row_stride + d;
    const A *norm_weight = sources[i].norm_weight, *norm_bias = sources[i].norm_bias;
    const A* weight = sources[i].weight;
    for (int v = 0; v < V; ++v) {
      const auto w = PerChannel ? load(lanes, weight + d + v * N) : broadcast(lanes, *weight);
      sum[v] += w * affine(lanes, load(lanes, n + v * N), norm_weight, norm_bias, d + v * N);
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
template <class T>
DEEPFAST_INLINE void push(const BoundaryForward& op, int64_t t, compute_t<T>* row) {
  using A = compute_t<T>;
  load_push<T>(op, t, row);
  T* state = row_of<T>(op.states, op.k, t);
  if (!op.norm_source) {
    store_row(row, state, op.D);
    return;
  }
  const auto m = moments<A>(row, op.D, static_cast<A>(op.source_eps), op.source_rms);
  for_lanes<A>(op.D, [&](auto lanes, int64_t d) {
    store(lanes, state + d, (load(lanes, row + d) - m.mean) * m.rstd);
  });
  *at<A>(op.source_rstd, t) = m.rstd;
}

template <class T>
void forward(const BoundaryForward& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  Scratch<A> row(op.D), mixed(op.D);
  Scratch<Source<T>> sources(op.near.count);
  find_sources<T>(op, sources.get());
  for (int64_t t = begin; t < end; ++t) {
    if (op.branch.data != nullptr) push<T>(op, t, row);
    mix_near<T>(op, sources.get(), t, mixed);
    store_output<T>(op, t, mixed);
  }
}

// u += weight * g and dweight += <g, z> (or, per channel, += g * z), where
// z = n * norm_weight + norm_bias.
template <class T>
DEEPFAST_INLINE void pull_row(const T* g, const compute_t<T>* z, const compute_t<T>* weight,
                              bool per_channel, compute_t<T>* dweight, compute_t<T>* u,
                              int64_t dim) {
  using A = compute_t<T>;
  RowSum<A> dot;
  for_lanes<A>(dim, [&](auto lanes, int64_t d) {
    const auto b = load(lanes, g + d);
    const auto w = per_channel ? load(lanes, weight + d) : broadcast(lanes, *weight);
    store(lanes, u + d, load(lanes, u + d) + w * b);
    if (dweight != nullptr) {
      const auto product = b * load(lanes, z + d);
      if (per_channel)
        store(lanes, dweight + d, load(lanes, dweight + d) + product);
      else
        dot.add(product);
    }
  });
  if (dweight != nullptr && !per_channel) *dweight += dot.total();
}

template <class T>
void backward(const BoundaryBackward& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  const int64_t dim = op.D, pulls = op.pull_rows.count;
  const A *norm_weight = at<A>(op.norm_weight, op.k * dim),
          *norm_bias = at<A>(op.norm_bias, op.k * dim);
  Scratch<A> g(dim), n(dim), z(dim), u(dim);
  Scratch<Source<T>> sources(op.near.count);
  find_sources<T>(op, sources.get());
  for (int64_t t = begin; t < end; ++t) {
    if (op.dout.data != nullptr) mix_near<T>(op, sources.get(), t, n);
    output_gradient<T>(op, t, chunk, n, g);
    // The state is read before the gradient is stored: the gradient may overwrite a slot of its
    // buffer.
    load_row(row_of<T>(op.states, op.k, t), n.get(), dim);
    store_row(g.get(), row_of<T>(op.grads, op.grad_slot, t), dim);
    for_lanes<A>(dim, [&](auto lanes, int64_t d) {
      store(lanes, z + d, affine(lanes, load(lanes, n + d), norm_weight, norm_bias, d));
    });
    load_pulled<T>(op, t, u);
    for (int64_t i = 0; i < pulls; ++i) {
      A* dweight = at<A>(op.dweight.data, (chunk * pulls + i) * op.weight.width);
      const A* weight = weight_of<A>(op.weight, op.pull_rows[i], op.k, op.R);
      const bool per_channel = op.weight.per_channel;
      // This row's gradient is still in scratch memory, in full precision.
      if (i == 0 && op.pull_rows[0] == op.k)
        pull_row<A>(g, z, weight, per_channel, dweight, u, dim);
      else
        pull_row<T>(row_of<T>(op.grads, op.pull_slots[i], t), z, weight, per_channel, dweight, u,
                    dim);
    }
    accumulate_affine<A>(u, n, at<A>(op.dnorm_weight, chunk * dim),
                         at<A>(op.dnorm_bias, chunk * dim), dim);
    scale_row<A>(u, norm_weight, dim);
    if (op.norm_source) norm_backward_row<A>(u, n, *at<A>(op.source_rstd, t), dim, op.source_rms);
    store_push_gradient<T>(op, t, u);
  }
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
