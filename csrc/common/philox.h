// Philox4x32-10, the counter-based generator behind dropout.
//
// Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011.
// A draw depends on (seed, counter) alone, so a mask is drawn again instead of being stored.
#pragma once

#include <stdint.h>

#if defined(__CUDACC__)
#define DEEPFAST_PHILOX static __host__ __device__ __forceinline__
#else
#define DEEPFAST_PHILOX static inline
#endif

namespace deepfast {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

// Turns a counter of four 32-bit words into four random words. A `Word` is a 64-bit integer, or a
// vector of them, and only its low half is used. A product therefore stays in place: each of its
// halves is a word of the next round and needs no unpacking. `multiply` returns the product of two
// low halves. `static` gives every translation unit its own copy, compiled for its own instruction
// set.
template <class Word, class Multiply>
DEEPFAST_PHILOX void philox4x32(uint64_t seed, Word c[4], const Multiply& multiply) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const Word p0 = multiply(c[0], kPhiloxM0), p1 = multiply(c[2], kPhiloxM1);
    c[0] = (p1 >> 32) ^ c[1] ^ uint64_t { k0 };
    c[2] = (p0 >> 32) ^ c[3] ^ uint64_t { k1 };
    c[1] = p1, c[3] = p0;
    k0 += kPhiloxW0, k1 += kPhiloxW1;
  }
}

}  // namespace deepfast
