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
// With K near states, the pushed one among them, a launch reads K + 2 rows and writes 3.
#include "boundary.h"

namespace deepfast {
namespace {

template <class T>
struct Forward {
  Mix<T> mix;  // parameters: out_norm_weight, out_norm_bias
  const T *branch, *residual;
  const float* partial;
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
  RowSum row_sum(mix.lanes, shared);
  typename Kernel::Rows rows(shared + kRowSumBytes, shared + Kernel::kRows, at, op.tokens);
  add_near(mix, rows);
  rows.add_sums(op.partial, op.partial_stride);
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
    if (op.partial != nullptr) rows.take_sums(x);
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

void boundary_forward(const BoundaryForward& a, const Tensor& like) {
  const Operands given(a);
  DEEPFAST_CHECK(!a.norm_source || a.branch.data == nullptr || a.source_rstd != nullptr,
                 "boundary: expected source_rstd for a normalised state, got None");
  DEEPFAST_CHECK(
      a.out.data == nullptr || (a.out_rms == (a.out_mean == nullptr) && a.out_rstd != nullptr),
      "boundary: expected out_rstd, and out_mean or out_rms, beside out");
  const bool aligned = given.aligned &&
                       Alignment(a.storage, a.D).rows({a.branch, a.residual, a.x, a.out}) &&
                       Alignment(Storage::f32, a.D).rows({a.partial});
  const Device device(like);
  const auto bytes = [&](auto type, auto fast, auto chunks, int threads) {
    return ForwardKernel<decltype(type), fast, chunks>::bytes(given, threads);
  };
  const auto run = [&](auto type, auto fast, auto chunks, const Shape& shape) {
    using T = decltype(type);
    Forward<T> op{};
    op.mix = given.mix<T>(shape.lanes, aligned);
    op.mix.parameters[0] = given.out_norm_weight, op.mix.parameters[1] = given.out_norm_bias;
    set_rows(a.branch, op.branch, op.branch_stride);
    set_rows(a.residual, op.residual, op.residual_stride);
    set_rows(a.partial, op.partial, op.partial_stride);
    set_rows(a.x, op.x, op.x_stride);
    set_rows(a.out, op.out, op.out_stride);
    op.state = static_cast<T*>(a.states[a.k].data);
    op.source_rstd = floats(a.source_rstd);
    op.out_mean = floats(a.out_mean), op.out_rstd = floats(a.out_rstd);
    op.tokens = a.T;
    op.source_eps = static_cast<float>(a.source_eps), op.out_eps = static_cast<float>(a.out_eps);
    op.norm_source = a.norm_source, op.source_rms = a.source_rms;
    op.dropout = dropout_mask(a);
    launch(boundary_fwd_kernel<T, fast, chunks>, shape.grid, device.stream(), op);
  };
  dispatch_shape<ForwardKernel>(device, given, aligned, bytes, run);
}

}  // namespace

DEEPFAST_CUDA_OPS(m) { m.impl("boundary_forward", &boxed<BoundaryForward, boundary_forward>); }

}  // namespace deepfast
