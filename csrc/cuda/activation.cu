// The activation of a feed-forward block with the dropout behind it, element by element.
//
//     forward     out = dropout(act(h))
//     backward    dh = dropout(dout * act'(h)),   for relu  dout * scale where out is not 0
//
// relu(h) = max(h, 0), gelu(h) = h Phi(h). A thread takes chunks of eight channels, the unit of a
// dropout counter, wherever they lie: rows have any number of channels. It reads what it takes
// before it writes, so that results may take the place of operands.
//
// Hendrycks, Gimpel: Gaussian Error Linear Units, 2016.
#include "op.h"

namespace deepfast {
namespace {

// Two chunks for a thread: as many loads on their way, and few registers.
constexpr int kThreads = 128, kEach = 2;

// The chunks of a (T, F) tensor.
struct Extent {
  int64_t tokens;
  int dim, row_chunks;
  bool aligned;
};

// This thread's chunks: the k-th is number `chunk` of token `token`, with `count` channels, none
// where there is no such token.
class Places {
 public:
  DEEPFAST_DEVICE explicit Places(const Extent& extent) : extent_(extent) {
    // The one division of 64 bits is the same for a whole block.
    const int64_t first = int64_t{blockIdx.x} * (kThreads * kEach);
    token_ = first / extent.row_chunks;
    chunk_ = static_cast<int>(first - token_ * extent.row_chunks) + static_cast<int>(threadIdx.x);
  }
  DEEPFAST_DEVICE int64_t token(int k) const {
    return token_ + (chunk_ + k * kThreads) / extent_.row_chunks;
  }
  DEEPFAST_DEVICE int chunk(int k) const { return (chunk_ + k * kThreads) % extent_.row_chunks; }
  DEEPFAST_DEVICE int count(int k) const {
    return token(k) < extent_.tokens ? extent_.dim - chunk(k) * kChunk : 0;
  }
  template <class T>
  DEEPFAST_DEVICE Chunk<T> load(const T* p, int64_t row_stride, int k) const {
    return load_chunk(at(p, row_stride, k), count(k), extent_.aligned);
  }
  template <class T>
  DEEPFAST_DEVICE void store(T* p, int64_t row_stride, int k, const float (&v)[kChunk]) const {
    store_chunk(at(p, row_stride, k), count(k), extent_.aligned, v);
  }
  DEEPFAST_DEVICE void drop(float (&v)[kChunk], const DropoutMask& mask, int k) const {
    if (mask.seed == nullptr) return;
    deepfast::drop(v, static_cast<uint64_t>(*mask.seed), token(k), chunk(k), mask.threshold,
                   mask.scale);
  }

 private:
  template <class T>
  DEEPFAST_DEVICE T* at(T* p, int64_t row_stride, int k) const {
    return p + token(k) * row_stride + int64_t{chunk(k)} * kChunk;
  }
  const Extent& extent_;
  int64_t token_;
  int chunk_;
};

// Phi(x).
DEEPFAST_DEVICE float normal(float x) { return 0.5f * (1.0f + erff(x * 0.707106781f)); }

template <class T>
struct Forward {
  const T* h;
  T* out;
  int64_t h_stride, out_stride;
  Extent extent;
  ActivationKind kind;
  DropoutMask dropout;
};

template <class T>
__global__ void __launch_bounds__(kThreads) activation_fwd_kernel(const Forward<T> op) {
  const Places at(op.extent);
  Chunk<T> h[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) h[k] = at.load(op.h, op.h_stride, k);
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    float v[kChunk];
    widen(h[k], v);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      // Not the larger of v and 0, which would lose a NaN.
      if (op.kind == ActivationKind::relu)
        v[i] = v[i] < 0.0f ? 0.0f : v[i];
      else
        v[i] *= normal(v[i]);
    }
    at.drop(v, op.dropout, k);
    at.store(op.out, op.out_stride, k, v);
  }
}

