// Attention within packed sentences, one sentence and one head of keys at a time.
//
//   s = scale q k^T           p = softmax(s)    w = dropout(p)           o = w v
//   dv = w^T do               dp = dropout(do v^T)
//   ds = p (dp - <do, o>)     dq = scale ds k   dk = scale ds^T q
//
// The scores of a block of queries stay in the cache, so the softmax needs no second pass over the
// keys. Backward recomputes the scores from q, k and the stored log-sum-exp. Compiled once per
// instruction set.
#include "exp.h"
#include "rows.h"
#include "transpose.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

// Queries of a block at most; where the sentence is long, as many as have scores of this size, which
// fit into the level-2 cache with the keys.
constexpr int64_t kMostQueries = 32, kScoreBytes = 1 << 18;

DEEPFAST_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
DEEPFAST_INLINE int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

template <class A>
DEEPFAST_INLINE int64_t up_to_lanes(int64_t n) {
  return (n + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
}

template <class T>
DEEPFAST_INLINE T* row_of(const Heads& x, int64_t token, int64_t head) {
  return static_cast<T*>(x.data) + token * x.token_stride + head * x.head_stride;
}

// c (rows, width) += a (rows, depth) b (depth, width). Value (i, k) of a lies at i * across + k *
// along. Widths and the distances between rows of b and c are whole vectors.
template <class A>
struct Product {
  const A* a;
  int64_t across, along;
  const A* b;
  int64_t b_stride;
  A* c;
  int64_t c_stride, rows, depth, width;

  template <int R, int V>
  DEEPFAST_INLINE void tile(int64_t i, int64_t x) const {
    constexpr int N = kLanes<A>;
    constexpr Lanes<N> lanes;
    vec_t<A, N> sum[R][V] = {};
    const A* factor = a + i * across;
    const A* row = b + x;
    for (int64_t k = 0; k < depth; ++k, factor += along, row += b_stride) {
      vec_t<A, N> column[V];
      DEEPFAST_UNROLL for (int v = 0; v < V; ++v) column[v] = load(lanes, row + v * N);
      DEEPFAST_UNROLL for (int r = 0; r < R; ++r) {
        const auto value = broadcast(lanes, factor[r * across]);
        DEEPFAST_UNROLL for (int v = 0; v < V; ++v) sum[r][v] += value * column[v];
      }
    }
    DEEPFAST_UNROLL for (int r = 0; r < R; ++r) DEEPFAST_UNROLL for (int v = 0; v < V; ++v) {
      A* const total = c + (i + r) * c_stride + x + v * N;
      store(lanes, total, load(lanes, total) + sum[r][v]);
    }
  }

  template <int V>
  DEEPFAST_INLINE void columns(int64_t x) const {
    int64_t i = 0;
    for (; i + 6 <= rows; i += 6) tile<6, V>(i, x);
    if (i + 4 <= rows) tile<4, V>(i, x), i += 4;
    if (i + 2 <= rows) tile<2, V>(i, x), i += 2;
    if (i < rows) tile<1, V>(i, x);
  }

  // The rounding error of a sum grows with the number of its terms, so they are added up in parts.
  void run() const {
    constexpr int N = kLanes<A>;
    constexpr int64_t kTerms = 128;
    Product part = *this;
    for (int64_t k = 0; k < depth; k += kTerms) {
      part.a = a + k * along, part.b = b + k * b_stride, part.depth = least(kTerms, depth - k);
      int64_t x = 0;
      for (; x + 2 * N <= width; x += 2 * N) part.template columns<2>(x);
      for (; x < width; x += N) part.template columns<1>(x);
    }
  }
};

// Rows of one head, times `factor`, in the compute type; each is filled up with zeros.
template <class T, class A = compute_t<T>>
void pack(const Heads& x, int64_t token, int64_t head, int64_t count, int64_t dim, A factor,
          A* out) {
  const int64_t stride = up_to_lanes<A>(dim);
  for (int64_t i = 0; i < count; ++i, out += stride) {
    const T* row = row_of<T>(x, token + i, head);
    for_lanes<A>(
        dim, [&](auto lanes, int64_t d) { store(lanes, out + d, load(lanes, row + d) * factor); });
    for (int64_t d = dim; d < stride; ++d) out[d] = A(0);
  }
}

template <class T, class A = compute_t<T>>
void unpack(const A* rows, const Heads& x, int64_t token, int64_t head, int64_t count, int64_t dim,
            A factor) {
  const int64_t stride = up_to_lanes<A>(dim);
  for (int64_t i = 0; i < count; ++i, rows += stride) {
    T* row = row_of<T>(x, token + i, head);
    for_lanes<A>(
        dim, [&](auto lanes, int64_t d) { store(lanes, row + d, load(lanes, rows + d) * factor); });
  }
}

// Whether no value is an infinity or a NaN.
template <class A>
bool finite(const A* p, int64_t n) {
  const auto sum = sum_over_lanes<A, RowSum<A>>(
      n, [&](auto lanes, int64_t i, auto& s) { s.add(load(lanes, p + i) * A(0)); });
  return sum.total() == A(0);
}

// One sentence with one head of keys and values.
template <class T, class Launch>
class Sentence {
  using A = compute_t<T>;

 public:
  Sentence(const Launch& op, int64_t number)
      : op_(op),
        group_(number % op.G),
        first_(op.cu_seqlens_q[number / op.G]),
        queries_(op.cu_seqlens_q[number / op.G + 1] - first_),
        first_key_(op.cu_seqlens_k[number / op.G]),
        keys_(op.cu_seqlens_k[number / op.G + 1] - first_key_),
        width_(up_to_lanes<A>(keys_)),
        stride_(up_to_lanes<A>(op.E)),
        block_(largest(4, least(kMostQueries, kScoreBytes / static_cast<int64_t>(sizeof(A)) /
                                                  largest(1, width_)))) {}

  void forward() const {
    const int64_t dim = op_.E;
    Scratch<A> rows(keys_ * stride_), columns(stride_ * width_), q(block_ * stride_),
        scores(block_ * width_), out(block_ * stride_);
    pack<T>(op_.k, first_key_, group_, keys_, dim, A(1), rows.get());
    transpose(rows.get(), stride_, keys_, dim, columns.get(), width_);
    pack<T>(op_.v, first_key_, group_, keys_, dim, A(1), rows.get());
    const bool alone = must_be_alone(rows);
    for_blocks([&](const Block& b) {
      pack<T>(op_.q, first_ + b.query, b.head, b.count, dim, static_cast<A>(op_.scale), q.get());
      multiply(q, columns, scores, b);
      memset(out.get(), 0, b.count * stride_ * sizeof(A));
      A factor[kMostQueries];
      for (int64_t i = 0; i < b.count; ++i) {
        A* row = scores + i * width_;
        const A total = weigh(row, b, i);
        if (op_.dropout.threshold > 0)
          drop(b, i, [&](auto lanes, int64_t j, const uint16_t* draws) {
            store(lanes, row + j, dropped<A>(lanes, load(lanes, row + j), draws, op_.dropout));
          });
        // A query without keys gives 0; a NaN stays.
        factor[i] = total == A(0) ? A(0) : A(1) / total;
      }
      add_seen(scores, rows, alone, out, b);
      for (int64_t i = 0; i < b.count; ++i)
        unpack<T>(out + i * stride_, op_.o, first_ + b.query + i, b.head, 1, dim, factor[i]);
    });
  }

  void backward() const {
    const int64_t dim = op_.E, size = keys_ * stride_;
    Scratch<A> k(size), columns(stride_ * width_), v_columns(stride_ * width_), dk(size), dv(size),
        q(block_ * stride_), dout(block_ * stride_), dq(block_ * stride_), p(block_ * width_),
        ds(block_ * width_);
    pack<T>(op_.v, first_key_, group_, keys_, dim, A(1), k.get());
    transpose(k.get(), stride_, keys_, dim, v_columns.get(), width_);
    pack<T>(op_.k, first_key_, group_, keys_, dim, A(1), k.get());
    transpose(k.get(), stride_, keys_, dim, columns.get(), width_);
    const bool alone = must_be_alone(k);
    memset(dk.get(), 0, size * sizeof(A));
    memset(dv.get(), 0, size * sizeof(A));
    for_blocks([&](const Block& b) {
      const int64_t token = first_ + b.query, seen = b.last - b.from;
      pack<T>(op_.q, token, b.head, b.count, dim, static_cast<A>(op_.scale), q.get());
      pack<T>(op_.dout, token, b.head, b.count, dim, A(1), dout.get());
      multiply(q, columns, p, b);
      multiply(dout, v_columns, ds, b);
      for (int64_t i = 0; i < b.count; ++i) {
        const T* o = row_of<T>(op_.o, token + i, b.head);
        const auto dots = sum_over_lanes<A, RowSum<A>>(dim, [&](auto lanes, int64_t d, auto& sum) {
          sum.add(load(lanes, o + d) * load(lanes, dout + i * stride_ + d));
        });
        differentiate(p + i * width_, ds + i * width_, dots.total(), b, i);
      }
      memset(dq.get(), 0, b.count * stride_ * sizeof(A));
      add_seen(ds, k, alone, dq, b);
      unpack<T>(dq.get(), op_.dq, token, b.head, b.count, dim, static_cast<A>(op_.scale));
      Product<A>{p + b.from, 1,    width_,  dout,   stride_, dv + b.from * stride_,
                 stride_,    seen, b.count, stride_}
          .run();
      Product<A>{ds + b.from,           1,       width_, q,       stride_,
                 dk + b.from * stride_, stride_, seen,   b.count, stride_}
          .run();
    });
    unpack<T>(dk.get(), op_.dk, first_key_, group_, keys_, dim, A(1));
    unpack<T>(dv.get(), op_.dv, first_key_, group_, keys_, dim, A(1));
  }

 private:
  // Queries of one head from `query` on, and the keys that one of them may see. The first key is a
  // multiple of kDraws.
  struct Block {
    int64_t head, query, count, from, last;
  };

  // The score of a key that is not seen.
  static constexpr A kHidden = -__builtin_inf();

  // The keys that query i sees: from the first, to before the second.
  DEEPFAST_INLINE int64_t seen_from(int64_t i) const {
    return op_.left < 0 ? 0 : least(keys_, largest(0, i + keys_ - queries_ - op_.left));
  }
  DEEPFAST_INLINE int64_t seen_to(int64_t i) const {
    return op_.right < 0 ? keys_ : least(keys_, largest(0, i + keys_ - queries_ + op_.right + 1));
  }

  template <class F>
  void for_blocks(const F& f) const {
    const int64_t each = op_.H / op_.G;
    for (int64_t h = 0; h < each; ++h)
      for (int64_t i = 0; i < queries_; i += block_) {
        const int64_t count = least(block_, queries_ - i);
        const int64_t from = seen_from(i) / kDraws * kDraws;
        f(Block{group_ * each + h, i, count, from, largest(from, seen_to(i + count - 1))});
      }
  }

  // out (queries, keys) of a block = rows (queries, dim) times columns (dim, keys).
  void multiply(const A* rows, const A* columns, A* out, const Block& b) const {
    const int64_t width = up_to_lanes<A>(b.last - b.from);
    for (int64_t i = 0; i < b.count; ++i) memset(out + i * width_ + b.from, 0, width * sizeof(A));
    Product<A>{rows,    stride_, 1,    columns + b.from, width_, out + b.from, width_,
               b.count, op_.E,   width}
        .run();
  }

  // Whether a product over these keys or values must take each query by itself: a weight of 0 does
  // not hide an infinity or a NaN of a key that the query does not see.
  bool must_be_alone(const A* rows) const {
    return (op_.left >= 0 || op_.right >= 0) && !finite(rows, keys_ * stride_);
  }

  // out (queries, dim) of a block += weights (queries, keys) times rows (keys, dim).
  void add_seen(const A* weights, const A* rows, bool alone, A* out, const Block& b) const {
    for (int64_t i = 0; i < b.count; i += alone ? 1 : b.count) {
      const int64_t from = alone ? seen_from(b.query + i) : b.from;
      const int64_t to = alone ? seen_to(b.query + i) : b.last;
      const int64_t count = alone ? 1 : b.count, depth = to - from;
      const A *w = weights + i * width_ + from, *keys = rows + from * stride_;
      A* sums = out + i * stride_;
      Product<A>{w, width_, 1, keys, stride_, sums, stride_, count, depth, stride_}.run();
    }
  }

  // Replaces what query i of a block does not see, and the rest of the last vector.
  DEEPFAST_INLINE void hide(A* row, const Block& b, int64_t i, A by) const {
    const int64_t end = b.from + up_to_lanes<A>(b.last - b.from);
    const int64_t from = seen_from(b.query + i), to = seen_to(b.query + i);
    for (int64_t j = b.from; j < least(from, end); ++j) row[j] = by;
    for (int64_t j = largest(from, to); j < end; ++j) row[j] = by;
  }

  // Turns scores into exp(s - most), stores the log-sum-exp, and returns the sum.
  A weigh(A* row, const Block& b, int64_t i) const {
    hide(row, b, i, kHidden);
    A* const lse = at<A>(op_.lse, b.head * op_.T + first_ + b.query + i);
    A most = row_max(row + b.from, b.last - b.from);
    if (most == kHidden) most = A(0);  // no key is seen, or only scores of -inf or NaN
    const auto total = sum_over_lanes<A, RowSum<A>>(
        up_to_lanes<A>(b.last - b.from), [&](auto l, int64_t j, auto& sum) {
          const auto e = exponential<A>(l, load(l, row + b.from + j) - most);
          store(l, row + b.from + j, e);
          sum.add(e);
        });
    const A sum = total.total();
    *lse = most + static_cast<A>(__builtin_log(sum));
    return sum;
  }

  // p: scores to dropped weights. ds: gradients of the dropped weights to those of the scores.
  void differentiate(A* p, A* ds, A dot, const Block& b, int64_t i) const {
    const A lse = *at<A>(op_.lse, b.head * op_.T + first_ + b.query + i);
    const int64_t width = up_to_lanes<A>(b.last - b.from);
    if (lse == kHidden) {
      memset(p + b.from, 0, width * sizeof(A));
      memset(ds + b.from, 0, width * sizeof(A));
      return;
    }
    const auto one = [&](auto lanes, int64_t j, const auto& keep) {
      const auto weight = exponential<A>(lanes, load(lanes, p + j) - lse);
      const auto gradient = weight * (keep(load(lanes, ds + j)) - dot);
      store(lanes, p + j, keep(weight));
      store(lanes, ds + j, gradient);
    };
    if (op_.dropout.threshold > 0) {
      drop(b, i, [&](auto lanes, int64_t j, const uint16_t* draws) {
        one(lanes, j, [&](auto v) { return dropped<A>(lanes, v, draws, op_.dropout); });
      });
    } else {
      for_lanes<A>(
          width, [&](auto lanes, int64_t j) { one(lanes, b.from + j, [](auto v) { return v; }); });
    }
    // Not by scores of -inf: a NaN in the log-sum-exp or in v would reach these keys.
    hide(p, b, i, A(0));
    hide(ds, b, i, A(0));
  }

  // Calls f(lanes, key, draws) for the weights of query i of a block.
  template <class F>
  DEEPFAST_INLINE void drop(const Block& b, int64_t i, const F& f) const {
    const int64_t row = (first_ + b.query + i) * op_.H + b.head;
    for_drawn_lanes<A>(op_.dropout, row, b.from + up_to_lanes<A>(b.last - b.from), f, b.from);
  }

  const Launch& op_;
  const int64_t group_, first_, queries_, first_key_, keys_, width_, stride_, block_;
};

}  // namespace

void attention_forward(const AttentionForward& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto type) {
    for (int64_t n = begin; n < end; ++n)
      Sentence<decltype(type), AttentionForward>(op, n).forward();
  });
}

void attention_backward(const AttentionBackward& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto type) {
    for (int64_t n = begin; n < end; ++n)
      Sentence<decltype(type), AttentionBackward>(op, n).backward();
  });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
