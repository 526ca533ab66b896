// Transposes a matrix by blocks in registers.
#pragma once

#include "simd.h"

namespace deepfast {
namespace DEEPFAST_ISA {

// The halves of two rows' blocks of 2 * Half columns, exchanged so that a block becomes its
// transpose when Half goes through all powers of two.
template <int Half, class V, int... I>
DEEPFAST_INLINE void exchange(V& a, V& b, std::integer_sequence<int, I...>) {
  constexpr int N = sizeof...(I);
  const V low = shuffle(a, b, std::integer_sequence<int, ((I & Half) ? N + I - Half : I)...>{});
  b = shuffle(a, b, std::integer_sequence<int, ((I & Half) ? N + I : I + Half)...>{});
  a = low;
}

template <class A, int N, int Half = N / 2>
DEEPFAST_INLINE void transpose_block(vec_t<A, N>* rows) {
  if constexpr (Half > 0) {
    DEEPFAST_UNROLL for (int i = 0; i < N; ++i) if ((i & Half) == 0)
        exchange<Half>(rows[i], rows[i + Half], std::make_integer_sequence<int, N>{});
    transpose_block<A, N, Half / 2>(rows);
  }
}

// out (columns, rows) = in (rows, columns). The distances between rows are whole vectors; what lies
// behind the last column of `in` is copied, and zeros are behind the last column of `out`.
template <class A>
void transpose(const A* in, int64_t in_stride, int64_t rows, int64_t columns, A* out,
               int64_t out_stride) {
  constexpr int N = kLanes<A>;
  constexpr Lanes<N> lanes;
  for (int64_t i = 0; i < rows; i += N)
    for (int64_t j = 0; j < columns; j += N) {
      vec_t<A, N> block[N];
      DEEPFAST_UNROLL for (int n = 0; n < N; ++n) block[n] =
          i + n < rows ? load(lanes, in + (i + n) * in_stride + j) : broadcast(lanes, A(0));
      transpose_block<A, N>(block);
      DEEPFAST_UNROLL for (int n = 0; n < N; ++n)
          store(lanes, out + (j + n) * out_stride + i, block[n]);
    }
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
