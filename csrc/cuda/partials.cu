// Sums over the blocks of a launch: the second, short part of every gradient of a parameter.
//
//     out_i[r, n] = sum_p partial[p, i, r, n]
//
// A block takes 32 neighbouring n. Each of its 8 warps adds up every eighth p in order, and their
// sums are added up in shared memory in the order of the warps. So the bits are the same in every
// run, without atomics.
#include "op.h"

namespace deepfast {
namespace {

constexpr int kWarps = 8;

__global__ void __launch_bounds__(kWarps* kWarp)
    sum_partials_kernel(const float* partial, int64_t P, int64_t I, int64_t R, int64_t N,
                        Sums outs) {
  float* scratch = reinterpret_cast<float*>(dynamic_shared());
  const int64_t pieces = (N + kWarp - 1) / kWarp;
  const int64_t r = blockIdx.x / pieces % R, i = blockIdx.x / pieces / R;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t n = blockIdx.x % pieces * kWarp + lane;
  float sum = 0.0f;
  if (n < N) {
    const float* p = partial + (i * R + r) * N + n;
#pragma unroll 4
    for (int64_t k = warp; k < P; k += kWarps) sum += p[k * I * R * N];
  }
  scratch[threadIdx.x] = sum;
  __syncthreads();
  if (warp != 0 || n >= N) return;
  for (int w = 1; w < kWarps; ++w) sum += scratch[w * kWarp + lane];
  float* out = i == 0 ? outs.out[0] : i == 1 ? outs.out[1] : i == 2 ? outs.out[2] : outs.out[3];
  const int64_t stride = i == 0   ? outs.stride[0]
                         : i == 1 ? outs.stride[1]
                         : i == 2 ? outs.stride[2]
                                  : outs.stride[3];
  if (out != nullptr) out[r * stride + n] = sum;
}

}  // namespace

void sum_partials(const Device& device, const float* partial, int64_t P, int64_t I, int64_t R,
                  int64_t N, const Sums& outs) {
  const int64_t pieces = (N + kWarp - 1) / kWarp;
  launch(sum_partials_kernel,
         {pieces * R * I, kWarps * kWarp, kWarps * kWarp * static_cast<int64_t>(sizeof(float))},
         device.stream(), partial, P, I, R, N, outs);
}

}  // namespace deepfast
