// Products of small tiles on tensor cores, for bf16 and fp16 with fp32 sums.
//
// mma        d (16, 8) += a (16, 16) b (16, 8). Of lane l, with g = l / 4 and t = l % 4:
//              a  four words: rows g, g+8, g, g+8; columns 2t, 2t+1 and, in the last two, 8 more
//              b  two words: column g; rows 2t, 2t+1 and 8 more
//              d  four values: rows g, g, g+8, g+8; columns 2t, 2t+1, 2t, 2t+1
// fma_pair   a * b + c of the two 16-bit values in each word, rounded once.
// load_tiles four (8, 8) tiles of 16-bit values in shared memory: lane l gives the address of row
//            l % 8 of tile l / 8 and gets, of tile i, row g, columns 2t and 2t+1 in word i.
// load_tiles_transposed
//            the same, but rows 2t and 2t+1 of column g.
#pragma once

#include "async.h"

#if defined(DEEPFAST_EMULATE) || defined(__CUDACC__)

namespace deepfast {

#if !defined(DEEPFAST_EMULATE)
template <class T>
DEEPFAST_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
DEEPFAST_DEVICE void mma<bf16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
DEEPFAST_DEVICE void mma<f16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <class T>
DEEPFAST_DEVICE uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c);

template <>
DEEPFAST_DEVICE uint32_t fma_pair<bf16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
template <>
DEEPFAST_DEVICE uint32_t fma_pair<f16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

DEEPFAST_DEVICE void load_tiles(uint32_t (&words)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
}
DEEPFAST_DEVICE void load_tiles_transposed(uint32_t (&words)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
}
#endif

// Splits the next part off two numbers; `rest` keeps the remainder.
template <class T>
DEEPFAST_DEVICE uint32_t cut(Pair& rest) {
  const uint32_t part = pack<T>(rest.first, rest.second);
  const Pair taken = unpack<T>(part);
  rest.first -= taken.first, rest.second -= taken.second;
  return part;
}

// The power of two that brings numbers up to `most` to [2^exponent, 2^(exponent + 1)), and its
// reciprocal.
DEEPFAST_DEVICE Pair scale_to(float most, int exponent) {
  int e = static_cast<int>(detail::bits_as<uint32_t>(most) >> 23);
  e = e < 40 ? 40 : e > 220 ? 220 : e;
  return {detail::bits_as<float>(static_cast<uint32_t>(254 + exponent - e) << 23),
          detail::bits_as<float>(static_cast<uint32_t>(e - exponent) << 23)};
}

}  // namespace deepfast

#endif
