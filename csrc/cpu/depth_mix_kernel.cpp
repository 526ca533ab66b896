// The weighted sum over layers, and its transpose.
//
//   mix   out[r] (+)= sum_k w[r, k] z_k              each z_k read once for all rows r
//   pull  u[j]   (+)= sum_l w[l, j] g_l              each g_l read once for all sources j,
//         dw[l, j] = <g_l, z_j>                      from the same tiles
//
// with z_k = n_k * gain_k + shift_k. Bytes: one read of every state (or gradient), one write of
// every output; weights and gains stay in the caches. Compiled once per instruction set.
#include "rows.h"
#include "tables.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

// Registers for accumulators: half of the file, the rest holds operands.
constexpr int kAccumulators = kVectorBytes == 64 ? 16 : 8;
// Tokens that share a pass over the weights, gains and shifts of one vector of channels.
constexpr int64_t kMixTokens = 16;
// Tokens whose z and u tiles stay in the level-2 cache during a pull.
constexpr int64_t kPullTokens = 8;

// ---- mix ---------------------------------------------------------------------------------------

// Rows [r0, r0 + R), channels [d, d + V * N), tokens [begin, end): sums live in registers.
template <class T, int N, int R, int V, bool PerChannel>
void mix_registers(const Mix& op, int64_t r0, int64_t d, int64_t begin, int64_t end,
                   compute_t<T>* weights) {
  using A = compute_t<T>;
  constexpr Lanes<N> lanes;
  if constexpr (!PerChannel)
    for (int64_t k = 0; k < op.sources; ++k)
      for (int r = 0; r < R; ++r)
        weights[k * R + r] = *static_cast<const A*>(op.weight[(r0 + r) * op.sources + k]);
  for (int64_t t = begin; t < end; ++t) {
    vec_t<A, N> sum[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v)
        sum[r][v] = op.accumulate ? load(lanes, row_of<T>(op.out[r0 + r], t) + d + v * N)
                                  : vec_t<A, N>{};
    for (int64_t k = 0; k < op.sources; ++k) {
      const T* n = row_of<T>(op.source[k], t) + d;
      // The same channels of the next token: too many streams for the hardware's prefetcher.
      for (int v = 0; v < V; ++v) __builtin_prefetch(n + op.source[k].row_stride + v * N);
      const A *gain = at<A>(op.gain[k], 0), *shift = at<A>(op.shift[k], 0);
      vec_t<A, N> z[V];
      for (int v = 0; v < V; ++v)
        z[v] = affine(lanes, load(lanes, n + v * N), gain, shift, d + v * N);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) {
          if constexpr (PerChannel) {
            const A* w = static_cast<const A*>(op.weight[(r0 + r) * op.sources + k]);
            sum[r][v] += load(lanes, w + d + v * N) * z[v];
          } else {
            sum[r][v] += weights[k * R + r] * z[v];
          }
        }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v)
        store(lanes, row_of<T>(op.out[r0 + r], t) + d + v * N, sum[r][v]);
  }
}

template <class T, int R, bool PerChannel>
void mix_rows(const Mix& op, int64_t r0, int64_t begin, int64_t end, compute_t<T>* weights) {
  constexpr int N = kLanes<compute_t<T>>;
  constexpr int V = 2 * R <= kAccumulators ? 2 : 1;
  int64_t d = 0;
  for (; d + V * N <= op.dim; d += V * N)
    mix_registers<T, N, R, V, PerChannel>(op, r0, d, begin, end, weights);
  for (; d + N <= op.dim; d += N)
    mix_registers<T, N, R, 1, PerChannel>(op, r0, d, begin, end, weights);
  for (; d < op.dim; ++d) mix_registers<T, 1, R, 1, PerChannel>(op, r0, d, begin, end, weights);
}

