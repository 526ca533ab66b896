// A row of channels across threads: its layout, loads, stores, sums over the row.
//
// `lanes` threads, a power of two, hold a row of D channels, kChunks chunks of eight each:
//
//      lane        0        1     ...  lanes-1 |   0        1     ...  lanes-1
//      channels  0 .. 7   8 .. 15  ...         |  8*lanes ...                    (zeros from D on)
//
// So a warp's loads are whole cache lines. With up to 32 lanes a warp holds 32 / lanes rows. With
// more, a block holds one row and its warps exchange their sums in shared memory. kChunks is 2, or
// 3 where fewer lanes stay idle: 768 channels are 3 chunks of 32 lanes.
#pragma once

#include "vector.h"

namespace deepfast {

constexpr int kMostLanes = 512;
constexpr int64_t kMostChannels = int64_t{kMostLanes} * 2 * kChunk;
// Threads that a block may have: 65536 registers leave 128 for each of 512.
template <int kChunks>
constexpr int kMostThreads = kChunks == 2 ? kMostLanes : kMostLanes / 2;

// Threads that share a row of `dim` channels.
inline int row_lanes(int64_t dim, int chunks) {
  int lanes = 1;
  while (lanes < kMostLanes && int64_t{lanes} * chunks * kChunk < dim) lanes *= 2;
  return lanes;
}

// Chunks of a thread. Rows that are not aligned always have two.
inline int row_chunks(int64_t dim, bool aligned) {
  const int lanes = row_lanes(dim, 3);
  const bool fewer = lanes <= kMostThreads<3> && 3 * lanes < 2 * row_lanes(dim, 2);
  return aligned && fewer ? 3 : 2;
}

// Threads of a block: four warps, or as many as one row takes.
inline int row_threads(int lanes) { return lanes < 4 * kWarp ? 4 * kWarp : lanes; }

#if defined(DEEPFAST_EMULATE) || defined(__CUDACC__)

// Bytes of shared memory that RowSum needs.
constexpr int kRowSumBytes = 2 * (kMostLanes / kWarp) * 4 * static_cast<int>(sizeof(float));

// This thread's place in the rows of its block. A block has blockDim.x / lanes rows at a time.
struct Lane {
  int dim, lanes, lane;
  bool aligned;
  float one_by_dim;

  DEEPFAST_DEVICE Lane(int dim_, int lanes_, bool aligned_)
      : dim(dim_),
        lanes(lanes_),
        lane(threadIdx.x & (lanes_ - 1)),
        aligned(aligned_),
        one_by_dim(1.0f / static_cast<float>(dim_)) {}

  DEEPFAST_DEVICE int row_in_block() const { return threadIdx.x / lanes; }
  DEEPFAST_DEVICE int rows_per_block() const { return blockDim.x / lanes; }
  // The number of the c-th chunk in the row, its first channel, and its number of channels.
  DEEPFAST_DEVICE int chunk(int c) const { return c * lanes + lane; }
  DEEPFAST_DEVICE int channel(int c) const { return chunk(c) * kChunk; }
  DEEPFAST_DEVICE int count(int c) const { return dim - channel(c); }
  // Whether value i of chunk c is in the row. An aligned row has all of a chunk or none of it.
  DEEPFAST_DEVICE bool has(int c, int i) const { return aligned ? count(c) > 0 : i < count(c); }
};

// A thread's part of a row, as stored: several can be in flight before one is used.
template <class T, int kChunks>
struct RowChunks {
  Chunk<T> chunk[kChunks];
};

// `row` points to channel 0; a row that does not exist (`exists` false) is zeros.
template <int kChunks, class T>
DEEPFAST_DEVICE RowChunks<T, kChunks> load_row(const T* row, const Lane& at, bool exists = true) {
  RowChunks<T, kChunks> r;
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
    r.chunk[c] = load_chunk(row + at.channel(c), exists ? at.count(c) : 0, at.aligned);
  return r;
}

template <class T, int kChunks>
DEEPFAST_DEVICE void widen(const RowChunks<T, kChunks>& r, float (&v)[kChunks][kChunk]) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) widen(r.chunk[c], v[c]);
}

template <class T, int kChunks>
DEEPFAST_DEVICE void store_row(T* row, const Lane& at, bool exists,
                               const RowChunks<T, kChunks>& r) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
    store_chunk(row + at.channel(c), exists ? at.count(c) : 0, at.aligned, r.chunk[c]);
}

template <class T, int kChunks>
DEEPFAST_DEVICE RowChunks<T, kChunks> narrow_row(const float (&v)[kChunks][kChunk]) {
  RowChunks<T, kChunks> r;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) r.chunk[c] = narrow<T>(v[c]);
  return r;
}

template <class T, int kChunks>
DEEPFAST_DEVICE void store_row(T* row, const Lane& at, bool exists,
                               const float (&v)[kChunks][kChunk]) {
  store_row(row, at, exists, narrow_row<T>(v));
}

// Loops over the values of a thread that has kChunks chunks, chunk c and index i in it. Unrolled,
// so they stay in registers.
#define DEEPFAST_EACH(c, i)                           \
  _Pragma("unroll") for (int c = 0; c < kChunks; ++c) \
      _Pragma("unroll") for (int i = 0; i < kChunk; ++i)

template <class T, int kChunks>
DEEPFAST_DEVICE void add_row(float (&v)[kChunks][kChunk], const RowChunks<T, kChunks>& row) {
  float r[kChunks][kChunk];
  widen(row, r);
  DEEPFAST_EACH(c, i) v[c][i] += r[c][i];
}

