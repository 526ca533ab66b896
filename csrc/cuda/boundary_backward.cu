// Backward through everything between two layers' matrix products, in one pass. With weights per
// channel, a second pass over the states and gradients computes the gradients of the weights.
//
//     g = dx + LN'(dout), kept for the states that pull it later
//     u = pulled + sum_l W[l, k] * g_l,   dW[l, k] = <g_l, z>
//     dresidual = norm'(u * norm_weight),     dbranch = dropout(dresidual)
//
// x is recomputed from the states (see boundary.h). A thread reads and writes only its own elements
// of a row, so g may overwrite the slot of a dead state: the pushed state has been read by then.
//
// The rows of the next operands and tokens are copied into shared memory while one is in work. A
// thread has sums over tokens: four of channels (dnorm_weight, dnorm_bias, dout_norm_weight,
// dout_norm_bias) and one dot product for each pull. Blocks add up their threads' sums in a fixed
// order, and boundary_totals_kernel adds up those of the blocks. Weights per channel have a dot
// product per channel, too many for shared memory: boundary_dots_kernel.
//
// With K near states and P pulls, the pushed state and this row among them, a launch reads K + P +
// 3 rows and writes 3.
#include "boundary_sums.h"

namespace deepfast {
namespace {

// Threads of a multiprocessor that hold their sums of channels in registers.
constexpr int kFastThreads = 256;

// W[rows[i], k], for each channel of a chunk.
template <class T>
DEEPFAST_DEVICE void pull_weight(const Backward<T>& op, const Lane& at, int i, int c,
                                 float (&w)[kChunk]) {
  const int64_t pair = op.rows[i] * op.columns + op.k;
  if (op.mix.per_channel) {
    load_chunk(op.weight + pair * op.mix.dim + at.channel(c), at.count(c), at.aligned, w);
    return;
  }
  const float all = op.weight[pair];
  for (int e = 0; e < kChunk; ++e) w[e] = all;
}

// u += W[rows[i], k] * g; returns this thread's part of <g, z>.
template <bool kFast, class T, int kChunks>
DEEPFAST_DEVICE float pull(const Backward<T>& op, const Table<kChunks>& table, const Lane& at,
                           int i, const float (&g)[kChunks][kChunk],
                           const float (&z)[kChunks][kChunk], float (&u)[kChunks][kChunk]) {
  float dot = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    float w[kChunk];
    if (kFast)
      table.get(kNear + op.mix.count + i, c, w);
    else
      pull_weight(op, at, i, c, w);
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      u[c][e] += w[e] * g[c][e];
      dot += g[c][e] * z[c][e];
    }
  }
  return dot;
}

// How the kernel runs, and the layout of a block's shared memory. At its end the block adds up the
// sums of channels in the memory of the rows or of the sums.
template <class T, bool kFast, int kChunks>
struct BackwardKernel {
  using Rows = RowQueue<T, kFast, kChunks>;
  using Sums = ChannelSums<kFast && kChunks * sizeof(T) <= 8, kChunks>;
  static constexpr int kThreads = kFast ? kFastThreads : kMostThreads<kChunks>;
  static constexpr int kRows = kRowSumBytes + kOperandBytes<T>;
  static constexpr int64_t kThreadBytes = Rows::kThreadBytes + Sums::kThreadBytes;
  static_assert(kThreadBytes >= kChunks * kChunk * 4, "room for the sums of the end");
  static int64_t bytes(const Operands& given, int64_t pulls, bool dots, int threads) {
    return kRows + threads * (kThreadBytes + (dots ? pulls : 0) * kFloat) +
           given.table<kChunks>(kFast, pulls);
  }
};

// A block's shared memory behind its queue.
template <class T, bool kFast, int kChunks>
struct Places {
  using Kernel = BackwardKernel<T, kFast, kChunks>;
  float* dots;
  Table<kChunks> table;

  DEEPFAST_DEVICE Places(const Backward<T>& op, const Lane& at, char* shared)
      : dots(reinterpret_cast<float*>(shared + Kernel::kRows +
                                      int64_t{blockDim.x} * Kernel::kThreadBytes)),
        table(dots + (op.dots ? op.pulls : 0) * static_cast<int>(blockDim.x),
              kNear + op.mix.count + op.pulls, at.lane) {}
  // This thread's dot product with pull i.
  DEEPFAST_DEVICE float& dot(int i) const {
    return dots[i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)];
  }
};

