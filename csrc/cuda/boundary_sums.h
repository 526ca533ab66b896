// The arguments of a boundary's backward, and its sums over tokens: the dot products of per-channel
// weights and the totals over blocks.
#pragma once

#include "boundary.h"

namespace deepfast {
namespace {

// Sums of channels: for the state's norm_weight and norm_bias, and for out_norm_weight and
// out_norm_bias.
constexpr int kSums = 4;

template <class T>
struct Backward {
  Mix<T> mix;  // parameters: out_norm_weight, the state's norm_weight, its norm_bias
  const T *dx, *dout, *grads;
  const float *partial, *pulled;
  T *grad, *dbranch, *dresidual;
  const float *source_rstd, *out_mean, *out_rstd;  // no mean with rms
  const float* weight;                             // all of W
  float* sums;  // (blocks, width): channel sums, then the pulls' dot products; or null
  int64_t partial_stride, dx_stride, dout_stride, pulled_stride, grads_stride, grad_stride;
  int64_t dbranch_stride, dresidual_stride, width;
  int64_t tokens, columns, k;
  int blocks, pulls;
  // A truth value. As a bool it takes boundary_bwd_kernel 48 instructions more for a token.
  int source_rms;
  bool norm_source, pulls_own, channel_sums, state_sums, out_sums, dots;
  DropoutMask dropout;
  // With pulls_own, the first is the row itself.
  int32_t rows[kMost], slots[kMost];
};

// A thread's sums over tokens, (kSums, kChunks, kChunk): in registers, or in shared memory where
// a thread has too few.
template <bool kRegisters, int kChunks>
class ChannelSums {
 public:
  static constexpr int64_t kThreadBytes = 0;
  DEEPFAST_DEVICE explicit ChannelSums(char*) {}
  // Adds d * n and d to sums `first` and `first` + 1.
  DEEPFAST_DEVICE void add(int first, const float (&d)[kChunks][kChunk],
                           const float (&n)[kChunks][kChunk]) {
    DEEPFAST_EACH(c, i) {
      sum_[first][c][i] += d[c][i] * n[c][i];
      sum_[first + 1][c][i] += d[c][i];
    }
  }
  DEEPFAST_DEVICE void store(const Lane& at, char* scratch, float* out) const {
    store_channel_sums(sum_, at, reinterpret_cast<float*>(scratch), out);
  }

 private:
  float sum_[kSums][kChunks][kChunk] = {};
};

template <int kChunks>
class ChannelSums<false, kChunks> {
 public:
  static constexpr int64_t kThreadBytes = (kSums * kChunks * kChunk + 4) * sizeof(float);
  DEEPFAST_DEVICE explicit ChannelSums(char* shared) : sums_(shared, kSums, threadIdx.x) {
    const float zero[kChunk] = {};
    for (int s = 0; s < kSums; ++s)
      for (int c = 0; c < kChunks; ++c) sums_.put(s, c, zero);
  }
  DEEPFAST_DEVICE void add(int first, const float (&d)[kChunks][kChunk],
                           const float (&n)[kChunks][kChunk]) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float sum[kChunk];
      sums_.get(first, c, sum);
      for (int i = 0; i < kChunk; ++i) sum[i] += d[c][i] * n[c][i];
      sums_.put(first, c, sum);
      sums_.get(first + 1, c, sum);
      for (int i = 0; i < kChunk; ++i) sum[i] += d[c][i];
      sums_.put(first + 1, c, sum);
    }
  }
  // `scratch` may be the memory of the sums.
  DEEPFAST_DEVICE void store(const Lane& at, char* scratch, float* out) const {
    float sum[kSums][kChunks][kChunk];
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) sums_.get(s, c, sum[s][c]);
    }
    store_channel_sums(sum, at, reinterpret_cast<float*>(scratch), out);
  }

 private:
  Table<kChunks> sums_;
};

// Dot products of per-channel weights, from the gradients as they are stored: too many for
// boundary_bwd_kernel. Blocks b, b + op.blocks, ... share the rows of that kernel's block b; each
// has one group of pulls.
constexpr int kPulls = 2;

