// The ends of a boundary, a few tokens at a time: the push of a state, the norm of the output, and the
// gradients of both. What lies between them, the mix of the states, is the kernel's own.
#pragma once

#include "ahead.h"

// For a function that several variants of a kernel call: inlined into each it would take most of the
// time to compile.
#define DEEPFAST_SHARED __attribute__((noinline))

namespace deepfast {
namespace DEEPFAST_ISA {

// y = residual + dropout(branch) of token `t`, in scratch memory.
template <class T, class Launch>
DEEPFAST_INLINE void load_push(const Launch& op, int64_t t, compute_t<T>* row) {
  using A = compute_t<T>;
  const T* branch = row_of<T>(op.branch, t);
  const T* residual = op.residual.data == nullptr ? nullptr : row_of<T>(op.residual, t);
  for_dropped<A>(
      op.dropout, t, op.D,
      [&](auto lanes, int64_t d) { return load_ahead(lanes, branch + d, op.branch.row_stride); },
      [&](auto lanes, int64_t d, auto y) {
        if (residual != nullptr) y += load_ahead(lanes, residual + d, op.residual.row_stride);
        store(lanes, row + d, y);
      });
}

// x and, where it is wanted, out = norm(x) of R tokens from `t` on, from x in scratch memory.
template <class T, int R, class Launch>
DEEPFAST_SHARED void store_output(const Launch& op, int64_t t, const compute_t<T>* x) {
  using A = compute_t<T>;
  const int64_t dim = op.D;
  if (op.x.data != nullptr)
    for (int r = 0; r < R; ++r)
      store_row_ahead(x + r * dim, row_of<T>(op.x, t + r), dim, op.x.row_stride);
  if (op.out.data == nullptr) return;
  const A *weight = at<A>(op.out_norm_weight, 0), *bias = at<A>(op.out_norm_bias, 0);
  const A* row[R];
  DEEPFAST_UNROLL for (int r = 0; r < R; ++r) row[r] = x + r * dim;
  Moments<A> m[R];
  moments_of_each<A, R>(row, dim, static_cast<A>(op.out_eps), m, op.out_rms);
  DEEPFAST_UNROLL for (int r = 0; r < R; ++r) {
    T* out = row_of<T>(op.out, t + r);
    for_lanes<A>(dim, [&](auto lanes, int64_t d) {
      const auto n = (load(lanes, row[r] + d) - m[r].mean) * m[r].rstd;
      store_ahead(lanes, out + d, affine(lanes, n, weight, bias, d), op.out.row_stride);
    });
    if (!op.out_rms) *at<A>(op.out_mean, t + r) = m[r].mean;
    *at<A>(op.out_rstd, t + r) = m[r].rstd;
  }
}

// g, the gradient of x of R tokens: dx plus the gradient through the output's norm. With a dout, `x`
// holds x.
template <class T, int R, class Launch>
DEEPFAST_SHARED void output_gradient(const Launch& op, int64_t t, int64_t chunk,
                                     const compute_t<T>* x, compute_t<T>* g) {
  using A = compute_t<T>;
  const int64_t dim = op.D;
  if (op.dout.data == nullptr) {
    for (int r = 0; r < R; ++r)
      load_row_ahead(row_of<T>(op.dx, t + r), g + r * dim, dim, op.dx.row_stride);
    return;
  }
  const T *dout[R], *dx[R];
  A mean[R], rstd[R];
  DEEPFAST_UNROLL for (int r = 0; r < R; ++r) {
    dout[r] = row_of<T>(op.dout, t + r);
    dx[r] = op.dx.data == nullptr ? nullptr : row_of<T>(op.dx, t + r);
    mean[r] = op.out_rms ? A(0) : *at<A>(op.out_mean, t + r);
    rstd[r] = *at<A>(op.out_rstd, t + r);
  }
  const Affine<A> norm{at<A>(op.out_norm_weight, 0), at<A>(op.dout_norm_weight, chunk * dim),
                       at<A>(op.dout_norm_bias, chunk * dim)};
  norm_gradient<A, R>(
      dim, norm, op.out_rms, rstd,
      [&](auto lanes, int r, int64_t d) {
        return load_ahead(lanes, dout[r] + d, op.dout.row_stride);
      },
      [&](auto lanes, int r, int64_t d) {
        return (load(lanes, x + r * dim + d) - mean[r]) * rstd[r];
      },
      [&](auto lanes, int r, int64_t d, auto value) {
        if (dx[r] != nullptr) value += load_ahead(lanes, dx[r] + d, op.dx.row_stride);
        store(lanes, g + r * dim + d, value);
      });
}

// u, the gradient of the pushed y, as those of residual and branch.
template <class T, class Launch>
DEEPFAST_INLINE void store_push_gradient(const Launch& op, int64_t t, compute_t<T>* u) {
  if (op.dresidual.data != nullptr)
    store_row_ahead(u, row_of<T>(op.dresidual, t), op.D, op.dresidual.row_stride);
  if (op.dbranch.data == nullptr) return;
  T* dbranch = row_of<T>(op.dbranch, t);
  for_dropped<compute_t<T>>(
      op.dropout, t, op.D, [&](auto lanes, int64_t d) { return load(lanes, u + d); },
      [&](auto lanes, int64_t d, auto value) {
        store_ahead(lanes, dbranch + d, value, op.dbranch.row_stride);
      });
}

// Later blocks' share of u, or zeros.
template <class T, class Launch>
DEEPFAST_INLINE void load_pulled(const Launch& op, int64_t t, compute_t<T>* u) {
  if (op.pulled.data != nullptr)
    load_row_ahead(row_of<compute_t<T>>(op.pulled, t), u, op.D, op.pulled.row_stride);
  else
    memset(u, 0, op.D * sizeof(compute_t<T>));
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
