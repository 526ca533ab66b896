// Products of a few rows with a packed matrix, panel by panel: see PeepholeLstm in kernels.h.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace deepfast {
namespace DEEPFAST_ISA {

// Rows of x in a product at once: their sums, four vectors each, fill the registers.
constexpr int kRows = kVectorBytes == 64 ? 6 : 3;

template <class A>
constexpr int64_t kPanel = kPanelBytes / static_cast<int64_t>(sizeof(A));

DEEPFAST_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// out (kCount, 4, kPanel) += x (kCount, count) times rows (count, 4, kPanel) of a panel. The rows
// of x are `depth` values apart.
template <int kCount, class A>
DEEPFAST_INLINE void multiply(const A* x, int64_t depth, int64_t count, const A* panel, A* out) {
  constexpr int N = kLanes<A>;
  const Lanes<N> lanes;
  for (int64_t part = 0; part < kPanel<A>; part += N) {
    vec_t<A, N> sum[kCount][4];
#pragma GCC unroll 6
    for (int i = 0; i < kCount; ++i)
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) sum[i][q] = load(lanes, out + (i * 4 + q) * kPanel<A> + part);
    const A* w = panel + part;
    for (int64_t k = 0; k < count; ++k, w += 4 * kPanel<A>) {
      vec_t<A, N> column[4];
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) column[q] = load(lanes, w + q * kPanel<A>);
#pragma GCC unroll 6
      for (int i = 0; i < kCount; ++i) {
        const A value = x[i * depth + k];
#pragma GCC unroll 4
        for (int q = 0; q < 4; ++q) sum[i][q] += value * column[q];
      }
    }
#pragma GCC unroll 6
    for (int i = 0; i < kCount; ++i)
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) store(lanes, out + (i * 4 + q) * kPanel<A> + part, sum[i][q]);
  }
}

template <class A>
void multiply(int64_t rows, const A* x, int64_t depth, int64_t count, const A* panel, A* out) {
  switch (rows) {
    case 1:
      return multiply<1>(x, depth, count, panel, out);
    case 2:
      return multiply<2>(x, depth, count, panel, out);
    case 3:
      return multiply<3>(x, depth, count, panel, out);
    case 4:
      return multiply<4>(x, depth, count, panel, out);
    case 5:
      return multiply<5>(x, depth, count, panel, out);
    default:
      return multiply<6>(x, depth, count, panel, out);
  }
}

// Rows of a panel that stay in the level-1 cache while all rows of x pass.
constexpr int64_t kDepth = 64;

// Calls f(row, panel number, its product (4, kPanel)) for every panel and every one of `rows` rows
// of x. The product is zeros without x. `products` has room for all rows.
template <class A, class F>
DEEPFAST_INLINE void for_products(const A* x, int64_t rows, int64_t depth, const A* packed,
                                  int64_t panels, A* products, const F& f) {
  constexpr int64_t width = 4 * kPanel<A>;
  for (int64_t j = 0; j < panels; ++j) {
    memset(products, 0, rows * width * sizeof(A));
    for (int64_t k = 0; k < depth && x != nullptr; k += kDepth)
      for (int64_t i = 0; i < rows; i += kRows)
        multiply(least(kRows, rows - i), x + i * depth + k, depth, least(kDepth, depth - k),
                 packed + (j * depth + k) * width, products + i * width);
    for (int64_t i = 0; i < rows; ++i) f(i, j, products + i * width);
  }
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
