// Depth mixing over a list of separate tensors: the functional form, without a history's buffer.
//
//     out = sum_k w_k z_k,  z_k = n_k * norm_weight_k + norm_bias_k
//     n_k = LN(source_k) or source_k
//
//     dsource_k = LN'(w_k norm_weight_k dout),    with G_k = sum_t dout n_k and S = sum_t dout:
//     dnorm_weight_k = w_k G_k,   dnorm_bias_k = w_k S,
//     dw_k = G_k norm_weight_k + S norm_bias_k  (its sum if scalar)
//
// Forward: a row's lanes (see row.h) hold the rows of two tokens and go through the sources in
// order. Meanwhile the next sources are copied into shared memory, 64 KB in flight on a
// multiprocessor. Two rows share each read of the norm weights. These come from L1 and L2 with 8
// bytes a value, beside 2 bytes of a source: more than L1 could deliver for one row at a time. (K +
// 1) T D values of memory.
//
// Backward: a block has one source and one of several groups of rows; G_k and S stay in registers
// until its end. Blocks of one group are neighbours. Their K reads of a row of dout are then close
// in time, and all but the first come from L2: (2 K + 1) T D values of memory. Two sources a block
// would read a quarter less from L2, but take 32 more registers of a thread.
//
// Wang et al.: Learning Deep Transformer Models for Machine Translation, ACL 2019, Eq. 8.
#include <algorithm>

#include "op.h"
#include "row_ring.h"

