// The rows of a token's operands, one after another and token after token, some of them in flight.
#pragma once

#include "row_ring.h"

namespace deepfast {
namespace {

// The most states or rows in one list.
constexpr int kMost = 64;

// An operand whose rows are read: row t starts at first + t * stride.
template <class T>
struct alignas(16) Operand {
  const T* first;
  int64_t stride;
};
// The operands of a token, in the order in which its threads need them: the near states, the rows
// that are pulled, and what else there is.
constexpr int kMostOperands = 2 * kMost + 6;
template <class T>
constexpr int kOperandBytes = kMostOperands * static_cast<int>(sizeof(Operand<T>));

// The rows of those operands, token after token. With kFast the next ones are in flight.
template <class T, bool kFast, int kChunks>
class RowQueue {
 public:
  // 6 rows of 16-bit values, 3 of fp32; fewer of longer ones.
  using Ring = RowRing<T, kChunks, 1, 192 / static_cast<int>(sizeof(RowChunks<T, kChunks>)), kFast>;
  static constexpr int64_t kThreadBytes = kFast ? Ring::kThreadBytes : 0;

  // `operands` in shared memory, written by add(); `shared`: kThreadBytes for each thread.
  DEEPFAST_DEVICE RowQueue(char* operands, char* shared, const Lane& at, int64_t tokens)
      : operands_(reinterpret_cast<Operand<T>*>(operands)), at_(at), ring_(shared, at) {
    tokens_ = static_cast<uint32_t>(tokens);
    step_ = gridDim.x * at.rows_per_block();
    asked_ = taken_ = blockIdx.x * at.rows_per_block() + at.row_in_block();
  }

  // Adds an operand behind the others, unless it is null. The caller calls it alike in all threads.
  DEEPFAST_DEVICE void add(const T* first, int64_t stride) {
    if (first == nullptr) return;
    if (threadIdx.x == 0) operands_[count_] = {first, stride};
    ++count_;
  }
  // Starts the first copies; includes a barrier of the block.
  DEEPFAST_DEVICE void start() {
    __syncthreads();
    if (!kFast || count_ == 0) return;
    next_ = operands_[0];
    for (int i = 0; i < Ring::kAhead; ++i) ask();
  }
  // This thread's part of the next row. Of a token that does not exist it is undefined.
  DEEPFAST_DEVICE RowChunks<T, kChunks> take() {
    if (kFast) {
      ask();
      ring_.wait();
      const auto row = ring_.take(0);
      ring_.taken();
      return row;
    }
    const Operand<T> from = operands_[take_];
    const auto row = load_row<kChunks>(from.first + taken_ * from.stride, at_, taken_ < tokens_);
    if (++take_ == count_) take_ = 0, taken_ += step_;
    return row;
  }
  // Waits for copies that nobody takes.
  DEEPFAST_DEVICE void end() {
    if (kFast) wait_copies<0>();
  }

 private:
  DEEPFAST_DEVICE void ask() {
    ring_.ask(0, next_.first + asked_ * next_.stride, asked_ < tokens_);
    ring_.asked();
    if (++ask_ == count_) ask_ = 0, asked_ += step_;
    // Here, so that no copy waits for it.
    next_ = operands_[ask_];
  }

  Operand<T>* operands_;
  const Lane& at_;
  Ring ring_;
  Operand<T> next_;
  int count_ = 0, ask_ = 0, take_ = 0;
  // Tokens of the next row to ask for and to take; 32 bits, so that a product takes two
  // instructions.
  uint32_t tokens_, step_, asked_, taken_;
};

}  // namespace
}  // namespace deepfast
