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
// A thread's sums over tokens are in shared memory, where they cost no registers: four sums of
// channels (dnorm_weight, dnorm_bias, dout_norm_weight, dout_norm_bias) and one dot product for
// each pull. Blocks add up their threads' sums in a fixed order, and boundary_totals_kernel adds up
// those of the blocks. Weights per channel have a dot product per channel, too many for shared
// memory: boundary_dots_kernel.
//
// With K near states and P pulls, the pushed state and this row among them, a launch reads K + P +
// 3 rows and writes 3.
#include <array>

#include "boundary_sums.h"

namespace deepfast {
namespace {

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
template <bool kFast, class T>
DEEPFAST_DEVICE float pull(const Backward<T>& op, const Table& table, const Lane& at, int i,
                           const float (&g)[kRowChunks][kChunk],
                           const float (&z)[kRowChunks][kChunk], float (&u)[kRowChunks][kChunk]) {
  float dot = 0.0f;
#pragma unroll
  for (int c = 0; c < kRowChunks; ++c) {
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

// The layout of a block's shared memory.
template <class T, bool kFast>
struct Places {
  Table table, sums;
  float *all_sums, *all_dots;

  DEEPFAST_DEVICE Places(const Backward<T>& op, const Lane& at)
      : table(base(), rows(op), at.lane),
        sums(base() + table_bytes(op), kSums, threadIdx.x),
        all_sums(reinterpret_cast<float*>(base() + table_bytes(op))),
        all_dots(all_sums + (op.channel_sums ? Table::floats(kSums, blockDim.x) : 0)) {}
  // This thread's dot product with pull i.
  DEEPFAST_DEVICE float& dot(int i) const {
    return all_dots[i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)];
  }

 private:
  static DEEPFAST_DEVICE char* base() { return dynamic_shared() + kRowSumBytes; }
  static DEEPFAST_DEVICE int rows(const Backward<T>& op) { return kNear + op.mix.count + op.pulls; }
  static DEEPFAST_DEVICE int table_bytes(const Backward<T>& op) {
    return kFast ? Table::floats(rows(op), op.mix.lanes) * static_cast<int>(sizeof(float)) : 0;
  }
};

template <class T, bool kFast>
DEEPFAST_DEVICE void prepare(const Backward<T>& op, const Places<T, kFast>& in, const Lane& at) {
#pragma unroll 1
  for (int s = 0; s < kSums && op.channel_sums; ++s) {
    const float zero[kChunk] = {};
    for (int c = 0; c < kRowChunks; ++c) in.sums.put(s, c, zero);
  }
#pragma unroll 1
  for (int i = 0; op.dots && i < op.pulls; ++i) in.dot(i) = 0.0f;
  if (kFast) {
    fill(op.mix, in.table, at);
#pragma unroll 1
    for (int q = at.row_in_block(); q < op.pulls * kRowChunks; q += at.rows_per_block()) {
      float w[kChunk];
      pull_weight(op, at, q / kRowChunks, q % kRowChunks, w);
      in.table.put(kNear + op.mix.count + q / kRowChunks, q % kRowChunks, w);
    }
  }
  __syncthreads();
}

// The gradient of x through LN.
template <bool kFast, class T>
DEEPFAST_DEVICE void norm_gradient(const Backward<T>& op, const Places<T, kFast>& in,
                                   const Lane& at, RowsApart& row_sum, int64_t t, bool exists,
                                   const RowChunks<T>& own, float (&g)[kRowChunks][kChunk]) {
  const Mix<T>& mix = op.mix;
  RowChunks<T> dout, partial;
  if (kFast) dout = load_present(op.dout, op.dout_stride, t, at, exists);
  if (kEarly<T, kFast>) partial = load_present(op.partial, op.partial_stride, t, at, exists);
  const float mean = exists ? op.out_mean[t] : 0.0f, rstd = exists ? op.out_rstd[t] : 0.0f;
  float n[kRowChunks][kChunk];
  mix_near<kFast>(mix, in.table, at, t * mix.row_stride, exists, n);
  if (!kEarly<T, kFast>) partial = load_present(op.partial, op.partial_stride, t, at, exists);
  add_row(n, partial);
  if (mix.reads_own) add_state<kFast>(mix, in.table, at, kOwn, mix.k, own, n);
  DEEPFAST_EACH(c, i) n[c][i] = i < at.count(c) ? (n[c][i] - mean) * rstd : 0.0f;
  if (!kFast) dout = load_present(op.dout, op.dout_stride, t, at, exists);
  widen(dout, g);
  if (op.out_sums) add_sums(in.sums, 2, g, n);
  scale<kFast>(mix, in.table, at, 0, g);
  norm_backward(g, n, rstd, at, row_sum);
}

// u += W[l, k] * g_l for all pulls, and the dot products of g_l with z. `g` is that of the row
// itself.
template <bool kFast, class T>
DEEPFAST_DEVICE void pull_all(const Backward<T>& op, const Places<T, kFast>& in, const Lane& at,
                              int64_t t, bool exists, const RowChunks<T>& own,
                              float (&g)[kRowChunks][kChunk], float (&u)[kRowChunks][kChunk]) {
  constexpr int kGroup = kAtOnce<T, kFast>;
  float z[kRowChunks][kChunk];
  widen(own, z);
  scale<kFast>(op.mix, in.table, at, 1, z);
  shift<kFast>(op.mix, in.table, at, 2, z);
  // The row's own gradient is still in registers, in fp32.
  if (op.pulls_own) {
    const float dot = pull<kFast>(op, in.table, at, 0, g, z, u);
    if (op.dots) in.dot(0) += dot;
  }
#pragma unroll 1
  for (int i = op.pulls_own; i < op.pulls; i += kGroup) {
    RowChunks<T> grads[kGroup];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const bool there = i + j < op.pulls;
      const T* grad = op.grads + op.slots[there ? i + j : 0] * op.grads_stride;
      grads[j] = load_row(grad + t * op.grad_stride, at, exists && there);
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      if (i + j >= op.pulls) continue;
      widen(grads[j], g);
      const float dot = pull<kFast>(op, in.table, at, i + j, g, z, u);
      if (op.dots) in.dot(i + j) += dot;
    }
  }
}

// The sums and dot products of the block: those of its rows of threads, added up in order.
template <class T, bool kFast>
DEEPFAST_DEVICE void store_sums(const Backward<T>& op, const Places<T, kFast>& in, const Lane& at) {
  if (op.sums == nullptr) return;
  const int threads = blockDim.x, thread = threadIdx.x, lanes = at.lanes;
  float* out = op.sums + blockIdx.x * op.width;
  __syncthreads();
#pragma unroll 1
  for (int s = 0; s < kSums && op.channel_sums; ++s) {
#pragma unroll 1
    for (int d = thread; d < at.dim; d += threads) {
      const int chunk = d / kChunk, c = chunk >= lanes, lane = chunk & (lanes - 1);
      const float* p =
          in.all_sums + Table::floats(kSums, lane) + (s * kRowChunks + c) * kChunk + d % kChunk;
      float total = 0.0f;
#pragma unroll 4
      for (int r = 0; r < at.rows_per_block(); ++r) total += p[Table::floats(kSums, r * lanes)];
      out[s * at.dim + d] = total;
    }
  }
  if (op.channel_sums) out += kSums * at.dim;
  if (!op.dots) return;
#pragma unroll 1
  for (int i = thread / kWarp; i < op.pulls; i += threads / kWarp) {
    float total = 0.0f;
    for (int k = thread % kWarp; k < threads; k += kWarp) total += in.all_dots[i * threads + k];
    for (int s = kWarp / 2; s > 0; s /= 2) total += __shfl_xor_sync(0xffffffffu, total, s);
    if (thread % kWarp == 0) out[i] = total;
  }
}

template <class T, bool kFast>
__global__ void __launch_bounds__(kMostLanes)
    boundary_bwd_kernel(const __grid_constant__ Backward<T> op) {
  constexpr bool early = kEarly<T, kFast>;
  const Mix<T>& mix = op.mix;
  const Lane at(mix.dim, mix.lanes, kFast || mix.aligned);
  RowsApart row_sum(mix.lanes, dynamic_shared());
  const Places<T, kFast> in(op, at);
  prepare(op, in, at);
  const int64_t step = int64_t{gridDim.x} * at.rows_per_block();
  // Every thread of a block runs equally many rounds, because a sum over a row needs all of its
  // threads.
  for (int64_t first = int64_t{blockIdx.x} * at.rows_per_block(); first < op.tokens;
       first += step) {
    const int64_t t = first + at.row_in_block();
    const bool exists = t < op.tokens;
    const RowChunks<T> own =
        load_row(mix.states + mix.k * mix.slot_stride + t * mix.row_stride, at, exists);
    RowChunks<T> dx, pulled;
    if (early) dx = load_present(op.dx, op.dx_stride, t, at, exists);
    float g[kRowChunks][kChunk] = {}, u[kRowChunks][kChunk] = {};
    if (op.dout != nullptr) norm_gradient<kFast>(op, in, at, row_sum, t, exists, own, g);
    if (!early) dx = load_present(op.dx, op.dx_stride, t, at, exists);
    add_row(g, dx);
    // In place this is the slot of a later, dead state; the pushed state has been read above.
    store_row(op.grad + t * op.grad_stride, at, exists, g);
    if (early) pulled = load_present(op.pulled, op.pulled_stride, t, at, exists);
    pull_all<kFast>(op, in, at, t, exists, own, g, u);
    if (!early) pulled = load_present(op.pulled, op.pulled_stride, t, at, exists);
    add_row(u, pulled);
    float n[kRowChunks][kChunk];
    widen(own, n);
    if (op.state_sums) add_sums(in.sums, 0, u, n);
    scale<kFast>(mix, in.table, at, 1, u);
    if (op.norm_source) norm_backward(u, n, exists ? op.source_rstd[t] : 0.0f, at, row_sum);
    if (op.dresidual != nullptr) store_row(op.dresidual + t * op.dresidual_stride, at, exists, u);
    if (op.dbranch != nullptr) {
      drop_row(u, op.dropout, t, at);
      store_row(op.dbranch + t * op.dbranch_stride, at, exists, u);
    }
  }
  store_sums(op, in, at);
}

// The rows to pull, the row itself first.
template <class T>
void list_pulls(Backward<T>& op, Totals& totals, const Operands& given, const Indices& rows,
                const Indices& slots, const Tensor& grads, int64_t grad_slot) {
  for (const bool own : {true, false}) {
    for (size_t i = 0; i < rows.size(); ++i) {
      if ((rows[i] == given.k) != own) continue;
      const int64_t from = own ? grad_slot : slots[i];
      given.w.offset(rows[i], op.k);
      slot(grads, from);
      op.pulls_own |= own;
      op.slots[op.pulls] = static_cast<int32_t>(from);
      totals.rows[op.pulls] = op.rows[op.pulls] = static_cast<int32_t>(rows[i]);
      ++op.pulls;
    }
  }
}

// The destinations of the sums over tokens that the caller asked for.
Totals totals_of(const Operands& given, bool has_dout, int64_t pulls, const OptionalTensor& dweight,
                 const std::array<OptionalTensor, kSums>& channels) {
  Totals totals{};
  for (int s = 0; s < (has_dout ? kSums : 2); ++s) totals.out[s] = floats(channels[s], given.dim);
  totals.dweight = floats(dweight, given.w.rows * given.w.columns * given.w.width);
  totals.channel_sums = totals.state_sums() || totals.out_sums() ? kSums : 0;
  totals.pulls = totals.dweight != nullptr ? static_cast<int>(pulls) : 0;
  totals.dim = static_cast<int>(given.dim), totals.piece = given.w.width;
  totals.columns = given.w.columns, totals.k = given.k;
  return totals;
}

void boundary_backward(Tensor states, int64_t k, Indices near, Tensor weight,
                       OptionalTensor norm_weight, OptionalTensor norm_bias, bool norm_source,
                       OptionalTensor partial, OptionalTensor out_norm_weight,
                       OptionalTensor out_norm_bias, OptionalTensor source_rstd,
                       OptionalTensor out_mean, OptionalTensor out_rstd, double dropout_p,
                       OptionalTensor seed, OptionalTensor dx, OptionalTensor dout, Tensor grads,
                       int64_t grad_slot, Indices pull_rows, Indices pull_slots,
                       OptionalTensor pulled, OptionalTensor dbranch, OptionalTensor dresidual,
                       OptionalTensor dweight, OptionalTensor dnorm_weight,
                       OptionalTensor dnorm_bias, OptionalTensor dout_norm_weight,
                       OptionalTensor dout_norm_bias) {
  check_buffer(states);
  check_buffer(grads, states);
  const Operands given(states, k, near, weight, norm_weight, norm_bias, out_norm_weight,
                       out_norm_bias);
  const int64_t tokens = given.tokens, dim = given.dim, pulls = pull_rows.size();
  const Storage storage = given.storage;
  const Matrix partial_ = matrix(partial, storage, tokens, dim);
  const Matrix dx_ = matrix(dx, storage, tokens, dim), dout_ = matrix(dout, storage, tokens, dim);
  const Matrix pulled_ = matrix(pulled, storage, tokens, dim);
  const Matrix dbranch_ = matrix(dbranch, storage, tokens, dim);
  const Matrix dresidual_ = matrix(dresidual, storage, tokens, dim);
  float* const source_rstd_ = floats(source_rstd, tokens);
  float *const mean_ = floats(out_mean, tokens), *const rstd_ = floats(out_rstd, tokens);
  DEEPFAST_CHECK(dx.has_value() || dout.has_value(), "boundary: no gradient came in");
  DEEPFAST_CHECK(!norm_source || source_rstd.has_value(), "boundary: source_rstd is missing");
  DEEPFAST_CHECK(!dout.has_value() || (out_mean.has_value() && out_rstd.has_value()),
                 "boundary: out_mean or out_rstd is missing");
  DEEPFAST_CHECK(pull_rows.size() == pull_slots.size(), "boundary: expected ", pull_rows.size(),
                 " pull_slots, got ", pull_slots.size());
  DEEPFAST_CHECK(pulls <= kMost, "boundary: CUDA kernels pull at most ", kMost, " rows, got ",
                 pulls);
  given.w.offset(k, k);
  Totals totals = totals_of(given, dout.has_value(), pulls, dweight,
                            {dnorm_weight, dnorm_bias, dout_norm_weight, dout_norm_bias});
  const bool per_channel = given.w.width > 1, dots = totals.pulls > 0;

  const bool aligned =
      given.aligned && Alignment(storage, dim)
                           .slots(grads)
                           .rows({partial_, dx_, dout_, pulled_, dbranch_, dresidual_});
  const int lanes = row_lanes(dim);
  const Device device(states);
  const Shape shape(device, tokens, lanes, aligned, [&](int threads, bool fast) {
    const int64_t channels = totals.channel_sums > 0 ? Table::floats(kSums, threads) : 0;
    return kRowSumBytes + given.table(fast, pulls) +
           (channels + (dots && !per_channel ? pulls * threads : 0)) * kFloat;
  });
  std::optional<Tensor> sums;
  totals.blocks = shape.grid.blocks;
  dispatch(storage, shape.fast, [&](auto type, auto fast) {
    using T = decltype(type);
    // boundary_dots_kernel processes the pulls in full groups.
    const int64_t groups = (totals.pulls + kPulls - 1) / kPulls;
    totals.width = totals.channel_sums * dim + (per_channel ? groups * kPulls * dim : totals.pulls);
    if (totals.width > 0) sums = scratch(states, totals.blocks * totals.width);
    Backward<T> op{};
    op.mix = given.mix<T>(aligned);
    op.mix.parameters[0] = given.out_norm_weight;
    if (given.norm_weight != nullptr) op.mix.parameters[1] = given.norm_weight + k * dim;
    if (given.norm_bias != nullptr) op.mix.parameters[2] = given.norm_bias + k * dim;
    op.partial = static_cast<const T*>(partial_.data), op.partial_stride = partial_.row_stride;
    op.dx = static_cast<const T*>(dx_.data), op.dx_stride = dx_.row_stride;
    op.dout = static_cast<const T*>(dout_.data), op.dout_stride = dout_.row_stride;
    op.pulled = static_cast<const T*>(pulled_.data), op.pulled_stride = pulled_.row_stride;
    op.grads = static_cast<const T*>(slot(grads, 0).data);
    op.grads_stride = grads.stride(0), op.grad_stride = grads.stride(1);
    op.grad = static_cast<T*>(slot(grads, grad_slot).data);
    op.dbranch = static_cast<T*>(dbranch_.data), op.dbranch_stride = dbranch_.row_stride;
    op.dresidual = static_cast<T*>(dresidual_.data), op.dresidual_stride = dresidual_.row_stride;
    op.source_rstd = source_rstd_, op.out_mean = mean_, op.out_rstd = rstd_;
    op.weight = reinterpret_cast<const float*>(given.w.base);
    op.sums = sums.has_value() ? floats(*sums) : nullptr;
    op.width = totals.width, op.blocks = static_cast<int>(totals.blocks);
    op.tokens = tokens, op.columns = given.w.columns, op.k = k;
    op.norm_source = norm_source, op.channel_sums = totals.channel_sums > 0;
    op.state_sums = totals.state_sums(), op.out_sums = totals.out_sums();
    op.dots = dots && !per_channel;
    op.dropout = dropout_mask(seed, dropout_p);
    list_pulls(op, totals, given, pull_rows, pull_slots, grads, grad_slot);
    launch(boundary_bwd_kernel<T, fast>, shape.grid, device.stream(), op);
    if (dots && per_channel)
      launch(boundary_dots_kernel<T>,
             {shape.grid.blocks * groups, shape.grid.threads,
              int64_t{shape.grid.threads} * kRowValues * kFloat},
             device.stream(), op);
  });
  totals.partial = sums.has_value() ? floats(*sums) : nullptr;
  launch(boundary_totals_kernel,
         {(totals.width + kWarp - 1) / kWarp, kTotalWarps * kWarp, kTotalWarps * kWarp * kFloat},
         device.stream(), totals);
}

}  // namespace

DEEPFAST_CUDA_OPS(m) { m.impl("boundary_backward", TORCH_BOX(&boundary_backward)); }

}  // namespace deepfast
