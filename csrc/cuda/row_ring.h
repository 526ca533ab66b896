// Rows that are copied into shared memory before they are used.
//
//      stage      k         k + 1      k + 2       kRows rows each; kDepth stages
//             | in work |  coming  |  coming  |
//
// A thread reads only what it copied itself, its chunks of a row (see row.h), so no barrier is
// needed. The 16-byte pieces of a warp are neighbours. Values behind the end of a row are zeros.
// Without kAligned for any row: each copy has arrived when its request returns.
#pragma once

#include "async.h"
#include "row.h"

#if defined(DEEPFAST_EMULATE) || defined(__CUDACC__)

namespace deepfast {

template <class T, int kChunks, int kRows, int kDepth, bool kAligned>
class RowRing {
 public:
  // Stages in flight behind the one that is waited for.
  static constexpr int kAhead = kDepth - 1;
  static constexpr int64_t kThreadBytes = kDepth * kRows * sizeof(RowChunks<T, kChunks>);

  // `shared`: kThreadBytes for each thread.
  DEEPFAST_DEVICE RowRing(char* shared, const Lane& at)
      : at_(at),
        mine_(reinterpret_cast<Words*>(shared + threadIdx.x / kWarp * kWarp * kThreadBytes) +
              threadIdx.x % kWarp) {
    if constexpr (kAligned) {
      // Never copied.
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        for (int stage = 0; at.count(c) <= 0 && stage < kDepth; ++stage)
          for (int r = 0; r < kRows; ++r) put(stage, r, c, zero_chunk<T>());
    }
  }

  // Starts the copy of row `r` of the next stage. A row that does not exist has undefined values. Of
  // chunks of fp32 `half` copies half.
  DEEPFAST_DEVICE void ask(int r, const T* row, bool exists, bool half = false) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const T* p = row + (at_.channel(c) << half);
      if constexpr (!kAligned) {
        put(write_, r, c, load_chunk(p, exists ? at_.count(c) : 0, at_.aligned));
      } else if (exists && at_.count(c) > 0) {
        // The two halves of 32 bytes of fp32 go through L1, so that L2 serves them in one access.
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          const auto* from = reinterpret_cast<const Words*>(p) + i;
          if (sizeof(T) == 4 || half)
            copy_words<true>(word(write_, r, c, i), from);
          else
            copy_words<false>(word(write_, r, c, i), from);
        }
      }
    }
  }
  // Ends a stage, whether or not its rows are copied.
  DEEPFAST_DEVICE void asked() {
    commit_copies();
    write_ = write_ + 1 == kDepth ? 0 : write_ + 1;
  }

  // Waits for the oldest stage, with kAhead stages behind it.
  DEEPFAST_DEVICE void wait() { wait_copies<kAhead>(); }
  DEEPFAST_DEVICE RowChunks<T, kChunks> take(int r) const {
    RowChunks<T, kChunks> row;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) row.chunk[c].words[i] = *word(read_, r, c, i);
    }
    return row;
  }
  // Frees the place of the oldest stage.
  DEEPFAST_DEVICE void taken() { read_ = read_ + 1 == kDepth ? 0 : read_ + 1; }

 private:
  static constexpr int kWords = Chunk<T>::kWords;

  DEEPFAST_DEVICE Words* word(int stage, int r, int c, int i) const {
    return mine_ + (((stage * kRows + r) * kChunks + c) * kWords + i) * kWarp;
  }
  DEEPFAST_DEVICE void put(int stage, int r, int c, const Chunk<T>& chunk) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) *word(stage, r, c, i) = chunk.words[i];
  }
  const Lane& at_;
  Words* mine_;
  int write_ = 0, read_ = 0;
};

}  // namespace deepfast

#endif
