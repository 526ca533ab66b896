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

// exp(x - max) of `count` scores, written over them, and their sum. The scores end with values of
// -inf up to a whole vector.
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

template <class T>
void attend_cached(const CachedAttention& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  constexpr int N = kLanes<A>;
  const int64_t d = op.width, shared = op.heads / op.groups;
  const A scale = static_cast<A>(1 / __builtin_sqrt(static_cast<double>(d)));
  Scratch<int64_t> seen(op.count);
  Scratch<A> scores(op.count + N), query(d);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t sentence = op.sentence[row], count = seen_columns(op, row, seen);
    const T* q = row_of<T>(op.q, row);
    T* out = row_of<T>(op.out, row);
    for (int64_t h = 0; h < op.heads; ++h, q += d, out += d) {
      const int64_t g = h / shared;
      T* keys = static_cast<T*>(op.keys.data) + op.keys.at(sentence, g);
      T* values = static_cast<T*>(op.values.data) + op.values.at(sentence, g);
      if (op.key.data != nullptr && h % shared == 0) {
        // The new column of this row.
        const int64_t own = seen[count - 1];
        memcpy(keys + own * op.keys.column, row_of<T>(op.key, row) + g * d, d * sizeof(T));
        memcpy(values + own * op.values.column, row_of<T>(op.value, row) + g * d, d * sizeof(T));
      }
      for_lanes<A>(
          d, [&](auto lanes, int64_t i) { store(lanes, query + i, load(lanes, q + i) * scale); });
      for (int64_t n = 0; n < count; ++n) {
        const T* k = keys + seen[n] * op.keys.column;
        RowSum<A> dot;
        for_lanes<A>(d, [&](auto lanes, int64_t i) {
          dot.add(load(lanes, query + i) * load(lanes, k + i));
        });
        scores[n] = dot.total();
      }
      const int64_t padded = (count + N - 1) / N * N;
      for (int64_t n = count; n < padded; ++n) scores[n] = -A(__builtin_inf());
      const A total = softmax<A>(scores, padded), factor = count == 0 ? A(0) : 1 / total;
      for_lanes<A>(d, [&](auto lanes, int64_t i) {
        auto sum = broadcast(lanes, A(0));
        for (int64_t n = 0; n < count; ++n)
          sum += load(lanes, values + seen[n] * op.values.column + i) * scores[n];
        store(lanes, out + i, sum * factor);
      });
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
