// What the kernels of csrc/cuda share with the host, as ops for test_device_functions.py.
//
// Compiled as plain C++, neither for a GPU nor for the emulator.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "common/views.h"
#include "cuda/dropout.h"
#include "cuda/row.h"

namespace deepfast {
namespace {

using torch::stable::Tensor;

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

template <class T>
void narrow_all(const float* values, uint16_t* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kChunk) {
    float v[kChunk];
    memcpy(v, values + i, sizeof(v));
    const Chunk<T> chunk = narrow<T>(v);
    memcpy(out + i, &chunk, sizeof(chunk));
  }
}

// fp32 to 16-bit patterns; a multiple of eight of them.
void narrow_op(Tensor values, bool half, Tensor out) {
  (half ? narrow_all<f16> : narrow_all<bf16>)(data<float>(values), data<uint16_t>(out),
                                              values.numel());
}

// Applies dropout to the rows of x (T, D), D a multiple of eight. The first row is token `first`.
void drop_op(Tensor x, Tensor seed, int64_t first, double p) {
  const Dropout factors = dropout_of(p, data<int64_t>(seed));
  const int64_t dim = x.size(1);
  for (int64_t t = 0; t < x.size(0); ++t)
    for (int64_t c = 0; c < dim / kChunk; ++c) {
      float v[kChunk];
      float* at = data<float>(x) + t * dim + c * kChunk;
      memcpy(v, at, sizeof(v));
      drop(v, static_cast<uint64_t>(*data<int64_t>(seed)), first + t, static_cast<int32_t>(c),
           factors.threshold, static_cast<float>(factors.scale));
      memcpy(at, v, sizeof(v));
    }
}

// Threshold and scale of a probability.
void dropout_factors_op(double p, Tensor out) {
  const Dropout factors = dropout_of(p, nullptr);
  data<double>(out)[0] = factors.threshold, data<double>(out)[1] = factors.scale;
}

// Chunks and lanes of a row and threads of its block, for each of `dims`.
void row_op(Tensor dims, bool aligned, Tensor chunks, Tensor lanes, Tensor threads) {
  for (int64_t i = 0; i < dims.numel(); ++i) {
    const int64_t dim = data<int64_t>(dims)[i];
    const int count = row_chunks(dim, aligned), own = row_lanes(dim, count);
    data<int64_t>(chunks)[i] = count;
    data<int64_t>(lanes)[i] = own;
    data<int64_t>(threads)[i] = row_threads(own);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY(deepfast_device_functions, m) {
  m.def("narrow(Tensor values, bool half, Tensor(a!) out) -> ()");
  m.def("drop(Tensor(a!) x, Tensor seed, int first, float p) -> ()");
  m.def("dropout_factors(float p, Tensor(a!) out) -> ()");
  m.def(
      "row(Tensor dims, bool aligned, Tensor(a!) chunks, Tensor(b!) lanes, Tensor(c!) threads) -> "
      "()");
}

STABLE_TORCH_LIBRARY_IMPL(deepfast_device_functions, CPU, m) {
  m.impl("narrow", TORCH_BOX(&narrow_op));
  m.impl("drop", TORCH_BOX(&drop_op));
  m.impl("dropout_factors", TORCH_BOX(&dropout_factors_op));
  m.impl("row", TORCH_BOX(&row_op));
}

}  // namespace deepfast
