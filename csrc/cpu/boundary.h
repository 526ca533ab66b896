// The ends of a boundary, one token at a time: the push of a state, the norm of the output, and the
// gradients of both. What lies between them, the mix of the states, is the kernel's own.
#pragma once

#include "rows.h"

namespace deepfast {
namespace DEEPFAST_ISA {

// y = residual + dropout(branch) in scratch memory.
template <class T, class Launch>
DEEPFAST_INLINE void load_push(const Launch& op, int64_t t, compute_t<T>* row) {
  load_row(row_of<T>(op.branch, t), row, op.D);
  if (op.dropout.threshold > 0) dropout_row<compute_t<T>>(op.dropout, t, row, op.D);
  if (op.residual.data != nullptr) add_row(row_of<T>(op.residual, t), row, op.D);
}

// x and, where it is wanted, out = norm(x), from x in scratch memory.
template <class T, class Launch>
DEEPFAST_INLINE void store_output(const Launch& op, int64_t t, const compute_t<T>* x) {
  using A = compute_t<T>;
  const int64_t dim = op.D;
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
template <class T, class Launch>
DEEPFAST_INLINE void output_gradient(const Launch& op, int64_t t, int64_t chunk, compute_t<T>* x,
                                     compute_t<T>* g) {
  using A = compute_t<T>;
  const int64_t dim = op.D;
  if (op.dout.data == nullptr) {
    load_row(row_of<T>(op.dx, t), g, dim);
    return;
  }
  const A mean = op.out_rms ? A(0) : *at<A>(op.out_mean, t), rstd = *at<A>(op.out_rstd, t);
  for_lanes<A>(
      dim, [&](auto lanes, int64_t d) { store(lanes, x + d, (load(lanes, x + d) - mean) * rstd); });
  load_row(row_of<T>(op.dout, t), g, dim);
  accumulate_affine<A>(g, x, at<A>(op.dout_norm_weight, chunk * dim),
                       at<A>(op.dout_norm_bias, chunk * dim), dim);
  scale_row<A>(g, at<A>(op.out_norm_weight, 0), dim);
  norm_backward_row<A>(g, x, rstd, dim, op.out_rms);
  if (op.dx.data != nullptr) add_row(row_of<T>(op.dx, t), g, dim);
}

// u, the gradient of the pushed y, as those of residual and branch. It overwrites u.
template <class T, class Launch>
DEEPFAST_INLINE void store_push_gradient(const Launch& op, int64_t t, compute_t<T>* u) {
  if (op.dresidual.data != nullptr) store_row(u, row_of<T>(op.dresidual, t), op.D);
  if (op.dbranch.data == nullptr) return;
  if (op.dropout.threshold > 0) dropout_row<compute_t<T>>(op.dropout, t, u, op.D);
  store_row(u, row_of<T>(op.dbranch, t), op.D);
}

// Later blocks' share of u, or zeros.
template <class T, class Launch>
DEEPFAST_INLINE void load_pulled(const Launch& op, int64_t t, compute_t<T>* u) {
  if (op.pulled.data != nullptr)
    load_row(row_of<T>(op.pulled, t), u, op.D);
  else
    memset(u, 0, op.D * sizeof(compute_t<T>));
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
