// An LSTM layer with peepholes: all steps of some sentences, the matrix products included.
//
//   (z, rho, phi, pi) = f_t + h_{t-1} W
//   c_t = tanh(z) * s(rho + p0 c_{t-1}) + s(phi + p1 c_{t-1}) * c_{t-1}
//   h_t = tanh(c_t) * s(pi + p2 c_t)
//
// Sentences do not depend on each other: a thread runs its sentences through time and never waits
// for another thread. The weight is packed once. A product of a few sentences with a panel then
// gives the four gates of the same channels in the level-1 cache, and the cell reads them at once.
// Compiled once per instruction set.
#include "exp.h"
#include "panels.h"
#include "rows.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

template <class T>
DEEPFAST_INLINE T* at(void* base, int64_t index) {
  return static_cast<T*>(base) + index;
}
template <class T>
DEEPFAST_INLINE const T* at(const void* base, int64_t index) {
  return static_cast<const T*>(base) + index;
}

// The row of (T, B) that holds step s of sentence b.
template <class Launch>
DEEPFAST_INLINE int64_t place(const Launch& op, int64_t b, int64_t s) {
  return (op.reverse ? op.length[b] - 1 - s : s) * op.N + b;
}

// How many of the thread's sentences are longer than s; they come first.
template <class Launch>
DEEPFAST_INLINE int64_t longer_than(const Launch& op, int64_t s, const int64_t* order,
                                    int64_t most) {
  while (most > 0 && op.length[order[most - 1]] <= s) --most;
  return most;
}

template <class T>
void pack(const Lstm<PeepholeLstmForward>& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  const int64_t P = kPanel<A>, H = op.H;
  for (int64_t j = begin; j < end; ++j)
    for (int64_t k = 0; k < H; ++k)
      for (int64_t q = 0; q < 4; ++q) {
        A* out = at<A>(op.packed, ((j * H + k) * 4 + q) * P);
        const T* w = at<T>(op.weight, (k * 4 + q) * H + j * P);
        const int64_t width = least(P, H - j * P);
        for (int64_t p = 0; p < P; ++p) out[p] = p < width ? load(Lanes<1>{}, w + p)[0] : A(0);
      }
}

template <class T>
void pack_transposed(const Lstm<PeepholeLstmBackward>& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  const int64_t P = 4 * kPanel<A>, H = op.H;
  for (int64_t j = begin; j < end; ++j) {
    A* out = at<A>(op.packed, j * 4 * H * P);
    for (int64_t p = 0; p < P; ++p) {
      const bool inside = j * P + p < H;
      const T* w = at<T>(op.weight, inside ? (j * P + p) * 4 * H : 0);
      for (int64_t k = 0; k < 4 * H; ++k)
        out[k * P + p] = inside ? load(Lanes<1>{}, w + k)[0] : A(0);
    }
  }
}

// The operands of a cell at one position of one sentence, from some channel on.
template <class T, class A = compute_t<T>>
struct Cell {
  int64_t dim;
  const A* peephole;  // (3, H)
  const T* f;         // (4, H)
  A *c, *h;           // the state, and h_t for the next step's product
  T* h_out;
  A* c_out;  // null if nothing is saved for backward
  T* gates;

  // z: four gates, kPanel apart, of the product h_{t-1} W.
  DEEPFAST_INLINE void run(const A* z, int64_t width) const {
    for_lanes<A>(width, [&](auto lanes, int64_t i) {
      const auto gate = [&](int64_t q) {
        return load(lanes, z + q * kPanel<A> + i) + load(lanes, f + q * dim + i);
      };
      const auto eye = [&](int64_t q) { return load(lanes, peephole + q * dim + i); };
      const auto before = load(lanes, c + i);
      const auto value = hyperbolic_tangent<A>(lanes, gate(0));
      const auto enter = logistic<A>(lanes, gate(1) + eye(0) * before);
      const auto stay = logistic<A>(lanes, gate(2) + eye(1) * before);
      const auto now = value * enter + stay * before;
      const auto leave = logistic<A>(lanes, gate(3) + eye(2) * now);
      store(lanes, h_out + i, hyperbolic_tangent<A>(lanes, now) * leave);
      // h is rounded as it was stored: the next step sees what the caller sees.
      store(lanes, h + i, load(lanes, h_out + i));
      store(lanes, c + i, now);
      if (gates == nullptr) return;
      store(lanes, c_out + i, now);
      store(lanes, gates + i, value);
      store(lanes, gates + dim + i, enter);
      store(lanes, gates + 2 * dim + i, stay);
      store(lanes, gates + 3 * dim + i, leave);
    });
  }
};

