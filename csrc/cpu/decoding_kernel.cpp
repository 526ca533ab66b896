// What one step of decoding needs beside matrix products: attention of one position of each
// hypothesis to cached keys, and the best tokens of a row of logits. Compiled once per instruction
// set.
//
//   o = softmax(q K^T / sqrt(d)) V    over the columns of the cache that the hypothesis sees
//   log p_v = (x_v - max x) - log sum_v exp(x_v - max x)

#include "exp.h"
#include "rows.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

// The columns that a row sees; returns how many they are.
int64_t seen_columns(const CachedAttention& op, int64_t row, int64_t* seen) {
  if (op.columns != nullptr) {
    memcpy(seen, op.columns + row * op.columns_stride, op.count * sizeof(int64_t));
    return op.count;
  }
  const uint8_t* padding =
      op.padding == nullptr ? nullptr : op.padding + op.sentence[row] * op.count;
  int64_t count = 0;
  for (int64_t n = 0; n < op.count; ++n)
    if (padding == nullptr || padding[n] == 0) seen[count++] = n;
  return count;
}

// The products of q with as many rows of keys as a vector has lanes.
template <class T, class A = compute_t<T>>
DEEPFAST_INLINE vec_t<A, kLanes<A>> products(const T* q, const T* keys, const int64_t* seen,
                                             int64_t column, int64_t d) {
  constexpr int N = kLanes<A>;
  const T* k[N];
  for (int j = 0; j < N; ++j) k[j] = keys + seen[j] * column;
  vec_t<A, N> parts[N] = {}, tail = {};
  int64_t i = 0;
  for (; i + N <= d; i += N) {
    const auto x = load(Lanes<N>{}, q + i);
    DEEPFAST_UNROLL
    for (int j = 0; j < N; ++j) parts[j] += x * load(Lanes<N>{}, k[j] + i);
  }
  for (; i < d; ++i)
    for (int j = 0; j < N; ++j)
      tail[j] += load(Lanes<1>{}, q + i)[0] * load(Lanes<1>{}, k[j] + i)[0];
  return sums_of_lanes<A, N>(parts) + tail;
}

// exp(x - max) of scores, written over them, and their sum; they are whole vectors.
template <class A>
DEEPFAST_INLINE A softmax(A* scores, int64_t count) {
  constexpr int N = kLanes<A>;
  const A most = row_max(scores, count);
  RowSum<A> sum;
  for (int64_t n = 0; n < count; n += N) {
    const auto e = exponential<A>(Lanes<N>{}, load(Lanes<N>{}, scores + n) - most);
    store(Lanes<N>{}, scores + n, e);
    sum.add(e);
  }
  return sum.total();
}

// W vectors of the sum of the values by their weights, times `factor`.
template <int W, class T, class A, int N>
DEEPFAST_INLINE void weighted(Lanes<N> lanes, const T* values, const int64_t* seen, int64_t column,
                              const A* weights, int64_t count, A factor, T* out) {
  vec_t<A, N> sums[W] = {};
  for (int64_t n = 0; n < count; ++n) {
    const T* v = values + seen[n] * column;
    DEEPFAST_UNROLL
    for (int w = 0; w < W; ++w) sums[w] += load(lanes, v + w * N) * weights[n];
  }
  DEEPFAST_UNROLL
  for (int w = 0; w < W; ++w) store(lanes, out + w * N, sums[w] * factor);
}

