// The weighted sum over the states of a buffer for several rows at once, and its transpose.
//
//   mix   out[r] (+)= sum_k w[r, k] z_k              each z_k read once for all rows r
//   pull  u[j]   (+)= sum_l w[l, j] g_l              each g_l read once for all sources j,
//         dw[l, j] = <g_l, z_j>                      from the same tiles
//
// with z_k = n_k * norm_weight_k + norm_bias_k. Bytes: one read of every state (or gradient), one
// write of every output; weights and norm weights stay in the caches. Compiled once per instruction
// set.
#include "tiles.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

// States that a mix holds in registers at once, and vectors of each.
constexpr int kMixStates = kManyRegisters ? 8 : 4;
// Rows and sources that a pull holds the weights and dot products of.
constexpr int kPullRows = kManyRegisters ? 4 : 2, kPullSources = kManyRegisters ? 4 : 2;

// ---- mix ---------------------------------------------------------------------------------------

// sums += weights * z for K states from k0 on, of one token's channels [d, d1), V vectors of N
// channels at once. Returns the first channel that is left.
template <class T, int N, int V, int K, bool PerChannel>
DEEPFAST_INLINE int64_t mix_channels(const MixRows& op, const Streams<T, K>& states, int64_t d,
                                     int64_t d1, int64_t k0, const compute_t<T>* weights,
                                     compute_t<T>* sums, int64_t sums_stride) {
  using A = compute_t<T>;
  constexpr Lanes<N> lanes;
  const int64_t rows = op.rows.count, sources = op.sources.count;
  const A *norm_weight[K], *norm_bias[K];
  DEEPFAST_UNROLL for (int k = 0; k < K; ++k) {
    norm_weight[k] = at<A>(op.norm_weight, op.sources[k0 + k] * op.D);
    norm_bias[k] = at<A>(op.norm_bias, op.sources[k0 + k] * op.D);
  }
  for (; d + V * N <= d1; d += V * N) {
    states.template prefetch<V * N>(d);
    vec_t<A, N> z[K][V];
    DEEPFAST_UNROLL for (int k = 0; k < K; ++k) DEEPFAST_UNROLL for (int v = 0; v < V; ++v)
        z[k][v] = affine(lanes, load(lanes, states.row[k] + d + v * N), norm_weight[k],
                         norm_bias[k], d + v * N);
    A* sum = sums + d;
    const A* weight = weights + k0;
    for (int64_t r = 0; r < rows; ++r, sum += sums_stride, weight += sources) {
      vec_t<A, N> s[V];
      DEEPFAST_UNROLL for (int v = 0; v < V; ++v) s[v] = load(lanes, sum + v * N);
      DEEPFAST_UNROLL for (int k = 0; k < K; ++k) {
        if constexpr (PerChannel) {
          const A* w = weight_of<A>(op.weight, op.rows[r], op.sources[k0 + k], op.R) + d;
          DEEPFAST_UNROLL for (int v = 0; v < V; ++v) s[v] += load(lanes, w + v * N) * z[k][v];
        } else {
          const auto w = broadcast(lanes, weight[k]);
          DEEPFAST_UNROLL for (int v = 0; v < V; ++v) s[v] += w * z[k][v];
        }
      }
      DEEPFAST_UNROLL for (int v = 0; v < V; ++v) store(lanes, sum + v * N, s[v]);
    }
  }
  return d;
}

template <class T, int K, bool PerChannel>
void mix_states(const MixRows& op, const Tile& tile, const TileShape& shape, int64_t k0,
                const compute_t<T>* weights, compute_t<T>* sums) {
  constexpr int N = kLanes<compute_t<T>>;
  const int64_t stride = shape.tokens * shape.channels;
  for (int64_t t = tile.t0; t < tile.t1; ++t) {
    const Streams<T, K> states(Chosen{op.states, op.sources}, k0, tile, t);
    compute_t<T>* sum = sums + tile_index(shape, 0, t - tile.t0, 0) - tile.d0;
    int64_t d = tile.d0;
    d = mix_channels<T, N, 2, K, PerChannel>(op, states, d, tile.d1, k0, weights, sum, stride);
    d = mix_channels<T, N, 1, K, PerChannel>(op, states, d, tile.d1, k0, weights, sum, stride);
    mix_channels<T, 1, 1, K, PerChannel>(op, states, d, tile.d1, k0, weights, sum, stride);
  }
}