template <class T>
struct Backward {
  const T *dout, *saved;
  T* dh;
  int64_t dout_stride, saved_stride, dh_stride;
  Extent extent;
  ActivationKind kind;
  float scale;
  DropoutMask dropout;
};

template <class T>
__global__ void __launch_bounds__(kThreads) activation_bwd_kernel(const Backward<T> op) {
  const Places at(op.extent);
  Chunk<T> saved[kEach], dout[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    saved[k] = at.load(op.saved, op.saved_stride, k);
    dout[k] = at.load(op.dout, op.dout_stride, k);
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    float x[kChunk], d[kChunk];
    widen(saved[k], x);
    widen(dout[k], d);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (op.kind == ActivationKind::relu)
        d[i] = x[i] != 0.0f ? d[i] * op.scale : 0.0f;
      else
        d[i] *= normal(x[i]) + x[i] * (0.398942280f * expf(-0.5f * x[i] * x[i]));
    }
    at.drop(d, op.dropout, k);
    at.store(op.dh, op.dh_stride, k, d);
  }
}

Extent extent_of(int64_t tokens, int64_t dim, bool aligned) {
  return {tokens, static_cast<int>(dim), static_cast<int>((dim + kChunk - 1) / kChunk), aligned};
}

Grid grid_of(const Extent& extent) {
  constexpr int64_t kBlock = kThreads * kEach;
  return {(extent.tokens * extent.row_chunks + kBlock - 1) / kBlock, kThreads};
}

void activation_forward(Tensor h, std::string kind, double dropout_p, OptionalTensor seed,
                        Tensor out) {
  const Storage storage = storage_of(h);
  const int64_t tokens = h.size(0), dim = h.size(1);
  const Matrix h_ = matrix(h, storage, tokens, dim), out_ = matrix(out, storage, tokens, dim);
  const Extent extent = extent_of(tokens, dim, Alignment(storage, dim).rows({h_, out_}));
  const Device device(h);
  dispatch(storage, [&](auto type) {
    using T = decltype(type);
    launch(
        activation_fwd_kernel<T>, grid_of(extent), device.stream(),
        Forward<T>{static_cast<const T*>(h_.data), static_cast<T*>(out_.data), h_.row_stride,
                   out_.row_stride, extent, activation_kind(kind), dropout_mask(seed, dropout_p)});
  });
}

void activation_backward(Tensor dout, Tensor saved, std::string kind, double dropout_p,
                         OptionalTensor seed, Tensor dh) {
  const Storage storage = storage_of(saved);
  const int64_t tokens = saved.size(0), dim = saved.size(1);
  const Matrix dout_ = matrix(dout, storage, tokens, dim);
  const Matrix saved_ = matrix(saved, storage, tokens, dim);
  const Matrix dh_ = matrix(dh, storage, tokens, dim);
  const Extent extent = extent_of(tokens, dim, Alignment(storage, dim).rows({dout_, saved_, dh_}));
  const ActivationKind which = activation_kind(kind);
  const bool draws = which == ActivationKind::gelu;
  const Device device(saved);
  dispatch(storage, [&](auto type) {
    using T = decltype(type);
    launch(
        activation_bwd_kernel<T>, grid_of(extent), device.stream(),
        Backward<T>{static_cast<const T*>(dout_.data), static_cast<const T*>(saved_.data),
                    static_cast<T*>(dh_.data), dout_.row_stride, saved_.row_stride, dh_.row_stride,
                    extent, which, static_cast<float>(dropout_factors(dropout_p).scale),
                    dropout_mask(seed, draws ? dropout_p : 0.0)});
  });
}

}  // namespace

DEEPFAST_CUDA_OPS(m) {
  m.impl("activation_forward", TORCH_BOX(&activation_forward));
  m.impl("activation_backward", TORCH_BOX(&activation_backward));
}

}  // namespace deepfast