template <class T>
void forward(const Lstm<PeepholeLstmForward>& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  const int64_t n = end - begin, H = op.H, panels = (H + kPanel<A> - 1) / kPanel<A>;
  const int64_t* order = op.order + begin;
  // h before an even step, h before an odd step, c.
  Scratch<A> state(3 * n * H), products(n * 4 * kPanel<A>);
  memset(state.get(), 0, 3 * n * H * sizeof(A));
  A* c = state + 2 * n * H;
  for (int64_t i = 0; i < n; ++i)
    for_lanes<A>(H, [&](auto lanes, int64_t d) {
      const int64_t from = order[i] * H + d;
      if (op.h0 != nullptr) store(lanes, state + i * H + d, load(lanes, at<T>(op.h0, from)));
      if (op.c0 != nullptr) store(lanes, c + i * H + d, load(lanes, at<A>(op.c0, from)));
    });

  int64_t active = n;
  for (int64_t s = 0; (active = longer_than(op, s, order, active)) > 0; ++s) {
    const A* before = s > 0 || op.h0 != nullptr ? state + (s & 1) * n * H : nullptr;
    A* after = state + (~s & 1) * n * H;
    for_products<A>(before, active, H, at<A>(op.packed, 0), panels, products.get(),
                    [&](int64_t i, int64_t j, const A* product) {
                      const int64_t d = j * kPanel<A>, row = place(op, order[i], s);
                      const bool kept = op.gates != nullptr;
                      const Cell<T> cell{H,
                                         at<A>(op.peephole, d),
                                         at<T>(op.f, row * 4 * H + d),
                                         c + i * H + d,
                                         after + i * H + d,
                                         at<T>(op.h, row * H + d),
                                         kept ? at<A>(op.c, row * H + d) : nullptr,
                                         kept ? at<T>(op.gates, row * 4 * H + d) : nullptr};
                      cell.run(product, least(kPanel<A>, H - d));
                    });
  }

  for (int64_t i = 0; i < n; ++i) {
    const int64_t b = order[i], length = op.length[b];
    const A* last = state + (length & 1) * n * H + i * H;
    for_lanes<A>(H, [&](auto lanes, int64_t d) {
      store(lanes, at<T>(op.h_last, b * H + d), load(lanes, last + d));
      store(lanes, at<A>(op.c_last, b * H + d), load(lanes, c + i * H + d));
    });
    for (int64_t t = length; t < op.P; ++t) {
      const int64_t row = t * op.N + b;
      memset(at<T>(op.h, row * H), 0, H * sizeof(T));
      if (op.gates == nullptr) continue;
      memset(at<A>(op.c, row * H), 0, H * sizeof(A));
      memset(at<T>(op.gates, row * 4 * H), 0, 4 * H * sizeof(T));
    }
  }
}

// The same for backward.
template <class T, class A = compute_t<T>>
struct CellGrad {
  int64_t dim;
  const A* peephole;      // (3, H)
  const A *before, *now;  // c_{t-1} and c_t
  const T* gates;         // (4, H)
  const T* dh;            // null for zeros
  const T* dh_last;       // null but in the sentence's last step
  A* dc;                  // of c_t, then of c_{t-1}
  A* dz;                  // (4, H), for the next product
  T* df;                  // (4, H)
  A* dpeephole;           // (3, H)

  // recurrent: the product dz_{t+1} W^T.
  DEEPFAST_INLINE void run(const A* recurrent, int64_t width) const {
    for_lanes<A>(width, [&](auto lanes, int64_t i) {
      const auto gate = [&](int64_t q) { return load(lanes, gates + q * dim + i); };
      const auto eye = [&](int64_t q) { return load(lanes, peephole + q * dim + i); };
      const auto value = gate(0), enter = gate(1), stay = gate(2), leave = gate(3);
      const auto c0 = load(lanes, before + i), c1 = load(lanes, now + i);
      const auto top = hyperbolic_tangent<A>(lanes, c1);
      auto d = load(lanes, recurrent + i);
      if (dh != nullptr) d += load(lanes, dh + i);
      if (dh_last != nullptr) d += load(lanes, dh_last + i);
      const auto dpi = d * top * leave * (A(1) - leave);
      const auto dstate = load(lanes, dc + i) + d * leave * (A(1) - top * top) + dpi * eye(2);
      const auto drho = dstate * value * enter * (A(1) - enter);
      const auto dphi = dstate * c0 * stay * (A(1) - stay);
      store(lanes, dc + i, dstate * stay + drho * eye(0) + dphi * eye(1));
      const auto put = [&](int64_t q, auto v) {
        store(lanes, dz + q * dim + i, v);
        store(lanes, df + q * dim + i, v);
      };
      put(0, dstate * enter * (A(1) - value * value));
      put(1, drho);
      put(2, dphi);
      put(3, dpi);
      const auto add = [&](int64_t q, auto v) {
        A* sum = dpeephole + q * dim + i;
        store(lanes, sum, load(lanes, sum) + v);
      };
      add(0, drho * c0);
      add(1, dphi * c0);
      add(2, dpi * c1);
    });
  }
};