// The operands of a token, in the order in which the kernel takes them.
template <class T, class Rows>
DEEPFAST_DEVICE void add_operands(const Backward<T>& op, Rows& rows) {
  const Mix<T>& mix = op.mix;
  rows.add(mix.states + mix.k * mix.slot_stride, mix.row_stride);
  if (op.dout != nullptr) {
    add_near(mix, rows);
    rows.add_sums(op.partial, op.partial_stride);
    rows.add(op.dout, op.dout_stride);
  }
  rows.add(op.dx, op.dx_stride);
  for (int i = op.pulls_own; i < op.pulls; ++i)
    rows.add(op.grads + op.slots[i] * op.grads_stride, op.grad_stride);
  rows.add_sums(op.pulled, op.pulled_stride);
}

template <class T, bool kFast, int kChunks>
DEEPFAST_DEVICE void prepare(const Backward<T>& op, const Places<T, kFast, kChunks>& in,
                             const Lane& at) {
#pragma unroll 1
  for (int i = 0; op.dots && i < op.pulls; ++i) in.dot(i) = 0.0f;
  if (kFast) {
    fill(op.mix, in.table, at);
#pragma unroll 1
    for (int q = at.row_in_block(); q < op.pulls * kChunks; q += at.rows_per_block()) {
      float w[kChunk];
      pull_weight(op, at, q / kChunks, q % kChunks, w);
      in.table.put(kNear + op.mix.count + q / kChunks, q % kChunks, w);
    }
  }
  __syncthreads();
}

// The gradient of x through LN.
template <class T, bool kFast, int kChunks>
DEEPFAST_DEVICE void norm_gradient(const Backward<T>& op, const Places<T, kFast, kChunks>& in,
                                   const Lane& at, RowQueue<T, kFast, kChunks>& rows,
                                   RowSum& row_sum, const Moments& moments, bool exists,
                                   const RowChunks<T, kChunks>& own,
                                   typename BackwardKernel<T, kFast, kChunks>::Sums& sums,
                                   float (&g)[kChunks][kChunk]) {
  const Mix<T>& mix = op.mix;
  float n[kChunks][kChunk];
  mix_near(mix, in.table, at, rows, n);
  if (op.partial != nullptr) rows.take_sums(n);
  if (mix.reads_own) add_state<kFast>(mix, in.table, at, kOwn, mix.k, own, n);
  // Behind the end of a row dout is 0.
  DEEPFAST_EACH(c, i) n[c][i] = (n[c][i] - moments.mean) * moments.rstd;
  widen(rows.take(), g);
  if (op.out_sums && exists) sums.add(2, g, n);
  scale<kFast>(mix, in.table, at, 0, g);
  norm_backward(g, n, moments.rstd, at, row_sum, op.out_mean == nullptr);
}

// u += W[l, k] * g_l for all pulls, and the dot products of g_l with z. `g` is that of the row
// itself.
template <class T, bool kFast, int kChunks>
DEEPFAST_DEVICE void pull_all(const Backward<T>& op, const Places<T, kFast, kChunks>& in,
                              const Lane& at, RowQueue<T, kFast, kChunks>& rows, bool exists,
                              const RowChunks<T, kChunks>& own, float (&g)[kChunks][kChunk],
                              float (&u)[kChunks][kChunk]) {
  float z[kChunks][kChunk];
  widen(own, z);
  scale<kFast>(op.mix, in.table, at, 1, z);
  shift<kFast>(op.mix, in.table, at, 2, z);
#pragma unroll 1
  for (int i = 0; i < op.pulls; ++i) {
    // The row's own gradient is still in registers, in fp32.
    if (i > 0 || !op.pulls_own) widen(rows.take(), g);
    const float dot = pull<kFast>(op, in.table, at, i, g, z, u);
    if (op.dots && exists) in.dot(i) += dot;
  }
}

// The sums and dot products of the block: those of its rows of threads, added up in order.
template <class T, bool kFast, int kChunks>
DEEPFAST_DEVICE void store_sums(const Backward<T>& op, const Places<T, kFast, kChunks>& in,
                                const typename BackwardKernel<T, kFast, kChunks>::Sums& sums,
                                const Lane& at, char* scratch) {
  if (op.sums == nullptr) return;
  const int threads = blockDim.x, thread = threadIdx.x;
  float* out = op.sums + blockIdx.x * op.width;
  if (op.channel_sums) {
    sums.store(at, scratch, out);
    out += kSums * at.dim;
  }
  if (!op.dots) return;
  __syncthreads();
#pragma unroll 1
  for (int i = thread / kWarp; i < op.pulls; i += threads / kWarp) {
    float total = 0.0f;
    for (int k = thread % kWarp; k < threads; k += kWarp) total += in.dots[i * threads + k];
    for (int s = kWarp / 2; s > 0; s /= 2) total += __shfl_xor_sync(0xffffffffu, total, s);
    if (thread % kWarp == 0) out[i] = total;
  }
}