template <class T, bool PerChannel>
void mix_all(const Mix& op, int64_t begin, int64_t end) {
  Scratch<compute_t<T>> weights(op.sources * kAccumulators);
  for (int64_t t = begin; t < end; t += kMixTokens) {
    const int64_t stop = t + kMixTokens < end ? t + kMixTokens : end;
    int64_t r = 0;
    while (r < op.rows) {
      const int64_t left = op.rows - r;
      if (kAccumulators >= 16 && left >= 10) {
        mix_rows<T, 10, PerChannel>(op, r, t, stop, weights);
        r += 10;
      } else if (left >= 8) {
        mix_rows<T, 8, PerChannel>(op, r, t, stop, weights);
        r += 8;
      } else if (left >= 4) {
        mix_rows<T, 4, PerChannel>(op, r, t, stop, weights);
        r += 4;
      } else if (left >= 2) {
        mix_rows<T, 2, PerChannel>(op, r, t, stop, weights);
        r += 2;
      } else {
        mix_rows<T, 1, PerChannel>(op, r, t, stop, weights);
        r += 1;
      }
    }
  }
}

// ---- pull --------------------------------------------------------------------------------------

// One tile of tokens of a pull: z and u of all sources, in the compute type.
template <class A>
struct Tile {
  int64_t begin, end;   // tokens
  int64_t limit;        // end of the whole range, for prefetching the next tile
  A *z, *u;             // (sources, kPullTokens, D)
  A* dweight;           // this chunk's partial sums
};

// Rows [l0, l0 + L) and sources [j0, j0 + J), channels [d0, d1): L * J dot products in registers.
template <class T, int N, int L, int J, bool PerChannel>
void pull_registers(const Pull& op, const Tile<compute_t<T>>& tile, int64_t l0, int64_t j0,
                    int64_t d0, int64_t d1) {
  using A = compute_t<T>;
  constexpr Lanes<N> lanes;
  const int64_t dim = op.dim, tokens = tile.end - tile.begin;
  const A* weight[L][J];
  A w[L][J];
  for (int l = 0; l < L; ++l)
    for (int j = 0; j < J; ++j) {
      weight[l][j] = static_cast<const A*>(op.weight[(l0 + l) * op.sources + j0 + j]);
      w[l][j] = *weight[l][j];
    }
  vec_t<A, N> dot[L][J] = {};
  for (int64_t d = d0; d < d1; d += N) {
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t t = tile.begin + i;
      vec_t<A, N> g[L];
      for (int l = 0; l < L; ++l) g[l] = load(lanes, row_of<T>(op.grad[l0 + l], t) + d);
      if (j0 == 0)
        for (int l = 0; l < L; ++l) {
          const int64_t next = l0 + L + l;
          if (next < op.rows)
            __builtin_prefetch(row_of<T>(op.grad[next], t) + d, 0, 2);
          else if (t + kPullTokens < tile.limit && next - op.rows < L)
            __builtin_prefetch(row_of<T>(op.grad[next - op.rows], t + kPullTokens) + d, 0, 2);
        }
      for (int j = 0; j < J; ++j) {
        const int64_t at = ((j0 + j) * kPullTokens + i) * dim + d;
        auto u = load(lanes, tile.u + at);
        const auto z = load(lanes, tile.z + at);
        for (int l = 0; l < L; ++l) {
          if constexpr (PerChannel)
            u += load(lanes, weight[l][j] + d) * g[l];
          else
            u += w[l][j] * g[l];
          dot[l][j] += g[l] * z;
        }
        store(lanes, tile.u + at, u);
      }
    }
    if constexpr (PerChannel) {
      if (!op.need_dweight) continue;
      for (int l = 0; l < L; ++l)
        for (int j = 0; j < J; ++j) {
          A* p = tile.dweight + ((l0 + l) * op.sources + j0 + j) * dim + d;
          store(lanes, p, load(lanes, p) + dot[l][j]);
          dot[l][j] = vec_t<A, N>{};
        }
    }
  }
  if constexpr (!PerChannel) {
    if (!op.need_dweight) return;
    for (int l = 0; l < L; ++l)
      for (int j = 0; j < J; ++j)
        tile.dweight[(l0 + l) * op.sources + j0 + j] += sum_lanes<A, N>(dot[l][j]);
  }
}

