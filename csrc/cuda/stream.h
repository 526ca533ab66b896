// Reading many states in turn: what mix_rows and pull_rows share.
//
// A tile is a slice of up to 128 channels times as many tokens as the block's warps hold. A warp
// has kLines lines of 128 elements; a thread has four neighbouring channels of each:
//
//      lane        0        1     ...    31           of D >= 128: a line is a token's slice
//      line 0   0 1 2 3  4 5 6 7  ... 124-127         of D = 32: four tokens of 8 lanes each
//      line 1   the next token's
//
// A block keeps its slice, so it reads the norm's parameters of these channels once.
#pragma once

#include "async.h"
#include "op.h"

namespace deepfast {

constexpr int kQuad = 4, kLine = kWarp * kQuad;

// Four values, as stored.
template <class T>
struct alignas(kQuad * sizeof(T)) Quad {
  uint32_t w[sizeof(T)];
};

// A list of states that are read one after another, the same for each tile. Passed by value.
template <class T>
struct Stream {
  static constexpr int kMost = 128;
  const T* states;
  int64_t slot_stride, row_stride, tokens;
  int dim, count, log2_lanes, slices, tile_tokens;
  bool aligned;
  int32_t slot[kMost];
};

#if defined(DEEPFAST_EMULATE) || defined(__CUDACC__)

template <class T>
DEEPFAST_DEVICE void widen(const Quad<T>& q, float (&v)[kQuad]) {
#pragma unroll
  for (int i = 0; i < kQuad / 2; ++i) {
    const Pair p = unpack<T>(q.w[i]);
    v[2 * i] = p.first, v[2 * i + 1] = p.second;
  }
}
template <>
DEEPFAST_DEVICE void widen(const Quad<float>& q, float (&v)[kQuad]) {
#pragma unroll
  for (int i = 0; i < kQuad; ++i) v[i] = detail::bits_as<float>(q.w[i]);
}

template <class T>
DEEPFAST_DEVICE Quad<T> narrow_quad(const float (&v)[kQuad]) {
  if constexpr (sizeof(T) == 2) {
    return {{pack<T>(v[0], v[1]), pack<T>(v[2], v[3])}};
  } else {
    Quad<T> q;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) q.w[i] = detail::bits_as<uint32_t>(v[i]);
    return q;
  }
}

// The `count` (clamped to 0 to 4) values at p, zeros behind them. `aligned`: p is a multiple of
// four values and count is not 1, 2 or 3.
template <class T>
DEEPFAST_DEVICE Quad<T> load_quad(const T* p, int count, bool aligned) {
  float v[kQuad] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (aligned && count > 0) return *reinterpret_cast<const Quad<T>*>(p);
#pragma unroll
  for (int i = 0; i < kQuad; ++i)
    if (i < count) v[i] = to_float(p[i]);
  return narrow_quad<T>(v);
}

template <class T>
DEEPFAST_DEVICE void load_quad(const T* p, int count, bool aligned, float (&v)[kQuad]) {
  widen(load_quad(p, count, aligned), v);
}

template <class T>
DEEPFAST_DEVICE void store_quad(T* p, int count, bool aligned, const float (&v)[kQuad]) {
  if (aligned) {
    if (count > 0) *reinterpret_cast<Quad<T>*>(p) = narrow_quad<T>(v);
    return;
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i)
    if (i < count) p[i] = from_float<T>(v[i]);
}

// A thread's place in the tiles of its block; its channels are the same in all of them.
struct Place {
  int lane, line, lines_apart;  // the warp's first line; tokens from a line to the next
  int channel, count;           // the thread's first channel, and how many it has up to four
  int own;                      // the thread's first token in a tile
  int64_t first, step;          // the block's first tile's first token, tokens to the next tile

