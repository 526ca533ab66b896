// mix_rows on tensor cores: bf16 or fp16 states in aligned rows, one weight for each state.
//
// A tile is 128 channels of four tokens, 16 of these channels for each of eight warps. The states
// come through a ring (ring.h), sixteen at a time:
//
//      out (16 e, 8 b)  +=  z^T (16 e, 16 k)  W (16 k, 8 b)      for one or two sets of eight rows
//
// A product takes 16-bit numbers, so W and norm_weight are each a sum of two, and so is z = n *
// norm_weight: its first part is n times norm_weight's first, rounded; what that rounding lost has
// at most the bits of one more number. Of the four products of parts the smallest is left out.
// W z then has 16 bits of bf16 and 22 of fp16: more than a row keeps. fp16 numbers are scaled by
// powers of two, so that no product of parts overflows. The norm biases add the same to all tokens:
// sum_k W[b, k] norm_bias_k, in fp32, once for a block.
#pragma once

#include <type_traits>

#include "mma.h"
#include "ring.h"
#include "stream.h"

namespace deepfast {

constexpr int kDotRows = 16, kDotTokens = 4, kDotStages = 3;

#if defined(DEEPFAST_EMULATE) || defined(__CUDACC__)

// A stage: the block's slice of the channels of a tile's tokens, in the next sixteen states.
template <class T>
struct MixCopies {
  static constexpr int kRow = kLine * 2, kPitch = kDotTokens * kRow + 16;
  static constexpr int kBytes = kDotRows * kPitch;
  const Stream<T>& from;
  int tiles, steps, channel, bytes;

  DEEPFAST_DEVICE explicit MixCopies(const Stream<T>& from_)
      : from(from_),
        tiles(static_cast<int>((from.tokens + kDotTokens - 1) / kDotTokens) * from.slices),
        steps((from.count + kDotRows - 1) / kDotRows),
        channel(static_cast<int>(blockIdx.x) % from.slices * kLine),
        bytes((from.dim - channel < kLine ? from.dim - channel : kLine) * 2) {}

  DEEPFAST_DEVICE int64_t token(int tile) const { return int64_t{tile / from.slices} * kDotTokens; }
  DEEPFAST_DEVICE int tokens(int tile) const {
    const int64_t left = from.tokens - token(tile);
    return left < kDotTokens ? static_cast<int>(left) : kDotTokens;
  }
  DEEPFAST_DEVICE int states(int step) const {
    const int left = from.count - step * kDotRows;
    return left < kDotRows ? left : kDotRows;
  }
  DEEPFAST_DEVICE const T* row(int tile, int step, int k, int v) const {
    return from.states + from.slot[step * kDotRows + k] * from.slot_stride +
           (token(tile) + v) * from.row_stride + channel;
  }

  DEEPFAST_DEVICE void bulk(char* stage, int tile, int step, Barrier& done) const {
    const int lane = threadIdx.x % kWarp, v = lane % kDotTokens, count = tokens(tile);
    if (lane == 0)
      done.arrive_and_expect(static_cast<uint32_t>(bytes) *
                             static_cast<uint32_t>(count * states(step)));
    __syncwarp();
    for (int k = lane / kDotTokens; k < states(step); k += kWarp / kDotTokens)
      if (v < count)
        copy_bulk(stage + k * kPitch + v * kRow, row(tile, step, k, v),
                  static_cast<uint32_t>(bytes), done);
  }