template <class T, int L, int J, bool PerChannel>
void pull_block(const Pull& op, const Tile<compute_t<T>>& tile, int64_t l, int64_t j) {
  constexpr int N = kLanes<compute_t<T>>;
  const int64_t whole = op.dim / N * N;
  if (whole > 0) pull_registers<T, N, L, J, PerChannel>(op, tile, l, j, 0, whole);
  if (whole < op.dim) pull_registers<T, 1, L, J, PerChannel>(op, tile, l, j, whole, op.dim);
}

template <class T, int L, bool PerChannel>
void pull_sources(const Pull& op, const Tile<compute_t<T>>& tile, int64_t l) {
  int64_t j = 0;
  for (; j + 4 <= op.sources; j += 4) pull_block<T, L, 4, PerChannel>(op, tile, l, j);
  for (; j + 2 <= op.sources; j += 2) pull_block<T, L, 2, PerChannel>(op, tile, l, j);
  for (; j < op.sources; ++j) pull_block<T, L, 1, PerChannel>(op, tile, l, j);
}

template <class T, bool PerChannel>
void pull_all(const Pull& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  constexpr int kRows = kAccumulators / 4;
  const int64_t dim = op.dim, size = op.sources * kPullTokens * dim;
  const int64_t width = PerChannel ? dim : 1;
  Scratch<A> z(size), u(size);
  Tile<A> tile{0, 0, end, z, u, at<A>(op.dweight, chunk * op.rows * op.sources * width)};
  for (int64_t t0 = begin; t0 < end; t0 += kPullTokens) {
    tile.begin = t0;
    tile.end = t0 + kPullTokens < end ? t0 + kPullTokens : end;
    for (int64_t j = 0; j < op.sources; ++j) {
      const A *gain = at<A>(op.gain[j], 0), *shift = at<A>(op.shift[j], 0);
      for (int64_t t = t0; t < tile.end; ++t) {
        const int64_t at_row = (j * kPullTokens + t - t0) * dim;
        const T* n = row_of<T>(op.source[j], t);
        for_lanes<A>(dim, [&](auto lanes, int64_t d) {
          store(lanes, z + at_row + d, affine(lanes, load(lanes, n + d), gain, shift, d));
        });
        if (op.accumulate)
          load_row(row_of<T>(op.out[j], t), u + at_row, dim);
        else
          memset(u + at_row, 0, dim * sizeof(A));
      }
    }
    int64_t l = 0;
    for (; l + kRows <= op.rows; l += kRows) pull_sources<T, kRows, PerChannel>(op, tile, l);
    for (; l < op.rows; ++l) pull_sources<T, 1, PerChannel>(op, tile, l);
    for (int64_t j = 0; j < op.sources; ++j)
      for (int64_t t = t0; t < tile.end; ++t)
        store_row(u + (j * kPullTokens + t - t0) * dim, row_of<T>(op.out[j], t), dim);
  }
}

// ---- depth_mix over separate tensors -----------------------------------------------------------

template <class T>
void depth_mix_forward_rows(const DepthMix& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  const int64_t dim = op.dim, width = op.per_channel ? dim : 1;
  Scratch<A> row(dim), sum(dim);
  for (int64_t t = begin; t < end; ++t) {
    memset(sum.get(), 0, dim * sizeof(A));
    for (int64_t k = 0; k < op.sources; ++k) {
      load_row(row_of<T>(op.source[k], t), row.get(), dim);
      if (op.norm) {
        const auto m = moments<A>(row, dim, static_cast<A>(op.eps));
        *at<A>(op.mean, k * op.tokens + t) = m.mean;
        *at<A>(op.rstd, k * op.tokens + t) = m.rstd;
        for_lanes<A>(dim, [&](auto lanes, int64_t d) {
          store(lanes, row + d, (load(lanes, row + d) - m.mean) * m.rstd);
        });
      }
      mix_row<A>(row.get(), at<A>(op.gain, k * dim), at<A>(op.shift, k * dim),
                 at<A>(op.weight, k * width), op.per_channel, sum.get(), dim);
    }
    store_row(sum.get(), row_of<T>(op.out, t), dim);
  }
}

