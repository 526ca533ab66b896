// A row of channels across threads: its layout, loads, stores, sums over the row.
//
// `lanes` threads, a power of two, hold a row of D channels, two chunks of eight each:
//
//      lane        0        1     ...  lanes-1 |   0        1     ...  lanes-1
//      channels  0 .. 7   8 .. 15  ...         |  8*lanes ...                    (zeros from D on)
//
// So a warp's loads are whole cache lines. With up to 32 lanes a warp holds 32 / lanes rows. With
// more, a block holds one row and its warps exchange their sums in shared memory.
#pragma once

#include "vector.h"

namespace deepfast {

constexpr int kRowChunks = 2, kRowValues = kRowChunks * kChunk;
constexpr int kMostLanes = 512;
constexpr int64_t kMostChannels = int64_t{kMostLanes} * kRowValues;

// Threads that share a row of `dim` channels.
inline int row_lanes(int64_t dim) {
  int lanes = 1;
  while (lanes < kMostLanes && int64_t{lanes} * kRowValues < dim) lanes *= 2;
  return lanes;
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

  DEEPFAST_DEVICE Lane(int dim_, int lanes_, bool aligned_)
      : dim(dim_), lanes(lanes_), lane(threadIdx.x & (lanes_ - 1)), aligned(aligned_) {}

  DEEPFAST_DEVICE int row_in_block() const { return threadIdx.x / lanes; }
  DEEPFAST_DEVICE int rows_per_block() const { return blockDim.x / lanes; }
  // The number of the c-th chunk in the row, its first channel, and its number of channels.
  DEEPFAST_DEVICE int chunk(int c) const { return c * lanes + lane; }
  DEEPFAST_DEVICE int channel(int c) const { return chunk(c) * kChunk; }
  DEEPFAST_DEVICE int count(int c) const { return dim - channel(c); }
};

// A thread's part of a row, as stored: several can be in flight before one is used.
template <class T>
struct RowChunks {
  Chunk<T> chunk[kRowChunks];
};

// `row` points to channel 0; a row that does not exist (`exists` false) is zeros.
template <class T>
DEEPFAST_DEVICE RowChunks<T> load_row(const T* row, const Lane& at, bool exists = true) {
  RowChunks<T> r;
#pragma unroll
  for (int c = 0; c < kRowChunks; ++c)
    r.chunk[c] = load_chunk(row + at.channel(c), exists ? at.count(c) : 0, at.aligned);
  return r;
}

template <class T>
DEEPFAST_DEVICE void widen(const RowChunks<T>& r, float (&v)[kRowChunks][kChunk]) {
#pragma unroll
  for (int c = 0; c < kRowChunks; ++c) widen(r.chunk[c], v[c]);
}

template <class T>
DEEPFAST_DEVICE void load_row(const T* row, const Lane& at, bool exists,
                              float (&v)[kRowChunks][kChunk]) {
  widen(load_row(row, at, exists), v);
}

template <class T>
DEEPFAST_DEVICE void store_row(T* row, const Lane& at, bool exists, const RowChunks<T>& r) {
#pragma unroll
  for (int c = 0; c < kRowChunks; ++c)
    store_chunk(row + at.channel(c), exists ? at.count(c) : 0, at.aligned, r.chunk[c]);
}

template <class T>
DEEPFAST_DEVICE RowChunks<T> narrow_row(const float (&v)[kRowChunks][kChunk]) {
  RowChunks<T> r;
#pragma unroll
  for (int c = 0; c < kRowChunks; ++c) r.chunk[c] = narrow<T>(v[c]);
  return r;
}

template <class T>
DEEPFAST_DEVICE void store_row(T* row, const Lane& at, bool exists,
                               const float (&v)[kRowChunks][kChunk]) {
  store_row(row, at, exists, narrow_row<T>(v));
}

// Loops over a thread's sixteen values, chunk c and index i in it. Unrolled, so they stay in
// registers.
#define DEEPFAST_EACH(c, i)                              \
  _Pragma("unroll") for (int c = 0; c < kRowChunks; ++c) \
      _Pragma("unroll") for (int i = 0; i < kChunk; ++i)

// Sums over the threads of a row, in one order: each thread gets the same bits, in every run. Every
// thread of the block takes part in each sum, with zeros if it has no row. With `kApart`, several
// rows of several warps each in one block do not wait for one another. That takes all sixteen
// barriers of a block, too many where blocks are small and many.
template <bool kApart>
class RowSums {
 public:
  // `scratch`: kRowSumBytes of shared memory that nothing else uses.
  DEEPFAST_DEVICE RowSums(int lanes, char* scratch)
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
    if (kApart)
      sync_neighbours(lanes_);
    else
      __syncthreads();
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
using RowSum = RowSums<false>;

struct Moments {
  float mean, rstd;
};

// Turns a row into (v - mean) * rstd, zeros behind its end, in two passes over the registers. The
// second pass sums both d = v - mean and d^2. The first sum is tiny and corrects the mean. It
// corrects the variance too: E[d^2] - E[d]^2 loses nothing where E[d] is near 0.
template <class Sum>
DEEPFAST_DEVICE Moments normalise(float (&v)[kRowChunks][kChunk], const Lane& at, Sum& row_sum,
                                  float eps) {
  float total[1] = {0.0f};
  DEEPFAST_EACH(c, i) total[0] += v[c][i];
  row_sum(total);
  const float n = static_cast<float>(at.dim), rough = total[0] / n;
  float sums[2] = {0.0f, 0.0f};
  DEEPFAST_EACH(c, i) {
    v[c][i] = i < at.count(c) ? v[c][i] - rough : 0.0f;
    sums[0] += v[c][i];
    sums[1] += v[c][i] * v[c][i];
  }
  row_sum(sums);
  const float rest = sums[0] / n;
  const float rstd = 1.0f / sqrtf(fmaxf(sums[1] / n - rest * rest, 0.0f) + eps);
  DEEPFAST_EACH(c, i) v[c][i] = i < at.count(c) ? (v[c][i] - rest) * rstd : 0.0f;
  return {rough + rest, rstd};
}

// Overwrites the gradient of the result n with the gradient before normalisation; both are zeros
// behind the row's end.
template <class Sum>
DEEPFAST_DEVICE void norm_backward(float (&d)[kRowChunks][kChunk],
                                   const float (&n)[kRowChunks][kChunk], float rstd, const Lane& at,
                                   Sum& row_sum) {
  float sums[2] = {0.0f, 0.0f};
  DEEPFAST_EACH(c, i) {
    sums[0] += d[c][i];
    sums[1] += d[c][i] * n[c][i];
  }
  row_sum(sums);
  const float mean = sums[0] / static_cast<float>(at.dim);
  const float slope = sums[1] / static_cast<float>(at.dim);
  DEEPFAST_EACH(c, i) {
    d[c][i] = i < at.count(c) ? rstd * (d[c][i] - mean - n[c][i] * slope) : 0.0f;
  }
}

// Adds up `N` sums of the rows of a block, channel by channel, and writes them to out[n * dim + d]:
// rows of the block in their order. `scratch`: threads * kRowValues floats of shared memory.
template <int N>
DEEPFAST_DEVICE void store_channel_sums(const float (&sum)[N][kRowChunks][kChunk], const Lane& at,
                                        float* scratch, float* out) {
  const int rows = at.rows_per_block(), width = at.lanes * kRowValues;
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
