// What forward and backward of a boundary share: a row's sum over the near states, with
// coefficients in shared memory, and the choice of blocks.
//
//     x = S + sum over near j of c_j * n_j
//     c_j = W[k, j] * norm_weight_j,  S = sum W[k, j] * norm_bias_j
//
// A block processes many rows. It computes c and S once, in the layout in which its threads hold a
// row. Each channel of a state then costs one product, with scalar and per-channel weights alike.
#pragma once

#include <algorithm>
#include <type_traits>

#include "op.h"

namespace deepfast {
namespace {

// Blocks are large, so the warps of a row wait for each other only, not for the whole block.
using RowsApart = RowSums<true>;

// The most states or rows in one list.
constexpr int kMost = 64;

// Most rows are aligned and narrow enough for the table: kernels with kFast. Other rows run in an
// instance of the same kernels without kFast, so they cost the fast ones no registers.
//
// States or gradients of a row whose loads are in flight at a time:
template <class T, bool kFast>
constexpr int kAtOnce = !kFast           ? 1
                        : sizeof(T) == 2 ? 4
                                         : 2;
// Whether there are enough registers to load partial, dx, dout and pulled before the loop over the
// states. The loop then hides their latency.
template <class T, bool kFast>
constexpr bool kEarly = kFast && sizeof(T) == 2;

// The states that a row reads, and parameters of all channels.
template <class T>
struct Mix {
  const T* states;
  int64_t slot_stride, row_stride;
  const float* weight;                   // of the row
  const float *norm_weight, *norm_bias;  // (R, D) or null
  const float* parameters[3];
  int dim, lanes, count, k;
  bool per_channel, reads_own, aligned;
  int32_t near[kMost];
};

// Rows of values in shared memory, sixteen for each thread of a row or of the block. A thread's
// values are 16 bytes apart from those of the next thread, so no two threads meet in a bank.
class Table {
 public:
  static DEEPFAST_HOST_DEVICE int floats(int rows, int threads) {
    return (rows * kRowValues + 4) * threads;
  }
  DEEPFAST_DEVICE Table(void* base, int rows, int thread)
      : words_(static_cast<Words*>(base) + (rows * kRowValues / 4 + 1) * thread) {}
  DEEPFAST_DEVICE void put(int row, int c, const float (&v)[kChunk]) const {
    const Chunk<float> chunk = narrow<float>(v);
#pragma unroll
    for (int h = 0; h < 2; ++h) words_[(row * kRowChunks + c) * 2 + h] = chunk.words[h];
  }
  DEEPFAST_DEVICE void get(int row, int c, float (&v)[kChunk]) const {
    Chunk<float> chunk;
#pragma unroll
    for (int h = 0; h < 2; ++h) chunk.words[h] = words_[(row * kRowChunks + c) * 2 + h];
    widen(chunk, v);
  }