template <class T, bool kFast, int kChunks>
__global__ void __launch_bounds__(BackwardKernel<T, kFast, kChunks>::kThreads, 1)
    boundary_bwd_kernel(const __grid_constant__ Backward<T> op) {
  using Kernel = BackwardKernel<T, kFast, kChunks>;
  const Mix<T>& mix = op.mix;
  const Lane at(mix.dim, mix.lanes, kFast || mix.aligned);
  char* const shared = dynamic_shared();
  RowSum row_sum(mix.lanes, shared);
  typename Kernel::Rows rows(shared + kRowSumBytes, shared + Kernel::kRows, at, op.tokens);
  add_operands(op, rows);
  rows.start();
  const Places<T, kFast, kChunks> in(op, at, shared);
  typename Kernel::Sums sums(shared + Kernel::kRows +
                             int64_t{blockDim.x} * Kernel::Rows::kThreadBytes);
  prepare(op, in, at);
  const int64_t step = int64_t{gridDim.x} * at.rows_per_block();
  const auto moments_of = [&](int64_t t) {
    if (op.dout == nullptr || t >= op.tokens) return Moments{0.0f, 0.0f};
    return Moments{op.out_mean == nullptr ? 0.0f : op.out_mean[t], op.out_rstd[t]};
  };
  const auto source_rstd_of = [&](int64_t t) {
    return op.norm_source && t < op.tokens ? op.source_rstd[t] : 0.0f;
  };
  int64_t t = int64_t{blockIdx.x} * at.rows_per_block() + at.row_in_block();
  Moments next = moments_of(t);
  float next_rstd = source_rstd_of(t);
  // Every thread of a block runs equally many rounds, because a sum over a row needs all of its
  // threads.
#pragma unroll 1
  for (int64_t first = int64_t{blockIdx.x} * at.rows_per_block(); first < op.tokens;
       first += step, t += step) {
    const bool exists = t < op.tokens;
    const Moments moments = next;
    const float source_rstd = next_rstd;
    next = moments_of(t + step), next_rstd = source_rstd_of(t + step);
    const auto own = rows.take();
    float g[kChunks][kChunk] = {}, u[kChunks][kChunk] = {};
    if (op.dout != nullptr) norm_gradient(op, in, at, rows, row_sum, moments, exists, own, sums, g);
    if (op.dx != nullptr) add_row(g, rows.take());
    // In place this is the slot of a later, dead state; the pushed state has been read above.
    store_row(op.grad + t * op.grad_stride, at, exists, g);
    pull_all(op, in, at, rows, exists, own, g, u);
    if (op.pulled != nullptr) rows.take_sums(u);
    float n[kChunks][kChunk];
    widen(own, n);
    if (op.state_sums && exists) sums.add(0, u, n);
    scale<kFast>(mix, in.table, at, 1, u);
    if (op.norm_source) norm_backward(u, n, source_rstd, at, row_sum, op.source_rms);
    if (op.dresidual != nullptr) store_row(op.dresidual + t * op.dresidual_stride, at, exists, u);
    if (op.dbranch != nullptr) {
      drop_row(u, op.dropout, t, at);
      store_row(op.dbranch + t * op.dbranch_stride, at, exists, u);
    }
  }
  rows.end();
  store_sums(op, in, sums, at, shared + Kernel::kRows);
}

// The rows to pull, the row itself first.
template <class T>
void fill_pulls(Backward<T>& op, Totals& totals, const BoundaryBackward& a) {
  for (const bool own : {true, false}) {
    for (int64_t i = 0; i < a.pull_rows.count; ++i) {
      if ((a.pull_rows[i] == a.k) != own) continue;
      op.pulls_own |= own;
      op.slots[op.pulls] = static_cast<int32_t>(own ? a.grad_slot : a.pull_slots[i]);
      totals.rows[op.pulls] = op.rows[op.pulls] = static_cast<int32_t>(a.pull_rows[i]);
      ++op.pulls;
    }
  }
}

// The destinations of the sums over tokens that the caller asked for.
Totals totals_of(const BoundaryBackward& a) {
  Totals totals{};
  totals.out[0] = floats(a.dnorm_weight), totals.out[1] = floats(a.dnorm_bias);
  if (a.dout.data != nullptr)
    totals.out[2] = floats(a.dout_norm_weight), totals.out[3] = floats(a.dout_norm_bias);
  totals.dweight = floats(a.dweight.data);
  totals.channel_sums = totals.state_sums() || totals.out_sums() ? kSums : 0;
  totals.pulls = totals.dweight != nullptr ? static_cast<int>(a.pull_rows.count) : 0;
  totals.dim = static_cast<int>(a.D), totals.piece = a.weight.width;
  totals.columns = a.R, totals.k = a.k;
  return totals;
}

