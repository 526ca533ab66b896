// pull_rows on tensor cores: bf16 or fp16 slots that are rows of N = T * D elements.
//
// A tile is 512 elements, 64 for each of eight warps. Its z_j and then its g_l, sixteen rows at a
// time, come through a ring (ring.h). Rows are 1 KB and 16 bytes apart, so eight rows are in
// different banks. A warp reads its (16, 64) part of a stage twice:
//
//      dW (16 l, 8 j)  +=  g   (16 l, 16 e)  z (16 e, 8 j)     over all tiles, in shared memory
//      u  (16 e, 8 j)  +=  g^T (16 e, 16 l)  W (16 l, 8 j)     until the tile ends, in registers
//
// A weight and z are each a sum of two 16-bit numbers: W g then has 16 bits of bf16 and 22 of fp16,
// more than a gradient keeps. fp16 numbers are scaled by powers of two, W by one and each source of a
// tile by its own, so no part of them overflows. Sixteen products and eight loads of tiles serve
// 1024 values. Two blocks have 64 KB in flight.
#pragma once

#include <type_traits>

#include "mma.h"
#include "pull.h"
#include "ring.h"

namespace deepfast {

constexpr int kDotRows = 16, kDotOwn = 64, kDotTile = kPullWarps * kDotOwn;
constexpr int kDotSteps = kDotOwn / 16, kDotStages = 3;

#if defined(DEEPFAST_EMULATE) || defined(__CUDACC__)

// A stage: a tile of all z, or of the next sixteen gradients.
template <class T>
struct DotCopies {
  static constexpr int kPitch = kDotTile * 2 + 16, kBytes = kDotRows * kPitch;
  const Pull<T>& op;
  int64_t elements;
  int tiles, steps;

  DEEPFAST_DEVICE explicit DotCopies(const Pull<T>& op_)
      : op(op_),
        elements(op_.from.tokens * op_.from.dim),
        tiles(static_cast<int>((elements + kDotTile - 1) / kDotTile)),
        steps((op_.partial != nullptr) + (op_.from.count + kDotRows - 1) / kDotRows) {}

  // How many elements of the tile and rows of the step exist, and the address of row r.
  DEEPFAST_DEVICE int width(int tile) const {
    const int64_t left = elements - int64_t{tile} * kDotTile;
    return left < kDotTile ? static_cast<int>(left) : kDotTile;
  }
  DEEPFAST_DEVICE bool of_states(int step) const { return op.partial != nullptr && step == 0; }
  DEEPFAST_DEVICE int first(int step) const { return (step - (op.partial != nullptr)) * kDotRows; }
  DEEPFAST_DEVICE int rows(int step) const {
    if (of_states(step)) return op.sources;
    const int left = op.from.count - first(step);
    return left < kDotRows ? left : kDotRows;
  }
  DEEPFAST_DEVICE const T* row(int tile, int step, int r) const {
    const T* p = of_states(step)
                     ? op.states + op.source[r] * op.slot_stride
                     : op.from.states + op.from.slot[first(step) + r] * op.from.slot_stride;
    return p + int64_t{tile} * kDotTile;
  }

  DEEPFAST_DEVICE void bulk(char* stage, int tile, int step, Barrier& done) const {
    const int r = threadIdx.x % kWarp, count = rows(step);
    const uint32_t bytes = static_cast<uint32_t>(width(tile)) * 2;
    if (r == 0) done.arrive_and_expect(bytes * static_cast<uint32_t>(count));
    if (r < count) copy_bulk(stage + r * kPitch, row(tile, step, r), bytes, done);
  }

