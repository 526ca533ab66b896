// What forward and backward of a boundary share: a row's sum over the near states, with
// coefficients in shared memory, the queue of rows in flight, and the choice of blocks.
//
//     x = S + sum over near j of c_j * n_j
//     c_j = W[k, j] * norm_weight_j,  S = sum W[k, j] * norm_bias_j
//
// A block processes many rows. It computes c and S once, in the layout in which its threads hold a
// row, while its first rows are in flight. Each channel of a state then costs one product, with
// scalar and per-channel weights alike.
#pragma once

#include <algorithm>

#include "op.h"
#include "row_queue.h"

namespace deepfast {
namespace {

// Most rows are aligned and narrow enough for the table: kernels with kFast. Other rows run in an
// instance of the same kernels without kFast, so they cost the fast ones no registers.

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

// Rows of values in shared memory, kChunks chunks for each thread of a row or of the block. A
// thread's values are 16 bytes apart from those of the next thread, so no two threads meet in a
// bank.
template <int kChunks>
class Table {
 public:
  static DEEPFAST_HOST_DEVICE int floats(int rows, int threads) {
    return (rows * kChunks * kChunk + 4) * threads;
  }
  DEEPFAST_DEVICE Table(void* base, int rows, int thread)
      : words_(static_cast<Words*>(base) + (rows * kChunks * 2 + 1) * thread) {}
  DEEPFAST_DEVICE void put(int row, int c, const float (&v)[kChunk]) const {
    const Chunk<float> chunk = narrow<float>(v);
#pragma unroll
    for (int h = 0; h < 2; ++h) words_[(row * kChunks + c) * 2 + h] = chunk.words[h];
  }
  DEEPFAST_DEVICE void get(int row, int c, float (&v)[kChunk]) const {
    Chunk<float> chunk;
#pragma unroll
    for (int h = 0; h < 2; ++h) chunk.words[h] = words_[(row * kChunks + c) * 2 + h];
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
template <class T, int kChunks>
DEEPFAST_DEVICE void fill(const Mix<T>& mix, const Table<kChunks>& table, const Lane& at) {
#pragma unroll 1
  for (int q = at.row_in_block(); q < (kNear + mix.count) * kChunks; q += at.rows_per_block()) {
    const int r = q / kChunks, c = q % kChunks;
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
template <bool kFast, class T, int kChunks>
DEEPFAST_DEVICE void parameter(const Mix<T>& mix, const Table<kChunks>& table, const Lane& at,
                               int p, int c, float (&v)[kChunk]) {
  if (kFast)
    table.get(kParameter + p, c, v);
  else
    load_chunk(mix.parameters[p] + at.channel(c), at.count(c), at.aligned, v);
}

// v times parameter p, and v plus parameter p; v itself if p is null.
template <bool kFast, class T, int kChunks>
DEEPFAST_DEVICE void scale(const Mix<T>& mix, const Table<kChunks>& table, const Lane& at, int p,
                           float (&v)[kChunks][kChunk]) {
  if (mix.parameters[p] == nullptr) return;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    float factor[kChunk];
    parameter<kFast>(mix, table, at, p, c, factor);
    for (int i = 0; i < kChunk; ++i) v[c][i] *= factor[i];
  }
}
template <bool kFast, class T, int kChunks>
DEEPFAST_DEVICE void shift(const Mix<T>& mix, const Table<kChunks>& table, const Lane& at, int p,
                           float (&v)[kChunks][kChunk]) {
  if (mix.parameters[p] == nullptr) return;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    float term[kChunk];
    parameter<kFast>(mix, table, at, p, c, term);
    for (int i = 0; i < kChunk; ++i) v[c][i] += term[i];
  }
}

// x += W[row, k] * z_k for state n_k, whose coefficients are row r of the table.
template <bool kFast, class T, int kChunks>
DEEPFAST_DEVICE void add_state(const Mix<T>& mix, const Table<kChunks>& table, const Lane& at,
                               int r, int k, const RowChunks<T, kChunks>& state,
                               float (&x)[kChunks][kChunk]) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
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

template <class T, bool kFast, int kChunks>
DEEPFAST_DEVICE void add_near(const Mix<T>& mix, RowQueue<T, kFast, kChunks>& rows) {
  for (int j = 0; j < mix.count; ++j)
    rows.add(mix.states + mix.near[j] * mix.slot_stride, mix.row_stride);
}

// x = S + the sum over the near states, without the pushed one.
template <bool kFast, class T, int kChunks>
DEEPFAST_DEVICE void mix_near(const Mix<T>& mix, const Table<kChunks>& table, const Lane& at,
                              RowQueue<T, kFast, kChunks>& rows, float (&x)[kChunks][kChunk]) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    for (int i = 0; i < kChunk; ++i) x[c][i] = 0.0f;
    if (kFast) table.get(kSum, c, x[c]);
  }
#pragma unroll 1
  for (int j = 0; j < mix.count; ++j)
    add_state<kFast>(mix, table, at, kNear + j, mix.near[j], rows.take(), x);
}

// ---- on the host -------------------------------------------------------------------------------

constexpr int64_t kFloat = sizeof(float);

// What forward and backward share, and whether all operands are aligned.
struct Operands {
  const Slots states;
  const Indices near;
  const Weights w;
  const int64_t R, k, tokens, dim;
  const float *norm_weight, *norm_bias, *out_norm_weight, *out_norm_bias;
  const Storage storage;
  bool aligned;

