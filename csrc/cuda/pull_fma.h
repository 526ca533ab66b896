// pull_rows by multiply-add: fp32, weights per channel, rows that are apart or not aligned.
//
// A thread holds kLines quads of channels (stream.h) of all z_j and u_j in registers, 128 values,
// while it reads the g_l. Ten shuffles sum a gradient's products with all z_j over the warp. They
// are added to the warp's own (L, J) sums in shared memory. A value and eight sources take 26
// instructions, of about 28 in the time in which an H200 reads 4 bytes.
#pragma once

#include "pull.h"

#if defined(DEEPFAST_EMULATE) || defined(__CUDACC__)

namespace deepfast {

// Shared memory: the rings of the warps, the slots' offsets, W as (L, kSources), then each warp's
// sums of W's gradient: (L, kSources), or of one row (kSources, 128) where W is per channel.
template <class T, int kSources>
struct PullLayout {
  static constexpr int kLines = 16 / kSources;
  using Ring = Lines<T, kLines, 64 / (kLines * static_cast<int>(sizeof(T)))>;
  static constexpr int kOffsets = kPullWarps * static_cast<int>(Ring::kBytes);
  static constexpr int kWeights = kOffsets + Stream<T>::kMost * 8;
  static constexpr int kSums = kWeights + Stream<T>::kMost * kSources * 4;
  static constexpr int kChannelBytes = kPullWarps * kSources * kLine * 4;
  static constexpr int kRowBytes = kPullWarps * kSources * 4;
};

// The sum over the warp of s[lane / (32 / N)]. In each step a lane gives half of its sums for half
// of another lane's, until it has one.
template <int N>
DEEPFAST_DEVICE float sum_over_lanes(float (&s)[N], int lane) {
  int step = kWarp / 2;
#pragma unroll
  for (int n = N / 2; n > 0; n /= 2, step /= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float give = upper ? s[i] : s[i + n], keep = upper ? s[i + n] : s[i];
      s[i] = keep + __shfl_xor_sync(0xffffffffu, give, step);
    }
  }
#pragma unroll
  for (; step > 0; step /= 2) s[0] += __shfl_xor_sync(0xffffffffu, s[0], step);
  return s[0];
}

// Adds a row's sums of all warps and lines, in order, to the block's own sums in memory.
template <class T, int kSources>
DEEPFAST_DEVICE void add_channel_sums(const Pull<T>& op, const float* sums, int l, bool first) {
  const Stream<T>& from = op.from;
  const int slice = kQuad << from.log2_lanes, channel = blockIdx.x % from.slices * slice;
  float* out = op.partial +
               (int64_t{blockIdx.x / from.slices} * from.count + l) * op.sources * from.dim +
               channel;
  for (int i = threadIdx.x; i < op.sources * slice; i += kPullThreads) {
    const int j = i / slice, c = i % slice;
    if (channel + c >= from.dim) continue;
    float sum = 0.0f;
    for (int w = 0; w < kPullWarps; ++w)
      for (int part = c; part < kLine; part += slice)
        sum += sums[(w * kSources + j) * kLine + part];
    float* to = out + int64_t{j} * from.dim + c;
    *to = first ? sum : *to + sum;
  }
}

// z of a tile. Places behind the last source repeat slot 0. All loads are issued before the first
// value is used.
template <class T, int kSources, bool kGeneral, int kLines>
DEEPFAST_DEVICE void load_states(const Pull<T>& op, const Place& at, int64_t tile,
                                 float (&z)[kSources][kLines][kQuad]) {
#pragma unroll
  for (int j = 0; j < kSources; ++j) {
    const T* state = op.states + op.source[j] * op.slot_stride + at.channel;
#pragma unroll
    for (int v = 0; v < kLines; ++v)
      load_quad(state + at.token(tile, v) * op.row_stride, at.count_of(op.from, tile, v),
                !kGeneral || op.states_aligned, z[j][v]);
  }
#pragma unroll
  for (int j = 0; j < kSources; ++j) {
    float norm_weight[kQuad] = {1.0f, 1.0f, 1.0f, 1.0f}, norm_bias[kQuad] = {};
    const int64_t row = int64_t{op.source[j]} * op.from.dim + at.channel;
    const bool aligned = !kGeneral || op.channels_aligned;
    if (op.norm_weight != nullptr) load_quad(op.norm_weight + row, at.count, aligned, norm_weight);
    if (op.norm_bias != nullptr) load_quad(op.norm_bias + row, at.count, aligned, norm_bias);
#pragma unroll
    for (int v = 0; v < kLines; ++v) {
      const int count = at.count_of(op.from, tile, v);
#pragma unroll
      for (int i = 0; i < kQuad; ++i)
        z[j][v][i] = i < count ? fmaf(z[j][v][i], norm_weight[i], norm_bias[i]) : 0.0f;
    }
  }
}