  template <int kThreads>
  DEEPFAST_DEVICE void async(char* stage, int tile, int step) const {
    constexpr int kUnits = kRow / 16;
#pragma unroll
    for (int i = 0; i < kDotRows * kDotTokens * kUnits / kThreads; ++i) {
      const int at = i * kThreads + static_cast<int>(threadIdx.x), unit = at % kUnits;
      const int v = at / kUnits % kDotTokens, k = at / kUnits / kDotTokens;
      if (k < states(step) && v < tokens(tile) && unit * 16 < bytes)
        copy_async(stage + k * kPitch + v * kRow + unit * 16, row(tile, step, k, v) + unit * kChunk,
                   true);
    }
  }
};

// Shared memory: the ring, each warp's results of a token, the sums of the biases (kRows, 128), and
// in the layout of the products the parts of W, (groups, 2, kRows / 8, 2, 32) words, and of the
// norm weights, (groups, 8 warps, 2, 32) of four words.
template <class T, int kRows>
struct MixLayout {
  using Stages = Ring<MixCopies<T>, kDotStages, 8>;
  static constexpr int kPitch = 16 + 4, kOctets = kRows / 8;
  static constexpr int kTurn = (Stages::kBytes + 127) / 128 * 128;
  static constexpr int kBias = kTurn + 8 * kRows * kPitch * 4;
  static constexpr int kScale = kBias + kRows * kLine * 4;
  static constexpr int kWeights = kScale + 128;
  static constexpr int kGroup = (2 * kOctets * 2 * kWarp + 8 * 2 * kWarp * 4) * 4;
  static int64_t bytes(int64_t states) {
    return kWeights + (states + kDotRows - 1) / kDotRows * kGroup;
  }
};

// The largest magnitude that the block's threads give, for all of them.
DEEPFAST_DEVICE float block_most(float most, float* scratch) {
  for (int step = kWarp / 2; step > 0; step /= 2)
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
  __syncthreads();
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = most;
  __syncthreads();
  for (int w = 0; w < 8; ++w) most = fmaxf(most, scratch[w]);
  return most;
}

// Writes W's parts, the norm weights' parts and the biases' sums. Returns the factor of the sums.
template <class T, int kRows, bool kAffine, class Op>
DEEPFAST_DEVICE float fill_mix(const Op& op, int channel, char* shared) {
  using At = MixLayout<T, kRows>;
  const Stream<T>& from = op.from;
  constexpr int kThreads = 8 * kWarp;
  const int groups = (from.count + kDotRows - 1) / kDotRows;
  auto* bias = reinterpret_cast<float*>(shared + At::kBias);
  auto* weights = reinterpret_cast<uint32_t*>(shared + At::kWeights);
  auto* norms = reinterpret_cast<Words*>(weights + groups * 2 * At::kOctets * 2 * kWarp);
  const auto weight = [&](int k, int b) {
    return k < from.count && b < op.rows ? op.weight[int64_t{op.row[b]} * op.columns + from.slot[k]]
                                         : 0.0f;
  };
  const auto norm = [&](const float* values, int k, int c) {
    return k < from.count && channel + c < from.dim
               ? values[int64_t{from.slot[k]} * from.dim + channel + c]
               : 0.0f;
  };
  Pair w_scale = {1.0f, 1.0f}, norm_scale = {1.0f, 1.0f};
  if (std::is_same_v<T, f16>) {
    auto* scratch = reinterpret_cast<float*>(shared + At::kScale);
    float most = 0.0f;
    for (int i = threadIdx.x; i < from.count * kRows; i += kThreads)
      most = fmaxf(most, fabsf(weight(i / kRows, i % kRows)));
    w_scale = scale_to(block_most(most, scratch), 14);
    most = 0.0f;
    for (int i = threadIdx.x; kAffine && i < from.count * kLine; i += kThreads)
      most = fmaxf(most, fabsf(norm(op.norm_weight, i / kLine, i % kLine)));
    if (kAffine) norm_scale = scale_to(block_most(most, scratch), -1);
  }
  for (int i = threadIdx.x; i < groups * At::kOctets * 2 * kWarp; i += kThreads) {
    const int lane = i % kWarp, half = i / kWarp % 2, octet = i / kWarp / 2 % At::kOctets;
    const int group = i / kWarp / 2 / At::kOctets, b = octet * 8 + lane / 4;
    const int k = group * kDotRows + half * 8 + lane % 4 * 2;
    Pair rest = {weight(k, b) * w_scale.first, weight(k + 1, b) * w_scale.first};
#pragma unroll
    for (int p = 0; p < 2; ++p)
      weights[(((group * 2 + p) * At::kOctets + octet) * 2 + half) * kWarp + lane] = cut<T>(rest);
  }
  for (int i = threadIdx.x; kAffine && i < groups * 8 * kWarp; i += kThreads) {
    const int lane = i % kWarp, warp = i / kWarp % 8, group = i / kWarp / 8;
    Words parts[2];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int k = group * kDotRows + j / 2 * 8 + lane % 4 * 2;
      const int c = warp * 16 + j % 2 * 8 + lane / 4;
      Pair rest = {norm(op.norm_weight, k, c) * norm_scale.first,
                   norm(op.norm_weight, k + 1, c) * norm_scale.first};
      parts[0].w[j] = cut<T>(rest), parts[1].w[j] = cut<T>(rest);
    }
    for (int p = 0; p < 2; ++p) norms[((group * 8 + warp) * 2 + p) * kWarp + lane] = parts[p];
  }
  const int c = threadIdx.x % kLine;
  for (int b = threadIdx.x / kLine; b < kRows; b += kThreads / kLine) {
    float sum = 0.0f;
#pragma unroll 4
    for (int k = 0; k < from.count && op.norm_bias != nullptr; ++k)
      sum = fmaf(weight(k, b), norm(op.norm_bias, k, c), sum);
    bias[b * kLine + c] = sum;
  }
  return w_scale.second * norm_scale.second;
}