void boundary_backward(const BoundaryBackward& a, const Tensor& like) {
  const Operands given(a);
  const int64_t dim = a.D, pulls = a.pull_rows.count;
  DEEPFAST_CHECK(a.dx.data != nullptr || a.dout.data != nullptr,
                 "boundary: expected dx or dout, got neither");
  DEEPFAST_CHECK(!a.norm_source || a.source_rstd != nullptr,
                 "boundary: expected source_rstd for a normalised state, got None");
  DEEPFAST_CHECK(
      a.dout.data == nullptr || (a.out_rms == (a.out_mean == nullptr) && a.out_rstd != nullptr),
      "boundary: expected out_rstd, and out_mean or out_rms, beside dout");
  DEEPFAST_CHECK(pulls == a.pull_slots.count, "boundary: expected ", pulls,
                 " pull_slots, one for each of pull_rows, got ", a.pull_slots.count);
  DEEPFAST_CHECK(pulls <= kMost, "boundary: CUDA kernels: expected at most ", kMost,
                 " pull_rows, got ", pulls);
  Totals totals = totals_of(a);
  const bool per_channel = a.weight.per_channel, dots = totals.pulls > 0;

  // boundary_dots_kernel processes the pulls in full groups.
  const int64_t groups = (totals.pulls + kPulls - 1) / kPulls;
  totals.width = totals.channel_sums * dim + (per_channel ? groups * kPulls * dim : totals.pulls);
  const bool aligned =
      given.aligned &&
      Alignment(a.storage, dim).slots(a.grads).rows({a.dx, a.dout, a.dbranch, a.dresidual}) &&
      Alignment(Storage::f32, dim).rows({a.partial, a.pulled});
  const Device device(like);
  const auto bytes = [&](auto type, auto fast, auto chunks, int threads) {
    return BackwardKernel<decltype(type), fast, chunks>::bytes(given, pulls, dots && !per_channel,
                                                               threads);
  };
  std::optional<Tensor> sums;
  const auto run = [&](auto type, auto fast, auto chunks, const Shape& shape) {
    using T = decltype(type);
    totals.blocks = shape.grid.blocks;
    if (totals.width > 0) sums = scratch(like, totals.blocks * totals.width);
    Backward<T> op{};
    op.mix = given.mix<T>(shape.lanes, aligned);
    op.mix.parameters[0] = given.out_norm_weight;
    if (given.norm_weight != nullptr) op.mix.parameters[1] = given.norm_weight + a.k * dim;
    if (given.norm_bias != nullptr) op.mix.parameters[2] = given.norm_bias + a.k * dim;
    set_rows(a.partial, op.partial, op.partial_stride);
    set_rows(a.dx, op.dx, op.dx_stride);
    set_rows(a.dout, op.dout, op.dout_stride);
    set_rows(a.pulled, op.pulled, op.pulled_stride);
    set_rows(a.dbranch, op.dbranch, op.dbranch_stride);
    set_rows(a.dresidual, op.dresidual, op.dresidual_stride);
    set_rows(a.grads[a.grad_slot], op.grad, op.grad_stride);
    op.grads = static_cast<const T*>(a.grads.data), op.grads_stride = a.grads.slot_stride;
    op.source_rstd = floats(a.source_rstd);
    op.out_mean = floats(a.out_mean), op.out_rstd = floats(a.out_rstd);
    op.weight = floats(a.weight.data), op.columns = a.R, op.k = a.k;
    op.sums = sums.has_value() ? floats(*sums) : nullptr;
    op.width = totals.width, op.blocks = static_cast<int>(totals.blocks);
    op.tokens = a.T, op.norm_source = a.norm_source, op.source_rms = a.source_rms;
    op.channel_sums = totals.channel_sums > 0;
    op.state_sums = totals.state_sums(), op.out_sums = totals.out_sums();
    op.dots = dots && !per_channel;
    op.dropout = dropout_mask(a);
    fill_pulls(op, totals, a);
    launch(boundary_bwd_kernel<T, fast, chunks>, shape.grid, device.stream(), op);
    if (dots && per_channel)
      launch(boundary_dots_kernel<T, chunks>,
             {shape.grid.blocks * groups, shape.grid.threads,
              int64_t{shape.grid.threads} * chunks * kChunk * kFloat},
             device.stream(), op);
  };
  dispatch_shape<BackwardKernel>(device, given, aligned, bytes, run);
  totals.partial = sums.has_value() ? floats(*sums) : nullptr;
  launch(boundary_totals_kernel,
         {(totals.width + kWarp - 1) / kWarp, kTotalWarps * kWarp, kTotalWarps * kWarp * kFloat},
         device.stream(), totals);
}

}  // namespace

DEEPFAST_CUDA_OPS(m) { m.impl("boundary_backward", &boxed<BoundaryBackward, boundary_backward>); }

}  // namespace deepfast
