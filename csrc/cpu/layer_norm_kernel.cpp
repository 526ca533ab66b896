// Layer normalisation with optional residual and dropout in front of it.
//
//   s = residual + dropout(x),  y = (s - mean(s)) * rstd(s) * weight + bias
//
// One token's row is held in scratch memory (level-1 cache), so each operand is read once and each
// result written once. Compiled once per instruction set.
#include "rows.h"
#include "tables.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

template <class T>
void forward(const LayerNorm& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  const int64_t dim = op.dim;
  const A *weight = at<A>(op.weight, 0), *bias = at<A>(op.bias, 0);
  Scratch<A> row(dim);
  for (int64_t t = begin; t < end; ++t) {
    load_row(row_of<T>(op.x, t), row.get(), dim);
    if (op.dropout.p > 0) dropout_row<A>(op.dropout, t, row, dim);
    if (op.residual.data != nullptr) add_row(row_of<T>(op.residual, t), row.get(), dim);
    if (op.sum.data != nullptr) {
      // Statistics are taken of the sum as it is stored: backward reads that.
      store_row(row.get(), row_of<T>(op.sum, t), dim);
      load_row(row_of<T>(op.sum, t), row.get(), dim);
    }
    const auto m = moments<A>(row, dim, static_cast<A>(op.eps));
    T* y = row_of<T>(op.y, t);
    for_lanes<A>(dim, [&](auto lanes, int64_t d) {
      const auto n = (load(lanes, row + d) - m.mean) * m.rstd;
      store(lanes, y + d, affine(lanes, n, weight, bias, d));
    });
    if (op.mean != nullptr) *at<A>(op.mean, t) = m.mean;
    if (op.rstd != nullptr) *at<A>(op.rstd, t) = m.rstd;
  }
}

template <class T>
void backward(const LayerNorm& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  const int64_t dim = op.dim;
  const A* weight = at<A>(op.weight, 0);
  A *dweight = at<A>(op.dweight, chunk * dim), *dbias = at<A>(op.dbias, chunk * dim);
  Scratch<A> grad(dim), n(dim);
  for (int64_t t = begin; t < end; ++t) {
    const A mean = *at<A>(op.mean, t), rstd = *at<A>(op.rstd, t);
    const T* s = row_of<T>(op.sum, t);
    const T* dy = row_of<T>(op.dy, t);
    for_lanes<A>(dim, [&](auto lanes, int64_t d) {
      const auto normalised = (load(lanes, s + d) - mean) * rstd;
      auto g = load(lanes, dy + d);
      store(lanes, n + d, normalised);
      if (dweight != nullptr)
        store(lanes, dweight + d, load(lanes, dweight + d) + g * normalised);
      if (dbias != nullptr) store(lanes, dbias + d, load(lanes, dbias + d) + g);
      if (weight != nullptr) g *= load(lanes, weight + d);
      store(lanes, grad + d, g);
    });
    norm_backward_row<A>(grad, n, rstd, dim);
    if (op.dsum.data != nullptr) add_row(row_of<T>(op.dsum, t), grad.get(), dim);
    if (op.dresidual.data != nullptr) store_row(grad.get(), row_of<T>(op.dresidual, t), dim);
    if (op.dx.data != nullptr) {
      if (op.dropout.p > 0) dropout_row<A>(op.dropout, t, grad, dim);
      store_row(grad.get(), row_of<T>(op.dx, t), dim);
    }
  }
}

}  // namespace

void layer_norm_forward(const LayerNorm& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto* tag) {
    forward<typename pointee<decltype(tag)>::type>(op, begin, end);
  });
}

void layer_norm_backward(const LayerNorm& op, int64_t begin, int64_t end, int64_t chunk) {
  with_storage(op.storage, [&](auto* tag) {
    backward<typename pointee<decltype(tag)>::type>(op, begin, end, chunk);
  });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
