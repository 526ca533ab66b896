// Operations on one token's row of D channels, held in scratch memory in the compute type.
#pragma once

#include "../common/philox.h"
#include "kernels.h"
#include "simd.h"

namespace deepfast {
namespace DEEPFAST_ISA {

template <class T>
DEEPFAST_INLINE T* row_of(const Matrix& m, int64_t t) {
  return static_cast<T*>(m.data) + t * m.row_stride;
}

template <class T, class A = compute_t<T>>
DEEPFAST_INLINE void load_row(const T* p, A* row, int64_t dim) {
  for_lanes<A>(dim, [&](auto lanes, int64_t d) { store(lanes, row + d, load(lanes, p + d)); });
}

template <class T, class A = compute_t<T>>
DEEPFAST_INLINE void add_row(const T* p, A* row, int64_t dim) {
  for_lanes<A>(dim, [&](auto lanes, int64_t d) {
    store(lanes, row + d, load(lanes, row + d) + load(lanes, p + d));
  });
}

template <class T, class A = compute_t<T>>
DEEPFAST_INLINE void store_row(const A* row, T* p, int64_t dim) {
  for_lanes<A>(dim, [&](auto lanes, int64_t d) { store(lanes, p + d, load(lanes, row + d)); });
}

// Multiplies row `t` by its dropout mask: 0 or 1 / (1 - p).
template <class A>
inline void dropout_row(const Dropout& dropout, int64_t t, A* row, int64_t dim) {
  const double scaled = dropout.p * 4294967296.0;
  const uint32_t threshold = scaled >= 4294967295.0 ? 0xffffffffu : static_cast<uint32_t>(scaled);
  const A scale = dropout.p < 1.0 ? static_cast<A>(1.0 / (1.0 - dropout.p)) : A(0);
  const uint32_t t_low = static_cast<uint32_t>(t), t_high = static_cast<uint32_t>(t >> 32);
  // 64 channels at a time, one counter for four: the compiler turns this loop into vectors.
  constexpr int kGroups = 16;
  uint32_t draw[4][kGroups];
  for (int64_t start = 0; start < dim; start += 4 * kGroups) {
    for (int i = 0; i < kGroups; ++i) {
      const uint32_t counter[4] = {static_cast<uint32_t>(start / 4 + i), t_low, t_high, 0};
      uint32_t out[4];
      philox4x32(dropout.seed, counter, out);
      for (int j = 0; j < 4; ++j) draw[j][i] = out[j];
    }
    const int64_t n = dim - start < 4 * kGroups ? dim - start : 4 * kGroups;
    // Channel start + j * kGroups + i takes word j of counter i.
    const uint32_t* flat = &draw[0][0];
    for (int64_t i = 0; i < n; ++i)
      row[start + i] = flat[i] >= threshold ? row[start + i] * scale : A(0);
  }
}

template <class A>
struct Moments {
  A mean, rstd;
};

// Two passes over the row, never E[x^2] - E[x]^2. The second one also corrects the mean by the mean
// of what is left after it, so that a large mean, or a constant row, leaves no rounding error of
// its own (Chan, Golub, LeVeque 1983). The row may be of storage type: reading it again from the
// level-1 cache is cheaper than writing a converted copy.
template <class T, class A = compute_t<T>>
DEEPFAST_INLINE Moments<A> moments(const T* row, int64_t dim, A eps) {
  const auto sum = sum_over_lanes<A, RowSum<A>>(
      dim, [&](auto lanes, int64_t d, auto& s) { s.add(load(lanes, row + d)); });
  const A mean = sum.total() / static_cast<A>(dim);
  const auto rest = sum_over_lanes<A, RowSums<A>>(dim, [&](auto lanes, int64_t d, auto& s) {
    const auto c = load(lanes, row + d) - mean;
    s.first.add(c);
    s.second.add(c * c);
  });
  const A left = rest.first.total() / static_cast<A>(dim);
  const A variance = rest.second.total() / static_cast<A>(dim) - left * left;
  return {mean + left,
          A(1) / static_cast<A>(__builtin_sqrt((variance > A(0) ? variance : A(0)) + eps))};
}

// Normalised value times weight plus bias, either of which may be absent.
template <class A, int N>
DEEPFAST_INLINE vec_t<A, N> affine(Lanes<N> lanes, vec_t<A, N> n, const A* weight, const A* bias,
                                   int64_t d) {
  if (weight != nullptr) n *= load(lanes, weight + d);
  if (bias != nullptr) n += load(lanes, bias + d);
  return n;
}

// out += weight * (n * gain + shift), weight one value or one per channel.
template <class T, class A = compute_t<T>>
DEEPFAST_INLINE void mix_row(const T* n, const A* gain, const A* shift, const A* weight,
                             bool per_channel, A* out, int64_t dim) {
  for_lanes<A>(dim, [&](auto lanes, int64_t d) {
    const auto z = affine(lanes, load(lanes, n + d), gain, shift, d);
    const auto w = per_channel ? load(lanes, weight + d) : broadcast(lanes, *weight);
    store(lanes, out + d, load(lanes, out + d) + w * z);
  });
}

// Gradient of the input of a layer-norm row: `dn` is the gradient of the normalised row `n`.
//   dy = rstd * (dn - mean(dn) - n * mean(dn * n)); written over dn.
template <class A>
DEEPFAST_INLINE void norm_backward_row(A* dn, const A* n, A rstd, int64_t dim) {
  const auto sums = sum_over_lanes<A, RowSums<A>>(dim, [&](auto lanes, int64_t d, auto& s) {
    const auto g = load(lanes, dn + d);
    s.first.add(g);
    s.second.add(g * load(lanes, n + d));
  });
  const A a = sums.first.total() / static_cast<A>(dim);
  const A b = sums.second.total() / static_cast<A>(dim);
  for_lanes<A>(dim, [&](auto lanes, int64_t d) {
    store(lanes, dn + d, rstd * (load(lanes, dn + d) - a - load(lanes, n + d) * b));
  });
}

// total[d] += a[d] * b[d] and, for the bias, total[d] += a[d].
template <class A>
DEEPFAST_INLINE void accumulate_affine(const A* grad, const A* n, A* dweight, A* dbias,
                                       int64_t dim) {
  for_lanes<A>(dim, [&](auto lanes, int64_t d) {
    const auto g = load(lanes, grad + d);
    if (dweight != nullptr)
      store(lanes, dweight + d, load(lanes, dweight + d) + g * load(lanes, n + d));
    if (dbias != nullptr) store(lanes, dbias + d, load(lanes, dbias + d) + g);
  });
}

template <class A>
DEEPFAST_INLINE A* at(void* p, int64_t i) {
  return p == nullptr ? nullptr : static_cast<A*>(p) + i;
}

template <class A>
DEEPFAST_INLINE const A* at(const void* p, int64_t i) {
  return p == nullptr ? nullptr : static_cast<const A*>(p) + i;
}

// Calls f with a null pointer of the storage type.
template <class F>
DEEPFAST_INLINE void with_storage(Storage storage, const F& f) {
  switch (storage) {
    case Storage::f32:
      return f(static_cast<float*>(nullptr));
    case Storage::f64:
      return f(static_cast<double*>(nullptr));
    case Storage::bf16:
      return f(static_cast<bf16*>(nullptr));
    case Storage::f16:
      return f(static_cast<f16*>(nullptr));
  }
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
