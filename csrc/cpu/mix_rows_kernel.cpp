// The weighted sum over the states of a buffer for several rows at once, and its transpose.
//
//   mix   out[r] (+)= sum_k w[r, k] z_k              each z_k read once for all rows r
//   pull  u[j]   (+)= sum_l w[l, j] g_l              each g_l read once for all sources j,
//         dw[l, j] = <g_l, z_j>                      from the same registers
//
// with z_k = n_k * norm_weight_k + norm_bias_k. Both take one vector of channels of two tokens at a
// time: the results stay in registers, and all that is summed is read in a row. So many streams are
// open at once, more than the processor fetches ahead by itself. Compiled once per instruction set.
#include "ahead.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

// Results whose sums stay in registers. A pull has two values for each.
constexpr int kMixed = 4, kPulled = kVectorBytes == 64 ? 4 : 2;

// Calls f(Lanes<tokens>, t, lanes, d, Lanes<results>, i) for each piece of the results: two tokens, one
// vector of channels, and Most of `count` results, and for the smaller pieces at the ends.
template <int Most, class A, class F>
DEEPFAST_INLINE void for_pieces(int64_t begin, int64_t end, int64_t dim, int64_t count,
                                const F& f) {
  const auto tokens = [&](auto at_once, int64_t t) {
    for_lanes<A>(dim, [&](auto lanes, int64_t d) {
      int64_t i = 0;
      for (; i + Most <= count; i += Most) f(at_once, t, lanes, d, Lanes<Most>{}, i);
      if constexpr (Most > 2)
        for (; i + 2 <= count; i += 2) f(at_once, t, lanes, d, Lanes<2>{}, i);
      for (; i < count; ++i) f(at_once, t, lanes, d, Lanes<1>{}, i);
    });
  };
  int64_t t = begin;
  for (; t + 2 <= end; t += 2) tokens(Lanes<2>{}, t);
  for (; t < end; ++t) tokens(Lanes<1>{}, t);
}

// What is summed, with its weights (sums, results) in a row. One weight per channel is read from the
// parameter itself.
template <class T, bool PerChannel>
class Summed {
  using A = compute_t<T>;

 public:
  // weight(i, r): the weight of operand i for result r.
  template <class Weight>
  Summed(const Slots& slots, const Indices& at, int64_t results, const Weight& weight)
      : count(at.count),
        stride(slots.row_stride),
        results_(results),
        rows_(count),
        values_(PerChannel ? 0 : count * results),
        weights_(PerChannel ? count * results : 0) {
    for (int64_t i = 0; i < count; ++i) {
      rows_[i] = row_of<T>(slots, at[i], 0);
      for (int64_t r = 0; r < results; ++r)
        if constexpr (PerChannel)
          weights_[i * results + r] = weight(i, r);
        else
          values_[i * results + r] = *weight(i, r);
    }
  }
  const int64_t count, stride;

  // Channels from d on of token t.
  DEEPFAST_INLINE const T* row(int64_t i, int64_t t, int64_t d) const {
    return rows_[i] + t * stride + d;
  }
  template <int N>
  DEEPFAST_INLINE vec_t<A, N> weight(Lanes<N> lanes, int64_t i, int64_t r, int64_t d) const {
    if constexpr (PerChannel)
      return load(lanes, weights_[i * results_ + r] + d);
    else
      return broadcast(lanes, values_[i * results_ + r]);
  }

 private:
  int64_t results_;
  Scratch<const T*> rows_;
  Scratch<A> values_;
  Scratch<const A*> weights_;
};

// The results of a piece so far: what is there already, or 0.
template <class T, int V, int J, int N, class Launch>
DEEPFAST_INLINE void begin_sums(const Launch& op, int64_t t, Lanes<N> lanes, int64_t d, int64_t i,
                                vec_t<compute_t<T>, N> (&sum)[J][V]) {
  DEEPFAST_UNROLL for (int j = 0; j < J; ++j) DEEPFAST_UNROLL for (int v = 0; v < V; ++v) {
    sum[j][v] = vec_t<compute_t<T>, N>{};
    if (op.accumulate) sum[j][v] = load(lanes, row_of<T>(op.out, op.out_rows[i + j], t + v) + d);
  }
}

template <class T, int V, int J, int N, class Launch>
DEEPFAST_INLINE void end_sums(const Launch& op, int64_t t, Lanes<N> lanes, int64_t d, int64_t i,
                              const vec_t<compute_t<T>, N> (&sum)[J][V]) {
  DEEPFAST_UNROLL for (int j = 0; j < J; ++j) DEEPFAST_UNROLL for (int v = 0; v < V; ++v)
      store_ahead(lanes, row_of<T>(op.out, op.out_rows[i + j], t + v) + d, sum[j][v],
                  op.out.row_stride);
}

