// Cross entropy of rows of logits, with label smoothing, and its gradient over the logits.
//
//     nll = log sum_v exp(x_v) - x_t,   loss = (1 - eps) * nll + eps * mean_v(log sum exp(x) - x_v)
//     dx = softmax(x) - (1 - eps) * onehot(t) - eps / V,   zeros for an ignored target
//
// A block has one row and goes over it three times: its maximum, its sums, its gradient. The matrix
// product before has just written the rows, and they are read from the L2 cache.
//
// Szegedy et al.: Rethinking the Inception Architecture, 2016, for label smoothing.
#include "op.h"

namespace deepfast {
namespace {

constexpr int kMostThreads = 512;
constexpr float kPerLog2 = 1.44269504f;

template <class T>
struct CrossEntropy {
  T* logits;
  const int64_t* target;
  float *loss, *nll;
  int64_t stride, ignore_index;
  int vocabulary;
  float smoothing;
  bool aligned, write_grad;
};

// One thread's chunks of a row: f(v, count) for its first class and how many it has from there on.
template <class F>
DEEPFAST_DEVICE void each_chunk(int vocabulary, const F& f) {
  const int step = static_cast<int>(blockDim.x) * kChunk;
  for (int v = static_cast<int>(threadIdx.x) * kChunk; v < vocabulary; v += step)
    f(v, vocabulary - v);
}

// The largest over the block's threads; a NaN is passed over, and shows in the sums.
DEEPFAST_DEVICE float block_max(float x, float* scratch) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  const int warps = blockDim.x / kWarp;
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  for (int w = 0; w < warps; ++w) x = fmaxf(x, scratch[w]);
  return x;
}

template <class T>
__global__ void __launch_bounds__(kMostThreads) cross_entropy_kernel(const CrossEntropy<T> op) {
  const int V = op.vocabulary;
  const int64_t t = blockIdx.x, target = op.target[t];
  T* row = op.logits + t * op.stride;
  const auto aligned = [&](int count) { return op.aligned && count >= kChunk; };
  if (target == op.ignore_index) {
    if (threadIdx.x == 0) op.loss[t] = op.nll[t] = 0.0f;
    if (op.write_grad)
      each_chunk(V, [&](int v, int count) {
        store_chunk(row + v, count, aligned(count), zero_chunk<T>());
      });
    return;
  }
  // Before the block's first barrier: after it the logit is written over.
  const bool inside = target >= 0 && target < V;
  const float hit = inside ? to_float(row[target]) : NAN;
  RowSum row_sum(static_cast<int>(blockDim.x), dynamic_shared());
  float most = -INFINITY;
  each_chunk(V, [&](int v, int count) {
    float x[kChunk];
    load_chunk(row + v, count, aligned(count), x);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) most = i < count ? fmaxf(most, x[i]) : most;
  });
  most = block_max(most, reinterpret_cast<float*>(dynamic_shared() + kRowSumBytes));

  // Of exp(x - max), and of x - max.
  float sums[2] = {0.0f, 0.0f};
  each_chunk(V, [&](int v, int count) {
    float x[kChunk];
    load_chunk(row + v, count, aligned(count), x);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      sums[0] += i < count ? exp2f((x[i] - most) * kPerLog2) : 0.0f;
      sums[1] += i < count ? x[i] - most : 0.0f;
    }
  });
  row_sum(sums);
  const float log_total = logf(sums[0]), nll = log_total - (hit - most), eps = op.smoothing;
  const float even = eps / static_cast<float>(V), scale = 1.0f / sums[0];
  if (threadIdx.x == 0) {
    op.nll[t] = nll;
    op.loss[t] =
        eps > 0 ? (1 - eps) * nll + eps * (log_total - sums[1] / static_cast<float>(V)) : nll;
  }
  if (!op.write_grad) return;
  each_chunk(V, [&](int v, int count) {
    float x[kChunk];
    load_chunk(row + v, count, aligned(count), x);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      x[i] = exp2f((x[i] - most) * kPerLog2) * scale - even;
      if (v + i == target) x[i] -= 1 - eps;
    }
    store_chunk(row + v, count, aligned(count), x);
  });
}

// Two chunks or more for each thread, up to a block of kMostThreads.
int threads_of(int64_t vocabulary) {
  int threads = kWarp;
  while (threads < kMostThreads && int64_t{threads} * 2 * kChunk < vocabulary) threads *= 2;
  return threads;
}

void cross_entropy(Tensor logits, Tensor target, double label_smoothing, int64_t ignore_index,
                   bool write_grad, Tensor loss, Tensor nll) {
  const Storage storage = storage_of(logits);
  const int64_t tokens = logits.size(0), vocabulary = logits.size(1);
  DEEPFAST_CHECK(vocabulary < int64_t{1} << 30, "expected fewer than 2^30 classes, got ",
                 vocabulary);
  const Matrix logits_ = matrix(logits, storage, tokens, vocabulary);
  // Not by the row's length: its last chunk alone may be a part of one.
  const bool aligned = Alignment(storage, kChunk).rows({logits_});
  const Device device(logits);
  dispatch(storage, [&](auto type) {
    using T = decltype(type);
    launch(cross_entropy_kernel<T>,
           {tokens, threads_of(vocabulary),
            kRowSumBytes + kMostThreads / kWarp * static_cast<int64_t>(sizeof(float))},
           device.stream(),
           CrossEntropy<T>{static_cast<T*>(logits_.data), targets(target, tokens),
                           floats(loss, tokens), floats(nll, tokens), logits_.row_stride,
                           ignore_index, static_cast<int>(vocabulary),
                           static_cast<float>(label_smoothing), aligned, write_grad});
  });
}

}  // namespace

DEEPFAST_CUDA_OPS(m) { m.impl("cross_entropy", TORCH_BOX(&cross_entropy)); }

}  // namespace deepfast
