// The far passes of attention over depth, and their transpose, see attend.h for the formulas:
//
//   attend       out[r] = sum_k p[r, k] v_k       each v_k read once for all rows r
//   attend_pull  out[j] = the gradient of v_j from all rows l, each g_l read once for all sources j
//
// Compiled once per instruction set.
#include "attend.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

// The results are in the compute dtype, so that each part of the operands adds to those of the parts
// before it.
template <class T>
void attend_all(const AttendRows& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  Attend<T> rows(op, op.rows, op.sources);
  const auto stats = [&](int64_t r) { return at<A>(op.out_stats, op.out_rows[r] * 2 * op.T); };
  for_parts<T>(
      begin, end, op.sources.count, op.D, [&](int64_t t, int64_t n, int64_t first, int64_t last) {
        const bool joins = op.accumulate || first > 0;
        rows.weigh(t, n, first, last, joins, stats, stats);
        for (int64_t i = 0; i < n; ++i) {
          const auto out = [&](int64_t r, int64_t d) {
            return row_of<A>(op.out, op.out_rows[r], t + i) + d;
          };
          rows.mix(
              t, i, joins, [&](auto lanes, int64_t r, int64_t d) { return load(lanes, out(r, d)); },
              [&](auto lanes, int64_t r, int64_t d, auto x) {
                store_ahead(lanes, out(r, d), x, op.out.row_stride);
              });
        }
      });
}

template <class T>
void pull_all(const AttendPull& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  const int64_t sources = op.sources.count;
  Pull<T> pull(op, op.rows, op.grad_slots, op.sources, chunk);
  Scratch<const T*> v(kBatch<A> * sources);
  for_parts<T>(
      begin, end, op.rows.count, op.D, [&](int64_t t, int64_t n, int64_t first, int64_t last) {
        for (int64_t i = 0; i < n; ++i)
          for (int64_t j = 0; j < sources; ++j)
            v[i * sources + j] = row_of<T>(op.states, op.sources[j], t + i);
        pull.weigh(t, n, first, last, v.get());
        for (int64_t i = 0; i < n; ++i) {
          const auto out = [&](int64_t j, int64_t d) {
            return row_of<A>(op.out, op.out_rows[j], t + i) + d;
          };
          pull.add(
              t, i, v + i * sources,
              [&](auto lanes, int64_t j, int64_t d) {
                return op.accumulate || first > 0 ? load(lanes, out(j, d)) : broadcast(lanes, A(0));
              },
              [&](auto lanes, int64_t j, int64_t d, auto u) {
                store_ahead(lanes, out(j, d), u, op.out.row_stride);
              });
        }
      });
}

}  // namespace

void attend_rows(const AttendRows& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto type) { attend_all<decltype(type)>(op, begin, end); });
}

void attend_pull(const AttendPull& op, int64_t begin, int64_t end, int64_t chunk) {
  with_storage(op.storage, [&](auto type) { pull_all<decltype(type)>(op, begin, end, chunk); });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