// kGeneral: a weight per channel, or rows that are not aligned to 16 bytes.
template <class T, int kSources, bool kGeneral>
__global__ void __launch_bounds__(kPullThreads, 1)
    pull_rows_kernel(const __grid_constant__ Pull<T> op) {
  using At = PullLayout<T, kSources>;
  constexpr int kLines = At::kLines;
  const Stream<T>& from = op.from;
  char* shared = dynamic_shared();
  int64_t* offsets = reinterpret_cast<int64_t*>(shared + At::kOffsets);
  float* weights = reinterpret_cast<float*>(shared + At::kWeights);  // (L, kSources)
  float* sums = reinterpret_cast<float*>(shared + At::kSums);
  const Place at(from, kLines);
  const int warp = threadIdx.x / kWarp;
  const bool per_channel = kGeneral && op.per_channel, ring = !kGeneral || from.aligned;
  fill_offsets(offsets, from);
  __syncthreads();
  typename At::Ring lines(from, at, offsets, shared);
  for (int i = threadIdx.x; i < from.count * kSources; i += kPullThreads) {
    const int j = i % kSources;
    weights[i] = j < op.sources && !per_channel
                     ? op.weight[int64_t{op.row[i / kSources]} * op.columns + op.source[j]]
                     : 0.0f;
  }
  if (!per_channel)
    for (int i = threadIdx.x; i < kPullWarps * from.count * kSources; i += kPullThreads)
      sums[i] = 0.0f;
  __syncthreads();
  float* own_sums = sums + warp * from.count * kSources + at.lane / (kWarp / kSources);
  Quad<T> part[kLines];
  const auto take = [&](int l, int64_t tile) {
    if (ring) {
      lines.take(part);
    } else {
#pragma unroll
      for (int v = 0; v < kLines; ++v)
        part[v] = load_quad(
            bytes_on(from.states, offsets[l]) + at.channel + at.token(tile, v) * from.row_stride,
            at.count_of(from, tile, v), false);
    }
  };
  for (int64_t tile = at.first; tile < from.tokens; tile += at.step) {
    float z[kSources][kLines][kQuad] = {}, u[kSources][kLines][kQuad] = {};
    if (op.partial != nullptr) load_states<T, kSources, kGeneral>(op, at, tile, z);
    if (op.accumulate) load_sums(op, op.sources, at, tile, !kGeneral || op.out_aligned, u);
    for (int l = 0; l < from.count; ++l) {
      float g[kLines][kQuad], w[kSources][kQuad];
      take(l, tile);
#pragma unroll
      for (int v = 0; v < kLines; ++v) widen(part[v], g[v]);
#pragma unroll
      for (int j = 0; j < kSources; ++j) {
        if (per_channel)
          load_quad(
              op.weight + at.channel + (int64_t{op.row[l]} * op.columns + op.source[j]) * from.dim,
              j < op.sources ? at.count : 0, op.channels_aligned, w[j]);
        else
          w[j][0] = w[j][1] = w[j][2] = w[j][3] = weights[l * kSources + j];
#pragma unroll
        for (int v = 0; v < kLines; ++v) {
#pragma unroll
          for (int i = 0; i < kQuad; ++i) u[j][v][i] = fmaf(w[j][i], g[v][i], u[j][v][i]);
        }
      }
      if (op.partial == nullptr) continue;
      if (per_channel) {
        float* own = sums + (warp * kSources * kWarp + at.lane) * kQuad;
#pragma unroll
        for (int j = 0; j < kSources; ++j) {
#pragma unroll
          for (int i = 0; i < kQuad; ++i) {
            float s = 0.0f;
#pragma unroll
            for (int v = 0; v < kLines; ++v) s = fmaf(g[v][i], z[j][v][i], s);
            own[j * kLine + i] = s;
          }
        }
        __syncthreads();
        add_channel_sums<T, kSources>(op, sums, l, tile == at.first);
        __syncthreads();
      } else {
        float s[kSources];
#pragma unroll
        for (int j = 0; j < kSources; ++j) {
          s[j] = 0.0f;
#pragma unroll
          for (int v = 0; v < kLines; ++v) {
#pragma unroll
            for (int i = 0; i < kQuad; ++i) s[j] = fmaf(g[v][i], z[j][v][i], s[j]);
          }
        }
        const float sum = sum_over_lanes(s, at.lane);
        if (at.lane % (kWarp / kSources) == 0) own_sums[l * kSources] += sum;
      }
    }
    store_sums(op, op.sources, at, tile, !kGeneral || op.out_aligned, u);
  }
  if (op.partial == nullptr || per_channel) return;
  __syncthreads();
  for (int i = threadIdx.x; i < from.count * op.sources; i += kPullThreads) {
    const int l = i / op.sources, j = i % op.sources;
    float sum = 0.0f;
    for (int w = 0; w < kPullWarps; ++w) sum += sums[(w * from.count + l) * kSources + j];
    op.partial[int64_t{blockIdx.x} * from.count * op.sources + i] = sum;
  }
}

}  // namespace deepfast

#endif
