// Everything between two layers' matrix products, in one pass.
//
//     y = residual + dropout(branch),  n = norm(y) rounded into its slot
//     x = partial + sum over near j of W[k, j] * (n_j * norm_weight_j + norm_bias_j),  out = LN(x)
//
// A row stays in the registers of its threads (see row.h) from its first read to its last write,
// while the rows of the next operands and tokens are copied into shared memory:
//
//     near states -> x = partial + S + sum c_j n_j --+
//     branch --+                                     v
//     residual +-> y -> n -> slot ----------------> x -> x, LN -> out
//
// where c_j = W[k, j] * norm_weight_j and S = sum W[k, j] * norm_bias_j (boundary.h).
//
// With K near states, the pushed one among them, a launch reads K + 2 rows and writes 3. What a
// row costs beside them is counted in bench/results/limits.md.
#include "boundary.h"

namespace deepfast {
namespace {

template <class T>
struct Forward {
  Mix<T> mix;  // parameters: out_norm_weight, out_norm_bias
  const T *branch, *residual, *partial;
  T *state, *x, *out;
  float *source_rstd, *out_mean, *out_rstd;  // no mean with rms
  int64_t branch_stride, residual_stride, partial_stride, x_stride, out_stride;
  int64_t tokens;
  float source_eps, out_eps;
  bool norm_source, source_rms;
  DropoutMask dropout;
};

// How the kernel runs, and the layout of a block's shared memory.
template <class T, bool kFast, int kChunks>
struct ForwardKernel {
  using Rows = RowQueue<T, kFast, kChunks>;
  static constexpr int kThreads = kMostThreads<kChunks>;
  static constexpr int kRows = kRowSumBytes + kOperandBytes<T>;
  static int64_t bytes(const Operands& given, int threads) {
    return kRows + threads * Rows::kThreadBytes + given.table<kChunks>(kFast);
  }
};

template <class T, bool kFast, int kChunks>
__global__ void __launch_bounds__(kMostThreads<kChunks>, 1)
    boundary_fwd_kernel(const __grid_constant__ Forward<T> op) {
  using Kernel = ForwardKernel<T, kFast, kChunks>;
  const Mix<T>& mix = op.mix;
  const Lane at(mix.dim, mix.lanes, kFast || mix.aligned);
  char* const shared = dynamic_shared();
  RowsApart row_sum(mix.lanes, shared);
  typename Kernel::Rows rows(shared + kRowSumBytes, shared + Kernel::kRows, at, op.tokens);
  add_near(mix, rows);
  rows.add(op.partial, op.partial_stride);
  const bool reads_slot = op.branch == nullptr && mix.reads_own;
  rows.add(reads_slot ? op.state : op.branch, reads_slot ? mix.row_stride : op.branch_stride);
  if (op.branch != nullptr) rows.add(op.residual, op.residual_stride);
  rows.start();
  const Table<kChunks> table(
      shared + Kernel::kRows + int64_t{blockDim.x} * Kernel::Rows::kThreadBytes, kNear + mix.count,
      at.lane);
  if (kFast) fill(mix, table, at);
  __syncthreads();
  const int64_t step = int64_t{gridDim.x} * at.rows_per_block();
  // Every thread of a block runs equally many rounds, because a sum over a row needs all of its
  // threads.
#pragma unroll 1
  for (int64_t first = int64_t{blockIdx.x} * at.rows_per_block(); first < op.tokens;
       first += step) {
    const int64_t t = first + at.row_in_block();
    const bool exists = t < op.tokens;
    float x[kChunks][kChunk];
    mix_near(mix, table, at, rows, x);
    if (op.partial != nullptr) add_row(x, rows.take());
    RowChunks<T, kChunks> own;
    if (op.branch != nullptr || mix.reads_own) own = rows.take();
    if (op.branch != nullptr) {
      float y[kChunks][kChunk];
      widen(own, y);
      drop_row(y, op.dropout, t, at);
      if (op.residual != nullptr) add_row(y, rows.take());
      if (op.norm_source) {
        const Moments moments = normalise(y, at, row_sum, op.source_eps, op.source_rms);
        if (at.lane == 0 && exists) op.source_rstd[t] = moments.rstd;
      }
      // The state is mixed as later rows will read it: rounded.
      own = narrow_row<T>(y);
      store_row(op.state + t * mix.row_stride, at, exists, own);
    }
    if (mix.reads_own) add_state<kFast>(mix, table, at, kOwn, mix.k, own, x);
    if (op.x != nullptr) store_row(op.x + t * op.x_stride, at, exists, x);
    if (op.out == nullptr) continue;
    const Moments moments = normalise(x, at, row_sum, op.out_eps, op.out_mean == nullptr);
    scale<kFast>(mix, table, at, 0, x);
    shift<kFast>(mix, table, at, 1, x);
    store_row(op.out + t * op.out_stride, at, exists, x);
    if (at.lane == 0 && exists) {
      if (op.out_mean != nullptr) op.out_mean[t] = moments.mean;
      op.out_rstd[t] = moments.rstd;
    }
  }
  rows.end();
}

void boundary_forward(OptionalTensor branch, OptionalTensor residual, double dropout_p,
                      OptionalTensor seed, Tensor states, int64_t k, Indices near, Tensor weight,
                      OptionalTensor norm_weight, OptionalTensor norm_bias, bool norm_source,
                      double source_eps, bool source_rms, OptionalTensor partial,
                      OptionalTensor out_norm_weight, OptionalTensor out_norm_bias, double out_eps,
                      bool out_rms, OptionalTensor x, OptionalTensor out,
                      OptionalTensor source_rstd, OptionalTensor out_mean,
                      OptionalTensor out_rstd) {
  check_buffer(states);
  const Operands given(states, k, near, weight, norm_weight, norm_bias, out_norm_weight,
                       out_norm_bias);
  const int64_t tokens = given.tokens, dim = given.dim;
  const Storage storage = given.storage;
  const Matrix branch_ = matrix(branch, storage, tokens, dim);
  const Matrix residual_ = matrix(residual, storage, tokens, dim);
  const Matrix partial_ = matrix(partial, storage, tokens, dim);
  const Matrix x_ = matrix(x, storage, tokens, dim), out_ = matrix(out, storage, tokens, dim);
  float* const source_rstd_ = floats(source_rstd, tokens);
  float *const mean_ = floats(out_mean, tokens), *const rstd_ = floats(out_rstd, tokens);
  DEEPFAST_CHECK(!norm_source || !branch.has_value() || source_rstd.has_value(),
                 "boundary: expected source_rstd for a normalised state, got None");
  DEEPFAST_CHECK(!out.has_value() || (out_rms != out_mean.has_value() && out_rstd.has_value()),
                 "boundary: expected out_rstd, and out_mean or out_rms, beside out");
  const bool aligned =
      given.aligned && Alignment(storage, dim).rows({branch_, residual_, partial_, x_, out_});
  const Device device(states);
  const auto bytes = [&](auto type, auto fast, auto chunks, int threads) {
    return ForwardKernel<decltype(type), fast, chunks>::bytes(given, threads);
  };
  const auto run = [&](auto type, auto fast, auto chunks, const Shape& shape) {
    using T = decltype(type);
    Forward<T> op{};
    op.mix = given.mix<T>(shape.lanes, aligned);
    op.mix.parameters[0] = given.out_norm_weight, op.mix.parameters[1] = given.out_norm_bias;
    op.branch = static_cast<const T*>(branch_.data), op.branch_stride = branch_.row_stride;
    op.residual = static_cast<const T*>(residual_.data), op.residual_stride = residual_.row_stride;
    op.partial = static_cast<const T*>(partial_.data), op.partial_stride = partial_.row_stride;
    op.state = static_cast<T*>(slot(states, k).data);
    op.x = static_cast<T*>(x_.data), op.x_stride = x_.row_stride;
    op.out = static_cast<T*>(out_.data), op.out_stride = out_.row_stride;
    op.source_rstd = source_rstd_, op.out_mean = mean_, op.out_rstd = rstd_;
    op.tokens = tokens;
    op.source_eps = static_cast<float>(source_eps), op.out_eps = static_cast<float>(out_eps);
    op.norm_source = norm_source, op.source_rms = source_rms;
    op.dropout = dropout_mask(seed, dropout_p);
    launch(boundary_fwd_kernel<T, fast, chunks>, shape.grid, device.stream(), op);
  };
  dispatch_shape<ForwardKernel>(device, given, aligned, bytes, run);
}

}  // namespace

DEEPFAST_CUDA_OPS(m) { m.impl("boundary_forward", TORCH_BOX(&boundary_forward)); }

}  // namespace deepfast
