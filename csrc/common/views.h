// Tensors and lists as kernels see them. No dependencies: kernel files include this without torch.
// Kernel files are compiled once for each instruction set, and the linker keeps one copy of a
// function of all: these must be inlined.
#pragma once

#include <cstdint>

#define DEEPFAST_VIEW inline __attribute__((always_inline))

namespace deepfast {

class Arguments;
struct Signature;

enum class Storage { f32, f64, bf16, f16 };

DEEPFAST_VIEW int64_t compute_size(Storage s) { return s == Storage::f64 ? 8 : 4; }

// A (T, D) matrix of the storage type, or sums of the compute type; rows may be strided, columns are
// contiguous. Null data is a missing operand.
struct Matrix {
  void* data = nullptr;
  int64_t row_stride = 0;
};

// A buffer of `count` slots, each a (T, D) matrix.
struct Slots {
  void* data = nullptr;
  int64_t count = 0, slot_stride = 0, row_stride = 0, value_size = 0;

  DEEPFAST_VIEW Matrix operator[](int64_t i) const {
    return {static_cast<char*>(data) + i * slot_stride * value_size, row_stride};
  }
};

// Tokens of several heads, channels contiguous.
struct Heads {
  void* data = nullptr;
  int64_t token_stride = 0, head_stride = 0;
};

// A contiguous table of weights of the compute type, each one value, or one for each channel.
struct Weights {
  void* data = nullptr;
  bool per_channel = false;
  int64_t width = 1;  // values of a weight
};

struct Indices {
  const int64_t* data = nullptr;
  int64_t count = 0;

  DEEPFAST_VIEW int64_t operator[](int64_t i) const { return data[i]; }
  DEEPFAST_VIEW const int64_t* begin() const { return data; }
  DEEPFAST_VIEW const int64_t* end() const { return data + count; }
};

// Dropout by counter: element (t, d) is kept, and multiplied by `scale`, when its 16-bit draw is at
// least `threshold`. A threshold of 0 drops nothing. The seed is where the tensors are, so that a
// device can read it without waiting for the host.
struct Dropout {
  const int64_t* seed = nullptr;
  int32_t threshold = 0;
  double scale = 1.0;
};

DEEPFAST_VIEW Dropout dropout_of(double p, const int64_t* seed) {
  if (p == 0) return {};
  constexpr double kRange = 65536;
  const auto threshold = static_cast<int32_t>(p * kRange + 0.5);
  return {seed, threshold, threshold < kRange ? kRange / (kRange - threshold) : 0.0};
}

// A list of separate (T, D) matrices.
struct Matrices {
  const Matrix* data = nullptr;
  int64_t count = 0;

  DEEPFAST_VIEW const Matrix& operator[](int64_t i) const { return data[i]; }
};

}  // namespace deepfast