namespace deepfast {
namespace {

// Tensors of one launch: their pointers and strides are kernel arguments, which take at most 4 KB.
constexpr int kSources = 120;

constexpr int kPair = 2;

struct Forward {
  Matrix source[kSources];
  const float *weight, *norm_weight, *norm_bias;
  float *mean, *rstd;  // (K, T), or null without norm
  float* total;        // (T, D) between the launches of a long list
  Matrix out;
  int64_t tokens;
  int sources, dim, lanes;
  float eps;
  bool per_channel, first, last;
};

// Two rows at a time, of 16-bit values two stages ahead; of fp32, twice as long, one.
template <class T, int kChunks, bool kAligned>
using RowPairs = RowRing<T, kChunks, kPair, sizeof(T) == 4 ? 2 : 3, kAligned>;

// Loops over the rows of the pair, unrolled.
#define EACH_ROW(r) _Pragma("unroll") for (int r = 0; r < kPair; ++r)
#define EACH_OF_PAIR(r, i) EACH_ROW(r) _Pragma("unroll") for (int i = 0; i < kChunk; ++i)

// normalise() of row.h for a pair of rows, whose sums are computed together. Values behind the end
// of a row are undefined.
template <int kChunks>
DEEPFAST_DEVICE void normalise_pair(float (&v)[kPair][kChunks][kChunk], const Lane& at,
                                    RowSum& row_sum, float eps, Moments (&moments)[kPair]) {
  float rough[kPair] = {}, sums[2 * kPair] = {};
  EACH_ROW(r) DEEPFAST_EACH(c, i) rough[r] += v[r][c][i];
  row_sum(rough);
  EACH_ROW(r) {
    rough[r] *= at.one_by_dim;
    DEEPFAST_EACH(c, i) {
      if (at.has(c, i)) v[r][c][i] -= rough[r];
      sums[r] += v[r][c][i];
      sums[kPair + r] += v[r][c][i] * v[r][c][i];
    }
  }
  row_sum(sums);
  EACH_ROW(r) {
    const float rest = sums[r] * at.one_by_dim;
    const float variance = fmaxf(sums[kPair + r] * at.one_by_dim - rest * rest, 0.0f);
    const float rstd = reciprocal_root(variance + eps);
    DEEPFAST_EACH(c, i) v[r][c][i] = (v[r][c][i] - rest) * rstd;
    moments[r] = {rough[r] + rest, rstd};
  }
}

// A thread's chunk of a row of a (K, D) parameter; undefined values behind the end of the row.
DEEPFAST_DEVICE void load_parameter(const float* p, int row, const Lane& at, int c,
                                    float (&v)[kChunk]) {
  const int channel = at.aligned && at.count(c) <= 0 ? 0 : at.channel(c);
  // For at most kSources rows, so 32 bits hold an offset.
  load_chunk(p + (row * at.dim + channel), at.aligned ? kChunk : at.count(c), at.aligned, v);
}

// `kAffine`: both norm_weight and norm_bias are given.
template <class T, int kChunks, bool kAligned, bool kAffine>
__global__ void __launch_bounds__(kMostThreads<kChunks>, 1)
    depth_mix_fwd_kernel(const __grid_constant__ Forward op) {
  const Lane at(op.dim, op.lanes, kAligned);
  RowSum row_sum(op.lanes, dynamic_shared());
  using Pairs = RowPairs<T, kChunks, kAligned>;
  Pairs pairs(dynamic_shared() + kRowSumBytes, at);
  // Rows behind the last one repeat it: they are not stored, and their moments are the same.
  const int last = static_cast<int>(op.tokens) - 1;
  const int t0 = static_cast<int>(blockIdx.x) * kPair * at.rows_per_block() + at.row_in_block();
  const int t1 = t0 + at.rows_per_block();
  const bool exists[kPair] = {t0 <= last, t1 <= last};
  const int t[kPair] = {exists[0] ? t0 : last, exists[1] ? t1 : last};
  const auto ask = [&](int k) {
    if (k < op.sources) {
      const Matrix source = op.source[k];
      EACH_ROW(r) pairs.ask(r, static_cast<const T*>(source.data) + t[r] * source.row_stride, true);
    }
    pairs.asked();
  };
  for (int k = 0; k < Pairs::kAhead; ++k) ask(k);
  float sum[kPair][kChunks][kChunk] = {};
  if (!op.first) EACH_ROW(r) load_row(op.total + int64_t{t[r]} * op.dim, at, true, sum[r]);
#pragma unroll 1
  for (int k = 0; k < op.sources; ++k) {
    ask(k + Pairs::kAhead);
    const float weight = op.per_channel ? 0.0f : op.weight[k];
    pairs.wait();
    float v[kPair][kChunks][kChunk];
    EACH_ROW(r) widen(pairs.take(r), v[r]);
    pairs.taken();
    if (op.mean != nullptr) {
      Moments moments[kPair];
      normalise_pair(v, at, row_sum, op.eps, moments);
      EACH_ROW(r) if (at.lane == 0) {
        op.mean[k * op.tokens + t[r]] = moments[r].mean;
        op.rstd[k * op.tokens + t[r]] = moments[r].rstd;
      }
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float p[kChunk], q[kChunk];
      if constexpr (kAffine) {
        load_parameter(op.norm_weight, k, at, c, p);
        load_parameter(op.norm_bias, k, at, c, q);
        EACH_OF_PAIR(r, i) v[r][c][i] = v[r][c][i] * p[i] + q[i];
      } else {
        if (op.norm_weight != nullptr) {
          load_parameter(op.norm_weight, k, at, c, p);
          EACH_OF_PAIR(r, i) v[r][c][i] *= p[i];
        }
        if (op.norm_bias != nullptr) {
          load_parameter(op.norm_bias, k, at, c, p);
          EACH_OF_PAIR(r, i) v[r][c][i] += p[i];
        }
      }
      if (op.per_channel) {
        load_parameter(op.weight, k, at, c, p);
        EACH_OF_PAIR(r, i) sum[r][c][i] += p[i] * v[r][c][i];
      } else {
        EACH_OF_PAIR(r, i) sum[r][c][i] += weight * v[r][c][i];
      }
    }
  }
  wait_copies<0>();
  EACH_ROW(r) {
    if (op.last)
      store_row(static_cast<T*>(op.out.data) + t[r] * op.out.row_stride, at, exists[r], sum[r]);
    else
      store_row(op.total + int64_t{t[r]} * op.dim, at, exists[r], sum[r]);
  }
}

struct Backward {
  Matrix source[kSources], dsource[kSources];
  const float *weight, *norm_weight, *mean, *rstd;
  Matrix dout;
  float* partial;  // (groups, partial_rows, D), or null: G of every source of the list, then S
  int64_t tokens;
  int partial_rows, first, sources, dim, lanes;
  bool per_channel, need_dsource;
};

template <class T, int kChunks, bool kAligned>
__global__ void __launch_bounds__(kMostThreads<kChunks>, 1)
    depth_mix_bwd_kernel(const __grid_constant__ Backward op) {
  const Lane at(op.dim, op.lanes, kAligned);
  RowSum row_sum(op.lanes, dynamic_shared());
  using Pairs = RowPairs<T, kChunks, kAligned>;
  Pairs pairs(dynamic_shared() + kRowSumBytes, at);
  const int k = blockIdx.x % op.sources, group = blockIdx.x / op.sources;
  const int tokens = static_cast<int>(op.tokens), first = group * at.rows_per_block();
  const int step = static_cast<int>(gridDim.x) / op.sources * at.rows_per_block();
  const Matrix source = op.source[k], dsource = op.dsource[k];
  const bool norm = op.mean != nullptr, need_source = norm || op.partial != nullptr;
  const float *mean = op.mean + k * op.tokens, *rstd = op.rstd + k * op.tokens;
  // The token of the current row, and that of the next row to copy.
  int t = first + at.row_in_block(), t_ask = t;
  const T* p_source = static_cast<const T*>(source.data) + t * source.row_stride;
  const T* p_dout = static_cast<const T*>(op.dout.data) + t * op.dout.row_stride;
  T* p_dsource = static_cast<T*>(dsource.data) + t * dsource.row_stride;
  const auto ask = [&] {
    pairs.ask(0, p_source, t_ask < tokens && need_source);
    pairs.ask(1, p_dout, t_ask < tokens);
    pairs.asked();
    p_source += step * source.row_stride, p_dout += step * op.dout.row_stride, t_ask += step;
  };
  for (int i = 0; i < Pairs::kAhead; ++i) ask();
  Moments next = {0.0f, 0.0f};
  if (norm && t < tokens) next = {mean[t], rstd[t]};
  // weight * norm_weight.
  float w[kChunks][kChunk];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    float norm_weight[kChunk];
    if (op.per_channel) load_parameter(op.weight, k, at, c, w[c]);
    if (op.norm_weight != nullptr) load_parameter(op.norm_weight, k, at, c, norm_weight);
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      w[c][i] = (op.per_channel ? w[c][i] : op.weight[k]) *
                (op.norm_weight != nullptr ? norm_weight[i] : 1.0f);
  }
  float gn[1][kChunks][kChunk] = {}, g[1][kChunks][kChunk] = {};
  // Every thread of a block runs equally many rounds, because a sum over a row needs all of its
  // threads.
#pragma unroll 1
  for (int begin = first; begin < tokens; begin += step, t += step) {
    const bool exists = t < tokens;
    ask();
    const Moments moments = next;
    if (norm && t + step < tokens) next = {mean[t + step], rstd[t + step]};
    pairs.wait();
    float n[kChunks][kChunk], d[kChunks][kChunk];
    widen(pairs.take(0), n);
    widen(pairs.take(1), d);
    pairs.taken();
    // Behind the end of a row n is undefined and d is 0.
    if (norm) DEEPFAST_EACH(c, i) n[c][i] = (n[c][i] - moments.mean) * moments.rstd;
    if (exists) {
      DEEPFAST_EACH(c, i) {
        gn[0][c][i] += d[c][i] * n[c][i];
        g[0][c][i] += d[c][i];
      }
    }
    if (!op.need_dsource) continue;
    DEEPFAST_EACH(c, i) d[c][i] *= w[c][i];
    if (norm) {
      // norm_backward() of row.h, with undefined values behind the end of the row.
      float sums[2] = {0.0f, 0.0f};
      DEEPFAST_EACH(c, i) sums[0] += d[c][i], sums[1] += d[c][i] * n[c][i];
      row_sum(sums);
      const float offset = sums[0] * at.one_by_dim, slope = sums[1] * at.one_by_dim;
      DEEPFAST_EACH(c, i) d[c][i] = moments.rstd * (d[c][i] - offset - n[c][i] * slope);
    }
    store_row(p_dsource, at, exists, d);
    p_dsource += step * dsource.row_stride;
  }
  wait_copies<0>();
  if (op.partial == nullptr) return;
  // All pairs have been read, so their shared memory is free.
  float* scratch = reinterpret_cast<float*>(dynamic_shared() + kRowSumBytes);
  float* partial = op.partial + int64_t{group} * op.partial_rows * op.dim;
  store_channel_sums(gn, at, scratch, partial + int64_t{op.first + k} * op.dim);
  // S depends on dout alone: only the first source of the list writes it.
  if (op.first + k == 0)
    store_channel_sums(g, at, scratch, partial + int64_t{op.partial_rows - 1} * op.dim);
}

static_assert(sizeof(Forward) <= 4096 && sizeof(Backward) <= 4096, "arguments of a kernel");

struct Gradients {
  const float* sums;  // (K + 1, D): G of every source, then S
  const float *weight, *norm_weight, *norm_bias;
  float *dweight, *dnorm_weight, *dnorm_bias;
  int64_t sources;
  int dim;
  bool per_channel;
};

constexpr int kGradientThreads = 256;

// One block for each source.
__global__ void __launch_bounds__(kGradientThreads) depth_mix_gradients_kernel(const Gradients op) {
  RowSum row_sum(blockDim.x, dynamic_shared());
  const int64_t first = int64_t{blockIdx.x} * op.dim;
  float total[1] = {0.0f};
  for (int d = threadIdx.x; d < op.dim; d += blockDim.x) {
    const float gn = op.sums[first + d], g = op.sums[op.sources * op.dim + d];
    const float w = op.weight[op.per_channel ? first + d : int64_t{blockIdx.x}];
    if (op.dnorm_weight != nullptr) op.dnorm_weight[first + d] = w * gn;
    if (op.dnorm_bias != nullptr) op.dnorm_bias[first + d] = w * g;
    float dw = op.norm_weight == nullptr ? gn : gn * op.norm_weight[first + d];
    if (op.norm_bias != nullptr) dw += g * op.norm_bias[first + d];
    if (op.per_channel && op.dweight != nullptr) op.dweight[first + d] = dw;
    total[0] += dw;
  }
  if (op.per_channel || op.dweight == nullptr) return;
  row_sum(total);
  if (threadIdx.x == 0) op.dweight[blockIdx.x] = total[0];
}

// How threads hold a row of the sources, and what all launches of a long list share.
struct Rows {
  int64_t tokens, dim;
  bool aligned;
  int chunks, lanes, threads, rows;

