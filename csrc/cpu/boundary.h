// The ends of a boundary, one token at a time: the push of a state, the norm of the output, and the
// gradients of both. What lies between them, the mix of the states, is the kernel's own.
#pragma once

#include "rows.h"

namespace deepfast {
namespace DEEPFAST_ISA {

// y = residual + dropout(branch), normalised or not, into its slot.
template <class T>
DEEPFAST_INLINE void push(const Boundary& op, int64_t t, compute_t<T>* row) {
  using A = compute_t<T>;
  const int64_t dim = op.dim;
  load_row(row_of<T>(op.branch, t), row, dim);
  if (op.dropout.threshold > 0) dropout_row<A>(op.dropout, t, row, dim);
  if (op.residual.data != nullptr) add_row(row_of<T>(op.residual, t), row, dim);
  T* state = row_of<T>(op.state, t);
  if (op.norm_source) {
    const auto m = moments<A>(row, dim, static_cast<A>(op.source_eps), op.source_rms);
    for_lanes<A>(dim, [&](auto lanes, int64_t d) {
      store(lanes, state + d, (load(lanes, row + d) - m.mean) * m.rstd);
    });
    *at<A>(op.source_rstd, t) = m.rstd;
  } else {
    store_row(row, state, dim);
  }
}

// x and, where it is wanted, out = norm(x), from x in scratch memory.
template <class T>
DEEPFAST_INLINE void store_output(const Boundary& op, int64_t t, const compute_t<T>* x) {
  using A = compute_t<T>;
  const int64_t dim = op.dim;
  if (op.x.data != nullptr) store_row(x, row_of<T>(op.x, t), dim);
  if (op.out.data == nullptr) return;
  const A *weight = at<A>(op.out_norm_weight, 0), *bias = at<A>(op.out_norm_bias, 0);
  const auto m = moments<A>(x, dim, static_cast<A>(op.out_eps), op.out_rms);
  T* out = row_of<T>(op.out, t);
  for_lanes<A>(dim, [&](auto lanes, int64_t d) {
    const auto n = (load(lanes, x + d) - m.mean) * m.rstd;
    store(lanes, out + d, affine(lanes, n, weight, bias, d));
  });
  if (!op.out_rms) *at<A>(op.out_mean, t) = m.mean;
  *at<A>(op.out_rstd, t) = m.rstd;
}

// d *= weight, where there is one.
template <class A>
DEEPFAST_INLINE void scale_row(A* d, const A* weight, int64_t dim) {
  if (weight == nullptr) return;
  for_lanes<A>(dim, [&](auto lanes, int64_t i) {
    store(lanes, d + i, load(lanes, d + i) * load(lanes, weight + i));
  });
}

// g, the gradient of x: dx plus the gradient through the output's norm. With a dout, `x` holds x,
// and afterwards x normalised.
template <class T>
DEEPFAST_INLINE void output_gradient(const BoundaryGrad& op, int64_t t, int64_t chunk,
                                     compute_t<T>* x, compute_t<T>* g) {
  using A = compute_t<T>;
  const Boundary& f = op.forward;
  const int64_t dim = f.dim;
  if (op.dout.data == nullptr) {
    load_row(row_of<T>(op.dx, t), g, dim);
    return;
  }
  const A mean = f.out_rms ? A(0) : *at<A>(f.out_mean, t), rstd = *at<A>(f.out_rstd, t);
  for_lanes<A>(
      dim, [&](auto lanes, int64_t d) { store(lanes, x + d, (load(lanes, x + d) - mean) * rstd); });
  load_row(row_of<T>(op.dout, t), g, dim);
  accumulate_affine<A>(g, x, at<A>(op.dout_norm_weight, chunk * dim),
                       at<A>(op.dout_norm_bias, chunk * dim), dim);
  scale_row<A>(g, at<A>(f.out_norm_weight, 0), dim);
  norm_backward_row<A>(g, x, rstd, dim, f.out_rms);
  if (op.dx.data != nullptr) add_row(row_of<T>(op.dx, t), g, dim);
}

// From u, the gradient of z = n * norm_weight + norm_bias, those of the pushed state's operands. It
// overwrites u.
template <class T>
DEEPFAST_INLINE void push_gradient(const BoundaryGrad& op, int64_t t, int64_t chunk,
                                   const compute_t<T>* n, compute_t<T>* u) {
  using A = compute_t<T>;
  const Boundary& f = op.forward;
  const int64_t dim = f.dim;
  accumulate_affine<A>(u, n, at<A>(op.dnorm_weight, chunk * dim), at<A>(op.dnorm_bias, chunk * dim),
                       dim);
  scale_row<A>(u, at<A>(op.state_norm_weight, 0), dim);
  if (f.norm_source) norm_backward_row<A>(u, n, *at<A>(f.source_rstd, t), dim, f.source_rms);
  if (op.dresidual.data != nullptr) store_row(u, row_of<T>(op.dresidual, t), dim);
  if (op.dbranch.data != nullptr) {
    if (f.dropout.threshold > 0) dropout_row<A>(f.dropout, t, u, dim);
    store_row(u, row_of<T>(op.dbranch, t), dim);
  }
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
