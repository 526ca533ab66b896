// Tiles of tokens and channels: how the far passes go through many states at once.
#pragma once

#include "rows.h"

namespace deepfast {
namespace DEEPFAST_ISA {

// A tile is a run of whole tokens, about kTileValues of every operand. The sums of all rows (mix),
// or z and u of all sources (pull), stay in the level-2 cache while a few states at a time are
// read. Each state is read in long contiguous runs, and the next few are prefetched meanwhile.
// Reading short pieces of all states side by side ran at half the speed.
constexpr int64_t kTileValues = 2048;

constexpr bool kManyRegisters = kVectorBytes == 64;

struct TileShape {
  int64_t tokens, channels;

  explicit TileShape(int64_t dim)
      : tokens(dim < kTileValues ? kTileValues / dim : 1),
        channels(dim < kTileValues ? dim : kTileValues) {
    if (tokens > 64) tokens = 64;
  }
  // Tiles with all channels of their tokens.
  static TileShape whole_rows(int64_t dim) {
    TileShape shape(dim);
    shape.channels = dim;
    return shape;
  }
};

// One tile: tokens [t0, t1), channels [d0, d1), and where the next tile starts.
struct Tile {
  int64_t t0, t1, d0, d1, next_t, next_d;
};

// Calls f(tile) over tokens [begin, end) and all channels, channels first.
template <class F>
DEEPFAST_INLINE void for_tiles(int64_t begin, int64_t end, int64_t dim, const TileShape& shape,
                               const F& f) {
  for (int64_t t = begin; t < end; t += shape.tokens) {
    const int64_t t1 = t + shape.tokens < end ? t + shape.tokens : end;
    for (int64_t d = 0; d < dim; d += shape.channels) {
      const bool last = d + shape.channels >= dim;
      const int64_t d1 = last ? dim : d + shape.channels;
      // Past the last tile the prefetch reads this tile again.
      const int64_t next_t = last && t1 < end ? t1 : t;
      f(Tile{t, t1, d, d1, next_t, last ? (t1 < end ? 0 : d) : d1});
    }
  }
}

// One token's rows of a group of streams, and the rows to prefetch meanwhile: those of the next group
// in this tile, or of the first group in the next tile.
template <class T, int Group>
struct Streams {
  const T *row[Group], *next[Group];  // at channel 0

  // streams: a list of matrices.
  template <class List>
  DEEPFAST_INLINE Streams(const List& streams, int64_t first, const Tile& tile, int64_t t) {
    const int64_t count = streams.count;
    const bool same_tile = first + Group < count;
    const int64_t after = same_tile ? first + Group : 0;
    const int64_t next_t = same_tile ? t : tile.next_t + (t - tile.t0);
    const int64_t shift = same_tile ? 0 : tile.next_d - tile.d0;
    DEEPFAST_UNROLL for (int i = 0; i < Group; ++i) {
      row[i] = row_of<T>(streams[first + i], t);
      const int64_t stream = after + i < count ? after + i : count - 1;
      next[i] = row_of<T>(streams[stream], next_t) + shift;
    }
  }

  // The lines of these channels, of the rows [from, to) of the group.
  template <int Channels>
  DEEPFAST_INLINE void prefetch(int64_t d, int64_t from = 0, int64_t to = Group) const {
    constexpr int kStep = Channels < 64 / sizeof(T) ? Channels : 64 / sizeof(T);
    for (int64_t i = from; i < to; ++i)
      DEEPFAST_UNROLL for (int c = 0; c < Channels; c += kStep)
          __builtin_prefetch(next[i] + d + c, 0, 2);
  }
  DEEPFAST_INLINE void prefetch_row(int64_t dim) const {
    constexpr int kLine = 64 / sizeof(T);
    for (int64_t d = 0; d < dim; d += kLine) prefetch<kLine>(d);
  }
};

// A value of (rows, tokens, channels) of the tile's shape.
DEEPFAST_INLINE int64_t tile_index(const TileShape& shape, int64_t row, int64_t t, int64_t d) {
  return (row * shape.tokens + t) * shape.channels + d;
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