 private:
  Words* words_;
};

// Rows of the table: the sum S, the coefficients of the own state, up to three parameters, and the
// coefficients of the near states.
constexpr int kSum = 0, kOwn = 1, kParameter = 2, kNear = 5;

// z_k * W[row, k] is a * n_k + b.
template <class T>
DEEPFAST_DEVICE void terms(const Mix<T>& mix, const Lane& at, int64_t k, int c, float (&a)[kChunk],
                           float (&b)[kChunk]) {
  const int64_t channel = k * mix.dim + at.channel(c);
  float w[kChunk];
  if (mix.per_channel) {
    load_chunk(mix.weight + channel, at.count(c), at.aligned, w);
  } else {
    for (int i = 0; i < kChunk; ++i) w[i] = mix.weight[k];
  }
  load_chunk(mix.norm_weight + channel, mix.norm_weight != nullptr ? at.count(c) : 0, at.aligned,
             a);
  load_chunk(mix.norm_bias + channel, mix.norm_bias != nullptr ? at.count(c) : 0, at.aligned, b);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    a[i] = mix.norm_weight != nullptr ? a[i] * w[i] : w[i];
    b[i] *= w[i];
  }
}

// Fills the table; each of the block's rows of threads takes some chunks of it.
template <class T>
DEEPFAST_DEVICE void fill(const Mix<T>& mix, const Table& table, const Lane& at) {
#pragma unroll 1
  for (int q = at.row_in_block(); q < (kNear + mix.count) * kRowChunks; q += at.rows_per_block()) {
    const int r = q / kRowChunks, c = q % kRowChunks;
    float a[kChunk] = {}, b[kChunk];
    if (r == kSum) {
#pragma unroll 4
      for (int j = 0; j < mix.count + mix.reads_own; ++j) {
        float unused[kChunk];
        terms(mix, at, j < mix.count ? mix.near[j] : mix.k, c, unused, b);
        for (int i = 0; i < kChunk; ++i) a[i] += b[i];
      }
    } else if (r == kOwn || r >= kNear) {
      if (r != kOwn || mix.reads_own)
        terms(mix, at, r == kOwn ? mix.k : mix.near[r - kNear], c, a, b);
    } else if (mix.parameters[r - kParameter] != nullptr) {
      load_chunk(mix.parameters[r - kParameter] + at.channel(c), at.count(c), at.aligned, a);
    }
    table.put(r, c, a);
  }
}

// A parameter's values for one chunk; the parameter is not null.
template <bool kFast, class T>
DEEPFAST_DEVICE void parameter(const Mix<T>& mix, const Table& table, const Lane& at, int p, int c,
                               float (&v)[kChunk]) {
  if (kFast)
    table.get(kParameter + p, c, v);
  else
    load_chunk(mix.parameters[p] + at.channel(c), at.count(c), at.aligned, v);
}

// v times parameter p, and v plus parameter p; v itself if p is null.
template <bool kFast, class T>
DEEPFAST_DEVICE void scale(const Mix<T>& mix, const Table& table, const Lane& at, int p,
                           float (&v)[kRowChunks][kChunk]) {
  if (mix.parameters[p] == nullptr) return;
#pragma unroll
  for (int c = 0; c < kRowChunks; ++c) {
    float factor[kChunk];
    parameter<kFast>(mix, table, at, p, c, factor);
    for (int i = 0; i < kChunk; ++i) v[c][i] *= factor[i];
  }
}
template <bool kFast, class T>
DEEPFAST_DEVICE void shift(const Mix<T>& mix, const Table& table, const Lane& at, int p,
                           float (&v)[kRowChunks][kChunk]) {
  if (mix.parameters[p] == nullptr) return;
#pragma unroll
  for (int c = 0; c < kRowChunks; ++c) {
    float term[kChunk];
    parameter<kFast>(mix, table, at, p, c, term);
    for (int i = 0; i < kChunk; ++i) v[c][i] += term[i];
  }
}

// x += W[row, k] * z_k for state n_k, whose coefficients are row r of the table.
template <bool kFast, class T>
DEEPFAST_DEVICE void add_state(const Mix<T>& mix, const Table& table, const Lane& at, int r, int k,
                               const RowChunks<T>& state, float (&x)[kRowChunks][kChunk]) {
#pragma unroll
  for (int c = 0; c < kRowChunks; ++c) {
    float n[kChunk], a[kChunk];
    widen(state.chunk[c], n);
    if (kFast) {
      table.get(r, c, a);
    } else {
      float b[kChunk];
      terms(mix, at, k, c, a, b);
      for (int i = 0; i < kChunk; ++i) x[c][i] += b[i];
    }
    for (int i = 0; i < kChunk; ++i) x[c][i] += a[i] * n[i];
  }
}

// x = S + the sum over the near states, without the pushed one, of the row at `offset`.
template <bool kFast, class T>
DEEPFAST_DEVICE void mix_near(const Mix<T>& mix, const Table& table, const Lane& at, int64_t offset,
                              bool exists, float (&x)[kRowChunks][kChunk]) {
#pragma unroll
  for (int c = 0; c < kRowChunks; ++c) {
    for (int i = 0; i < kChunk; ++i) x[c][i] = 0.0f;
    if (kFast) table.get(kSum, c, x[c]);
  }
  constexpr int kGroup = kAtOnce<T, kFast>;
#pragma unroll 1
  for (int first = 0; first < mix.count; first += kGroup) {
    RowChunks<T> states[kGroup];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const bool there = first + j < mix.count;
      const T* state = mix.states + mix.near[there ? first + j : 0] * mix.slot_stride;
      states[j] = load_row(state + offset, at, exists && there);
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j)
      if (first + j < mix.count)
        add_state<kFast>(mix, table, at, kNear + first + j, mix.near[first + j], states[j], x);
  }
}

// Row t of an operand, or zeros if the operand is null. The zeros matter: a register that some path
// through a loop does not write stays occupied during the whole loop.
template <class T>
DEEPFAST_DEVICE RowChunks<T> load_present(const T* operand, int64_t stride, int64_t t,
                                          const Lane& at, bool exists) {
  return load_row(operand + t * stride, at, exists && operand != nullptr);
}

template <class T>
DEEPFAST_DEVICE void add_row(float (&v)[kRowChunks][kChunk], const RowChunks<T>& row) {
  float r[kRowChunks][kChunk];
  widen(row, r);
  DEEPFAST_EACH(c, i) v[c][i] += r[c][i];
}

// ---- on the host -------------------------------------------------------------------------------

constexpr int64_t kFloat = sizeof(float);

