// The activation of a feed-forward block with the bias in front of it and the dropout behind it.
//
//   out = dropout(act(h + bias)),  dh = dropout(dout * act'(h + bias)),  dbias = sum over rows of dh
//
// The gradient of relu reads out alone: out is 0 where relu or dropout made it 0. An element is
// read before it is written, so results may overwrite operands. Compiled once per instruction set.
#include "normal.h"
#include "rows.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

// Whether results are stored past the caches: those of relu, because gelu takes longer than its bytes
// do, and only where they overwrite no operand.
template <class T, class Launch>
DEEPFAST_INLINE bool streams(const Launch& op, const void* operand, const void* result) {
  return op.kind == Launch::Kind::relu && operand != result &&
         op.T * op.D * static_cast<int64_t>(sizeof(T)) >= kStreamBytes;
}

template <class T>
void forward(const ActivationForward& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  const A *bias = at<A>(op.bias, 0), *none = nullptr;
  const bool streamed = streams<T>(op, op.h.data, op.out.data);
  for (int64_t t = begin; t < end; ++t) {
    const T* h = row_of<T>(op.h, t);
    T* out = row_of<T>(op.out, t);
    const auto x_of = [&](auto lanes, int64_t d) {
      return affine(lanes, load(lanes, h + d), none, bias, d);
    };
    const bool past_caches = streamed && can_stream(out);
    const auto put = [&](auto lanes, int64_t d, auto y) {
      past_caches ? stream(lanes, out + d, y) : store(lanes, out + d, y);
    };
    if (op.kind == decltype(op.kind)::relu) {
      const auto relu = [&](auto lanes, int64_t d) {
        const auto x = x_of(lanes, d);
        // Not max(x, 0), which would lose a NaN.
        return x < 0 ? broadcast(lanes, A(0)) : x;
      };
      for_dropped<A>(op.dropout, t, op.D, relu, put);
    } else {
      const auto gelu = [&](auto lanes, int64_t d) {
        const auto x = x_of(lanes, d);
        return x * normal(lanes, x).cdf;
      };
      for_dropped<A>(op.dropout, t, op.D, gelu, put);
    }
  }
  if (streamed) end_stream();
}

template <class T>
void backward(const ActivationBackward& op, int64_t begin, int64_t end, int64_t chunk) {
  using A = compute_t<T>;
  const A scale = static_cast<A>(op.dropout.scale);
  const A *bias = at<A>(op.bias, 0), *none = nullptr;
  A* dbias = at<A>(op.dbias, chunk * op.D);
  const bool streamed = streams<T>(op, op.dout.data, op.dh.data) && op.saved.data != op.dh.data;
  for (int64_t t = begin; t < end; ++t) {
    const T *dout = row_of<T>(op.dout, t), *saved = row_of<T>(op.saved, t);
    T* dh = row_of<T>(op.dh, t);
    const bool past_caches = streamed && can_stream(dh);
    const auto put = [&](auto lanes, int64_t d, auto g) {
      past_caches ? stream(lanes, dh + d, g) : store(lanes, dh + d, g);
      if (dbias != nullptr) store(lanes, dbias + d, load(lanes, dbias + d) + g);
    };
    if (op.kind == decltype(op.kind)::relu) {
      for_lanes<A>(op.D, [&](auto lanes, int64_t d) {
        const auto kept = load(lanes, saved + d) != 0;
        const auto g = load(lanes, dout + d) * scale;
        put(lanes, d, kept ? g : broadcast(lanes, A(0)));
      });
    } else {
      const auto slope = [&](auto lanes, int64_t d) {
        const auto x = affine(lanes, load(lanes, saved + d), none, bias, d);
        const auto at = normal(lanes, x);
        return load(lanes, dout + d) * (at.cdf + x * at.pdf);
      };
      for_dropped<A>(op.dropout, t, op.D, slope, put);
    }
  }
  if (streamed) end_stream();
}

}  // namespace

void activation_forward(const ActivationForward& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto type) { forward<decltype(type)>(op, begin, end); });
}

void activation_backward(const ActivationBackward& op, int64_t begin, int64_t end, int64_t chunk) {
  with_storage(op.storage, [&](auto type) { backward<decltype(type)>(op, begin, end, chunk); });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
