// Pairs of rows, copied into shared memory before they are used.
//
//      pair      k         k + 1      k + 2       of 16-bit values; of fp32, twice as long, two
//            | in work |  coming  |  coming  |
//
// A thread reads only what it copied itself, its chunks of a row (see row.h), so no barrier is
// needed. The 16-byte pieces of a warp are neighbours. Values behind the end of a row are zeros.
#pragma once

#include "async.h"
#include "row.h"

#if defined(DEEPFAST_EMULATE) || defined(__CUDACC__)

namespace deepfast {

template <class T, bool kAligned>
class RowPairs {
 public:
  static constexpr int kRows = 2;
  static constexpr int kDepth = sizeof(T) == 4 ? 2 : 3;
  static constexpr int64_t kThreadBytes = kDepth * kRows * sizeof(RowChunks<T>);

  // `shared`: kThreadBytes for each thread.
  DEEPFAST_DEVICE RowPairs(char* shared, const Lane& at)
      : at_(at),
        mine_(reinterpret_cast<Words*>(shared + threadIdx.x / kWarp * kWarp * kThreadBytes) +
              threadIdx.x % kWarp) {
    if constexpr (kAligned) {
      // Never copied.
#pragma unroll
      for (int c = 0; c < kRowChunks; ++c)
        for (int pair = 0; at.count(c) <= 0 && pair < kDepth; ++pair)
          for (int r = 0; r < kRows; ++r) put(pair, r, c, zero_chunk<T>());
    }
  }

  // Starts the copy of row `r` of the next pair. A row that does not exist has undefined values.
  DEEPFAST_DEVICE void ask(int r, const T* row, bool exists) {
#pragma unroll
    for (int c = 0; c < kRowChunks; ++c) {
      const T* p = row + at_.channel(c);
      if constexpr (!kAligned) {
        put(write_, r, c, load_chunk(p, exists ? at_.count(c) : 0, false));
      } else if (exists && at_.count(c) > 0) {
        // The two halves of 32 bytes of fp32 go through L1, so that L2 serves them in one access.
#pragma unroll
        for (int i = 0; i < kWords; ++i)
          copy_words<sizeof(T) == 4>(word(write_, r, c, i), reinterpret_cast<const Words*>(p) + i);
      }
    }
  }
  // Ends a pair, whether or not its rows are copied.
  DEEPFAST_DEVICE void asked() {
    commit_copies();
    write_ = write_ + 1 == kDepth ? 0 : write_ + 1;
  }

  // Waits for the oldest pair, with kDepth - 1 pairs behind it.
  DEEPFAST_DEVICE void wait() { wait_copies<kDepth - 1>(); }
  DEEPFAST_DEVICE void take(int r, float (&v)[kRowChunks][kChunk]) const {
#pragma unroll
    for (int c = 0; c < kRowChunks; ++c) {
      Chunk<T> chunk;
#pragma unroll
      for (int i = 0; i < kWords; ++i) chunk.words[i] = *word(read_, r, c, i);
      widen(chunk, v[c]);
    }
  }
  // Frees the place of the oldest pair.
  DEEPFAST_DEVICE void taken() { read_ = read_ + 1 == kDepth ? 0 : read_ + 1; }

 private:
  static constexpr int kWords = Chunk<T>::kWords;

  DEEPFAST_DEVICE Words* word(int pair, int r, int c, int i) const {
    return mine_ + (((pair * kRows + r) * kRowChunks + c) * kWords + i) * kWarp;
  }
  DEEPFAST_DEVICE void put(int pair, int r, int c, const Chunk<T>& chunk) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) *word(pair, r, c, i) = chunk.words[i];
  }
  const Lane& at_;
  Words* mine_;
  int write_ = 0, read_ = 0;
};

}  // namespace deepfast

#endif
