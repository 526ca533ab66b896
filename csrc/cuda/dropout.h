// Dropout by counter on chunks of eight channels and on rows of them. A mask is drawn again from
// its seed, never stored.
#pragma once

#include "../common/philox.h"
#include "row.h"

namespace deepfast {

// Draws of 16 bits that are at least `threshold` are kept and multiplied by `scale`. Without a seed
// there is no dropout.
struct DropoutMask {
  const int64_t* seed;
  int32_t threshold;
  float scale;
};

// Applies dropout to eight values of `token`, channels 8 * chunk and on. Channel 8 a + 2 w + h
// takes half h of word w of the counter (a, token mod 2^32, token div 2^32, 0), see
// deepfast.reference.dropout.
DEEPFAST_HOST_DEVICE void drop(float (&v)[kChunk], uint64_t seed, int64_t token, int32_t chunk,
                               int32_t threshold, float scale) {
  uint64_t c[4] = {static_cast<uint64_t>(chunk), static_cast<uint64_t>(token) & 0xffffffffu,
                   static_cast<uint64_t>(token) >> 32, 0};
  philox4x32(seed, c, [](uint64_t word, uint32_t factor) {
    return uint64_t{static_cast<uint32_t>(word)} * factor;
  });
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t word = static_cast<uint32_t>(c[w]);
    const int32_t low = static_cast<int32_t>(word & 0xffffu);
    const int32_t high = static_cast<int32_t>(word >> 16);
    // Selected, not multiplied by 0, so a dropped infinity is 0.
    v[2 * w] = low >= threshold ? v[2 * w] * scale : 0.0f;
    v[2 * w + 1] = high >= threshold ? v[2 * w + 1] * scale : 0.0f;
  }
}

#if defined(DEEPFAST_EMULATE) || defined(__CUDACC__)

// Applies the mask to a row; without a mask it does nothing.
template <int kChunks>
DEEPFAST_DEVICE void drop_row(float (&v)[kChunks][kChunk], const DropoutMask& mask, int64_t token,
                              const Lane& at) {
  if (mask.seed == nullptr) return;
  const uint64_t seed = static_cast<uint64_t>(*mask.seed);
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
    drop(v[c], seed, token, at.chunk(c), mask.threshold, mask.scale);
}

#endif

}  // namespace deepfast