  // rows: further matrices of the call.
  template <class Launch>
  Rows(const Launch& a, std::initializer_list<Matrices> lists, const Matrix& row)
      : tokens(a.T), dim(a.D) {
    check_dim(dim);
    DEEPFAST_CHECK(tokens < int64_t{1} << 29, "depth_mix: expected fewer than 2^29 tokens, got ",
                   tokens);
    DEEPFAST_CHECK(!a.norm || (a.mean != nullptr && a.rstd != nullptr),
                   "depth_mix: expected mean and rstd with norm, got None");
    Alignment found(a.storage, dim);
    found.values({a.weight.per_channel ? a.weight.data : nullptr, a.norm_weight, a.norm_bias});
    for (const Matrices& list : lists)
      for (int64_t k = 0; k < list.count; ++k) found.rows({list[k]});
    aligned = found.rows({row});
    chunks = row_chunks(dim, aligned), lanes = row_lanes(dim, chunks);
    threads = row_threads(lanes), rows = threads / lanes;
  }
  // Row `first` of a parameter with `width` values a row.
  static float* from(void* p, int64_t first, int64_t width) {
    return p == nullptr ? nullptr : floats(p) + first * width;
  }
  // Fills an argument struct for the sources from `first` on; returns their number.
  template <class Launch, class Op>
  int fill(const Launch& a, Op& op, int64_t first) const {
    op.sources = static_cast<int>(std::min<int64_t>(kSources, a.K - first));
    std::copy_n(a.sources.data + first, op.sources, op.source);
    op.weight = from(a.weight.data, first, a.weight.width);
    op.norm_weight = from(a.norm_weight, first, dim);
    op.mean = from(a.norm ? a.mean : nullptr, first, tokens);
    op.rstd = from(a.norm ? a.rstd : nullptr, first, tokens);
    op.tokens = tokens, op.dim = static_cast<int>(dim), op.lanes = lanes;
    op.per_channel = a.weight.per_channel;
    return op.sources;
  }
};

void depth_mix_forward(const DepthMixForward& a, const Tensor& like) {
  const Rows in(a, {a.sources}, a.out);
  const Device device(like);
  std::optional<Tensor> total;
  if (a.K > kSources) total = scratch(like, a.T * a.D);
  const int64_t blocks = (a.T + kPair * in.rows - 1) / (kPair * in.rows);
  dispatch_rows(a.storage, in.aligned, in.chunks, [&](auto type, auto aligned, auto chunks) {
    using T = decltype(type);
    const auto kernel = aligned && a.norm_weight != nullptr && a.norm_bias != nullptr
                            ? depth_mix_fwd_kernel<T, chunks, aligned, aligned>
                            : depth_mix_fwd_kernel<T, chunks, aligned, false>;
    const int64_t shared = kRowSumBytes + in.threads * RowPairs<T, chunks, aligned>::kThreadBytes;
    for (int64_t first = 0; first < a.K; first += kSources) {
      Forward op{};
      const int sources_here = in.fill(a, op, first);
      op.norm_bias = in.from(a.norm_bias, first, in.dim);
      op.total = total.has_value() ? floats(*total) : nullptr;
      op.out = a.out;
      op.eps = static_cast<float>(a.eps);
      op.first = first == 0, op.last = first + sources_here == a.K;
      launch(kernel, {blocks, in.threads, shared}, device.stream(), op);
    }
  });
}

void depth_mix_backward(const DepthMixBackward& a, const Tensor& like) {
  const Rows in(a, {a.sources, a.dsources}, a.dout);
  // Either all sources need a gradient or none does.
  DEEPFAST_CHECK(a.dsources.count == 0 || a.dsources.count == a.K, "depth_mix: expected ", a.K,
                 " dsources or none, got ", a.dsources.count);
  const bool sums =
      a.dweight.data != nullptr || a.dnorm_weight != nullptr || a.dnorm_bias != nullptr;
  if (!sums && a.dsources.count == 0) return;
  const Device device(like);
  // No more blocks than run at once, shared evenly by the sources of a launch.
  const int64_t together = std::min<int64_t>(kSources, a.K);
  const int64_t tiles = (in.tokens + in.rows - 1) / in.rows;
  const int resident = in.chunks == 2 ? kMostThreads<2> : kMostThreads<3>;
  const int64_t groups =
      std::max<int64_t>(1, device.blocks(together * tiles, resident / in.threads) / together);
  std::optional<Tensor> partial;
  if (sums) partial = scratch(like, groups * (a.K + 1) * in.dim);
  dispatch_rows(a.storage, in.aligned, in.chunks, [&](auto type, auto aligned, auto chunks) {
    using T = decltype(type);
    using Pairs = RowPairs<T, chunks, aligned>;
    const auto kernel = depth_mix_bwd_kernel<T, chunks, aligned>;
    const int64_t shared = kRowSumBytes + in.threads * Pairs::kThreadBytes;
    static_assert(Pairs::kThreadBytes >= chunks * kChunk * 4, "room for the sums of the end");
    for (int64_t first = 0; first < a.K; first += kSources) {
      Backward op{};
      const int sources_here = in.fill(a, op, first);
      op.need_dsource = a.dsources.count > 0;
      if (op.need_dsource) std::copy_n(a.dsources.data + first, sources_here, op.dsource);
      op.dout = a.dout;
      op.partial = sums ? floats(*partial) : nullptr;
      op.partial_rows = static_cast<int>(a.K + 1), op.first = static_cast<int>(first);
      launch(kernel, {groups * sources_here, in.threads, shared}, device.stream(), op);
    }
  });
  if (!sums) return;
  const Tensor totals = scratch(like, (a.K + 1) * in.dim);
  sum_partials(device, floats(*partial), groups, 1, a.K + 1, in.dim,
               Sums{{floats(totals)}, {in.dim}});
  launch(depth_mix_gradients_kernel, {a.K, kGradientThreads, kRowSumBytes}, device.stream(),
         Gradients{floats(totals), floats(a.weight.data), floats(a.norm_weight),
                   floats(a.norm_bias), floats(a.dweight.data), floats(a.dnorm_weight),
                   floats(a.dnorm_bias), a.K, static_cast<int>(in.dim), a.weight.per_channel});
}

}  // namespace

DEEPFAST_CUDA_OPS(m) {
  m.impl("depth_mix_forward", &boxed<DepthMixForward, depth_mix_forward>);
  m.impl("depth_mix_backward", &boxed<DepthMixBackward, depth_mix_backward>);
}

}  // namespace deepfast