template <class T, int kChunks>
__global__ void __launch_bounds__(kMostThreads<kChunks>, 1)
    boundary_dots_kernel(const __grid_constant__ Backward<T> op) {
  const Mix<T>& mix = op.mix;
  const Lane at(mix.dim, mix.lanes, mix.aligned);
  const int block = blockIdx.x % op.blocks, pull = blockIdx.x / op.blocks * kPulls;
  float sums[kPulls][kChunks][kChunk] = {};
  const int64_t step = int64_t{op.blocks} * at.rows_per_block();
  for (int64_t t = int64_t{block} * at.rows_per_block() + at.row_in_block(); t < op.tokens;
       t += step) {
    RowChunks<T, kChunks> grads[kPulls];
    const auto own =
        load_row<kChunks>(mix.states + mix.k * mix.slot_stride + t * mix.row_stride, at);
#pragma unroll
    for (int j = 0; j < kPulls; ++j) {
      const bool there = pull + j < op.pulls;
      const T* grad = op.grads + op.slots[there ? pull + j : 0] * op.grads_stride;
      grads[j] = load_row<kChunks>(grad + t * op.grad_stride, at, there);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float z[kChunk], p[kChunk];
      widen(own.chunk[c], z);
      if (mix.parameters[1] != nullptr) {
        load_chunk(mix.parameters[1] + at.channel(c), at.count(c), at.aligned, p);
        for (int i = 0; i < kChunk; ++i) z[i] *= p[i];
      }
      if (mix.parameters[2] != nullptr) {
        load_chunk(mix.parameters[2] + at.channel(c), at.count(c), at.aligned, p);
        for (int i = 0; i < kChunk; ++i) z[i] += p[i];
      }
#pragma unroll
      for (int j = 0; j < kPulls; ++j) {
        widen(grads[j].chunk[c], p);
        for (int i = 0; i < kChunk; ++i) sums[j][c][i] += p[i] * z[i];
      }
    }
  }
  store_channel_sums(
      sums, at, reinterpret_cast<float*>(dynamic_shared()),
      op.sums + block * op.width + (op.channel_sums * kSums + pull) * int64_t{mix.dim});
}

// The sums over the blocks of a backward launch, all in one launch: of channels into four rows, of
// dot products into the gradient of W.
struct Totals {
  const float* partial;  // (blocks, width)
  int64_t blocks, width, columns, k, piece;
  int channel_sums, dim, pulls;  // channel_sums: 0 or kSums of them in front
  float* out[kSums];
  float* dweight;
  int32_t rows[kMost];

  bool state_sums() const { return out[0] != nullptr || out[1] != nullptr; }
  bool out_sums() const { return out[2] != nullptr || out[3] != nullptr; }
};

constexpr int kTotalWarps = 8;

// A block takes 32 neighbouring sums. Each of its warps adds up every eighth block in order, and the
// warps' sums are added up in shared memory in the order of the warps. So the bits are the same in
// every run, without atomics.
__global__ void __launch_bounds__(kTotalWarps* kWarp)
    boundary_totals_kernel(const __grid_constant__ Totals op) {
  float* scratch = reinterpret_cast<float*>(dynamic_shared());
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t n = int64_t{blockIdx.x} * kWarp + lane, dots = n - op.channel_sums * op.dim;
  float* out = nullptr;
  if (dots < 0) {
    out = op.out[n / op.dim];
    if (out != nullptr) out += n % op.dim;
  } else if (dots < op.pulls * op.piece) {
    out = op.dweight + (op.rows[dots / op.piece] * op.columns + op.k) * op.piece + dots % op.piece;
  }
  float sum = 0.0f;
  if (out != nullptr) {
#pragma unroll 4
    for (int64_t p = warp; p < op.blocks; p += kTotalWarps) sum += op.partial[p * op.width + n];
  }
  scratch[threadIdx.x] = sum;
  __syncthreads();
  if (warp != 0 || out == nullptr) return;
  for (int w = 1; w < kTotalWarps; ++w) sum += scratch[w * kWarp + lane];
  *out = sum;
}

}  // namespace
}  // namespace deepfast
