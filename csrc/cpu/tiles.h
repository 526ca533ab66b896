// Tiles of tokens: how a few results per token are summed over many operands.
#pragma once

#include "rows.h"

namespace deepfast {
namespace DEEPFAST_ISA {

constexpr bool kManyRegisters = kVectorBytes == 64;

// Tokens of a tile with about `values` values of each operand. The tile's sums stay in a cache while a
// few operands at a time are read, each in one long run; the next few are prefetched meanwhile.
inline int64_t tile_tokens(int64_t dim, int64_t values) {
  const int64_t tokens = dim < values ? values / dim : 1;
  return tokens < 64 ? tokens : 64;
}

// Tokens [t0, t1), and where the next tile starts.
struct Tile {
  int64_t t0, t1, next_t;
};

// Calls f(tile) over tokens [begin, end).
template <class F>
DEEPFAST_INLINE void for_tiles(int64_t begin, int64_t end, int64_t tokens, const F& f) {
  for (int64_t t = begin; t < end; t += tokens) {
    const int64_t t1 = t + tokens < end ? t + tokens : end;
    // Past the last tile the prefetch reads this tile again.
    f(Tile{t, t1, t1 < end ? t1 : t});
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
    DEEPFAST_UNROLL for (int i = 0; i < Group; ++i) {
      row[i] = row_of<T>(streams[first + i], t);
      const int64_t stream = after + i < count ? after + i : count - 1;
      next[i] = row_of<T>(streams[stream], next_t);
    }
  }

  // The lines of these channels.
  template <int Channels>
  DEEPFAST_INLINE void prefetch(int64_t d) const {
    constexpr int kStep = Channels < 64 / sizeof(T) ? Channels : 64 / sizeof(T);
    for (int i = 0; i < Group; ++i)
      DEEPFAST_UNROLL for (int c = 0; c < Channels; c += kStep)
          __builtin_prefetch(next[i] + d + c, 0, 2);
  }
  DEEPFAST_INLINE void prefetch_row(int64_t dim) const {
    constexpr int kLine = 64 / sizeof(T);
    for (int64_t d = 0; d < dim; d += kLine) prefetch<kLine>(d);
  }
};

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