// Adds sixteen states to the sums of the tile's tokens. `keep` masks states 2t, 2t + 1, 2t + 8 and
// 2t + 9 that exist: others are undefined, and an undefined value times 0 may be NaN.
template <class T, int kRows, bool kAffine>
DEEPFAST_DEVICE void multiply_group(const char* corner, const uint32_t (&keep)[2],
                                    const uint32_t* weights, const Words* norms,
                                    float (&sum)[kDotTokens][kRows / 8][4]) {
  constexpr int kOctets = kRows / 8;
  const int lane = threadIdx.x % kWarp;
  uint32_t w[2][kOctets][2];
#pragma unroll
  for (int i = 0; i < 4 * kOctets; ++i)
    w[i / 2 / kOctets][i / 2 % kOctets][i % 2] = weights[i * kWarp + lane];
  Words norm[2] = {};
  if (kAffine) norm[0] = norms[lane], norm[1] = norms[kWarp + lane];
#pragma unroll
  for (int v = 0; v < kDotTokens; ++v) {
    uint32_t n[4];
    load_tiles_transposed(n, corner + (lane / 16 * 8 + lane % 8) * MixCopies<T>::kPitch +
                                 v * MixCopies<T>::kRow + lane / 8 % 2 * 16);
    uint32_t first[4], second[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      n[i] &= keep[i / 2];
      // -0 as a third operand: a product with its own sign.
      first[i] = kAffine ? fma_pair<T>(n[i], norm[0].w[i], 0x80008000u) : n[i];
      if (kAffine)
        second[i] = fma_pair<T>(n[i], norm[1].w[i],
                                fma_pair<T>(n[i], norm[0].w[i], first[i] ^ 0x80008000u));
    }
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      mma<T>(sum[v][o], first, w[1][o]);
      if (kAffine) mma<T>(sum[v][o], second, w[0][o]);
      mma<T>(sum[v][o], first, w[0][o]);
    }
  }
}

// Writes the tile's sums; shared memory transposes columns of b to rows, 16 bytes for a lane.
template <class T, int kRows, class Op>
DEEPFAST_DEVICE void store_tile(const Op& op, int64_t token, int channel, float factor,
                                const float* bias, float* turn,
                                const float (&sum)[kDotTokens][kRows / 8][4]) {
  constexpr int kPitch = MixLayout<T, kRows>::kPitch;
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int v = 0; v < kDotTokens; ++v) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i)
      turn[(i / 4 * 8 + lane % 4 * 2 + i % 2) * kPitch + i % 4 / 2 * 8 + lane / 4] =
          sum[v][i / 4][i % 4] * factor;
    __syncwarp();
    const int b = lane / 2, e = lane % 2 * kChunk;
    if (b >= op.rows || token + v >= op.from.tokens) continue;
    float* out =
        op.out + op.out_row[b] * op.out_stride + (token + v) * op.out_row_stride + channel + e;
    const int count = op.from.dim - channel - e;
    float x[kChunk], before[kChunk] = {};
    widen(*reinterpret_cast<const Chunk<float>*>(turn + b * kPitch + e), x);
    if (op.accumulate) load_chunk(out, count, true, before);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] += bias[b * kLine + e + i] + before[i];
    store_chunk(out, count, true, x);
  }
}

template <class T, int kRows, bool kAffine, class Op>
DEEPFAST_DEVICE void mix_dot(const Op& op) {
  using At = MixLayout<T, kRows>;
  char* shared = dynamic_shared();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const MixCopies<T> copies(op.from);
  typename At::Stages ring(copies, shared);
  ring.start();
  const float factor = fill_mix<T, kRows, kAffine>(op, copies.channel, shared);
  const auto* weights = reinterpret_cast<const uint32_t*>(shared + At::kWeights);
  constexpr int kWeightGroup = 2 * At::kOctets * 2 * kWarp, kNormGroup = 8 * 2 * kWarp;
  const auto* norms =
      reinterpret_cast<const Words*>(weights + copies.steps * kWeightGroup) + warp * 2 * kWarp;
  const auto* bias = reinterpret_cast<const float*>(shared + At::kBias) + warp * 16;
  float* turn = reinterpret_cast<float*>(shared + At::kTurn) + warp * kRows * At::kPitch;
  uint32_t last[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int k = (copies.steps - 1) * kDotRows + i * 8 + lane % 4 * 2;
    last[i] = (k < op.from.count ? 0xffffu : 0u) | (k + 1 < op.from.count ? 0xffff0000u : 0u);
  }
  __syncthreads();
  const int channel = copies.channel + warp * 16;
  for (int tile = blockIdx.x; tile < copies.tiles; tile += gridDim.x) {
    float sum[kDotTokens][kRows / 8][4] = {};
    for (int group = 0; group < copies.steps; ++group) {
      const char* corner = ring.take() + warp * 16 * sizeof(T);
      const bool whole = group + 1 < copies.steps;
      const uint32_t keep[2] = {whole ? ~0u : last[0], whole ? ~0u : last[1]};
      multiply_group<T, kRows, kAffine>(corner, keep, weights + group * kWeightGroup,
                                        norms + group * kNormGroup, sum);
      ring.give_back();
    }
    if (channel < op.from.dim)
      store_tile<T, kRows>(op, copies.token(tile), channel, factor, bias, turn, sum);
  }
}

#endif

}  // namespace deepfast
