// Cross entropy of rows of logits, with label smoothing, and its gradient over the logits.
//
//   nll = log sum_v exp(x_v) - x_t,   loss = (1 - eps) * nll + eps * mean_v(log sum exp(x) - x_v)
//   dx = softmax(x) - (1 - eps) * onehot(t) - eps / V,   zeros for an ignored target
//
// A row is read three times, for its maximum, its sums and its gradient, and stays in the level-2
// cache. Compiled once per instruction set.

#include "exp.h"
#include "rows.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

template <class T>
void rows(const CrossEntropy& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  const int64_t V = op.V;
  const A smoothing = static_cast<A>(op.label_smoothing), even = smoothing / static_cast<A>(V);
  for (int64_t t = begin; t < end; ++t) {
    T* row = row_of<T>(op.logits, t);
    const int64_t target = op.target[t];
    if (target == op.ignore_index) {
      *at<A>(op.loss, t) = *at<A>(op.nll, t) = 0;
      if (op.write_grad)
        for_lanes<A>(V,
                     [&](auto lanes, int64_t v) { store(lanes, row + v, broadcast(lanes, A(0))); });
      continue;
    }
    const A most = row_max(row, V);
    // The sums of exp(x - max) and of x - max.
    const auto sums = sum_over_lanes<A, RowSums<A>>(V, [&](auto lanes, int64_t v, auto& s) {
      const auto x = load(lanes, row + v) - most;
      s.first.add(exponential<A>(lanes, x));
      s.second.add(x);
    });
    const A total = sums.first.total(), log_total = static_cast<A>(__builtin_log(double(total)));
    const bool inside = target >= 0 && target < V;
    const A hit = inside ? load(Lanes<1>{}, row + target)[0] - most : A(__builtin_nan(""));
    const A nll = log_total - hit;
    A loss = nll;
    if (smoothing > 0)
      loss =
          (1 - smoothing) * nll + smoothing * (log_total - sums.second.total() / static_cast<A>(V));
    *at<A>(op.nll, t) = nll;
    *at<A>(op.loss, t) = loss;
    if (!op.write_grad) continue;
    const A scale = 1 / total;
    const auto gradient = [&](auto lanes, int64_t v) {
      return exponential<A>(lanes, load(lanes, row + v) - most) * scale - even;
    };
    // Computed before its logit is overwritten, and rounded once.
    const auto of_target = gradient(Lanes<1>{}, inside ? target : 0) - (1 - smoothing);
    for_lanes<A>(V, [&](auto lanes, int64_t v) { store(lanes, row + v, gradient(lanes, v)); });
    if (inside) store(Lanes<1>{}, row + target, of_target);
  }
}

}  // namespace

void cross_entropy(const CrossEntropy& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto type) { rows<decltype(type)>(op, begin, end); });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
