// CUDA as the kernels see it: qualifiers, launches, return codes.
//
// The same sources compile for a processor with DEEPFAST_EMULATE: tests/cuda/emulator.h then
// replaces CUDA and runs each thread of a block as a fiber, so tests run these kernels without a
// GPU.
#pragma once

#include <stdint.h>

#include "../common/check.h"

#if defined(DEEPFAST_EMULATE)
#include "emulator.h"
#elif defined(__CUDACC__)
#include <cuda_runtime.h>
#endif

#if defined(__CUDACC__)
#define DEEPFAST_HOST_DEVICE __host__ __device__ __forceinline__
#define DEEPFAST_DEVICE __device__ __forceinline__
#else
#define DEEPFAST_HOST_DEVICE inline
#define DEEPFAST_DEVICE inline
#endif

namespace deepfast {

constexpr int kWarp = 32;

}  // namespace deepfast

#if defined(DEEPFAST_EMULATE) || defined(__CUDACC__)

#define DEEPFAST_CUDA_CHECK(call)                                                   \
  do {                                                                              \
    const cudaError_t status = (call);                                              \
    DEEPFAST_CHECK(status == cudaSuccess, #call, ": ", cudaGetErrorString(status)); \
  } while (false)

namespace deepfast {

#if defined(__CUDACC__)
// A barrier of `threads` neighbouring threads, a power of two and at least 64: the block's first
// `threads`, its next `threads`, and so on. Other threads do not wait.
DEEPFAST_DEVICE void sync_neighbours(int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + static_cast<int>(threadIdx.x) / threads), "r"(threads)
               : "memory");
}

// A block's shared memory, as many bytes as the launch asked for, 128-byte aligned.
DEEPFAST_DEVICE char* dynamic_shared() {
  extern __shared__ __align__(128) char deepfast_shared[];
  return deepfast_shared;
}
#endif

// Blocks, threads in each, and the bytes of shared memory of each.
struct Grid {
  int64_t blocks;
  int threads;
  int64_t shared = 0;
};

// Starts `kernel` on the stream and does not wait for it. An empty grid launches nothing.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Grid& grid, cudaStream_t stream,
            Arguments&&... arguments) {
  if (grid.blocks == 0) return;
  DEEPFAST_CHECK(grid.blocks < (int64_t{1} << 31),
                 "expected fewer than 2^31 blocks in a launch, got ", grid.blocks);
  // CUDA refuses more than this unless an attribute of the kernel allows it.
  constexpr int64_t kPlain = 48 << 10;
  if (grid.shared > kPlain)
    DEEPFAST_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(grid.shared)));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared);
  config.stream = stream;
  DEEPFAST_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

}  // namespace deepfast

#endif
