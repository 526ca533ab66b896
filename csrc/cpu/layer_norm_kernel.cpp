// Layer normalisation with optional residual and dropout in front of it.
//
//   s = residual + dropout(x),  y = (s - mean(s)) * rstd(s) * weight + bias
//
// With `rms` it is RMS normalisation: means count as 0, and rstd = 1 / sqrt(mean(s^2) + eps).
//
// One token's row is held in scratch memory (level-1 cache), so each operand is read once and each
// result is written once. Compiled once per instruction set.
#include "rows.h"

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
      if (op.dropout.threshold > 0) dropout_row<A>(op.dropout, t, row, dim);
      if (op.residual.data != nullptr) add_row(row_of<T>(op.residual, t), row.get(), dim);
      store_row(row.get(), row_of<T>(op.sum, t), dim);
    }
    // The statistics are those of the stored (rounded) sum, because backward reads that.
    const T* s = row_of<T>(plain ? op.x : op.sum, t);
    const auto m = moments<T>(s, dim, static_cast<A>(op.eps), op.rms);
    T* y = row_of<T>(op.y, t);
    for_lanes<A>(dim, [&](auto lanes, int64_t d) {
      const auto n = (load(lanes, s + d) - m.mean) * m.rstd;
      store(lanes, y + d, affine(lanes, n, weight, bias, d));
    });
    if (!op.rms) *at<A>(op.mean, t) = m.mean;
    *at<A>(op.rstd, t) = m.rstd;
  }
}

// kRows tokens at once share one read and write of the weight gradients. The sum and dy are read
// twice, the second time from the level-1 cache.
//   g = dy * weight,  ds = rstd * (g - mean(g) - n * mean(g * n)) + dsum
template <class T, int kRows>
DEEPFAST_INLINE void backward_rows(const LayerNorm& op, int64_t t, compute_t<T>* dropped,
                                   compute_t<T>* dweight, compute_t<T>* dbias) {
  using A = compute_t<T>;
  const int64_t dim = op.dim;
  const A* weight = at<A>(op.weight, 0);
  const bool dropout = op.dropout.threshold > 0;
  A mean[kRows], rstd[kRows], mean_g[kRows], mean_gn[kRows];
  for (int r = 0; r < kRows; ++r) {
    mean[r] = op.rms ? A(0) : *at<A>(op.mean, t + r), rstd[r] = *at<A>(op.rstd, t + r);
    const T *s = row_of<T>(op.sum, t + r), *dy = row_of<T>(op.dy, t + r);
    const auto sums = sum_over_lanes<A, RowSums<A>>(dim, [&](auto lanes, int64_t d, auto& total) {
      const auto n = (load(lanes, s + d) - mean[r]) * rstd[r];
      const auto g = affine<A>(lanes, load(lanes, dy + d), weight, nullptr, d);
      total.first.add(g);
      total.second.add(g * n);
    });
    mean_g[r] = op.rms ? A(0) : sums.first.total() / static_cast<A>(dim);
    mean_gn[r] = sums.second.total() / static_cast<A>(dim);
  }
  for_lanes<A>(dim, [&](auto lanes, int64_t d) {
    auto weight_sum = broadcast(lanes, A(0)), bias_sum = weight_sum;
    for (int r = 0; r < kRows; ++r) {
      const auto n = (load(lanes, row_of<T>(op.sum, t + r) + d) - mean[r]) * rstd[r];
      const auto dy = load(lanes, row_of<T>(op.dy, t + r) + d);
      weight_sum += dy * n;
      bias_sum += dy;
      auto ds = rstd[r] * (affine<A>(lanes, dy, weight, nullptr, d) - mean_g[r] - n * mean_gn[r]);
      if (op.dsum.data != nullptr) ds += load(lanes, row_of<T>(op.dsum, t + r) + d);
      if (op.dresidual.data != nullptr) store(lanes, row_of<T>(op.dresidual, t + r) + d, ds);
      if (dropout)
        store(lanes, dropped + r * dim + d, ds);
      else if (op.dx.data != nullptr)
        store(lanes, row_of<T>(op.dx, t + r) + d, ds);
    }
    if (dweight != nullptr) store(lanes, dweight + d, load(lanes, dweight + d) + weight_sum);
    if (dbias != nullptr) store(lanes, dbias + d, load(lanes, dbias + d) + bias_sum);
  });
  if (!dropout || op.dx.data == nullptr) return;
  for (int r = 0; r < kRows; ++r) {
    dropout_row<A>(op.dropout, t + r, dropped + r * dim, dim);
    store_row(dropped + r * dim, row_of<T>(op.dx, t + r), dim);
  }
}

template <class T>
void backward(const LayerNorm& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  constexpr int kRows = 4;
  A* dweight = at<A>(op.dweight, chunk * op.dim);
  A* dbias = at<A>(op.dbias, chunk * op.dim);
  Scratch<A> dropped(kRows * op.dim);
  int64_t t = begin;
  for (; t + kRows <= end; t += kRows) backward_rows<T, kRows>(op, t, dropped, dweight, dbias);
  for (; t < end; ++t) backward_rows<T, 1>(op, t, dropped, dweight, dbias);
}

}  // namespace

void layer_norm_forward(const LayerNorm& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto type) { forward<decltype(type)>(op, begin, end); });
}

void layer_norm_backward(const LayerNorm& op, int64_t begin, int64_t end, int64_t chunk) {
  with_storage(op.storage, [&](auto type) { backward<decltype(type)>(op, begin, end, chunk); });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