// What forward and backward share, and whether all operands are aligned.
struct Operands {
  const Tensor& states;
  const Indices& near;
  const Weights w;
  const int64_t k, tokens, dim;
  const float *norm_weight, *norm_bias, *out_norm_weight, *out_norm_bias;
  const Storage storage;
  bool aligned;

  Operands(const Tensor& states_, int64_t k_, const Indices& near_, const Tensor& weight,
           const OptionalTensor& norm_weight_, const OptionalTensor& norm_bias_,
           const OptionalTensor& out_norm_weight_, const OptionalTensor& out_norm_bias_)
      : states(states_),
        near(near_),
        w(weight, storage_of(states_), states_.size(2)),
        k(k_),
        tokens(states_.size(1)),
        dim(states_.size(2)),
        norm_weight(floats(norm_weight_, w.columns * dim)),
        norm_bias(floats(norm_bias_, w.columns * dim)),
        out_norm_weight(floats(out_norm_weight_, dim)),
        out_norm_bias(floats(out_norm_bias_, dim)),
        storage(storage_of(states_)) {
    check_dim(dim);
    aligned = Alignment(storage, dim)
                  .slots(states)
                  .values({w.base, norm_weight, norm_bias, out_norm_weight, out_norm_bias});
    DEEPFAST_CHECK(near.size() <= kMost, "boundary: CUDA kernels read at most ", kMost,
                   " near states, got ", near.size());
  }

  // Near states without the pushed one.
  int64_t mixed_from() const { return near.size() - std::count(near.begin(), near.end(), k); }
  // Bytes of the table, or 0 without one.
  int64_t table(bool fast, int64_t pulls = 0) const {
    const int rows = static_cast<int>(kNear + mixed_from() + pulls);
    return fast ? Table::floats(rows, row_lanes(dim)) * kFloat : 0;
  }

  template <class T>
  Mix<T> mix(bool aligned) const {
    Mix<T> mix{};
    mix.states = static_cast<const T*>(deepfast::slot(states, k).data) - k * states.stride(0);
    mix.slot_stride = states.stride(0), mix.row_stride = states.stride(1);
    mix.weight = reinterpret_cast<const float*>(w.base + w.offset(k, 0));
    mix.norm_weight = norm_weight, mix.norm_bias = norm_bias;
    mix.dim = static_cast<int>(dim), mix.lanes = row_lanes(dim), mix.k = static_cast<int>(k);
    mix.per_channel = w.width > 1, mix.aligned = aligned;
    for (int64_t j : near) {
      DEEPFAST_CHECK(j >= 0 && j < states.size(0), "slot ", j, " of a buffer of ", states.size(0));
      w.offset(k, j);
      if (j == k) {
        mix.reads_own = true;
        continue;
      }
      mix.near[mix.count++] = static_cast<int32_t>(j);
    }
    return mix;
  }
};

// Calls f with a value of the storage type and with whether the fast kernel runs.
template <class F>
void dispatch(Storage storage, bool fast, const F& f) {
  dispatch(storage, [&](auto type) {
    if (fast)
      f(type, std::true_type{});
    else
      f(type, std::false_type{});
  });
}

// Blocks of 16 warps. Of fewer warps where there are few rows, or where a block would need more
// shared memory, `bytes(threads, fast)`, than the device has. Depends on the device and the shapes
// alone.
struct Shape {
  Grid grid;
  bool fast;

  template <class Bytes>
  Shape(const Device& device, int64_t tokens, int lanes, bool aligned, const Bytes& bytes) {
    const auto tiles = [&](int threads) {
      return (tokens + threads / lanes - 1) / (threads / lanes);
    };
    const int64_t most = device.shared();
    int threads = kMostLanes;
    while (threads > row_threads(lanes) && device.blocks(tiles(threads), 1) == tiles(threads))
      threads /= 2;
    while (threads > std::max(lanes, kMostLanes / 2) && bytes(threads, true) > most) threads /= 2;
    fast = aligned && bytes(threads, true) <= most;
    while (threads > std::max(lanes, kWarp) && bytes(threads, fast) > most) threads /= 2;
    const int64_t shared = bytes(threads, fast);
    DEEPFAST_CHECK(shared <= most, "boundary: a block takes ", shared,
                   " bytes of shared memory, and this device gives it ", most);
    // CUDA takes one kilobyte more for each block, and a multiprocessor has one more than `most`.
    const int64_t own = 1 << 10;
    const int64_t resident =
        std::clamp<int64_t>((most + own) / (shared + own), 1, kMostLanes / threads);
    grid = {device.blocks(tiles(threads), static_cast<int>(resident)), threads, shared};
  }
};

}  // namespace
}  // namespace deepfast
