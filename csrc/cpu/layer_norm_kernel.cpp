// Layer normalisation with optional residual and dropout in front of it.
//
//   s = residual + dropout(x),  y = (s - mean(s)) * rstd(s) * weight + bias
//
// With `rms` it is RMS normalisation: means count as 0, and rstd = 1 / sqrt(mean(s^2) + eps).
//
// Each operand is read from memory once and each result is written once. Compiled once per
// instruction set.
#include "rows.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

// Tokens that forward takes at a time: their horizontal sums do not wait for each other, and weight
// and bias are loaded once. With four, or with two long rows or results past the caches, reading and
// writing so many rows at once costs more: they often lie a multiple of 4096 bytes apart. A row's
// results are the same whether it comes alone or with another.
constexpr int kRows = 2;

template <class T, class Launch>
DEEPFAST_INLINE bool streams(const Launch& op) {
  return op.T * op.D * static_cast<int64_t>(sizeof(T)) >= kStreamBytes;
}

// The values of an operand, or one in place of those of a missing one.
template <class A, int N>
DEEPFAST_INLINE vec_t<A, N> or_value(Lanes<N> lanes, const A* p, int64_t d, A missing) {
  return p == nullptr ? broadcast(lanes, missing) : load(lanes, p + d);
}

// With `kept` the sum goes there first, and to its place past the caches when it was read.
template <class T, int R>
DEEPFAST_INLINE void forward_rows(const LayerNormForward& op, int64_t t, bool past_caches,
                                  T* kept) {
  using A = compute_t<T>;
  const int64_t dim = op.D;
  const bool plain = op.sum.data == nullptr, residual = op.residual.data != nullptr;
  const T* s[R];
  T *sum[R], *y[R];
  DEEPFAST_UNROLL for (int r = 0; r < R; ++r) {
    y[r] = row_of<T>(op.y, t + r);
    sum[r] = plain ? nullptr : row_of<T>(op.sum, t + r);
    past_caches &= can_stream(y[r]) && can_stream(sum[r]);
  }
  // Not 16 bytes at a time, which fill a line too slowly beside those of y.
  const bool late = past_caches && !plain && kLanes<float> * sizeof(T) >= 32;
  for (int r = 0; r < R; ++r) {
    const T* x = row_of<T>(op.x, t + r);
    s[r] = x;
    if (plain) continue;
    T* to = late ? kept : sum[r];
    for_dropped<A>(
        op.dropout, t + r, dim, [&](auto lanes, int64_t d) { return load(lanes, x + d); },
        [&](auto lanes, int64_t d, auto v) {
          if (residual) v += load(lanes, row_of<T>(op.residual, t + r) + d);
          store(lanes, to + d, v);
        });
    // The statistics are those of the stored (rounded) sum, because backward reads that.
    s[r] = to;
  }
  Moments<A> m[R];
  moments_of_each<T, R>(s, dim, static_cast<A>(op.eps), m, op.rms);
  const A *weight = at<A>(op.weight, 0), *bias = at<A>(op.bias, 0);
  for_lanes<A>(dim, [&](auto lanes, int64_t d) {
    // Loaded here, because a store to y might change them as far as the compiler knows.
    const auto w = or_value(lanes, weight, d, A(1)), b = or_value(lanes, bias, d, A(0));
    DEEPFAST_UNROLL for (int r = 0; r < R; ++r) {
      if (past_caches && residual) {
        // The next token's.
        __builtin_prefetch(row_of<T>(op.x, t + 1) + d);
        __builtin_prefetch(row_of<T>(op.residual, t + 1) + d);
      }
      const auto own = load(lanes, s[r] + d);
      const auto result = (own - m[r].mean) * m[r].rstd * w + b;
      past_caches ? stream(lanes, y[r] + d, result) : store(lanes, y[r] + d, result);
      if (late) stream(lanes, sum[r] + d, own);
    }
  });
  DEEPFAST_UNROLL for (int r = 0; r < R; ++r) {
    if (!op.rms) *at<A>(op.mean, t + r) = m[r].mean;
    *at<A>(op.rstd, t + r) = m[r].rstd;
  }
}

template <class T>
void forward(const LayerNormForward& op, int64_t begin, int64_t end) {
  const bool past_caches = streams<T>(op);
  const Scratch<T> kept(past_caches && op.sum.data != nullptr ? op.D : 0);
  int64_t t = begin;
  if (!past_caches && op.D * sizeof(T) < 4096)
    for (; t + kRows <= end; t += kRows) forward_rows<T, kRows>(op, t, past_caches, kept);
  for (; t < end; ++t) forward_rows<T, 1>(op, t, past_caches, kept);
  if (past_caches) end_stream();
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
  for_dropped<A>(
      op.dropout, t, dim, [&](auto lanes, int64_t d) { return load(lanes, dropped + d); },
      [&](auto lanes, int64_t d, auto value) { store(lanes, dx + d, value); });
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
  with_storage(op.storage, [&](auto type) { forward<decltype(type)>(op, begin, end); });
}

void layer_norm_backward(const LayerNormBackward& op, int64_t begin, int64_t end, int64_t chunk) {
  with_storage(op.storage, [&](auto type) {
    using T = decltype(type);
    op.rms ? backward<T, true>(op, begin, end, chunk) : backward<T, false>(op, begin, end, chunk);
  });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