  template <class T>
  DEEPFAST_DEVICE Place(const Stream<T>& op, int lines) {
    // The shuffle keeps it in a register. Without it nvcc recomputes it in every step, with four
    // instructions.
    lane = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) % kWarp, threadIdx.x % kWarp);
    line = static_cast<int>(threadIdx.x) / kWarp * lines;
    lines_apart = kWarp >> op.log2_lanes;
    const int lanes = 1 << op.log2_lanes;
    channel = ((blockIdx.x % op.slices << op.log2_lanes) + (lane & (lanes - 1))) * kQuad;
    count = op.dim - channel;
    own = line * lines_apart + (lane >> op.log2_lanes);
    first = int64_t{blockIdx.x / op.slices} * op.tile_tokens;
    step = int64_t{gridDim.x / op.slices} * op.tile_tokens;
  }
  // For line v of the tile at `tile`: the token, and how many channels the thread has there.
  DEEPFAST_DEVICE int64_t token(int64_t tile, int v) const { return tile + own + v * lines_apart; }
  template <class T>
  DEEPFAST_DEVICE int count_of(const Stream<T>& op, int64_t tile, int v) const {
    return token(tile, v) < op.tokens ? count : 0;
  }
};

// Loads and stores the sums of a tile, for the first `rows` of op.out_row.
template <class Op, int kRows, int kLines>
DEEPFAST_DEVICE void load_sums(const Op& op, int rows, const Place& at, int64_t tile, bool aligned,
                               float (&sum)[kRows][kLines][kQuad]) {
#pragma unroll
  for (int b = 0; b < kRows; ++b) {
    const auto* out = op.out + op.out_row[b] * op.out_stride + at.channel;
#pragma unroll
    for (int v = 0; v < kLines; ++v)
      load_quad(out + at.token(tile, v) * op.out_row_stride,
                b < rows ? at.count_of(op.from, tile, v) : 0, aligned, sum[b][v]);
  }
}

template <class Op, int kRows, int kLines>
DEEPFAST_DEVICE void store_sums(const Op& op, int rows, const Place& at, int64_t tile, bool aligned,
                                const float (&sum)[kRows][kLines][kQuad]) {
#pragma unroll
  for (int b = 0; b < kRows; ++b) {
    if (b >= rows) continue;
    auto* out = op.out + op.out_row[b] * op.out_stride + at.channel;
#pragma unroll
    for (int v = 0; v < kLines; ++v)
      store_quad(out + at.token(tile, v) * op.out_row_stride, at.count_of(op.from, tile, v),
                 aligned, sum[b][v]);
  }
}

template <class V>
DEEPFAST_DEVICE const V* bytes_on(const V* p, int64_t bytes) {
  return reinterpret_cast<const V*>(reinterpret_cast<const char*>(p) + bytes);
}

// Each slot's offset in the buffer in bytes, in shared memory, so no step needs a 64-bit product.
// The caller puts a barrier of the block before its use.
template <class T>
DEEPFAST_DEVICE void fill_offsets(int64_t* offsets, const Stream<T>& op) {
  for (int k = threadIdx.x; k < op.count; k += blockDim.x)
    offsets[k] = op.slot[k] * op.slot_stride * static_cast<int64_t>(sizeof(T));
}

// A warp's lines of one state after another, kStages - 1 of them in flight.
//
//      copies          | 4 | 5 | 6 |   into a ring in shared memory that the warp has for itself:
//      products    | 3 |               no barrier but the warp's own
//
// The ring continues from tile to tile. Every lane copies 16 bytes at a time: a row of a slice is
// 256 bytes, and bulk copies would take ten instructions for each row. A place that is no channel
// or no token holds a copy of one that is.
template <class T, int kLines, int kStages>
class Lines {
 public:
  static constexpr uint32_t kStageBytes = kLines * kLine * static_cast<int>(sizeof(T));
  static constexpr uint32_t kBytes = kStages * kStageBytes;  // of a warp

  // `offsets` of the stream's slots, written before; `shared`: kBytes for each warp.
  DEEPFAST_DEVICE Lines(const Stream<T>& op, const Place& at, const int64_t* offsets, char* shared)
      : op_(op), offsets_(offsets), tile_(op.aligned && op.count > 0 ? at.first : op.tokens) {
    const int log2_row = op.log2_lanes + 2, in_line = at.lane * kUnit % kLine;
    const int channel = (blockIdx.x % op.slices << log2_row) + (in_line & ((1 << log2_row) - 1));
    own_ = (at.line + at.lane * kUnit / kLine) * at.lines_apart + (in_line >> log2_row);
    apart_ = kApart * at.lines_apart;
    channel_ = channel < op.dim ? channel : 0;
    shared += at.line / kLines * kBytes;
    to_ = shared + at.lane * sizeof(Words);
    read_ = shared + at.lane * sizeof(Quad<T>);
    step_ = at.step;
    enter_tile();
#pragma unroll 1
    for (int s = 0; s < kStages - 1; ++s) copy(s * kStageBytes);
  }

