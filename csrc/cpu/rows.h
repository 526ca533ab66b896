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

template <class T>
DEEPFAST_INLINE T* row_of(const Slots& slots, int64_t i, int64_t t) {
  return static_cast<T*>(slots.data) + i * slots.slot_stride + t * slots.row_stride;
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

// Channels that are drawn at once.
constexpr int kDraws = 128;

// The 16-bit draws for kDraws channels of token `t` from `first` on, a multiple of 8. Channel 8a +
// 2w + h takes half h (0 is the low one) of word w of counter (a, t mod 2^32, t div 2^32, 0).
DEEPFAST_INLINE void draw_bits(uint64_t seed, int64_t t, int64_t first, uint16_t* draws) {
  constexpr int N = kLanes<uint64_t>, kCounters = kDraws / 8;
  using Words = vec_t<uint64_t, N>;
  constexpr uint64_t kWord = 0xffffffffu;
  const auto token = static_cast<uint64_t>(t);
  Words lane;
  for (int i = 0; i < N; ++i) lane[i] = i;
  // Two words of a counter make one value of 64 bits.
  uint64_t low[kCounters], high[kCounters], words[2 * kCounters];
  for (int i = 0; i < kCounters; i += N) {
    Words c[4] = {lane + static_cast<uint64_t>(first / 8 + i), Words{} + (token & kWord),
                  Words{} + (token >> 32), Words{}};
    philox4x32(seed, c, multiply_low_halves<N>);
    const Words c01 = (c[0] & kWord) | (c[1] << 32), c23 = (c[2] & kWord) | (c[3] << 32);
    memcpy(low + i, &c01, sizeof(Words));
    memcpy(high + i, &c23, sizeof(Words));
  }
  for (int i = 0; i < kCounters; ++i) words[2 * i] = low[i], words[2 * i + 1] = high[i];
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half of a word comes first");
  memcpy(draws, words, sizeof(words));
}

// Calls f(lanes, d, draws) over the channels of token `t` from `first` on, a multiple of 8, with the
// draws of these lanes.
template <class A, class F>
DEEPFAST_INLINE void for_drawn_lanes(const Dropout& dropout, int64_t t, int64_t dim, const F& f,
                                     int64_t first = 0) {
  uint16_t draws[kDraws];
  for (; first < dim; first += kDraws) {
    draw_bits(static_cast<uint64_t>(*dropout.seed), t, first, draws);
    for_lanes<A>(dim - first < kDraws ? dim - first : kDraws,
                 [&](auto lanes, int64_t i) { f(lanes, first + i, draws + i); });
  }
}

// Values under the mask of their draws: scaled where kept, else 0, for infinities and NaNs too.
template <class A, int N>
DEEPFAST_INLINE vec_t<A, N> dropped(Lanes<N> lanes, vec_t<A, N> v, const uint16_t* draws,
                                    const Dropout& dropout) {
  // Integers as wide as A, because a comparison of these can select lanes of A.
  using Wide = decltype(v == v);
  vec_t<uint16_t, N> draw;
  memcpy(&draw, draws, sizeof(draw));
  const auto kept = widen<Wide, N>(draw) >= dropout.threshold;
  return kept ? v * static_cast<A>(dropout.scale) : broadcast(lanes, A(0));
}

// Calls put(lanes, d, dropout(value(lanes, d))) over the row of token `t`.
template <class A, class F, class Put>
DEEPFAST_INLINE void for_dropped(const Dropout& dropout, int64_t t, int64_t dim, const F& value,
                                 const Put& put) {
  if (dropout.threshold == 0) {
    for_lanes<A>(dim, [&](auto lanes, int64_t d) { put(lanes, d, value(lanes, d)); });
    return;
  }
  for_drawn_lanes<A>(dropout, t, dim, [&](auto lanes, int64_t d, const uint16_t* draws) {
    put(lanes, d, dropped<A>(lanes, value(lanes, d), draws, dropout));
  });
}

// The largest value of a row. A NaN is skipped; sums over the row become NaN.
template <class T, class A = compute_t<T>>
DEEPFAST_INLINE A row_max(const T* row, int64_t n) {
  constexpr int N = kLanes<A>;
  auto wide = broadcast(Lanes<N>{}, A(-__builtin_inf()));
  auto tail = broadcast(Lanes<1>{}, A(-__builtin_inf()));
  int64_t i = 0;
  for (; i + N <= n; i += N) {
    const auto x = load(Lanes<N>{}, row + i);
    wide = x > wide ? x : wide;
  }
  for (; i < n; ++i) {
    const auto x = load(Lanes<1>{}, row + i);
    tail = x > tail ? x : tail;
  }
  const A most = max_lanes<A, N>(wide);
  return most > tail[0] ? most : tail[0];
}

template <class A>
struct Moments {
  A mean, rstd;
};

// The sums of several rows in one pass: their horizontal sums do not wait for each other.
template <class Sums, int kRows>
struct Each {
  Sums row[kRows];
  DEEPFAST_INLINE void add(const Each& other) {
    each_of<kRows>([&](auto r) { row[r].add(other.row[r]); });
  }
};

// The moments of rows that are divided by their root mean square: the mean counts as 0.
template <class T, int kRows, class A = compute_t<T>>
DEEPFAST_INLINE void moments_without_mean(const T* const (&rows)[kRows], int64_t dim, A eps,
                                          Moments<A> (&found)[kRows]) {
  const auto sum =
      sum_over_lanes<A, Each<RowSum<A>, kRows>>(dim, [&](auto lanes, int64_t d, auto& s) {
        each_of<kRows>([&](auto r) {
          const auto x = load(lanes, rows[r] + d);
          s.row[r].add(x * x);
        });
      });
  each_of<kRows>([&](auto r) {
    const A square = sum.row[r].total() / static_cast<A>(dim);
    found[r] = {A(0), A(1) / static_cast<A>(__builtin_sqrt(square + eps))};
  });
}

// Two passes over each row, never E[x^2] - E[x]^2. The second pass also computes the mean of x -
// mean and adds it to the mean, so a large mean or a constant row adds no rounding error (Chan,
// Golub, LeVeque 1983). A row may be of storage type: reading it again from the level-1 cache is
// cheaper than writing a converted copy.
template <class T, int kRows, class A = compute_t<T>>
DEEPFAST_INLINE void moments_of_each(const T* const (&rows)[kRows], int64_t dim, A eps,
                                     Moments<A> (&found)[kRows], bool rms = false) {
  if (rms) return moments_without_mean<T, kRows>(rows, dim, eps, found);
  const auto sum =
      sum_over_lanes<A, Each<RowSum<A>, kRows>>(dim, [&](auto lanes, int64_t d, auto& s) {
        each_of<kRows>([&](auto r) { s.row[r].add(load(lanes, rows[r] + d)); });
      });
  A mean[kRows];
  each_of<kRows>([&](auto r) { mean[r] = sum.row[r].total() / static_cast<A>(dim); });
  const auto rest =
      sum_over_lanes<A, Each<RowSums<A>, kRows>, 2>(dim, [&](auto lanes, int64_t d, auto& s) {
        each_of<kRows>([&](auto r) {
          const auto c = load(lanes, rows[r] + d) - mean[r];
          s.row[r].first.add(c);
          s.row[r].second.add(c * c);
        });
      });
  each_of<kRows>([&](auto r) {
    const A left = rest.row[r].first.total() / static_cast<A>(dim);
    const A variance = rest.row[r].second.total() / static_cast<A>(dim) - left * left;
    found[r] = {mean[r] + left,
                A(1) / static_cast<A>(__builtin_sqrt((variance > A(0) ? variance : A(0)) + eps))};
  });
}

// Normalised value times weight plus bias, either of which may be absent. Multiplication and addition
// stand in one expression, so that every kernel rounds once.
template <class A, int N>
DEEPFAST_INLINE vec_t<A, N> affine(Lanes<N> lanes, vec_t<A, N> n, const A* weight, const A* bias,
                                   int64_t d) {
  if (weight == nullptr) return bias == nullptr ? n : n + load(lanes, bias + d);
  const auto added = bias == nullptr ? broadcast(lanes, A(0)) : load(lanes, bias + d);
  return n * load(lanes, weight + d) + added;
}

// The weight of an affine map, and where the gradients of weight and bias are added; each may be null.
template <class A>
struct Affine {
  const A* weight;
  A *dweight, *dbias;
};

// The gradient of R rows through y = n * weight + bias, n = LN(x), from g, the gradient of y:
//   dn = g * weight,  dx = rstd * (dn - n * mean(dn * n) - mean(dn)),  dweight += g * n,  dbias += g
// g(lanes, r, d) and n(lanes, r, d) give values of row r, put(lanes, r, d, dx) takes them. With rms
// mean(dn) counts as 0. In this order: fused into one rounding, dn - mean(dn) would not be 0 for one
// channel.
template <class A, int R, class G, class Normalised, class Put>
DEEPFAST_INLINE void norm_gradient(int64_t dim, const Affine<A>& norm, bool rms, const A (&rstd)[R],
                                   const G& g, const Normalised& n, const Put& put) {
  const auto sums =
      sum_over_lanes<A, Each<RowSums<A>, R>, 2>(dim, [&](auto lanes, int64_t d, auto& total) {
        auto products = broadcast(lanes, A(0)), grads = products;
        each_of<R>([&](auto r) {
          const auto own = g(lanes, r, d), value = n(lanes, r, d);
          const auto dn = affine<A>(lanes, own, norm.weight, nullptr, d);
          products += own * value, grads += own;
          total.row[r].first.add(dn), total.row[r].second.add(dn * value);
        });
        if (norm.dweight != nullptr)
          store(lanes, norm.dweight + d, load(lanes, norm.dweight + d) + products);
        if (norm.dbias != nullptr)
          store(lanes, norm.dbias + d, load(lanes, norm.dbias + d) + grads);
      });
  A first[R], second[R];
  each_of<R>([&](auto r) {
    first[r] = rms ? A(0) : sums.row[r].first.total() / static_cast<A>(dim);
    second[r] = sums.row[r].second.total() / static_cast<A>(dim);
  });
  for_lanes<A>(dim, [&](auto lanes, int64_t d) {
    each_of<R>([&](auto r) {
      const auto dn = affine<A>(lanes, g(lanes, r, d), norm.weight, nullptr, d);
      put(lanes, r, d, rstd[r] * (dn - n(lanes, r, d) * second[r] - first[r]));
    });
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

// W[row, column] of R columns: one value, or one for each channel.
template <class A>
DEEPFAST_INLINE A* weight_of(const Weights& weights, int64_t row, int64_t column, int64_t R) {
  return at<A>(weights.data, (row * R + column) * weights.width);
}

// Calls f with a value of the storage type.
template <class F>
DEEPFAST_INLINE void with_storage(Storage storage, const F& f) {
#if defined(__AVX512BF16__)
  // For the other types these kernels would be those of avx512, and dispatch.cpp takes them there.
  (void)storage;
  return f(bf16{});
#else
  switch (storage) {
    case Storage::f32:
      return f(float{});
    case Storage::f64:
      return f(double{});
    case Storage::bf16:
      return f(bf16{});
    case Storage::f16:
      return f(f16{});
  }
#endif
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
