// Loads and stores of many rows at once, each fetched ahead. A processor follows a few streams by
// itself. Where tokens are taken one after the other and each needs a row of many operands, it would
// wait for the first lines of every row.
#pragma once

#include "rows.h"

namespace deepfast {
namespace DEEPFAST_ISA {

constexpr int64_t kTokensAhead = 2;

// As load, and brings the same channels of the token kTokensAhead later to the level-2 cache. `stride`
// values lie between tokens. An address outside of the operand does no harm.
template <int N, class T>
DEEPFAST_INLINE auto load_ahead(Lanes<N> lanes, const T* p, int64_t stride) {
  __builtin_prefetch(p + kTokensAhead * stride, 0, 2);
  return load(lanes, p);
}

// The same for a store: its line must come from memory before a part of it can change.
template <int N, class T, class V>
DEEPFAST_INLINE void store_ahead(Lanes<N> lanes, T* p, V v, int64_t stride) {
  __builtin_prefetch(p + kTokensAhead * stride, 1, 2);
  store(lanes, p, v);
}

template <class T, class A = compute_t<T>>
DEEPFAST_INLINE void load_row_ahead(const T* p, A* row, int64_t dim, int64_t stride) {
  for_lanes<A>(
      dim, [&](auto lanes, int64_t d) { store(lanes, row + d, load_ahead(lanes, p + d, stride)); });
}

template <class T, class A = compute_t<T>>
DEEPFAST_INLINE void store_row_ahead(const A* row, T* p, int64_t dim, int64_t stride) {
  for_lanes<A>(
      dim, [&](auto lanes, int64_t d) { store_ahead(lanes, p + d, load(lanes, row + d), stride); });
}

// A state at token 0 with its affine map, which may be absent. A kernel finds its states once, not
// again for each token.
template <class T>
struct State {
  const T* n;
  const compute_t<T>*norm_weight, *norm_bias;
};
template <class T, class Launch>
DEEPFAST_INLINE State<T> state_of(const Launch& op, int64_t k) {
  using A = compute_t<T>;
  return {row_of<T>(op.states, k, 0), at<A>(op.norm_weight, k * op.D),
          at<A>(op.norm_bias, k * op.D)};
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