  template <int kThreads>
  DEEPFAST_DEVICE void async(char* stage, int tile, int step) const {
    constexpr int kUnits = kDotTile / kChunk;  // of 16 bytes in a row
    const int count = rows(step), units = width(tile) / kChunk;
#pragma unroll
    for (int i = 0; i < kDotRows * kUnits / kThreads; ++i) {
      const int at = i * kThreads + static_cast<int>(threadIdx.x), r = at / kUnits;
      if (r < count && at % kUnits < units)
        copy_async(stage + r * kPitch + at % kUnits * 16, row(tile, step, r) + at % kUnits * kChunk,
                   true);
    }
  }
};

// Shared memory: the ring, each warp's u of a tile, W's parts in the layout of the products, (groups
// of l, 2, 2, 32) words, and each warp's dW, (groups of l, 16, 8).
template <class T>
struct DotLayout {
  using Stages = Ring<DotCopies<T>, kDotStages, kPullWarps>;
  static constexpr int kPitch = kDotOwn + 4, kPartWords = 2 * 2 * kWarp;
  static constexpr int kTurn = (Stages::kBytes + 127) / 128 * 128;
  static constexpr int kParts = kTurn + kPullWarps * kMostSources * kPitch * 4;
  static int64_t bytes(int64_t rows) {
    const int64_t groups = (rows + kDotRows - 1) / kDotRows;
    return kParts + groups * (kPartWords * 4 + kPullWarps * kDotRows * kMostSources * 4);
  }
};

// Writes W's parts. Returns the factor by which u's sums must be multiplied.
template <class T>
DEEPFAST_DEVICE float fill_parts(const Pull<T>& op, uint32_t* parts) {
  const auto weight = [&](int l, int j) {
    return l < op.from.count && j < op.sources
               ? op.weight[int64_t{op.row[l]} * op.columns + op.source[j]]
               : 0.0f;
  };
  const int groups = (op.from.count + kDotRows - 1) / kDotRows, lane = threadIdx.x % kWarp;
  Pair scale = {1.0f, 1.0f};
  if (std::is_same_v<T, f16>) {
    float most = 0.0f;
    for (int i = lane; i < groups * kDotRows * kMostSources; i += kWarp)
      most = fmaxf(most, fabsf(weight(i / kMostSources, i % kMostSources)));
    for (int step = kWarp / 2; step > 0; step /= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
    scale = scale_to(most, 14);
  }
  for (int i = threadIdx.x; i < groups * 2 * kWarp; i += kPullThreads) {
    const int l = i / kWarp * 8 + i % 4 * 2, j = i % kWarp / 4;
    Pair rest = {weight(l, j) * scale.first, weight(l + 1, j) * scale.first};
#pragma unroll
    for (int p = 0; p < 2; ++p)
      parts[((i / kWarp / 2 * 2 + p) * 2 + i / kWarp % 2) * kWarp + i % kWarp] = cut<T>(rest);
  }
  return scale.second;
}

// This warp's z in the layout of the products, in two parts; zeros where there is no element or
// source. Returns the factors of dW's sums of the lane's two sources.
template <class T>
DEEPFAST_DEVICE Pair form_states(const Pull<T>& op, const char* corner, int channel, int own,
                                 uint32_t (&z)[2][kDotSteps][2]) {
  constexpr int kPairs = kDotSteps * 2;
  struct alignas(8) Two {
    float first, second;
  };
  const int lane = threadIdx.x % kWarp, j = lane / 4;
  // Places behind the last source repeat source 0. All loads are issued before the first use.
  const int64_t row = int64_t{op.source[j]} * op.from.dim;
  Two norm_weight[kPairs], norm_bias[kPairs];
  int c = channel + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    norm_weight[i] = {1.0f, 1.0f}, norm_bias[i] = {0.0f, 0.0f};
    if (op.norm_weight != nullptr)
      norm_weight[i] = *reinterpret_cast<const Two*>(op.norm_weight + row + c);
    if (op.norm_bias != nullptr)
      norm_bias[i] = *reinterpret_cast<const Two*>(op.norm_bias + row + c);
    c += 8;
    if (c >= op.from.dim) c -= op.from.dim;
  }
  Pair rest[kPairs];
  float most = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t words[4];
    load_tiles(words, corner + lane % 8 * DotCopies<T>::kPitch + (half * 32 + lane / 8 * 8) * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int pair = half * 4 + i;
      const bool exists = j < op.sources && pair * 8 < own;
      const Pair n = unpack<T>(words[i]);
      const float first = fmaf(n.first, norm_weight[pair].first, norm_bias[pair].first);
      const float second = fmaf(n.second, norm_weight[pair].second, norm_bias[pair].second);
      rest[pair] = {exists ? first : 0.0f, exists ? second : 0.0f};
      most = fmaxf(most, fmaxf(fabsf(rest[pair].first), fabsf(rest[pair].second)));
    }
  }
  Pair scale = {1.0f, 1.0f}, back = scale;
  if (std::is_same_v<T, f16>) {
    // The four lanes of a source have its elements; sums have two sources in a lane.
    for (int step = 2; step > 0; step /= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
    scale = scale_to(most, 14);
    back = {__shfl_sync(0xffffffffu, scale.second, lane % 4 * 8),
            __shfl_sync(0xffffffffu, scale.second, lane % 4 * 8 + 4)};
  }
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    rest[pair].first *= scale.first, rest[pair].second *= scale.first;
    z[0][pair / 2][pair % 2] = cut<T>(rest[pair]);
    z[1][pair / 2][pair % 2] = cut<T>(rest[pair]);
  }
  return back;
}

