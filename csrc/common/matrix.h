// A tensor as kernels see it. No dependencies: kernel files include this without torch.
#pragma once

#include <cstdint>

namespace deepfast {

enum class Storage { f32, f64, bf16, f16 };

// A (T, D) matrix of storage type; rows may be strided, columns are contiguous.
struct Matrix {
  void* data = nullptr;
  int64_t row_stride = 0;
};

}  // namespace deepfast
