// deepfast::activation_{forward,backward} on the CPU: checks, threads, registration.
#include "op.h"

namespace deepfast {
namespace {

ActivationKind activation_kind(const std::string& kind) {
  DEEPFAST_CHECK(kind == "relu" || kind == "gelu", "activation: expected relu or gelu, got ", kind);
  return kind == "relu" ? ActivationKind::relu : ActivationKind::gelu;
}

void activation_forward(Tensor h, OptionalTensor bias, std::string kind, double dropout_p,
                        OptionalTensor seed, Tensor out) {
  const Storage storage = storage_of(h);
  const int64_t tokens = h.size(0), dim = h.size(1);
  Activation op{};
  op.storage = storage;
  op.dim = dim;
  op.kind = activation_kind(kind);
  op.dropout = dropout(seed, dropout_p);
  op.h = matrix(h, storage, tokens, dim);
  op.bias = parameter(bias, storage, dim);
  op.out = matrix(out, storage, tokens, dim);
  Chunks(tokens).run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).activation_forward(op, begin, end, chunk);
  });
}

void activation_backward(Tensor dout, Tensor saved, OptionalTensor bias, std::string kind,
                         double dropout_p, OptionalTensor seed, Tensor dh, OptionalTensor dbias) {
  const Storage storage = storage_of(saved);
  const int64_t tokens = saved.size(0), dim = saved.size(1);
  const Chunks chunks(tokens);
  Partial bias_sums(dbias.has_value(), chunks, dim, storage);
  Activation op{};
  op.storage = storage;
  op.dim = dim;
  op.kind = activation_kind(kind);
  if (op.kind == ActivationKind::relu)
    op.dropout.scale = dropout_factors(dropout_p).scale;
  else
    op.dropout = dropout(seed, dropout_p);
  op.dout = matrix(dout, storage, tokens, dim);
  op.saved = matrix(saved, storage, tokens, dim);
  op.bias = parameter(bias, storage, dim);
  op.dh = matrix(dh, storage, tokens, dim);
  op.dbias = bias_sums.get();
  chunks.run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).activation_backward(op, begin, end, chunk);
  });
  bias_sums.sum_into(parameter(dbias, storage, dim));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepfast, CPU, m) {
  m.impl("activation_forward", TORCH_BOX(&activation_forward));
  m.impl("activation_backward", TORCH_BOX(&activation_backward));
}

}  // namespace deepfast