template <class T, bool PerChannel>
void mix_all(const MixRows& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  const TileShape shape(op.D);
  const int64_t rows = op.rows.count, sources = op.sources.count;
  Scratch<A> sums(rows * shape.tokens * shape.channels);
  Scratch<A> weights(PerChannel ? 0 : rows * sources);
  if constexpr (!PerChannel)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < sources; ++k)
        weights[r * sources + k] = *weight_of<A>(op.weight, op.rows[r], op.sources[k], op.R);
  for_tiles(begin, end, op.D, shape, [&](const Tile& tile) {
    const int64_t width = tile.d1 - tile.d0;
    for (int64_t r = 0; r < op.rows.count; ++r)
      for (int64_t t = tile.t0; t < tile.t1; ++t) {
        A* sum = sums + tile_index(shape, r, t - tile.t0, 0);
        if (op.accumulate)
          load_row(row_of<T>(op.out, op.out_rows[r], t) + tile.d0, sum, width);
        else
          memset(sum, 0, width * sizeof(A));
      }
    int64_t k = 0;
    for (; k + kMixStates <= op.sources.count; k += kMixStates)
      mix_states<T, kMixStates, PerChannel>(op, tile, shape, k, weights, sums);
    for (; k + 4 <= op.sources.count; k += 4)
      mix_states<T, 4, PerChannel>(op, tile, shape, k, weights, sums);
    for (; k < op.sources.count; ++k)
      mix_states<T, 1, PerChannel>(op, tile, shape, k, weights, sums);
    for (int64_t r = 0; r < op.rows.count; ++r)
      for (int64_t t = tile.t0; t < tile.t1; ++t)
        store_row(sums + tile_index(shape, r, t - tile.t0, 0),
                  row_of<T>(op.out, op.out_rows[r], t) + tile.d0, width);
  });
}

// ---- pull --------------------------------------------------------------------------------------

// The operands of a pull's tile, and its dot products so far.
template <class A>
struct PullTile {
  Tile at;
  TileShape shape;
  A *z, *u;    // (sources, tokens, channels) of the tile's shape
  A* dots;     // (rows, sources, lanes): sums over tokens and channels, one per lane
  A* dweight;  // per channel: (rows, sources, D)
};

// Rows [l0, l0 + L) and sources [j0, j0 + J) over the tile's tokens, channels [d0, d1).
template <class T, int N, int L, int J, bool PerChannel>
DEEPFAST_INLINE void pull_registers(const PullRows& op, const PullTile<compute_t<T>>& tile,
                                    int64_t l0, int64_t j0, int64_t d0, int64_t d1) {
  using A = compute_t<T>;
  constexpr Lanes<N> lanes;
  const TileShape shape = tile.shape;
  const Tile at = tile.at;
  // The blocks of sources divide the prefetch of the next rows.
  const int64_t part = j0 / J, parts = (op.sources.count + J - 1) / J;
  const int64_t from = L * part / parts, to = L * (part + 1) / parts;
  const A* weight[L][J];
  vec_t<A, N> w[L][J], dot[L][J];
  A *z = tile.z + tile_index(shape, j0, 0, 0) - at.d0, *u = tile.u + (z - tile.z);
  const int64_t stride = shape.tokens * shape.channels;
  DEEPFAST_UNROLL for (int l = 0; l < L; ++l) DEEPFAST_UNROLL for (int j = 0; j < J; ++j) {
    weight[l][j] = weight_of<A>(op.weight, op.rows[l0 + l], op.sources[j0 + j], op.R);
    w[l][j] = broadcast(lanes, *weight[l][j]);
    dot[l][j] = vec_t<A, N>{};
  }
  const auto step = [&](const Streams<T, L>& grads, int64_t t, int64_t d) {
    vec_t<A, N> g[L];
    DEEPFAST_UNROLL for (int l = 0; l < L; ++l) g[l] = load(lanes, grads.row[l] + d);
    DEEPFAST_UNROLL for (int j = 0; j < J; ++j) {
      const int64_t i = j * stride + t * shape.channels + d;
      auto sum = load(lanes, u + i);
      const auto value = load(lanes, z + i);
      DEEPFAST_UNROLL for (int l = 0; l < L; ++l) {
        if constexpr (PerChannel)
          sum += load(lanes, weight[l][j] + d) * g[l];
        else
          sum += w[l][j] * g[l];
        dot[l][j] += g[l] * value;
      }
      store(lanes, u + i, sum);
    }
  };
  if constexpr (PerChannel) {
    for (int64_t d = d0; d < d1; d += N) {
      for (int64_t t = at.t0; t < at.t1; ++t) {
        const Streams<T, L> grads(Chosen{op.grads, op.grad_slots}, l0, at, t);
        grads.template prefetch<N>(d, from, to);
        step(grads, t - at.t0, d);
      }
      if (op.dweight.data == nullptr) continue;
      DEEPFAST_UNROLL for (int l = 0; l < L; ++l) DEEPFAST_UNROLL for (int j = 0; j < J; ++j) {
        A* p = tile.dweight + ((l0 + l) * op.sources.count + j0 + j) * op.D + d;
        store(lanes, p, load(lanes, p) + dot[l][j]);
        dot[l][j] = vec_t<A, N>{};
      }
    }
  } else {
    for (int64_t t = at.t0; t < at.t1; ++t) {
      const Streams<T, L> grads(Chosen{op.grads, op.grad_slots}, l0, at, t);
      for (int64_t d = d0; d < d1; d += N) {
        grads.template prefetch<N>(d, from, to);
        step(grads, t - at.t0, d);
      }
    }
    DEEPFAST_UNROLL for (int l = 0; l < L; ++l) DEEPFAST_UNROLL for (int j = 0; j < J; ++j) {
      A* p = tile.dots + ((l0 + l) * op.sources.count + j0 + j) * kLanes<A>;
      store(lanes, p, load(lanes, p) + dot[l][j]);
    }
  }
}

