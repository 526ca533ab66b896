// Layer normalisation with the dropout and residual before it, one pass in each direction.
//
//     forward     s = residual + dropout(x),   y = (s - mean) * rstd * weight + bias
//     backward    ds = dsum + LN'(dy),         dresidual = ds,  dx = dropout(ds)
//                 dweight = sum_t dy * n,      dbias = sum_t dy         with n = (s - mean) * rstd
//
// With `rms` it is RMS normalisation (Zhang, Sennrich 2019): the mean counts as 0.
//
// A row stays in registers from its first read to its last write (see row.h): the mean and the
// variance are two passes over registers, not over memory. Forward reads x and residual and writes
// s and y once: 4 T D values. Backward reads s, dy and dsum and writes dx and dresidual: 5 T D.
// Each of its blocks processes many rows, the next ones in flight, and keeps its share of dweight
// and dbias in registers; partials.cu adds these up.
//
// Ba, Kiros, Hinton: Layer Normalization, 2016.
#include "op.h"
#include "row_ring.h"

namespace deepfast {
namespace {

template <class T>
struct Forward {
  const T *x, *residual;
  const float *weight, *bias;
  T *sum, *y;
  float *mean, *rstd;  // no mean with rms
  int64_t x_stride, residual_stride, sum_stride, y_stride;
  int64_t tokens;
  int dim, lanes;
  float eps;
  DropoutMask dropout;
};

template <class T, int kChunks, bool kAligned>
__global__ void __launch_bounds__(kMostThreads<kChunks>, 1)
    layer_norm_fwd_kernel(const Forward<T> op) {
  const Lane at(op.dim, op.lanes, kAligned);
  RowSum row_sum(op.lanes, dynamic_shared());
  const int64_t t = int64_t{blockIdx.x} * at.rows_per_block() + at.row_in_block();
  const bool exists = t < op.tokens;
  const auto x = load_row<kChunks>(op.x + t * op.x_stride, at, exists);
  RowChunks<T, kChunks> residual;
  if (op.residual != nullptr)
    residual = load_row<kChunks>(op.residual + t * op.residual_stride, at, exists);
  float v[kChunks][kChunk];
  widen(x, v);
  drop_row(v, op.dropout, t, at);
  if (op.residual != nullptr) add_row(v, residual);
  if (op.sum != nullptr) {
    // The stored (rounded) row is normalised, because backward reads that.
    const auto stored = narrow_row<T>(v);
    store_row(op.sum + t * op.sum_stride, at, exists, stored);
    widen(stored, v);
  }
  const Moments moments = normalise(v, at, row_sum, op.eps, op.mean == nullptr);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    float p[kChunk];
    if (op.weight != nullptr) {
      load_chunk(op.weight + at.channel(c), at.count(c), at.aligned, p);
      for (int i = 0; i < kChunk; ++i) v[c][i] *= p[i];
    }
    if (op.bias != nullptr) {
      load_chunk(op.bias + at.channel(c), at.count(c), at.aligned, p);
      for (int i = 0; i < kChunk; ++i) v[c][i] += p[i];
    }
  }
  store_row(op.y + t * op.y_stride, at, exists, v);
  if (at.lane == 0 && exists) {
    if (op.mean != nullptr) op.mean[t] = moments.mean;
    op.rstd[t] = moments.rstd;
  }
}

template <class T>
struct Backward {
  const T *sum, *dy, *dsum;
  const float *weight, *mean, *rstd;  // no mean with rms
  T *dx, *dresidual;
  float* partial;  // (blocks, 2, D), or null
  int64_t sum_stride, dy_stride, dsum_stride, dx_stride, dresidual_stride;
  int64_t tokens;
  int dim, lanes;
  bool aligned;
  DropoutMask dropout;
};

// The rows of s, dy and dsum of a token, with kFast one or two tokens ahead.
constexpr int tokens_ahead(int64_t value_size) { return value_size == 4 ? 1 : 2; }
template <class T, int kChunks, bool kFast>
using Inputs = RowRing<T, kChunks, 3, kFast ? 1 + tokens_ahead(sizeof(T)) : 1, kFast>;

// kFast: aligned rows, for whose copies a block has the shared memory.
template <class T, int kChunks, bool kFast>
__global__ void __launch_bounds__(kMostThreads<kChunks>, 1)
    layer_norm_bwd_kernel(const __grid_constant__ Backward<T> op) {
  // Without kFast fp32 goes value by value: code for both ways would spill registers.
  const Lane at(op.dim, op.lanes, kFast || (sizeof(T) == 2 && op.aligned));
  RowSum row_sum(op.lanes, dynamic_shared());
  using Rows = Inputs<T, kChunks, kFast>;
  Rows rows(dynamic_shared() + kRowSumBytes, at);
  const int64_t step = int64_t{gridDim.x} * at.rows_per_block();
  const int64_t first = int64_t{blockIdx.x} * at.rows_per_block();
  int64_t t = first + at.row_in_block();
  const auto ask = [&](int64_t token) {
    const bool exists = token < op.tokens;
    rows.ask(0, op.sum + token * op.sum_stride, exists);
    rows.ask(1, op.dy + token * op.dy_stride, exists);
    rows.ask(2, op.dsum + token * op.dsum_stride, exists && op.dsum != nullptr);
    rows.asked();
  };
  for (int i = 0; i < Rows::kAhead; ++i) ask(t + i * step);
  const auto moments_of = [&](int64_t token) {
    if (token >= op.tokens) return Moments{0.0f, 0.0f};
    return Moments{op.mean == nullptr ? 0.0f : op.mean[token], op.rstd[token]};
  };
  Moments next;
  if (kFast) next = moments_of(t);
  float weight[kChunks][kChunk];
  if (kFast && op.weight != nullptr) load_row(op.weight, at, true, weight);
  // [0] for the weight, [1] for the bias.
  float sums[2][kChunks][kChunk] = {};
  // Every thread of a block runs equally many rounds, because a sum over a row needs all of its
  // threads.
#pragma unroll 1
  for (int64_t begin = first; begin < op.tokens; begin += step, t += step) {
    const bool exists = t < op.tokens;
    ask(t + Rows::kAhead * step);
    const Moments moments = kFast ? next : moments_of(t);
    if (kFast) next = moments_of(t + step);
    rows.wait();
    float n[kChunks][kChunk], d[kChunks][kChunk];
    widen(rows.take(0), n);
    widen(rows.take(1), d);
    // Behind the end of a row d is 0.
    DEEPFAST_EACH(c, i) n[c][i] = (n[c][i] - moments.mean) * moments.rstd;
    if (exists) {
      DEEPFAST_EACH(c, i) {
        sums[0][c][i] += d[c][i] * n[c][i];
        sums[1][c][i] += d[c][i];
      }
    }
    // Loads of any alignment take so many registers that the weight is read again.
    if (!kFast && op.weight != nullptr) load_row(op.weight, at, true, weight);
    if (op.weight != nullptr) DEEPFAST_EACH(c, i) d[c][i] *= weight[c][i];
    norm_backward(d, n, moments.rstd, at, row_sum, op.mean == nullptr);
    if (op.dsum != nullptr) add_row(d, rows.take(2));
    rows.taken();
    if (op.dresidual != nullptr) store_row(op.dresidual + t * op.dresidual_stride, at, exists, d);
    if (op.dx != nullptr) {
      drop_row(d, op.dropout, t, at);
      store_row(op.dx + t * op.dx_stride, at, exists, d);
    }
  }
  wait_copies<0>();
  // All rows have been read, so their shared memory is free.
  if (op.partial != nullptr)
    store_channel_sums(sums, at, reinterpret_cast<float*>(dynamic_shared() + kRowSumBytes),
                       op.partial + int64_t{blockIdx.x} * 2 * op.dim);
}

template <class Launch>
void check(const Launch& a) {
  check_dim(a.D);
  DEEPFAST_CHECK(a.rms == (a.mean == nullptr), "layer_norm: expected mean, or rms without it");
}

void layer_norm_forward(const LayerNormForward& a, const Tensor& like) {
  check(a);
  const bool aligned =
      Alignment(a.storage, a.D).rows({a.x, a.y, a.residual, a.sum}).values({a.weight, a.bias});
  const int chunks = row_chunks(a.D, aligned), lanes = row_lanes(a.D, chunks);
  const int threads = row_threads(lanes), rows = threads / lanes;
  const Device device(like);
  dispatch_rows(a.storage, aligned, chunks, [&](auto type, auto aligned_, auto chunks_) {
    using T = decltype(type);
    launch(layer_norm_fwd_kernel<T, chunks_, aligned_>,
           {(a.T + rows - 1) / rows, threads, kRowSumBytes}, device.stream(),
           Forward<T>{static_cast<const T*>(a.x.data), static_cast<const T*>(a.residual.data),
                      floats(a.weight), floats(a.bias), static_cast<T*>(a.sum.data),
                      static_cast<T*>(a.y.data), floats(a.mean), floats(a.rstd), a.x.row_stride,
                      a.residual.row_stride, a.sum.row_stride, a.y.row_stride, a.T,
                      static_cast<int>(a.D), lanes, static_cast<float>(a.eps), dropout_mask(a)});
  });
}

void layer_norm_backward(const LayerNormBackward& a, const Tensor& like) {
  check(a);
  const Storage storage = a.storage;
  const int64_t tokens = a.T, dim = a.D;
  const bool aligned =
      Alignment(storage, dim).rows({a.sum, a.dy, a.dsum, a.dx, a.dresidual}).values({a.weight});
  const Device device(like);
  // The copies of 512 threads, or of 256 with three chunks, may be more than the device has.
  const int64_t size = storage == Storage::f32 ? 4 : 2;
  const auto of_block = [&](int chunks) {
    return kRowSumBytes + row_threads(row_lanes(dim, chunks)) * 3 * (1 + tokens_ahead(size)) *
                              chunks * kChunk * size;
  };
  const bool fast = aligned && of_block(row_chunks(dim, true)) <= device.shared();
  const int chunks = row_chunks(dim, fast), lanes = row_lanes(dim, chunks);
  const int threads = row_threads(lanes), rows = threads / lanes;
  const int resident = chunks == 2 ? kMostThreads<2> : kMostThreads<3>;
  const int64_t blocks = device.blocks((tokens + rows - 1) / rows, resident / threads);
  const bool sums = a.dweight != nullptr || a.dbias != nullptr;
  std::optional<Tensor> partial;
  if (sums) partial = scratch(like, blocks * 2 * dim);
  dispatch_rows(storage, fast, chunks, [&](auto type, auto fast_, auto chunks_) {
    using T = decltype(type);
    using Rows = Inputs<T, chunks_, fast_>;
    static_assert(Rows::kThreadBytes >= chunks_ * kChunk * 4, "room for the sums of the end");
    launch(
        layer_norm_bwd_kernel<T, chunks_, fast_>,
        {blocks, threads, kRowSumBytes + threads * Rows::kThreadBytes}, device.stream(),
        Backward<T>{static_cast<const T*>(a.sum.data), static_cast<const T*>(a.dy.data),
                    static_cast<const T*>(a.dsum.data), floats(a.weight), floats(a.mean),
                    floats(a.rstd), static_cast<T*>(a.dx.data), static_cast<T*>(a.dresidual.data),
                    sums ? floats(*partial) : nullptr, a.sum.row_stride, a.dy.row_stride,
                    a.dsum.row_stride, a.dx.row_stride, a.dresidual.row_stride, tokens,
                    static_cast<int>(dim), lanes, aligned, dropout_mask(a)});
  });
  if (sums)
    sum_partials(device, floats(*partial), blocks, 2, 1, dim,
                 Sums{{floats(a.dweight), floats(a.dbias)}, {dim, dim}});
}

}  // namespace

DEEPFAST_CUDA_OPS(m) {
  m.impl("layer_norm_forward", &boxed<LayerNormForward, layer_norm_forward>);
  m.impl("layer_norm_backward", &boxed<LayerNormBackward, layer_norm_backward>);
}

}  // namespace deepfast
