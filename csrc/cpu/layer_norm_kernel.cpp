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

template <class T, class Launch>
DEEPFAST_INLINE bool streams(const Launch& op) {
  return op.T * op.D * static_cast<int64_t>(sizeof(T)) >= kStreamBytes;
}

template <class T, bool kRms>
void forward(const LayerNormForward& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  const int64_t dim = op.D;
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
    const auto m = moments<T>(s, dim, static_cast<A>(op.eps), kRms);
    T* y = row_of<T>(op.y, t);
    const bool past_caches = streams<T>(op) && can_stream(y);
    for_lanes<A>(dim, [&](auto lanes, int64_t d) {
      const auto n = (load(lanes, s + d) - m.mean) * m.rstd;
      const auto result = affine(lanes, n, weight, bias, d);
      past_caches ? stream(lanes, y + d, result) : store(lanes, y + d, result);
    });
    if (!kRms) *at<A>(op.mean, t) = m.mean;
    *at<A>(op.rstd, t) = m.rstd;
  }
  if (streams<T>(op)) end_stream();
}

// One token. The sum and dy are read twice, the second time from the level-1 cache. Rows are not
// taken several at a time: where rows lie a divisor of 4096 bytes apart, the stores of one delay the
// loads of another, and AVX2 has too few registers for the constants of several.
//   g = dy * weight,  ds = rstd * (g - n * mean(g * n) - mean(g)) + dsum
//
// With kPlain the only result per token is dx = ds: no dropout, dsum or dresidual.
template <class T, bool kRms, bool kPlain>
DEEPFAST_INLINE void backward_row(const LayerNormBackward& op, int64_t t, compute_t<T>* dropped,
                                  compute_t<T>* dweight, compute_t<T>* dbias) {
  using A = compute_t<T>;
  const int64_t dim = op.D;
  const A* weight = at<A>(op.weight, 0);
  const T *s = row_of<T>(op.sum, t), *dy = row_of<T>(op.dy, t);
  T* const dx = op.dx.data == nullptr ? nullptr : row_of<T>(op.dx, t);
  const A mean = kRms ? A(0) : *at<A>(op.mean, t), rstd = *at<A>(op.rstd, t);
  const auto sums = sum_over_lanes<A, RowSums<A>>(dim, [&](auto lanes, int64_t d, auto& total) {
    const auto n = (load(lanes, s + d) - mean) * rstd;
    const auto g = affine<A>(lanes, load(lanes, dy + d), weight, nullptr, d);
    total.first.add(g);
    total.second.add(g * n);
  });
  const A mean_g = kRms ? A(0) : sums.first.total() / static_cast<A>(dim);
  const A mean_gn = sums.second.total() / static_cast<A>(dim);
  const bool dropout = !kPlain && op.dropout.threshold > 0;
  const bool past_caches = kPlain && streams<T>(op) && can_stream(dx);
  for_lanes<A>(dim, [&](auto lanes, int64_t d) {
    const auto n = (load(lanes, s + d) - mean) * rstd;
    const auto own = load(lanes, dy + d);
    if (dweight != nullptr) store(lanes, dweight + d, load(lanes, dweight + d) + own * n);
    if (dbias != nullptr) store(lanes, dbias + d, load(lanes, dbias + d) + own);
    // In this order: fused into one rounding, dy * weight - mean(g) would not be 0 for one channel.
    auto ds = rstd * (affine<A>(lanes, own, weight, nullptr, d) - n * mean_gn - mean_g);
    if constexpr (kPlain) {
      past_caches ? stream(lanes, dx + d, ds) : store(lanes, dx + d, ds);
    } else {
      if (op.dsum.data != nullptr) ds += load(lanes, row_of<T>(op.dsum, t) + d);
      if (op.dresidual.data != nullptr) store(lanes, row_of<T>(op.dresidual, t) + d, ds);
      if (dropout)
        store(lanes, dropped + d, ds);
      else if (dx != nullptr)
        store(lanes, dx + d, ds);
    }
  });
  if (!dropout || dx == nullptr) return;
  dropout_row<A>(op.dropout, t, dropped, dim);
  store_row(dropped, dx, dim);
}

template <class T, bool kRms>
void backward(const LayerNormBackward& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  A* const dweight = at<A>(op.dweight, chunk * op.D);
  A* const dbias = at<A>(op.dbias, chunk * op.D);
  if (op.dropout.threshold == 0 && op.dsum.data == nullptr && op.dresidual.data == nullptr &&
      op.dx.data != nullptr) {
    for (int64_t t = begin; t < end; ++t)
      backward_row<T, kRms, true>(op, t, nullptr, dweight, dbias);
    if (streams<T>(op)) end_stream();
    return;
  }
  Scratch<A> dropped(op.D);
  for (int64_t t = begin; t < end; ++t)
    backward_row<T, kRms, false>(op, t, dropped, dweight, dbias);
}

}  // namespace

void layer_norm_forward(const LayerNormForward& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto type) {
    using T = decltype(type);
    op.rms ? forward<T, true>(op, begin, end) : forward<T, false>(op, begin, end);
  });
}

void layer_norm_backward(const LayerNormBackward& op, int64_t begin, int64_t end, int64_t chunk) {
  with_storage(op.storage, [&](auto type) {
    using T = decltype(type);
    op.rms ? backward<T, true>(op, begin, end, chunk) : backward<T, false>(op, begin, end, chunk);
  });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