  template <class Launch>
  explicit Operands(const Launch& a)
      : states(a.states),
        near(a.near),
        w(a.weight),
        R(a.R),
        k(a.k),
        tokens(a.T),
        dim(a.D),
        norm_weight(floats(a.norm_weight)),
        norm_bias(floats(a.norm_bias)),
        out_norm_weight(floats(a.out_norm_weight)),
        out_norm_bias(floats(a.out_norm_bias)),
        storage(a.storage) {
    check_dim(dim);
    DEEPFAST_CHECK(tokens < int64_t{1} << 31, "boundary: expected fewer than 2^31 tokens, got ",
                   tokens);
    aligned = Alignment(storage, dim)
                  .slots(states)
                  .values({w.data, norm_weight, norm_bias, out_norm_weight, out_norm_bias});
    DEEPFAST_CHECK(near.count <= kMost, "boundary: CUDA kernels: expected at most ", kMost,
                   " near states, got ", near.count);
  }

  // Near states without the pushed one.
  int64_t mixed_from() const { return near.count - std::count(near.begin(), near.end(), k); }
  // Bytes of the table, or 0 without one.
  template <int kChunks>
  int64_t table(bool fast, int64_t pulls = 0) const {
    const int rows = static_cast<int>(kNear + mixed_from() + pulls);
    return fast ? Table<kChunks>::floats(rows, row_lanes(dim, kChunks)) * kFloat : 0;
  }

  template <class T>
  Mix<T> mix(int lanes, bool aligned) const {
    Mix<T> mix{};
    mix.states = static_cast<const T*>(states.data);
    mix.slot_stride = states.slot_stride, mix.row_stride = states.row_stride;
    mix.weight = floats(w.data) + k * R * w.width;
    mix.norm_weight = norm_weight, mix.norm_bias = norm_bias;
    mix.dim = static_cast<int>(dim), mix.lanes = lanes, mix.k = static_cast<int>(k);
    mix.per_channel = w.per_channel, mix.aligned = aligned;
    for (int64_t j : near) {
      if (j == k)
        mix.reads_own = true;
      else
        mix.near[mix.count++] = static_cast<int32_t>(j);
    }
    return mix;
  }
};

// The rows of an operand, for the struct of a kernel's arguments.
template <class T>
void set_rows(const Matrix& m, T*& rows, int64_t& stride) {
  rows = static_cast<T*>(m.data), stride = m.row_stride;
}

// How a launch runs. Depends on the device and the shapes alone.
struct Shape {
  Grid grid;
  int chunks, lanes;
  bool fast;
};

// The kernel for aligned rows if the device has the shared memory, `bytes(threads)`, for a block
// of at least half of the threads that registers leave room for, `most`. Of these, as few as give
// each multiprocessor a block.
template <class Bytes>
bool fits(const Device& device, int64_t tokens, int lanes, int most, bool fast, const Bytes& bytes,
          Grid& grid) {
  const int unit = std::max(lanes, kWarp);
  if (unit > most) return false;
  const auto tiles = [&](int threads) {
    return (tokens + threads / lanes - 1) / (threads / lanes);
  };
  const auto halve = [&](int threads) { return (threads / unit + 1) / 2 * unit; };
  const int64_t available = device.shared();
  int threads = most / unit * unit;
  while (threads > row_threads(lanes) && device.blocks(tiles(threads), 1) == tiles(threads))
    threads = halve(threads);
  while (threads > (fast ? std::max(unit, most / 2) : unit) && bytes(threads) > available)
    threads = halve(threads);
  const int64_t shared = bytes(threads);
  if (shared > available) return false;
  // CUDA takes one kilobyte more for each block, and a multiprocessor has one more than it gives.
  const int64_t own = 1 << 10;
  const int64_t resident =
      std::clamp<int64_t>((available + own) / (shared + own), 1, std::max(1, most / threads));
  grid = {device.blocks(tiles(threads), static_cast<int>(resident)), threads, shared};
  return true;
}

// Calls f(type, fast, chunks) with types and the shape for the first of three kernels whose blocks
// fit: fast with the chunks that suit the row, fast with two, and the one for any row.
// `Kernel<T, kFast, kChunks>::kThreads` is the most threads of a multiprocessor, and
// `bytes(type, fast, chunks, threads)` the shared memory of a block.
template <template <class, bool, int> class Kernel, class Bytes, class F>
void dispatch_shape(const Device& device, const Operands& given, bool aligned, const Bytes& bytes,
                    const F& f) {
  bool done = false;
  const auto attempt = [&](auto type, auto fast, auto chunks) {
    using T = decltype(type);
    const int lanes = row_lanes(given.dim, chunks);
    Shape shape{{}, chunks, lanes, fast};
    const auto of_block = [&](int threads) { return bytes(type, fast, chunks, threads); };
    done = fits(device, given.tokens, lanes, Kernel<T, fast, chunks>::kThreads, fast, of_block,
                shape.grid);
    if (done) f(type, fast, chunks, shape);
  };
  const int chunks = row_chunks(given.dim, aligned);
  if (aligned) dispatch_rows(given.storage, true, chunks, attempt);
  if (!done && aligned && chunks != 2) dispatch_rows(given.storage, true, 2, attempt);
  if (!done) dispatch_rows(given.storage, false, 2, attempt);
  DEEPFAST_CHECK(done, "boundary: expected a row and lists that fit the shared memory of a block, ",
                 device.shared(), " bytes, got ", given.dim, " channels and ", given.near.count,
                 " near states");
}

}  // namespace
}  // namespace deepfast
