// Everything between two layers' matrix products, one token at a time. See kernels.h for the
// formulas. In order: residual and dropout, the source's layer-norm, the write of the state, the
// recent states' share of the mix, and the next layer's first layer-norm. Each operand is read once
// and each result is written once. Backward recomputes the mix from the states, so it is not
// stored.
#include "boundary.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

// x = partial + sum over the near sources, V vectors of channels at a time. The sum stays in
// registers over all sources.
template <class T, int N, int V, bool PerChannel>
DEEPFAST_INLINE void mix_near_registers(const Boundary& op, int64_t t, int64_t d, compute_t<T>* x) {
  using A = compute_t<T>;
  constexpr Lanes<N> lanes;
  vec_t<A, N> sum[V];
  for (int v = 0; v < V; ++v)
    sum[v] = op.partial.data != nullptr ? load(lanes, row_of<T>(op.partial, t) + d + v * N)
                                        : vec_t<A, N>{};
  for (int64_t j = 0; j < op.near; ++j) {
    const T* n = row_of<T>(op.source[j], t) + d;
    const A *norm_weight = at<A>(op.norm_weight[j], 0), *norm_bias = at<A>(op.norm_bias[j], 0);
    const A* weight = at<A>(op.weight[j], 0);
    for (int v = 0; v < V; ++v) {
      const auto w = PerChannel ? load(lanes, weight + d + v * N) : broadcast(lanes, *weight);
      sum[v] += w * affine(lanes, load(lanes, n + v * N), norm_weight, norm_bias, d + v * N);
    }
  }
  for (int v = 0; v < V; ++v) store(lanes, x + d + v * N, sum[v]);
}

template <class T, bool PerChannel>
DEEPFAST_INLINE void mix_near_row(const Boundary& op, int64_t t, compute_t<T>* x) {
  constexpr int N = kLanes<compute_t<T>>, V = 4;
  int64_t d = 0;
  for (; d + V * N <= op.dim; d += V * N) mix_near_registers<T, N, V, PerChannel>(op, t, d, x);
  for (; d + N <= op.dim; d += N) mix_near_registers<T, N, 1, PerChannel>(op, t, d, x);
  for (; d < op.dim; ++d) mix_near_registers<T, 1, 1, PerChannel>(op, t, d, x);
}

template <class T>
DEEPFAST_INLINE void mix_near(const Boundary& op, int64_t t, compute_t<T>* x) {
  op.per_channel ? mix_near_row<T, true>(op, t, x) : mix_near_row<T, false>(op, t, x);
}

template <class T>
void forward(const Boundary& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  Scratch<A> row(op.dim), mixed(op.dim);
  for (int64_t t = begin; t < end; ++t) {
    if (op.branch.data != nullptr) push<T>(op, t, row);
    mix_near<T>(op, t, mixed);
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
void backward(const BoundaryGrad& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  const Boundary& f = op.forward;
  const int64_t dim = f.dim;
  const A *norm_weight = at<A>(op.state_norm_weight, 0), *norm_bias = at<A>(op.state_norm_bias, 0);
  const int64_t width = f.per_channel ? dim : 1;
  Scratch<A> g(dim), n(dim), z(dim), u(dim);
  for (int64_t t = begin; t < end; ++t) {
    if (op.dout.data != nullptr) mix_near<T>(f, t, n);
    output_gradient<T>(op, t, chunk, n, g);
    // The state is read before the gradient is stored: the gradient may overwrite a slot of its
    // buffer.
    load_row(row_of<T>(f.state, t), n.get(), dim);
    store_row(g.get(), row_of<T>(op.grad, t), dim);
    for_lanes<A>(dim, [&](auto lanes, int64_t d) {
      store(lanes, z + d, affine(lanes, load(lanes, n + d), norm_weight, norm_bias, d));
    });
    if (op.pulled.data != nullptr)
      load_row(row_of<T>(op.pulled, t), u.get(), dim);
    else
      memset(u.get(), 0, dim * sizeof(A));
    for (int64_t i = 0; i < op.pulls; ++i) {
      A* dweight = op.need_dweight ? at<A>(op.dweight, (chunk * op.pulls + i) * width) : nullptr;
      const A* weight = at<A>(op.pull_weight[i], 0);
      // This row's gradient is still in scratch memory, in full precision.
      if (i == 0 && op.own_row_reads)
        pull_row<A>(g, z, weight, f.per_channel, dweight, u, dim);
      else
        pull_row<T>(row_of<T>(op.pull_grad[i], t), z, weight, f.per_channel, dweight, u, dim);
    }
    push_gradient<T>(op, t, chunk, n, u);
  }
}

}  // namespace

void boundary_forward(const Boundary& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto type) { forward<decltype(type)>(op, begin, end); });
}

void boundary_backward(const BoundaryGrad& op, int64_t begin, int64_t end, int64_t chunk) {
  with_storage(op.forward.storage,
               [&](auto type) { backward<decltype(type)>(op, begin, end, chunk); });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