template <class T, int L, int J, bool PerChannel>
void pull_block(const PullRows& op, const PullTile<compute_t<T>>& tile, int64_t l, int64_t j) {
  constexpr int N = kLanes<compute_t<T>>;
  const int64_t whole = tile.at.d0 + (tile.at.d1 - tile.at.d0) / N * N;
  if (whole > tile.at.d0) pull_registers<T, N, L, J, PerChannel>(op, tile, l, j, tile.at.d0, whole);
  if (whole < tile.at.d1) pull_registers<T, 1, L, J, PerChannel>(op, tile, l, j, whole, tile.at.d1);
}

template <class T, int L, bool PerChannel>
void pull_sources(const PullRows& op, const PullTile<compute_t<T>>& tile, int64_t l) {
  int64_t j = 0;
  for (; j + kPullSources <= op.sources.count; j += kPullSources)
    pull_block<T, L, kPullSources, PerChannel>(op, tile, l, j);
  if constexpr (kPullSources > 2)
    for (; j + 2 <= op.sources.count; j += 2) pull_block<T, L, 2, PerChannel>(op, tile, l, j);
  for (; j < op.sources.count; ++j) pull_block<T, L, 1, PerChannel>(op, tile, l, j);
}

template <class T, bool PerChannel>
void pull_all(const PullRows& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  const TileShape shape(op.D);
  const int64_t size = op.sources.count * shape.tokens * shape.channels;
  const int64_t pairs = op.rows.count * op.sources.count, width = PerChannel ? op.D : 1;
  A* dweight = at<A>(op.dweight.data, chunk * pairs * width);
  Scratch<A> z(size), u(size), dots(PerChannel ? 0 : pairs * kLanes<A>);
  if (!PerChannel) memset(dots.get(), 0, pairs * kLanes<A> * sizeof(A));
  for_tiles(begin, end, op.D, shape, [&](const Tile& at_tile) {
    const PullTile<A> tile{at_tile, shape, z, u, dots, dweight};
    const int64_t d0 = at_tile.d0, channels = at_tile.d1 - d0;
    for (int64_t j = 0; j < op.sources.count; ++j) {
      const A *norm_weight = at<A>(op.norm_weight, op.sources[j] * op.D),
              *norm_bias = at<A>(op.norm_bias, op.sources[j] * op.D);
      for (int64_t t = at_tile.t0; t < at_tile.t1; ++t) {
        const int64_t i = tile_index(shape, j, t - at_tile.t0, 0);
        const T* n = row_of<T>(op.states, op.sources[j], t);
        for_lanes<A>(channels, [&](auto lanes, int64_t d) {
          store(lanes, z + i + d,
                affine(lanes, load(lanes, n + d0 + d), norm_weight, norm_bias, d0 + d));
        });
        if (op.accumulate)
          load_row(row_of<T>(op.out, op.out_rows[j], t) + d0, u + i, channels);
        else
          memset(u + i, 0, channels * sizeof(A));
      }
    }
    int64_t l = 0;
    for (; l + kPullRows <= op.rows.count; l += kPullRows)
      pull_sources<T, kPullRows, PerChannel>(op, tile, l);
    for (; l < op.rows.count; ++l) pull_sources<T, 1, PerChannel>(op, tile, l);
    for (int64_t j = 0; j < op.sources.count; ++j)
      for (int64_t t = at_tile.t0; t < at_tile.t1; ++t)
        store_row(u + tile_index(shape, j, t - at_tile.t0, 0),
                  row_of<T>(op.out, op.out_rows[j], t) + d0, channels);
  });
  if (PerChannel || op.dweight.data == nullptr) return;
  constexpr Lanes<kLanes<A>> lanes;
  for (int64_t i = 0; i < pairs; ++i)
    dweight[i] = sum_lanes<A, kLanes<A>>(load(lanes, dots + i * kLanes<A>));
}

}  // namespace

void mix_rows(const MixRows& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto type) {
    using T = decltype(type);
    op.weight.per_channel ? mix_all<T, true>(op, begin, end) : mix_all<T, false>(op, begin, end);
  });
}

void pull_rows(const PullRows& op, int64_t begin, int64_t end, int64_t chunk) {
  with_storage(op.storage, [&](auto type) {
    using T = decltype(type);
    op.weight.per_channel ? pull_all<T, true>(op, begin, end, chunk)
                          : pull_all<T, false>(op, begin, end, chunk);
  });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
