// What a CUDA op needs on the host: the device and its stream, the dtype of a kernel, alignment,
// registration.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <optional>
#include <type_traits>

#include "../common/arguments.h"
#include "device.h"
#include "dropout.h"
#include "launches.h"
#include "row.h"

#if defined(DEEPFAST_EMULATE)
// Registered beside the ops of deepfast._C, for the same CPU tensors.
#define DEEPFAST_CUDA_OPS(m) STABLE_TORCH_LIBRARY_IMPL(deepfast_emulated, CPU, m)
constexpr bool kOnCuda = false;
#else
#define DEEPFAST_CUDA_OPS(m) STABLE_TORCH_LIBRARY_IMPL(deepfast, CUDA, m)
constexpr bool kOnCuda = true;
// Declared only where torch itself is built with CUDA; exported by every CUDA build since 2.10.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace deepfast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// How the dispatcher calls a launch: it fills its struct from the arguments. `like` is a tensor of
// the launch, on whose device it runs.
template <class Launch, void (*run)(const Launch&, const Tensor& like)>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  const Arguments in(Launch::kSignature, stack, kOnCuda);
  run(Launch(in), in.first_tensor());
}

// The device of a launch's tensors, made current, and torch's current stream there.
class Device {
 public:
#if defined(DEEPFAST_EMULATE)
  explicit Device(const Tensor&) : stream_(nullptr), multiprocessors_(2) {}
#else
  explicit Device(const Tensor& t) : guard_(t.get_device()) {
    const int32_t index = t.get_device();
    void* stream = nullptr;
    // torch's own macro is not used: its name differs between versions.
    DEEPFAST_CHECK(aoti_torch_get_current_cuda_stream(index, &stream) == AOTI_TORCH_SUCCESS,
                   "torch has no current stream on cuda:", index);
    int current = -1;
    DEEPFAST_CUDA_CHECK(cudaGetDevice(&current));
    DEEPFAST_CHECK(current == index, "expected cuda:", index,
                   " to be the current device, got cuda:", current);
    stream_ = static_cast<cudaStream_t>(stream);
    int count = 0;
    DEEPFAST_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, index));
    multiprocessors_ = count;
  }
#endif
  cudaStream_t stream() const { return stream_; }
  // Bytes of shared memory that a block may ask for.
  int64_t shared() const {
#if defined(DEEPFAST_EMULATE)
    return emulator::shared_limit();
#else
    int device = 0, bytes = 0;
    DEEPFAST_CUDA_CHECK(cudaGetDevice(&device));
    DEEPFAST_CUDA_CHECK(
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return bytes;
#endif
  }
  // The number of blocks that together process `tiles`: at most `resident` on each multiprocessor,
  // and no more than needed for the same number of rounds.
  int64_t blocks(int64_t tiles, int resident) const {
    if (tiles == 0) return 0;
    const int64_t most = int64_t{resident} * multiprocessors_, rounds = (tiles + most - 1) / most;
    return (tiles + rounds - 1) / rounds;
  }

 private:
#if !defined(DEEPFAST_EMULATE)
  torch::stable::accelerator::DeviceGuard guard_;
#endif
  cudaStream_t stream_;
  int multiprocessors_;
};

// Calls f with a value of the storage type.
template <class F>
void dispatch(Storage storage, const F& f) {
  switch (storage) {
    case Storage::f32:
      return f(float{});
    case Storage::bf16:
      return f(bf16{});
    case Storage::f16:
      return f(f16{});
    default:
      DEEPFAST_CHECK(false, "CUDA kernels: expected float32, bfloat16 or float16, got float64");
  }
}

// The same for kernels of rows: also with `aligned` and the chunks of a thread as types. Only
// aligned rows have three chunks.
template <class F>
void dispatch_rows(Storage storage, bool aligned, int chunks, const F& f) {
  using Two = std::integral_constant<int, 2>;
  dispatch(storage, [&](auto type) {
    if (!aligned)
      f(type, std::false_type{}, Two{});
    else if (chunks == 2)
      f(type, std::true_type{}, Two{});
    else
      f(type, std::true_type{}, std::integral_constant<int, 3>{});
  });
}

// Whether all rows of these tensors start at multiples of 16 bytes; null tensors do.
class Alignment {
 public:
  explicit Alignment(Storage storage, int64_t dim)
      : bytes_(storage == Storage::f32 ? 4 : 2), aligned_(dim % kChunk == 0) {}
  Alignment& rows(std::initializer_list<Matrix> matrices) {
    for (const Matrix& m : matrices) one(m.data, m.row_stride * bytes_);
    return *this;
  }
  Alignment& values(std::initializer_list<const void*> pointers) {
    for (const void* p : pointers) one(p, 0);
    return *this;
  }
  Alignment& slots(const Slots& buffer) {
    one(buffer.data, buffer.slot_stride * bytes_);
    one(nullptr, buffer.row_stride * bytes_);
    return *this;
  }
  operator bool() const { return aligned_; }

 private:
  void one(const void* p, int64_t stride) {
    aligned_ = aligned_ && reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % 16 == 0;
  }
  int64_t bytes_;
  bool aligned_;
};

inline void check_dim(int64_t dim) {
  DEEPFAST_CHECK(dim <= kMostChannels, "CUDA kernels: expected rows of at most ", kMostChannels,
                 " channels, got ", dim);
}

// An fp32 tensor for the partial sums of a launch's blocks.
inline Tensor scratch(const Tensor& like, int64_t count) {
  return torch::stable::new_empty(like, {count}, ScalarType::Float);
}

inline float* floats(const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

// A tensor of the compute type: kernels compute in fp32.
inline float* floats(void* data) { return static_cast<float*>(data); }

template <class Launch>
DropoutMask dropout_mask(const Launch& a) {
  DEEPFAST_CHECK(a.dropout_p == 0 || a.seed != nullptr, "dropout_p is ", a.dropout_p,
                 " and the seed is missing");
  return {a.dropout.seed, a.dropout.threshold, static_cast<float>(a.dropout.scale)};
}

}  // namespace deepfast
