// The rows of a token's operands, one after another and token after token, some of them copied into
// shared memory before they are used.
//
//      stage      k         k + 1      k + 2       a row each; kDepth stages
//             | in work |  coming  |  coming  |
//
// A thread reads only what it copied itself, its chunks of a row (see row.h), so no barrier is
// needed. The 16-byte pieces of a warp are neighbours. Values behind the end of a row are zeros.
#pragma once

#include "async.h"
#include "row.h"

namespace deepfast {
namespace {

// The most states or rows in one list.
constexpr int kMost = 64;

// An operand whose rows are read: row t starts at first + t * stride. A stride ~s stands for s and for
// half of each chunk of fp32 sums: of every sixteen values of T the first eight.
template <class T>
struct alignas(16) Operand {
  const T* first;
  int64_t stride;
};
// The operands of a token, in the order in which its threads need them: the near states, the rows
// that are pulled, and what else there is.
constexpr int kMostOperands = 2 * kMost + 8;
template <class T>
constexpr int kOperandBytes = kMostOperands * static_cast<int>(sizeof(Operand<T>));

// The rows of those operands, token after token. With kFast the next ones are in flight.
template <class T, bool kFast, int kChunks>
class RowQueue {
  // 6 rows of 16-bit values, 3 of fp32; fewer of longer ones.
  static constexpr int kDepth = 192 / static_cast<int>(sizeof(RowChunks<T, kChunks>));
  // Rows in flight behind the one that is waited for.
  static constexpr int kAhead = kDepth - 1;

 public:
  static constexpr int64_t kThreadBytes = kFast ? kDepth * sizeof(RowChunks<T, kChunks>) : 0;

  // `operands` in shared memory, written by add(); `shared`: kThreadBytes for each thread.
  DEEPFAST_DEVICE RowQueue(char* operands, char* shared, const Lane& at, int64_t tokens)
      : operands_(reinterpret_cast<Operand<T>*>(operands)),
        at_(at),
        mine_(reinterpret_cast<Words*>(shared + threadIdx.x / kWarp * kWarp * kThreadBytes) +
              threadIdx.x % kWarp) {
    tokens_ = static_cast<uint32_t>(tokens);
    step_ = gridDim.x * at.rows_per_block();
    asked_ = taken_ = blockIdx.x * at.rows_per_block() + at.row_in_block();
    if constexpr (kFast) {
      // Never copied.
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        for (int stage = 0; at.count(c) <= 0 && stage < kDepth; ++stage)
          for (int i = 0; i < kWords; ++i) *word(stage, c, i) = Words{{0, 0, 0, 0}};
    }
  }

  // Adds an operand behind the others, unless it is null. The caller calls it alike in all threads.
  DEEPFAST_DEVICE void add(const T* first, int64_t stride) {
    if (first == nullptr) return;
    if (threadIdx.x == 0) operands_[count_] = {first, stride};
    ++count_;
  }
  // The same of sums in fp32. With 16-bit values in flight they are two operands.
  DEEPFAST_DEVICE void add_sums(const float* first, int64_t stride) {
    if constexpr (sizeof(T) == 4) {
      add(first, stride);
    } else {
      const T* low = reinterpret_cast<const T*>(first);
      add(low, kFast ? ~(2 * stride) : 2 * stride);
      if (kFast && first != nullptr) add(low + kChunk, ~(2 * stride));
    }
  }
  // Starts the first copies; includes a barrier of the block.
  DEEPFAST_DEVICE void start() {
    __syncthreads();
    if (!kFast || count_ == 0) return;
    next_ = operands_[0];
    for (int i = 0; i < kAhead; ++i) ask();
  }
  // This thread's part of the next row. Of a token that does not exist it is undefined.
  DEEPFAST_DEVICE RowChunks<T, kChunks> take() {
    if (!kFast) return load<T>();
    ask();
    wait_copies<kAhead>();
    RowChunks<T, kChunks> row;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) row.chunk[c].words[i] = *word(read_, c, i);
    }
    read_ = read_ + 1 == kDepth ? 0 : read_ + 1;
    return row;
  }
  // Adds this thread's part of the next row, one of sums, to v.
  DEEPFAST_DEVICE void take_sums(float (&v)[kChunks][kChunk]) {
    if constexpr (sizeof(T) == 4) {
      add_row(v, take());
    } else if constexpr (!kFast) {
      add_row(v, load<float>());
    } else {
      const auto low = take(), high = take();
      RowChunks<float, kChunks> row;
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        row.chunk[c] = {{low.chunk[c].words[0], high.chunk[c].words[0]}};
      add_row(v, row);
    }
  }
  // Waits for copies that nobody takes.
  DEEPFAST_DEVICE void end() {
    if (kFast) wait_copies<0>();
  }

 private:
  // Reads the next row, of values V, where none is in flight.
  template <class V>
  DEEPFAST_DEVICE RowChunks<V, kChunks> load() {
    const Operand<T> from = operands_[take_];
    const auto* row = reinterpret_cast<const V*>(from.first + taken_ * from.stride);
    const bool exists = taken_ < tokens_;
    if (++take_ == count_) take_ = 0, taken_ += step_;
    return load_row<kChunks>(row, at_, exists);
  }
  // Starts the copies of the next row. A row that does not exist has undefined values.
  DEEPFAST_DEVICE void ask() {
    const bool half = sizeof(T) == 2 && next_.stride < 0;
    const int64_t stride = half ? ~next_.stride : next_.stride;
    const T* row = next_.first + asked_ * stride;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (asked_ >= tokens_ || at_.count(c) <= 0) continue;
      const auto* from = reinterpret_cast<const Words*>(row + (at_.channel(c) << half));
      // The two halves of 32 bytes of fp32 go through L1, so that L2 serves them in one access.
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if (sizeof(T) == 4 || half)
          copy_words<true>(word(write_, c, i), from + i);
        else
          copy_words<false>(word(write_, c, i), from + i);
      }
    }
    // A stage ends also where no row was left to be copied.
    commit_copies();
    write_ = write_ + 1 == kDepth ? 0 : write_ + 1;
    if (++ask_ == count_) ask_ = 0, asked_ += step_;
    // Here, so that no copy waits for it.
    next_ = operands_[ask_];
  }
  DEEPFAST_DEVICE Words* word(int stage, int c, int i) const {
    return mine_ + ((stage * kChunks + c) * kWords + i) * kWarp;
  }

  static constexpr int kWords = Chunk<T>::kWords;
  Operand<T>* operands_;
  const Lane& at_;
  Words* mine_;
  Operand<T> next_;
  int count_ = 0, ask_ = 0, take_ = 0;
  // Stages of the next row to copy and to take.
  int write_ = 0, read_ = 0;
  // Tokens of the next row to ask for and to take; 32 bits, so that a product takes two
  // instructions.
  uint32_t tokens_, step_, asked_, taken_;
};

}  // namespace
}  // namespace deepfast
