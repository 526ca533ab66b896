// A boundary whose row attends over depth, a batch of tokens at a time. See attend.h for the formulas:
// the older states' mean with its softmax's statistics comes in as `partial`, and the states of the
// row's own block join it here. Compiled once per instruction set.
#include "attend.h"
#include "boundary.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

// x of the row over the near sources and `partial`.
template <class T, class Launch>
class NearRow {
  using A = compute_t<T>;

 public:
  explicit NearRow(const Launch& op)
      : op_(op), joins_(op.partial.data != nullptr), row_(op, {&op.k, 1}, op.near) {}

  DEEPFAST_INLINE void weigh(int64_t t, int64_t n) {
    row_.weigh(
        t, n, 0, op_.near.count, joins_, [&](int64_t) { return at<A>(op_.partial_stats, 0); },
        [&](int64_t) { return at<A>(op_.stats, op_.k * 3 * op_.T); });
  }
  DEEPFAST_INLINE void mix(int64_t t, int64_t i, A* x) {
    const A* partial = joins_ ? row_of<A>(op_.partial, t + i) : nullptr;
    row_.mix(
        t, i, joins_,
        [&](auto lanes, int64_t, int64_t d) {
          return load_ahead(lanes, partial + d, op_.partial.row_stride);
        },
        [&](auto lanes, int64_t, int64_t d, auto value) { store(lanes, x + d, value); });
  }

 private:
  const Launch& op_;
  bool joins_;
  Attend<T> row_;
};

// Two tokens at once: their sums over channels overlap.
constexpr int kTokens = 2;

// Writes a state and its 1 / RMS.
template <class T>
DEEPFAST_INLINE void push(const AttentionBoundaryForward& op, int64_t t, int64_t n,
                          compute_t<T>* row) {
  using A = compute_t<T>;
  A squares[kBatch<A>] = {};
  for (int64_t i = 0; i < n; ++i) {
    load_push<T>(op, t + i, row);
    T* state = row_of<T>(op.states, op.k, t + i);
    store_row_ahead(row, state, op.D, op.states.row_stride);
    // Of the rounded state, which is what every row reads.
    squares[i] = sum_over_lanes<A, RowSum<A>>(op.D, [&](auto lanes, int64_t d, auto& s) {
                   const auto v = load(lanes, state + d);
                   s.add(v * v);
                 }).total();
  }
  for (int64_t i = 0; i < n; ++i) {
    const A mean = squares[i] / static_cast<A>(op.D);
    *at<A>(op.source_rstd, op.k * op.T + t + i) =
        A(1) / static_cast<A>(__builtin_sqrt(mean + static_cast<A>(op.eps)));
  }
}

template <class T>
void forward(const AttentionBoundaryForward& op, int64_t begin, int64_t end) {
  Scratch<compute_t<T>> rows(kTokens * op.D);
  NearRow<T, AttentionBoundaryForward> near(op);
  for_batches<T>(begin, end, op.near.count, op.D, [&](int64_t t, int64_t n) {
    if (op.branch.data != nullptr) push<T>(op, t, n, rows);
    near.weigh(t, n);
    for_groups<kTokens>(n, [&](auto group, int64_t i) {
      for (int r = 0; r < group.n; ++r) near.mix(t, i + r, rows + r * op.D);
      store_output<T, group.n>(op, t + i, rows);
    });
  });
}

template <class T>
void backward(const AttentionBoundaryBackward& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  const int64_t dim = op.D;
  Scratch<A> g(kTokens * dim), x(kTokens * dim), states(kBatch<A> * dim);
  Scratch<const A*> v(kBatch<A>);
  for (int i = 0; i < kBatch<A>; ++i) v[i] = states + i * dim;
  NearRow<T, AttentionBoundaryBackward> near(op);
  Pull<T> pull(op, op.pull_rows, op.pull_slots, {&op.k, 1}, chunk);
  const bool again = op.dout.data != nullptr || is_softmax(op);
  for_batches<T>(begin, end, op.near.count + op.pull_rows.count, dim, [&](int64_t t, int64_t n) {
    if (again) near.weigh(t, n);
    for_groups<kTokens>(n, [&](auto group, int64_t i) {
      constexpr int R = group.n;
      for (int r = 0; again && r < R; ++r) near.mix(t, i + r, x + r * dim);
      output_gradient<T, R>(op, t + i, chunk, x, g);
      for (int r = 0; r < R; ++r) {
        const int64_t token = t + i + r;
        // The state is read before the gradient is stored: the gradient may overwrite a slot of its
        // buffer.
        load_row_ahead(row_of<T>(op.states, op.k, token), states + (i + r) * dim, dim,
                       op.states.row_stride);
        T* stored = row_of<T>(op.grads, op.grad_slot, token);
        store_row_ahead(g + r * dim, stored, dim, op.grads.row_stride);
        if (!is_softmax(op)) continue;
        // Of the rounded gradient, which is what the boundaries read.
        const A* mixed = x + r * dim;
        multiply_rows<A, 1, 1>(&stored, &mixed, dim, at<A>(op.stats, (op.k * 3 + 2) * op.T + token),
                               0, 0);
      }
    });
    pull.weigh(t, n, 0, op.pull_rows.count, v.get());
    for (int64_t i = 0; i < n; ++i) {
      A* u = g;
      load_pulled<T>(op, t + i, u);
      pull.add(
          t, i, v + i, [&](auto lanes, int64_t, int64_t d) { return load(lanes, u + d); },
          [&](auto lanes, int64_t, int64_t d, auto value) { store(lanes, u + d, value); });
      store_push_gradient<T>(op, t + i, u);
    }
  });
}

}  // namespace

void attention_boundary_forward(const AttentionBoundaryForward& op, int64_t begin, int64_t end,
                                int64_t) {
  with_storage(op.storage, [&](auto type) { forward<decltype(type)>(op, begin, end); });
}

void attention_boundary_backward(const AttentionBoundaryBackward& op, int64_t begin, int64_t end,
                                 int64_t chunk) {
  with_storage(op.storage, [&](auto type) { backward<decltype(type)>(op, begin, end, chunk); });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