// dW of sixteen rows over this warp's elements, added to the warp's own sums.
template <class T>
DEEPFAST_DEVICE void multiply_states(const char* corner, int own,
                                     const uint32_t (&z)[2][kDotSteps][2], const Pair& back,
                                     float* sums) {
  const int lane = threadIdx.x % kWarp;
  float d[2][4] = {};
#pragma unroll
  for (int s = 0; s < kDotSteps; ++s) {
    // N is a multiple of 8: eight columns exist together or not at all.
    if (s * 16 >= own) continue;
    uint32_t g[4];
    load_tiles(g, corner + lane % 16 * DotCopies<T>::kPitch + (s * 16 + lane / 16 * 8) * 2);
    if (own - s * 16 == 8) g[2] = g[3] = 0;
    mma<T>(d[0], g, z[0][s]);
    mma<T>(d[1], g, z[1][s]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    sums[(lane / 4 + i / 2 * 8) * kMostSources + lane % 4 * 2 + i % 2] +=
        (d[0][i] + d[1][i]) * (i % 2 == 0 ? back.first : back.second);
}

// u of this warp's elements: sixteen gradients times W's parts. `keep` masks rows 2t, 2t + 1, 2t +
// 8 and 2t + 9 that exist. Other rows of a stage are undefined, and an undefined value times 0 may
// be NaN.
template <class T>
DEEPFAST_DEVICE void multiply_weights(const char* corner, const uint32_t (&keep)[2],
                                      const uint32_t* parts, float (&u)[kDotSteps][4]) {
  const int lane = threadIdx.x % kWarp;
  uint32_t w[2][2];
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    w[p][0] = parts[p * 2 * kWarp + lane];
    w[p][1] = parts[(p * 2 + 1) * kWarp + lane];
  }
  // Two independent steps, so a product does not wait for the one before.
#pragma unroll
  for (int s = 0; s < kDotSteps; s += 2) {
    uint32_t g[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      load_tiles_transposed(g[h], corner + (lane / 16 * 8 + lane % 8) * DotCopies<T>::kPitch +
                                      ((s + h) * 16 + lane / 8 % 2 * 8) * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) g[h][i] &= keep[i / 2];
    }
#pragma unroll
    for (int p = 1; p >= 0; --p) {
      mma<T>(u[s], g[0], w[p]);
      mma<T>(u[s + 1], g[1], w[p]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kPullThreads, 2)
    pull_rows_dot_kernel(const __grid_constant__ Pull<T> op) {
  using At = DotLayout<T>;
  char* shared = dynamic_shared();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int groups = (op.from.count + kDotRows - 1) / kDotRows;
  uint32_t* parts = reinterpret_cast<uint32_t*>(shared + At::kParts);
  float* all_sums = reinterpret_cast<float*>(parts + groups * At::kPartWords);
  float* sums = all_sums + warp * groups * kDotRows * kMostSources;
  float* turn = reinterpret_cast<float*>(shared + At::kTurn) + warp * kMostSources * At::kPitch;
  const DotCopies<T> copies(op);
  typename At::Stages ring(copies, shared);
  ring.start();
  const float factor = fill_parts(op, parts);
  for (int i = lane; i < groups * kDotRows * kMostSources; i += kWarp) sums[i] = 0.0f;
  uint32_t last[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int l = (groups - 1) * kDotRows + i * 8 + lane % 4 * 2;
    last[i] = (l < op.from.count ? 0xffffu : 0u) | (l + 1 < op.from.count ? 0xffff0000u : 0u);
  }
  __syncthreads();
  for (int tile = blockIdx.x; tile < copies.tiles; tile += gridDim.x) {
    const int left = copies.width(tile) - warp * kDotOwn;
    const int own = left < 0 ? 0 : left < kDotOwn ? left : kDotOwn;
    const int64_t first = int64_t{tile} * kDotTile + warp * kDotOwn;
    uint32_t z[2][kDotSteps][2];
    Pair back = {1.0f, 1.0f};
    if (op.partial != nullptr) {
      back = form_states(op, ring.take() + warp * kDotOwn * 2,
                         static_cast<int>(first % op.from.dim), own, z);
      ring.give_back();
    }
    float u[kDotSteps][4] = {};
    for (int group = 0; group < groups; ++group) {
      const char* corner = ring.take() + warp * kDotOwn * 2;
      if (op.partial != nullptr)
        multiply_states<T>(corner, own, z, back, sums + group * kDotRows * kMostSources);
      const bool whole = group + 1 < groups;
      const uint32_t keep[2] = {whole ? ~0u : last[0], whole ? ~0u : last[1]};
      multiply_weights<T>(corner, keep, parts + group * At::kPartWords, u);
      ring.give_back();
    }
    // Shared memory transposes columns of j to rows, 16 bytes for a lane.
#pragma unroll
    for (int s = 0; s < kDotSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        turn[(lane % 4 * 2 + i % 2) * At::kPitch + s * 16 + i / 2 * 8 + lane / 4] =
            u[s][i] * factor;
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int j = r * 4 + lane / 8, e = lane % 8 * kChunk;
      if (j >= op.sources || e >= own) continue;
      float* out = op.out + op.out_row[j] * op.out_stride + first + e;
      float v[kChunk], before[kChunk] = {};
      widen(*reinterpret_cast<const Chunk<float>*>(turn + j * At::kPitch + e), v);
      if (op.accumulate) load_chunk(out, kChunk, true, before);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) v[i] += before[i];
      store_chunk(out, kChunk, true, v);
    }
    __syncwarp();
  }
  if (op.partial == nullptr) return;
  __syncthreads();
  for (int i = threadIdx.x; i < op.from.count * op.sources; i += kPullThreads) {
    const int l = i / op.sources, j = i % op.sources;
    float sum = 0.0f;
    for (int w = 0; w < kPullWarps; ++w)
      sum += all_sums[(w * groups * kDotRows + l) * kMostSources + j];
    op.partial[int64_t{blockIdx.x} * op.from.count * op.sources + i] = sum;
  }
}

#endif

}  // namespace deepfast
