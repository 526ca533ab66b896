// The far pass of forward: several rows of depth weights times many states at once.
//
//     out_b (+)= sum_k W[row_b, k] z_k,  z_k = state_k * norm_weight_k + norm_bias_k
//
// Wang et al.: Learning Deep Transformer Models for Machine Translation, 2019, Eq. 8.
//
// A product of a small matrix (B, K) and a tall one (K, T D). Reading the states once bounds its
// time. 16-bit states in aligned rows are multiplied on tensor cores, for up to 16 rows in one pass:
// mix_dot.h. Here are the others. A block has a tile of tokens and channels (stream.h); the sums of
// all B rows stay in its registers while it reads the K states. What a thread reads of W and the
// norm serves 16 values. 7 stages in flight are 56 KB.
//
//      blockIdx    slice of 128 channels     tiles of 32 tokens; the blocks of a slice take turns
//         0        channels   0 - 127        0, 2, 4, ...
//         1        channels 128 - 255        0, 2, 4, ...        (D = 256, four blocks)
//         2        channels   0 - 127        1, 3, 5, ...
//         3        channels 128 - 255        1, 3, 5, ...
//
// (K + B) T D values of memory for each sixteen rows; for each eight in fp32, and for each four where
// rows are not aligned or have a weight per channel. More than 128 states take several launches;
// fewer do where a block has less shared memory (94 fp32 states on sm_80 with a norm).
#include "mix_dot.h"
#include "stream.h"