// Sums over the threads of a row, in one order: each thread gets the same bits, in every run. Every
// thread of the block takes part in each sum, with zeros if it has no row. Several rows of several
// warps each in one block do not wait for one another. That takes all sixteen barriers of a block.
class RowSum {
 public:
  // `scratch`: kRowSumBytes of shared memory that nothing else uses.
  DEEPFAST_DEVICE RowSum(int lanes, char* scratch)
      : lanes_(lanes), scratch_(reinterpret_cast<float*>(scratch)), turn_(0) {}

  template <int N>
  DEEPFAST_DEVICE void operator()(float (&sum)[N]) {
    static_assert(N <= 4, "the scratch holds four sums of a warp");
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      if (step >= lanes_) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) sum[n] += __shfl_xor_sync(0xffffffffu, sum[n], step);
    }
    if (lanes_ <= kWarp) return;
    // Two scratches alternate: a warp may be one sum ahead of another, never two.
    const int warps = lanes_ / kWarp, warp = threadIdx.x / kWarp;
    float* scratch = scratch_ + turn_ * (kMostLanes / kWarp) * 4;
    turn_ ^= 1;
    if (threadIdx.x % kWarp == 0) {
#pragma unroll
      for (int n = 0; n < N; ++n) scratch[warp * 4 + n] = sum[n];
    }
    sync_neighbours(lanes_);
    const int first = threadIdx.x / lanes_ * warps;
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n] = scratch[first * 4 + n];
    // More at once would take more registers than the row itself.
#pragma unroll 2
    for (int w = 1; w < warps; ++w) {
#pragma unroll
      for (int n = 0; n < N; ++n) sum[n] += scratch[(first + w) * 4 + n];
    }
  }

 private:
  int lanes_;
  float* scratch_;
  int turn_;
};

struct Moments {
  float mean, rstd;
};

DEEPFAST_DEVICE float reciprocal_root(float x) {
#if defined(__CUDA_ARCH__)
  return rsqrtf(x);
#else
  return 1.0f / sqrtf(x);
#endif
}

// Turns a row into (v - mean) * rstd, zeros behind its end, in two passes over the registers. The
// second pass sums both d = v - mean and d^2. The first sum is tiny and corrects the mean. It
// corrects the variance too: E[d^2] - E[d]^2 loses nothing where E[d] is near 0. With `rms` the mean
// counts as 0.
template <int kChunks>
DEEPFAST_DEVICE Moments normalise(float (&v)[kChunks][kChunk], const Lane& at, RowSum& row_sum,
                                  float eps, bool rms = false) {
  float rough = 0.0f;
  if (!rms) {
    float total[1] = {0.0f};
    DEEPFAST_EACH(c, i) total[0] += v[c][i];
    row_sum(total);
    rough = total[0] * at.one_by_dim;
  }
  float sums[2] = {0.0f, 0.0f};
  DEEPFAST_EACH(c, i) {
    if (at.has(c, i)) v[c][i] -= rough;
    sums[0] += v[c][i];
    sums[1] += v[c][i] * v[c][i];
  }
  row_sum(sums);
  const float rest = rms ? 0.0f : sums[0] * at.one_by_dim, square = sums[1] * at.one_by_dim;
  // fmaxf would lose a NaN, which in a layer-norm is in the mean too.
  const float rstd = reciprocal_root((rms ? square : fmaxf(square - rest * rest, 0.0f)) + eps);
  DEEPFAST_EACH(c, i) {
    if (at.has(c, i)) v[c][i] = (v[c][i] - rest) * rstd;
  }
  return {rough + rest, rstd};
}

// Overwrites the gradient of the result n with the gradient before normalisation; d is zero behind
// the row's end. With `rms` the mean of d counts as 0.
template <int kChunks>
DEEPFAST_DEVICE void norm_backward(float (&d)[kChunks][kChunk], const float (&n)[kChunks][kChunk],
                                   float rstd, const Lane& at, RowSum& row_sum, bool rms = false) {
  float sums[2] = {0.0f, 0.0f};
  DEEPFAST_EACH(c, i) {
    sums[0] += d[c][i];
    sums[1] += d[c][i] * n[c][i];
  }
  row_sum(sums);
  const float mean = rms ? 0.0f : sums[0] * at.one_by_dim, slope = sums[1] * at.one_by_dim;
  DEEPFAST_EACH(c, i) {
    if (at.has(c, i)) d[c][i] = rstd * (d[c][i] - mean - n[c][i] * slope);
  }
}

// Adds up `N` sums of the rows of a block, channel by channel, and writes them to out[n * dim + d]:
// rows of the block in their order. `scratch`: kChunks * kChunk floats of shared memory for each
// thread.
template <int N, int kChunks>
DEEPFAST_DEVICE void store_channel_sums(const float (&sum)[N][kChunks][kChunk], const Lane& at,
                                        float* scratch, float* out) {
  const int rows = at.rows_per_block(), width = at.lanes * kChunks * kChunk;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    __syncthreads();
    DEEPFAST_EACH(c, i) scratch[at.row_in_block() * width + at.channel(c) + i] = sum[n][c][i];
    __syncthreads();
    for (int d = threadIdx.x; d < at.dim; d += blockDim.x) {
      float total = scratch[d];
      for (int r = 1; r < rows; ++r) total += scratch[r * width + d];
      out[static_cast<int64_t>(n) * at.dim + d] = total;
    }
  }
}

#endif

}  // namespace deepfast