template <class T, bool PerChannel>
void mix_all(const MixRows& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  const Summed<T, PerChannel> states(
      op.states, op.sources, op.rows.count, [&](int64_t k, int64_t r) {
        return weight_of<A>(op.weight, op.rows[r], op.sources[k], op.R);
      });
  for_pieces<kMixed, A>(begin, end, op.D, op.rows.count,
                        [&](auto tokens, int64_t t, auto lanes, int64_t d, auto rows, int64_t r) {
                          constexpr int V = tokens.n, J = rows.n;
                          vec_t<A, lanes.n> sum[J][V];
                          begin_sums<T>(op, t, lanes, d, r, sum);
                          for (int64_t k = 0; k < states.count; ++k) {
                            const T* n = states.row(k, t, d);
                            const A *norm_weight = at<A>(op.norm_weight, op.sources[k] * op.D),
                                    *norm_bias = at<A>(op.norm_bias, op.sources[k] * op.D);
                            vec_t<A, lanes.n> z[V];
                            DEEPFAST_UNROLL for (int v = 0; v < V; ++v) z[v] = affine(
                                lanes, load_ahead(lanes, n + v * states.stride, states.stride),
                                norm_weight, norm_bias, d);
                            DEEPFAST_UNROLL for (int j = 0; j < J; ++j) {
                              const auto w = states.weight(lanes, k, r + j, d);
                              DEEPFAST_UNROLL for (int v = 0; v < V; ++v) sum[j][v] += w * z[v];
                            }
                          }
                          end_sums<T>(op, t, lanes, d, r, sum);
                        });
}

template <class T, bool PerChannel>
void pull_all(const PullRows& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  const int64_t sources = op.sources.count, pairs = op.rows.count * sources;
  const Summed<T, PerChannel> grads(op.grads, op.grad_slots, sources, [&](int64_t l, int64_t j) {
    return weight_of<A>(op.weight, op.rows[l], op.sources[j], op.R);
  });
  // (rows, sources): sums over tokens, and for one weight over channels, for each lane or channel.
  const int64_t width = PerChannel ? op.D : kLanes<A>;
  A* dweight = at<A>(op.dweight.data, chunk * pairs * (PerChannel ? op.D : 1));
  Scratch<A> dots(PerChannel ? 0 : pairs * width);
  if (!PerChannel) memset(dots.get(), 0, pairs * width * sizeof(A));
  A* sums = PerChannel || dweight == nullptr ? dweight : dots.get();
  for_pieces<kPulled, A>(
      begin, end, op.D, sources,
      [&](auto tokens, int64_t t, auto lanes, int64_t d, auto at_once, int64_t i) {
        constexpr int V = tokens.n, J = at_once.n;
        vec_t<A, lanes.n> z[J][V], u[J][V];
        begin_sums<T>(op, t, lanes, d, i, u);
        DEEPFAST_UNROLL for (int j = 0; j < J; ++j) {
          const int64_t k = op.sources[i + j];
          DEEPFAST_UNROLL for (int v = 0; v < V; ++v) {
            const T* n = row_of<T>(op.states, k, t + v) + d;
            z[j][v] = affine(lanes, load_ahead(lanes, n, op.states.row_stride),
                             at<A>(op.norm_weight, k * op.D), at<A>(op.norm_bias, k * op.D), d);
          }
        }
        for (int64_t l = 0; l < grads.count; ++l) {
          const T* row = grads.row(l, t, d);
          vec_t<A, lanes.n> g[V];
          DEEPFAST_UNROLL for (int v = 0; v < V; ++v) g[v] =
              load_ahead(lanes, row + v * grads.stride, grads.stride);
          A* dot = sums + (l * sources + i) * width + (PerChannel ? d : 0);
          DEEPFAST_UNROLL for (int j = 0; j < J; ++j, dot += width) {
            const auto w = grads.weight(lanes, l, i + j, d);
            DEEPFAST_UNROLL for (int v = 0; v < V; ++v) u[j][v] += w * g[v];
            if (sums == nullptr) continue;
            auto product = load(lanes, dot);
            DEEPFAST_UNROLL for (int v = 0; v < V; ++v) product += g[v] * z[j][v];
            store(lanes, dot, product);
          }
        }
        end_sums<T>(op, t, lanes, d, i, u);
      });
  if (PerChannel || dweight == nullptr) return;
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