template <class T>
void attend_cached(const CachedAttention& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  constexpr int N = kLanes<A>;
  const int64_t d = op.width, shared = op.heads / op.groups, room = op.count + N;
  const A scale = static_cast<A>(1 / __builtin_sqrt(static_cast<double>(d)));
  Scratch<int64_t> seen(room);
  Scratch<A> scores(op.heads * room), factors(op.heads);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t sentence = op.sentence[row], count = seen_columns(op, row, seen);
    const int64_t whole = (count + N - 1) / N * N;
    for (int64_t n = count; n < whole; ++n) seen[n] = seen[count - 1];
    const auto head_of = [&](const CacheView& cache, int64_t h) {
      return static_cast<T*>(cache.data) + cache.at(sentence, h / shared);
    };
    if (op.key.data != nullptr) {
      // The new column of this row.
      for (int64_t h = 0; h < op.heads; h += shared) {
        const int64_t from = h / shared * d, own = seen[count - 1];
        memcpy(head_of(op.keys, h) + own * op.keys.column, row_of<T>(op.key, row) + from,
               d * sizeof(T));
        memcpy(head_of(op.values, h) + own * op.values.column, row_of<T>(op.value, row) + from,
               d * sizeof(T));
      }
    }
    // Step by step for all heads: those of one head wait for each other, those of several do not.
    for (int64_t h = 0; h < op.heads; ++h) {
      A* of_head = scores + h * room;
      const T *q = row_of<T>(op.q, row) + h * d, *keys = head_of(op.keys, h);
      for (int64_t n = 0; n < whole; n += N)
        store(Lanes<N>{}, of_head + n, products(q, keys, seen + n, op.keys.column, d) * scale);
      for (int64_t n = count; n < whole; ++n) of_head[n] = -A(__builtin_inf());
    }
    for (int64_t h = 0; h < op.heads; ++h) {
      const A total = softmax<A>(scores + h * room, whole);
      factors[h] = count == 0 ? A(0) : 1 / total;
    }
    for (int64_t h = 0; h < op.heads; ++h) {
      const T* values = head_of(op.values, h);
      T* out = row_of<T>(op.out, row) + h * d;
      int64_t i = 0;
      const auto add = [&](auto vectors, auto lanes) {
        constexpr int W = decltype(vectors)::n, M = decltype(lanes)::n;
        for (; i + W * M <= d; i += W * M)
          weighted<W>(lanes, values + i, seen, op.values.column, scores + h * room, count,
                      factors[h], out + i);
      };
      add(Lanes<4>{}, Lanes<N>{});
      add(Lanes<2>{}, Lanes<N>{});
      add(Lanes<1>{}, Lanes<N>{});
      add(Lanes<1>{}, Lanes<1>{});
    }
  }
}

// Logits whose largest is kept, so that a search skips most of them.
constexpr int64_t kGroup = 128;

template <class T>
void best_tokens_of(const BestTokens& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  const int64_t V = op.vocabulary, groups = (V + kGroup - 1) / kGroup;
  const A lowest = -A(__builtin_inf());
  Scratch<A> largest(groups);
  const auto banned = [&](int64_t token) {
    bool found = false;
    for (int64_t i = 0; i < op.bans; ++i) found |= op.banned[i] == token;
    return found;
  };
  for (int64_t t = begin; t < end; ++t) {
    const T* row = row_of<T>(op.logits, t);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * kGroup;
      largest[g] = row_max(row + first, V - first < kGroup ? V - first : kGroup);
    }
    const A most = row_max(largest.get(), groups);
    const auto sum = sum_over_lanes<A, RowSum<A>>(V, [&](auto lanes, int64_t v, auto& s) {
      s.add(exponential<A>(lanes, load(lanes, row + v) - most));
    });
    const A log_total = static_cast<A>(__builtin_log(double(sum.total())));
    const auto log_p = [&](A x) { return (x - most) - log_total; };
    A* values = at<A>(op.values, t * op.count);
    int64_t* tokens = op.tokens + t * op.count;
    for (int64_t i = 0; i < op.count; ++i) values[i] = lowest, tokens[i] = -1;
    // A later token needs a larger logit than the last of the best: of equal ones the first stays.
    A needed = lowest;
    for (int64_t g = 0; g < groups; ++g) {
      if (!(largest[g] > needed)) continue;
      const int64_t stop = (g + 1) * kGroup < V ? (g + 1) * kGroup : V;
      for (int64_t v = g * kGroup; v < stop; ++v) {
        const A x = load(Lanes<1>{}, row + v)[0];
        if (!(x > needed)) continue;
        const A value = log_p(x);
        if (!(value > values[op.count - 1]) || banned(v)) continue;
        int64_t place = op.count - 1;
        for (; place > 0 && values[place - 1] < value; --place)
          values[place] = values[place - 1], tokens[place] = tokens[place - 1];
        values[place] = value, tokens[place] = v;
        const int64_t last = tokens[op.count - 1];
        if (last >= 0) needed = load(Lanes<1>{}, row + last)[0];
      }
    }
    *at<A>(op.of_eos, t) = log_p(load(Lanes<1>{}, row + op.eos)[0]);
  }
}

}  // namespace

void cached_attention(const CachedAttention& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto type) { attend_cached<decltype(type)>(op, begin, end); });
}

void best_tokens(const BestTokens& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto type) { best_tokens_of<decltype(type)>(op, begin, end); });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
