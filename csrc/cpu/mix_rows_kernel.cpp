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

// The weights of what is summed, (sums, results) in a row. One weight per channel is read from the
// parameter itself.
template <class A, bool PerChannel>
class SumWeights {
  using Value = std::conditional_t<PerChannel, const A*, A>;

 public:
  // weight(i, r): the weight of operand i for result r.
  template <class Weight>
  SumWeights(int64_t sums, int64_t results, const Weight& weight) : values_(sums * results) {
    for (int64_t i = 0; i < sums; ++i)
      for (int64_t r = 0; r < results; ++r)
        if constexpr (PerChannel)
          values_[i * results + r] = weight(i, r);
        else
          values_[i * results + r] = *weight(i, r);
  }
  DEEPFAST_INLINE const Value* get() const { return values_; }
  template <int N>
  static DEEPFAST_INLINE vec_t<A, N> load_at(Lanes<N> lanes, Value value, int64_t d) {
    if constexpr (PerChannel)
      return load(lanes, value + d);
    else
      return broadcast(lanes, value);
  }

 private:
  Scratch<Value> values_;
};

// The results of a launch, which stay in registers while a piece of them is summed.
template <class A>
class Results {
 public:
  template <class Launch>
  explicit Results(const Launch& op)
      : accumulate_(op.accumulate), stride_(op.out.row_stride), rows_(op.out_rows.count) {
    for (int64_t i = 0; i < op.out_rows.count; ++i) rows_[i] = row_of<A>(op.out, op.out_rows[i], 0);
  }
  // What is there already, or 0.
  template <int V, int J, int N>
  DEEPFAST_INLINE void begin(int64_t t, Lanes<N> lanes, int64_t d, int64_t i,
                             vec_t<A, N> (&sum)[J][V]) const {
    DEEPFAST_UNROLL for (int j = 0; j < J; ++j) DEEPFAST_UNROLL for (int v = 0; v < V; ++v) {
      sum[j][v] = vec_t<A, N>{};
      if (accumulate_) sum[j][v] = load(lanes, rows_[i + j] + (t + v) * stride_ + d);
    }
  }
  template <int V, int J, int N>
  DEEPFAST_INLINE void end(int64_t t, Lanes<N> lanes, int64_t d, int64_t i,
                           const vec_t<A, N> (&sum)[J][V]) const {
    DEEPFAST_UNROLL for (int j = 0; j < J; ++j) DEEPFAST_UNROLL for (int v = 0; v < V; ++v)
        store_ahead(lanes, rows_[i + j] + (t + v) * stride_ + d, sum[j][v], stride_);
  }

 private:
  bool accumulate_;
  int64_t stride_;
  Scratch<A*> rows_;
};

template <class T, bool PerChannel>
void mix_all(const MixRows& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  using W = SumWeights<A, PerChannel>;
  const int64_t sources = op.sources.count, results = op.rows.count, stride = op.states.row_stride;
  const W weights(sources, results, [&](int64_t k, int64_t r) {
    return weight_of<A>(op.weight, op.rows[r], op.sources[k], op.R);
  });
  const Scratch<State<T>> states(sources);
  for (int64_t k = 0; k < sources; ++k) states[k] = state_of<T>(op, op.sources[k]);
  const Results<A> out(op);
  for_pieces<kMixed, A>(begin, end, op.D, results,
                        [&](auto tokens, int64_t t, auto lanes, int64_t d, auto rows, int64_t r) {
                          constexpr int V = tokens.n, J = rows.n;
                          vec_t<A, lanes.n> sum[J][V];
                          out.template begin<V, J>(t, lanes, d, r, sum);
                          const int64_t from = t * stride + d;
                          const auto* weight = weights.get() + r;
                          for (const State<T>* state = states; state != states + sources;
                               ++state, weight += results) {
                            vec_t<A, lanes.n> z[V];
                            DEEPFAST_UNROLL for (int v = 0; v < V; ++v) z[v] = affine(
                                lanes, load_ahead(lanes, state->n + from + v * stride, stride),
                                state->norm_weight, state->norm_bias, d);
                            DEEPFAST_UNROLL for (int j = 0; j < J; ++j) {
                              const auto w = W::load_at(lanes, weight[j], d);
                              DEEPFAST_UNROLL for (int v = 0; v < V; ++v) sum[j][v] += w * z[v];
                            }
                          }
                          out.template end<V, J>(t, lanes, d, r, sum);
                        });
}

template <class T, bool PerChannel>
void pull_all(const PullRows& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  using W = SumWeights<A, PerChannel>;
  const int64_t rows = op.rows.count, sources = op.sources.count, pairs = rows * sources;
  const int64_t stride = op.states.row_stride, grad_stride = op.grads.row_stride;
  const W weights(rows, sources, [&](int64_t l, int64_t j) {
    return weight_of<A>(op.weight, op.rows[l], op.sources[j], op.R);
  });
  const Scratch<State<T>> states(sources);
  for (int64_t k = 0; k < sources; ++k) states[k] = state_of<T>(op, op.sources[k]);
  const Results<A> out(op);
  const Scratch<const T*> grads(rows);
  for (int64_t l = 0; l < rows; ++l) grads[l] = row_of<T>(op.grads, op.grad_slots[l], 0);
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
        out.template begin<V, J>(t, lanes, d, i, u);
        DEEPFAST_UNROLL for (int j = 0; j < J; ++j) {
          const State<T>& state = states[i + j];
          DEEPFAST_UNROLL for (int v = 0; v < V; ++v) z[j][v] =
              affine(lanes, load_ahead(lanes, state.n + (t + v) * stride + d, stride),
                     state.norm_weight, state.norm_bias, d);
        }
        const int64_t from = t * grad_stride + d;
        const auto* weight = weights.get() + i;
        A* row_dots = sums == nullptr ? nullptr : sums + i * width + (PerChannel ? d : 0);
        for (int64_t l = 0; l < rows; ++l, weight += sources) {
          vec_t<A, lanes.n> g[V];
          DEEPFAST_UNROLL for (int v = 0; v < V; ++v) g[v] =
              load_ahead(lanes, grads[l] + from + v * grad_stride, grad_stride);
          DEEPFAST_UNROLL for (int j = 0; j < J; ++j) {
            const auto w = W::load_at(lanes, weight[j], d);
            DEEPFAST_UNROLL for (int v = 0; v < V; ++v) u[j][v] += w * g[v];
          }
          if (row_dots == nullptr) continue;
          DEEPFAST_UNROLL for (int j = 0; j < J; ++j) {
            auto product = load(lanes, row_dots + j * width);
            DEEPFAST_UNROLL for (int v = 0; v < V; ++v) product += g[v] * z[j][v];
            store(lanes, row_dots + j * width, product);
          }
          row_dots += sources * width;
        }
        out.template end<V, J>(t, lanes, d, i, u);
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
