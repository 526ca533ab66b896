// The activation of a feed-forward block with the dropout behind it.
//
//   out = dropout(act(h)),  dh = dropout(dout * act'(h))
//
// The gradient of relu reads out alone: out is 0 where relu or dropout made it 0. An element is
// read before it is written, so results may overwrite operands. Compiled once per instruction set.
#include "normal.h"
#include "rows.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

// out = dropout(value(lanes, d)) over the row of token `t`.
template <class T, class F>
DEEPFAST_INLINE void drop_into(T* out, const Dropout& dropout, int64_t t, int64_t dim,
                               const F& value) {
  using A = compute_t<T>;
  if (dropout.threshold == 0) {
    for_lanes<A>(dim, [&](auto lanes, int64_t d) { store(lanes, out + d, value(lanes, d)); });
    return;
  }
  for_drawn_lanes<A>(dropout, t, dim, [&](auto lanes, int64_t d, const uint16_t* draws) {
    store(lanes, out + d, dropped<A>(lanes, value(lanes, d), draws, dropout));
  });
}

template <class T>
void forward(const Activation& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  for (int64_t t = begin; t < end; ++t) {
    const T* h = row_of<T>(op.h, t);
    T* out = row_of<T>(op.out, t);
    if (op.kind == ActivationKind::relu) {
      drop_into(out, op.dropout, t, op.dim, [&](auto lanes, int64_t d) {
        const auto x = load(lanes, h + d);
        // Not max(x, 0), which would lose a NaN.
        return x < 0 ? broadcast(lanes, A(0)) : x;
      });
    } else {
      drop_into(out, op.dropout, t, op.dim, [&](auto lanes, int64_t d) {
        const auto x = load(lanes, h + d);
        return x * normal(lanes, x).cdf;
      });
    }
  }
}

template <class T>
void backward(const Activation& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  const A scale = static_cast<A>(op.dropout.scale);
  for (int64_t t = begin; t < end; ++t) {
    const T *dout = row_of<T>(op.dout, t), *saved = row_of<T>(op.saved, t);
    T* dh = row_of<T>(op.dh, t);
    if (op.kind == ActivationKind::relu) {
      for_lanes<A>(op.dim, [&](auto lanes, int64_t d) {
        const auto kept = load(lanes, saved + d) != 0;
        const auto g = load(lanes, dout + d) * scale;
        store(lanes, dh + d, kept ? g : broadcast(lanes, A(0)));
      });
    } else {
      drop_into(dh, op.dropout, t, op.dim, [&](auto lanes, int64_t d) {
        const auto x = load(lanes, saved + d);
        const auto at = normal(lanes, x);
        return load(lanes, dout + d) * (at.cdf + x * at.pdf);
      });
    }
  }
}

}  // namespace

void activation_forward(const Activation& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto type) { forward<decltype(type)>(op, begin, end); });
}

void activation_backward(const Activation& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto type) { backward<decltype(type)>(op, begin, end); });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