template <class T>
void depth_mix_backward_rows(const DepthMix& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  const int64_t dim = op.dim, width = op.per_channel ? dim : 1;
  Scratch<A> g(dim), n(dim), u(dim);
  for (int64_t t = begin; t < end; ++t) {
    load_row(row_of<T>(op.dout, t), g.get(), dim);
    for (int64_t k = 0; k < op.sources; ++k) {
      const A *gain = at<A>(op.gain, k * dim), *shift = at<A>(op.shift, k * dim);
      const A* weight = at<A>(op.weight, k * width);
      A* dweight = op.need_dweight ? at<A>(op.dweight, (chunk * op.sources + k) * width) : nullptr;
      load_row(row_of<T>(op.source[k], t), n.get(), dim);
      A rstd = A(1);
      if (op.norm) {
        const A mean = *at<A>(op.mean, k * op.tokens + t);
        rstd = *at<A>(op.rstd, k * op.tokens + t);
        for_lanes<A>(dim, [&](auto lanes, int64_t d) {
          store(lanes, n + d, (load(lanes, n + d) - mean) * rstd);
        });
      }
      RowSum<A> dot;
      for_lanes<A>(dim, [&](auto lanes, int64_t d) {
        const auto b = load(lanes, g + d);
        const auto w = op.per_channel ? load(lanes, weight + d) : broadcast(lanes, *weight);
        store(lanes, u + d, w * b);
        if (dweight == nullptr) return;
        const auto product = b * affine(lanes, load(lanes, n + d), gain, shift, d);
        if (op.per_channel)
          store(lanes, dweight + d, load(lanes, dweight + d) + product);
        else
          dot.add(product);
      });
      if (dweight != nullptr && !op.per_channel) *dweight += dot.total();
      accumulate_affine<A>(u, n, at<A>(op.dgain, (chunk * op.sources + k) * dim),
                           at<A>(op.dshift, (chunk * op.sources + k) * dim), dim);
      if (op.dsource[k].data == nullptr) continue;
      if (gain != nullptr)
        for_lanes<A>(dim, [&](auto lanes, int64_t d) {
          store(lanes, u + d, load(lanes, u + d) * load(lanes, gain + d));
        });
      if (op.norm) norm_backward_row<A>(u, n, rstd, dim);
      store_row(u.get(), row_of<T>(op.dsource[k], t), dim);
    }
  }
}

}  // namespace

void mix(const Mix& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto* tag) {
    using T = typename pointee<decltype(tag)>::type;
    op.per_channel ? mix_all<T, true>(op, begin, end) : mix_all<T, false>(op, begin, end);
  });
}

void pull(const Pull& op, int64_t begin, int64_t end, int64_t chunk) {
  with_storage(op.storage, [&](auto* tag) {
    using T = typename pointee<decltype(tag)>::type;
    op.per_channel ? pull_all<T, true>(op, begin, end, chunk)
                   : pull_all<T, false>(op, begin, end, chunk);
  });
}

void depth_mix_forward(const DepthMix& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto* tag) {
    depth_mix_forward_rows<typename pointee<decltype(tag)>::type>(op, begin, end);
  });
}

void depth_mix_backward(const DepthMix& op, int64_t begin, int64_t end, int64_t chunk) {
  with_storage(op.storage, [&](auto* tag) {
    depth_mix_backward_rows<typename pointee<decltype(tag)>::type>(op, begin, end, chunk);
  });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
