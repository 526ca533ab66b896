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
  const bool plain = op.sum.data == nullptr;
  Scratch<A> row(dim);
  for (int64_t t = begin; t < end; ++t) {
    if (!plain) {
      load_row(row_of<T>(op.x, t), row.get(), dim);
      if (op.dropout.p > 0) dropout_row<A>(op.dropout, t, row, dim);
      if (op.residual.data != nullptr) add_row(row_of<T>(op.residual, t), row.get(), dim);
      store_row(row.get(), row_of<T>(op.sum, t), dim);
    }
    // Statistics are taken of the sum as it is stored: backward reads that.
    const T* s = row_of<T>(plain ? op.x : op.sum, t);
    const auto sum = sum_over_lanes<A, RowSum<A>>(dim, [&](auto lanes, int64_t d, auto& total) {
      const auto v = load(lanes, s + d);
      store(lanes, row + d, v);
      total.add(v);
    });
    const auto m = moments<A>(row, dim, static_cast<A>(op.eps), sum.total());
    T* y = row_of<T>(op.y, t);
    for_lanes<A>(dim, [&](auto lanes, int64_t d) {
      const auto n = (load(lanes, row + d) - m.mean) * m.rstd;
      store(lanes, y + d, affine(lanes, n, weight, bias, d));
    });
    *at<A>(op.mean, t) = m.mean;
    *at<A>(op.rstd, t) = m.rstd;
  }
}

// One row: `n` and `grad` become the normalised row and the gradient of the sum.
template <class T>
DEEPFAST_INLINE void backward_row(const LayerNorm& op, int64_t t, compute_t<T>* grad,
                                  compute_t<T>* n) {
  using A = compute_t<T>;
  const int64_t dim = op.dim;
  const A mean = *at<A>(op.mean, t), rstd = *at<A>(op.rstd, t);
  const A* weight = at<A>(op.weight, 0);
  const T *s = row_of<T>(op.sum, t), *dy = row_of<T>(op.dy, t);
  const auto sums = sum_over_lanes<A, RowSums<A>>(dim, [&](auto lanes, int64_t d, auto& total) {
    const auto normalised = (load(lanes, s + d) - mean) * rstd;
    auto g = load(lanes, dy + d);
    if (weight != nullptr) g *= load(lanes, weight + d);
    store(lanes, n + d, normalised);
    store(lanes, grad + d, g);
    total.first.add(g);
    total.second.add(g * normalised);
  });
  norm_backward_row<A>(grad, n, rstd, dim, sums.first.total(), sums.second.total());
  if (op.dsum.data != nullptr) add_row(row_of<T>(op.dsum, t), grad, dim);
  if (op.dresidual.data != nullptr) store_row(grad, row_of<T>(op.dresidual, t), dim);
  if (op.dx.data != nullptr) {
    if (op.dropout.p > 0) dropout_row<A>(op.dropout, t, grad, dim);
    store_row(grad, row_of<T>(op.dx, t), dim);
  }
}

// dweight += sum over kRows tokens of dy * n, dbias += sum of dy.
template <class T, int kRows>
DEEPFAST_INLINE void add_weight_gradients(const LayerNorm& op, int64_t t, const compute_t<T>* n,
                                          compute_t<T>* dweight, compute_t<T>* dbias) {
  using A = compute_t<T>;
  for_lanes<A>(op.dim, [&](auto lanes, int64_t d) {
    auto g = load(lanes, row_of<T>(op.dy, t) + d);
    auto weight_sum = g * load(lanes, n + d);
    auto bias_sum = g;
    for (int r = 1; r < kRows; ++r) {
      g = load(lanes, row_of<T>(op.dy, t + r) + d);
      weight_sum += g * load(lanes, n + r * op.dim + d);
      bias_sum += g;
    }
    if (dweight != nullptr) store(lanes, dweight + d, load(lanes, dweight + d) + weight_sum);
    if (dbias != nullptr) store(lanes, dbias + d, load(lanes, dbias + d) + bias_sum);
  });
}

template <class T>
void backward(const LayerNorm& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  // Rows that share one read and write of the weight gradients.
  constexpr int kRows = 4;
  const int64_t dim = op.dim;
  A *dweight = at<A>(op.dweight, chunk * dim), *dbias = at<A>(op.dbias, chunk * dim);
  Scratch<A> grad(dim), n(kRows * dim);
  for (int64_t t = begin; t < end; t += kRows) {
    const int64_t rows = end - t < kRows ? end - t : kRows;
    for (int64_t r = 0; r < rows; ++r) backward_row<T>(op, t + r, grad, n + r * dim);
    if (dweight == nullptr && dbias == nullptr) continue;
    if (rows == kRows)
      add_weight_gradients<T, kRows>(op, t, n, dweight, dbias);
    else
      for (int64_t r = 0; r < rows; ++r)
        add_weight_gradients<T, 1>(op, t + r, n + r * dim, dweight, dbias);
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
