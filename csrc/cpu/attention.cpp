// deepfast::attention_{forward,backward} on the CPU: checks, threads, registration.
#include "op.h"

namespace deepfast {
namespace {

// Tokens of heads (T, H, d) with contiguous channels.
Heads heads(const Tensor& t, const Tensor& like, int64_t tokens, int64_t count) {
  DEEPFAST_CHECK(is_here(t) && t.dim() == 3 && t.size(0) == tokens && t.size(1) == count &&
                     t.size(2) == like.size(2) && (t.stride(2) == 1 || t.size(2) == 1),
                 "attention: expected a tensor (", tokens, ", ", count, ", ", like.size(2),
                 ") with contiguous channels");
  DEEPFAST_CHECK(storage_of(t) == storage_of(like), "tensors of one call must share one dtype");
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1)};
}

// Where sentences begin, (N + 1,): rising from 0 to `tokens`.
const int32_t* begins(const Tensor& t, int64_t tokens) {
  DEEPFAST_CHECK(is_here(t) && t.scalar_type() == ScalarType::Int && t.dim() == 1 &&
                     t.size(0) > 0 && t.is_contiguous(),
                 "attention: expected where sentences begin as int32");
  const auto* p = t.const_data_ptr<int32_t>();
  bool rises = p[0] == 0 && p[t.size(0) - 1] == tokens;
  for (int64_t i = 1; i < t.size(0); ++i) rises &= p[i] >= p[i - 1];
  DEEPFAST_CHECK(rises, "attention: expected sentences from 0 to ", tokens);
  return p;
}

Attention attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& begin_q,
                    const Tensor& begin_k, int64_t left, int64_t right, double scale,
                    double dropout_p, const OptionalTensor& seed, const Tensor& o,
                    const Tensor& lse) {
  Attention op{};
  DEEPFAST_CHECK(q.dim() == 3 && k.dim() == 3, "attention: expected q and k (T, H, d)");
  op.storage = storage_of(q);
  op.heads = q.size(1), op.kv_heads = k.size(1), op.dim = q.size(2), op.tokens = q.size(0);
  DEEPFAST_CHECK(op.kv_heads > 0 && op.heads % op.kv_heads == 0,
                 "attention: expected heads of k that divide the ", op.heads, " of q");
  // No sentence is that long, and places of keys then stay in range.
  constexpr int64_t kLongest = int64_t{1} << 40;
  op.left = std::min(left, kLongest), op.right = std::min(right, kLongest);
  op.scale = scale;
  op.dropout = dropout(seed, dropout_p);
  op.q = heads(q, q, op.tokens, op.heads);
  op.k = heads(k, q, k.size(0), op.kv_heads);
  op.v = heads(v, q, k.size(0), op.kv_heads);
  op.o = heads(o, q, op.tokens, op.heads);
  op.lse = parameter(OptionalTensor(lse), op.storage, op.heads * op.tokens);
  op.begin_q = begins(begin_q, op.tokens);
  op.begin_k = begins(begin_k, k.size(0));
  DEEPFAST_CHECK(begin_q.size(0) == begin_k.size(0), "attention: expected as many sentences of k");
  return op;
}

// Each pair of a sentence and a head of k is computed by one thread.
Chunks pairs(const Attention& op, const Tensor& begin_q) {
  return Chunks((begin_q.size(0) - 1) * op.kv_heads, 256, 1);
}

void attention_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                       int64_t, int64_t, int64_t left, int64_t right, double scale,
                       double dropout_p, OptionalTensor seed, Tensor o, Tensor lse) {
  const Attention op =
      attention(q, k, v, cu_seqlens_q, cu_seqlens_k, left, right, scale, dropout_p, seed, o, lse);
  pairs(op, cu_seqlens_q).run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).attention_forward(op, begin, end, chunk);
  });
}

void attention_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor dout,
                        Tensor cu_seqlens_q, Tensor cu_seqlens_k, int64_t, int64_t, int64_t left,
                        int64_t right, double scale, double dropout_p, OptionalTensor seed,
                        Tensor dq, Tensor dk, Tensor dv) {
  Attention op =
      attention(q, k, v, cu_seqlens_q, cu_seqlens_k, left, right, scale, dropout_p, seed, o, lse);
  op.dout = heads(dout, q, op.tokens, op.heads);
  op.dq = heads(dq, q, op.tokens, op.heads);
  op.dk = heads(dk, q, k.size(0), op.kv_heads);
  op.dv = heads(dv, q, k.size(0), op.kv_heads);
  pairs(op, cu_seqlens_q).run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).attention_backward(op, begin, end, chunk);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepfast, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&attention_forward));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace deepfast