template <class T>
void backward(const Lstm<PeepholeLstmBackward>& op, int64_t begin, int64_t end) {
  using A = compute_t<T>;
  const int64_t n = end - begin, H = op.H, wide = 4 * kPanel<A>, panels = (H + wide - 1) / wide;
  const int64_t* order = op.order + begin;
  // dz of even steps, dz of odd steps, dc, and a row of zeros. The dz after a sentence's last step
  // is 0, so that its product is 0 too.
  Scratch<A> state(9 * n * H + H), products(n * wide);
  memset(state.get(), 0, (9 * n * H + H) * sizeof(A));
  A *dc = state + 8 * n * H, *zeros = state + 9 * n * H;
  for (int64_t i = 0; i < n; ++i) {
    memset(at<A>(op.dpeephole, order[i] * 3 * H), 0, 3 * H * sizeof(A));
    if (op.dc_last != nullptr) memcpy(dc + i * H, at<A>(op.dc_last, order[i] * H), H * sizeof(A));
  }

  const int64_t longest = n > 0 ? op.length[order[0]] : 0;
  for (int64_t s = longest - 1; s >= 0; --s) {
    A* dz = state + (s & 1) * 4 * n * H;
    const A* behind = s + 1 < longest ? state + (~s & 1) * 4 * n * H : nullptr;
    for_products<A>(behind, longer_than(op, s, order, n), 4 * H, at<A>(op.packed, 0), panels,
                    products.get(), [&](int64_t i, int64_t j, const A* product) {
                      const int64_t b = order[i], d = j * wide, row = place(op, b, s);
                      const A* start = op.c0 != nullptr ? at<A>(op.c0, b * H + d) : zeros + d;
                      const bool last = s + 1 == op.length[b] && op.dh_last != nullptr;
                      const CellGrad<T> cell{
                          H,
                          at<A>(op.peephole, d),
                          s > 0 ? at<A>(op.c, place(op, b, s - 1) * H + d) : start,
                          at<A>(op.c, row * H + d),
                          at<T>(op.gates, row * 4 * H + d),
                          op.dh != nullptr ? at<T>(op.dh, row * H + d) : nullptr,
                          last ? at<T>(op.dh_last, b * H + d) : nullptr,
                          dc + i * H + d,
                          dz + i * 4 * H + d,
                          at<T>(op.df, row * 4 * H + d),
                          at<A>(op.dpeephole, b * 3 * H + d)};
                      cell.run(product, least(wide, H - d));
                    });
  }

  if (op.dh0 != nullptr)
    for_products<A>(state.get(), n, 4 * H, at<A>(op.packed, 0), panels, products.get(),
                    [&](int64_t i, int64_t j, const A* product) {
                      const int64_t b = order[i], from = b * H + j * wide;
                      const bool given = op.length[b] == 0 && op.dh_last != nullptr;
                      for_lanes<A>(least(wide, H - j * wide), [&](auto lanes, int64_t d) {
                        auto g = load(lanes, product + d);
                        if (given) g += load(lanes, at<T>(op.dh_last, from + d));
                        store(lanes, at<T>(op.dh0, from + d), g);
                      });
                    });
  for (int64_t i = 0; i < n; ++i) {
    const int64_t b = order[i];
    if (op.dc0 != nullptr) memcpy(at<A>(op.dc0, b * H), dc + i * H, H * sizeof(A));
    for (int64_t t = op.length[b]; t < op.P; ++t)
      memset(at<T>(op.df, (t * op.N + b) * 4 * H), 0, 4 * H * sizeof(T));
  }
}

}  // namespace

void peephole_lstm_pack(const Lstm<PeepholeLstmForward>& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto type) { pack<decltype(type)>(op, begin, end); });
}

void peephole_lstm_pack_transposed(const Lstm<PeepholeLstmBackward>& op, int64_t begin, int64_t end,
                                   int64_t) {
  with_storage(op.storage, [&](auto type) { pack_transposed<decltype(type)>(op, begin, end); });
}

void peephole_lstm_forward(const Lstm<PeepholeLstmForward>& op, int64_t begin, int64_t end,
                           int64_t) {
  with_storage(op.storage, [&](auto type) { forward<decltype(type)>(op, begin, end); });
}

void peephole_lstm_backward(const Lstm<PeepholeLstmBackward>& op, int64_t begin, int64_t end,
                            int64_t) {
  with_storage(op.storage, [&](auto type) { backward<decltype(type)>(op, begin, end); });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