namespace deepfast {
namespace {

// One block per multiprocessor: a thread may have 255 registers, of which 128 are sums.
constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kMostRows = 16, kLines = 4;

template <class T>
struct Mix {
  Stream<T> from;
  const float *norm_weight, *norm_bias;  // (columns, dim), or null
  const float* weight;                   // (., columns) or (., columns, dim)
  float* out;
  int64_t out_stride, out_row_stride;
  int columns, rows;
  bool affine, per_channel, out_aligned, channels_aligned, accumulate;
  int32_t row[kMostRows], out_row[kMostRows];
};

template <class T>
using MixLines = Lines<T, kLines, 64 / (kLines * static_cast<int>(sizeof(T)))>;

// A thread's part of a step, as stored.
template <class T>
struct Part {
  Quad<T> n[kLines];
  Quad<float> norm_weight, norm_bias;
};

// Shared memory: the rings of the warps, the slots' offsets, W as (count, kRows), then the norm
// weights and biases of the block's slice, (count, 2, 128). Without a norm these are ones and
// zeros, (2, 128), for all slots.
template <class T, int kRows>
struct Layout {
  static constexpr int kOffsets = kWarps * MixLines<T>::kBytes;
  static constexpr int kWeights = kOffsets + Stream<T>::kMost * 8;
  static constexpr int kAffine = kWeights + Stream<T>::kMost * kRows * 4;
  static constexpr int kAffineBytes = 2 * kLine * 4;
};

template <class T, int kRows>
DEEPFAST_DEVICE void fill_parameters(const Mix<T>& op, float* weights, Quad<float>* affine) {
  const Stream<T>& from = op.from;
  for (int i = threadIdx.x; i < from.count * kRows; i += kThreads) {
    const int b = i % kRows, k = from.slot[i / kRows];
    weights[i] =
        b < op.rows && !op.per_channel ? op.weight[int64_t{op.row[b]} * op.columns + k] : 0.0f;
  }
  const int lanes = 1 << from.log2_lanes, rows = op.affine ? from.count : 1;
#pragma unroll 4
  for (int i = threadIdx.x; i < rows * 2 * kWarp; i += kThreads) {
    const bool norm_bias = i / kWarp % 2 == 1;
    const float* values = norm_bias ? op.norm_bias : op.norm_weight;
    const int channel = (blockIdx.x % from.slices * lanes + i % kWarp) * kQuad;
    const float rest = norm_bias ? 0.0f : 1.0f, constant[kQuad] = {rest, rest, rest, rest};
    affine[i] = values == nullptr
                    ? narrow_quad<float>(constant)
                    : load_quad(values + int64_t{from.slot[i / (2 * kWarp)]} * from.dim + channel,
                                i % kWarp < lanes ? from.dim - channel : 0, op.channels_aligned);
  }
}

// kGeneral: a weight per channel, or rows that are not aligned to 16 bytes.
template <class T, int kRows, bool kGeneral>
__global__ void __launch_bounds__(kThreads, 1) mix_rows_kernel(const __grid_constant__ Mix<T> op) {
  using At = Layout<T, kRows>;
  const Stream<T>& from = op.from;
  char* shared = dynamic_shared();
  int64_t* offsets = reinterpret_cast<int64_t*>(shared + At::kOffsets);
  float* weights = reinterpret_cast<float*>(shared + At::kWeights);
  const Place at(from, kLines);
  fill_offsets(offsets, from);
  __syncthreads();
  MixLines<T> lines(from, at, offsets, shared);
  fill_parameters<T, kRows>(op, weights, reinterpret_cast<Quad<float>*>(shared + At::kAffine));
  __syncthreads();
  const char* affine =
      shared + At::kAffine + (at.lane & ((1 << from.log2_lanes) - 1)) * sizeof(Quad<float>);
  const int affine_step = op.affine ? At::kAffineBytes : 0;
  const bool ring = !kGeneral || from.aligned;
  Part<T> part;
  const auto take = [&](int k, int64_t tile) {
    if (ring) {
      lines.take(part.n);
    } else {
#pragma unroll
      for (int v = 0; v < kLines; ++v)
        part.n[v] = load_quad(
            bytes_on(from.states, offsets[k]) + at.channel + at.token(tile, v) * from.row_stride,
            at.count_of(from, tile, v), false);
    }
    const auto* parameters = reinterpret_cast<const Quad<float>*>(affine + k * affine_step);
    part.norm_weight = parameters[0], part.norm_bias = parameters[kWarp];
  };
  if (from.count > 0) take(0, at.first);
  for (int64_t tile = at.first; tile < from.tokens; tile += at.step) {
    float sum[kRows][kLines][kQuad] = {};
    if (op.accumulate) load_sums(op, op.rows, at, tile, !kGeneral || op.out_aligned, sum);
    for (int k = 0; k < from.count; ++k) {
      float z[kLines][kQuad], norm_weight[kQuad], norm_bias[kQuad], w[kRows / kQuad][kQuad];
#pragma unroll
      for (int b = 0; b < kRows / kQuad; ++b)
        widen(reinterpret_cast<const Quad<float>*>(weights)[k * kRows / kQuad + b], w[b]);
      widen(part.norm_weight, norm_weight), widen(part.norm_bias, norm_bias);
#pragma unroll
      for (int v = 0; v < kLines; ++v) {
        widen(part.n[v], z[v]);
#pragma unroll
        for (int i = 0; i < kQuad; ++i) z[v][i] = fmaf(z[v][i], norm_weight[i], norm_bias[i]);
      }
      // The next step is loaded into registers during the products.
      const int next = k + 1 < from.count ? k + 1 : 0;
      take(next, next > 0 ? tile : tile + at.step);
#pragma unroll
      for (int b = 0; b < kRows; ++b) {
        float own[kQuad];
        if (kGeneral && op.per_channel)
          load_quad(
              op.weight + at.channel + (int64_t{op.row[b]} * op.columns + from.slot[k]) * from.dim,
              b < op.rows ? at.count : 0, op.channels_aligned, own);
#pragma unroll
        for (int v = 0; v < kLines; ++v) {
#pragma unroll
          for (int i = 0; i < kQuad; ++i)
            sum[b][v][i] = fmaf(kGeneral && op.per_channel ? own[i] : w[b / kQuad][b % kQuad],
                                z[v][i], sum[b][v][i]);
        }
      }
    }
    store_sums(op, op.rows, at, tile, !kGeneral || op.out_aligned, sum);
  }
}

template <class T, int kRows, bool kAffine>
__global__ void __launch_bounds__(kThreads, 1)
    mix_rows_dot_kernel(const __grid_constant__ Mix<T> op) {
  mix_dot<T, kRows, kAffine>(op);
}

// Launches for at most `most` states each, with bytes(states) of shared memory. `two`: whether a
// multiprocessor has the registers for two blocks.
template <class T, class Bytes>
void launch_mix(void (*kernel)(Mix<T>), const Device& device, Mix<T>& op, const Indices& sources,
                bool accumulate, size_t most, const Bytes& bytes, bool two = false) {
  size_t k = 0;
  do {
    op.accumulate = accumulate || k > 0;
    op.from.count = static_cast<int>(std::min(most, static_cast<size_t>(sources.count) - k));
    for (int i = 0; i < op.from.count; ++i) op.from.slot[i] = static_cast<int32_t>(sources[k + i]);
    k += op.from.count;
    const int64_t shared = bytes(op.from.count);
    const int resident = two && 2 * shared <= device.shared() ? 2 : 1;
    launch(kernel, {stream_blocks(device, op.from, resident), kThreads, shared}, device.stream(),
           op);
  } while (k < static_cast<size_t>(sources.count));
}

template <class T, int kRows, bool kGeneral>
void launch_fma(const Device& device, Mix<T>& op, const Indices& sources, bool accumulate) {
  using At = Layout<T, kRows>;
  const size_t fit = (device.shared() - At::kAffine) / At::kAffineBytes;
  const size_t most = op.affine ? std::min<size_t>(Stream<T>::kMost, fit) : Stream<T>::kMost;
  launch_mix(mix_rows_kernel<T, kRows, kGeneral>, device, op, sources, accumulate, most,
             [&](int64_t states) {
               return At::kAffine + int64_t{At::kAffineBytes} * (op.affine ? states : 1);
             });
}

template <class T, int kRows>
void launch_dot(const Device& device, Mix<T>& op, const Indices& sources, bool accumulate) {
  using At = MixLayout<T, kRows>;
  op.from.tile_tokens = kDotTokens;
  const int64_t groups = (device.shared() - At::kWeights) / At::kGroup;
  const size_t most = std::min<size_t>(Stream<T>::kMost, groups * kDotRows);
  launch_mix(op.norm_weight != nullptr ? mix_rows_dot_kernel<T, kRows, true>
                                       : mix_rows_dot_kernel<T, kRows, false>,
             device, op, sources, accumulate, most, At::bytes, true);
}

void mix_rows(const MixRows& a, const Tensor& like) {
  DEEPFAST_CHECK(a.rows.count == a.out_rows.count, "mix_rows: expected ", a.rows.count,
                 " out_rows, one for each row, got ", a.out_rows.count);
  DEEPFAST_CHECK(a.T * a.D < int64_t{1} << 38,
                 "mix_rows: expected a slot of fewer than 2^38 elements, got ", a.T * a.D);
  const bool aligned = Alignment(a.storage, a.D).slots(a.states);
  const bool out_aligned = Alignment(Storage::f32, a.D).slots(a.out);
  const bool per_channel = a.weight.per_channel;
  const Device device(like);
  dispatch(a.storage, [&](auto type) {
    using T = decltype(type);
    const bool half = sizeof(T) == 2;
    const bool plain = !per_channel && aligned && out_aligned;
    const bool dot = half && plain && MixLayout<T, 16>::bytes(kDotRows) <= device.shared();
    const int64_t most = dot ? kMostRows : plain && !half ? 8 : 4;
    for (int64_t first = 0; first < a.rows.count; first += most) {
      Mix<T> op{};
      op.rows = static_cast<int>(std::min(most, a.rows.count - first));
      op.from = stream_of<T>(a.states, a.T, a.D, kWarps * kLines, aligned);
      op.norm_weight = floats(a.norm_weight), op.norm_bias = floats(a.norm_bias);
      op.affine = a.norm_weight != nullptr || a.norm_bias != nullptr;
      op.weight = floats(a.weight.data), op.per_channel = per_channel;
      op.columns = static_cast<int>(a.R);
      op.channels_aligned =
          Alignment(a.storage, a.D).values({a.weight.data, a.norm_weight, a.norm_bias});
      op.out = floats(a.out.data);
      op.out_stride = a.out.slot_stride, op.out_row_stride = a.out.row_stride;
      op.out_aligned = out_aligned;
      for (int b = 0; b < op.rows; ++b) {
        op.row[b] = static_cast<int32_t>(a.rows[first + b]);
        op.out_row[b] = static_cast<int32_t>(a.out_rows[first + b]);
      }
      if constexpr (sizeof(T) == 2) {
        const auto run = !dot           ? launch_fma<T, 4, true>
                         : op.rows <= 8 ? launch_dot<T, 8>
                                        : launch_dot<T, 16>;
        run(device, op, a.sources, a.accumulate);
      } else {
        const auto run = !plain         ? launch_fma<T, 4, true>
                         : op.rows <= 4 ? launch_fma<T, 4, false>
                                        : launch_fma<T, 8, false>;
        run(device, op, a.sources, a.accumulate);
      }
    }
  });
}

}  // namespace

DEEPFAST_CUDA_OPS(m) { m.impl("mix_rows", &boxed<MixRows, mix_rows>); }

}  // namespace deepfast