  // The lines of the next step. Behind the last step they are undefined.
  DEEPFAST_DEVICE void take(Quad<T> (&n)[kLines]) {
    wait_copies<kStages - 2>();
    // Every lane's copies have arrived, and every lane has read the stage before.
    __syncwarp();
    copy((stage_ - kStageBytes) & (kBytes - 1));
#pragma unroll
    for (int v = 0; v < kLines; ++v)
      n[v] = reinterpret_cast<const Quad<T>*>(read_ + stage_)[v * kWarp];
    stage_ = (stage_ + kStageBytes) & (kBytes - 1);
  }

 private:
  // Units of 16 bytes: a lane has kUnits of a stage, each kApart lines behind the one before.
  static constexpr int kUnit = 16 / sizeof(T), kApart = kWarp * kUnit / kLine;
  static constexpr int kUnits = kLines / kApart;
  static_assert((kStages & (kStages - 1)) == 0, "a stage's place is a remainder");

  DEEPFAST_DEVICE void enter_tile() {
    left_ = tile_ < op_.tokens ? op_.count : 0;
    slot_ = offsets_;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int64_t token = tile_ + own_ + i * apart_;
      from_[i] =
          op_.states + channel_ + (token < op_.tokens ? token : op_.tokens - 1) * op_.row_stride;
    }
  }

  DEEPFAST_DEVICE void copy(uint32_t stage) {
    if (left_ > 0) {
      const int64_t offset = *slot_;
#pragma unroll
      for (int i = 0; i < kUnits; ++i)
        copy_words<false>(reinterpret_cast<Words*>(to_ + stage) + i * kWarp,
                          reinterpret_cast<const Words*>(bytes_on(from_[i], offset)));
      ++slot_;
      if (--left_ == 0) {
        tile_ += step_;
        enter_tile();
      }
    }
    commit_copies();
  }

  const Stream<T>& op_;
  const int64_t* offsets_;
  char* to_;
  const char* read_;
  uint32_t stage_ = 0;  // of the next step, from the ring's start
  // The tile being copied: its first token, the lane's units in slot 0, the next slot, the steps
  // left.
  int64_t tile_, step_;
  const T* from_[kUnits];
  const int64_t* slot_;
  int left_, own_, apart_, channel_;
};

#endif

// The part of a Stream that is the same for any list of slots; tiles of `lines` lines.
template <class T>
Stream<T> stream_of(const Slots& states, int64_t tokens, int64_t dim, int lines, bool aligned) {
  Stream<T> op{};
  op.states = static_cast<const T*>(states.data);
  op.slot_stride = states.slot_stride, op.row_stride = states.row_stride;
  op.tokens = tokens, op.dim = static_cast<int>(dim);
  while (op.log2_lanes < 5 && (kQuad << op.log2_lanes) < op.dim) ++op.log2_lanes;
  const int slice = kQuad << op.log2_lanes;
  op.slices = (op.dim + slice - 1) / slice;
  op.tile_tokens = lines * (kWarp >> op.log2_lanes);
  op.aligned = aligned;
  return op;
}

// The number of blocks, equally many for each slice: as many as run at once, and no more than
// needed for the same number of rounds.
template <class T>
int64_t stream_blocks(const Device& device, const Stream<T>& op, int resident = 1) {
  const int64_t tiles = (op.tokens + op.tile_tokens - 1) / op.tile_tokens;
  const int64_t at_once = device.blocks(int64_t{1} << 40, resident) / op.slices;
  const int64_t rounds = at_once == 0 ? tiles : (tiles + at_once - 1) / at_once;
  return tiles == 0 ? 0 : (tiles + rounds - 1) / rounds * op.slices;
}

}  // namespace deepfast
