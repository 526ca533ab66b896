// deepfast::layer_norm_{forward,backward} on the CPU: checks, threads, registration.
#include "op.h"

namespace deepfast {
namespace {

// A result from this size on is stored past the caches: it is larger than one core's share of them,
// so most of it would have left them before it is read.
constexpr int64_t kStreamBytes = int64_t{8} << 20;

bool streams(const Tensor& result) {
  return result.numel() * result.element_size() >= kStreamBytes;
}

void layer_norm_forward(Tensor x, OptionalTensor residual, OptionalTensor weight,
                        OptionalTensor bias, double eps, bool rms, double dropout_p,
                        OptionalTensor seed, OptionalTensor sum, Tensor y, OptionalTensor mean,
                        Tensor rstd) {
  DEEPFAST_CHECK(rms != mean.has_value(), "layer_norm: expected mean, or rms without it");
  const Storage storage = storage_of(x);
  const int64_t tokens = x.size(0), dim = x.size(1);
  LayerNorm op{};
  op.storage = storage;
  op.dim = dim;
  op.rms = rms;
  op.stream = streams(y);
  op.eps = eps;
  op.dropout = dropout(seed, dropout_p);
  op.x = matrix(x, storage, tokens, dim);
  op.residual = matrix(residual, storage, tokens, dim);
  op.sum = matrix(sum, storage, tokens, dim);
  op.y = matrix(y, storage, tokens, dim);
  op.weight = parameter(weight, storage, dim);
  op.bias = parameter(bias, storage, dim);
  op.mean = parameter(mean, storage, tokens);
  op.rstd = parameter(rstd, storage, tokens);
  Chunks(tokens).run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).layer_norm_forward(op, begin, end, chunk);
  });
}

void layer_norm_backward(Tensor sum, Tensor dy, OptionalTensor dsum, OptionalTensor weight,
                         bool rms, OptionalTensor mean, Tensor rstd, double dropout_p,
                         OptionalTensor seed, OptionalTensor dx, OptionalTensor dresidual,
                         OptionalTensor dweight, OptionalTensor dbias) {
  DEEPFAST_CHECK(rms != mean.has_value(), "layer_norm: expected mean, or rms without it");
  const Storage storage = storage_of(sum);
  const int64_t tokens = sum.size(0), dim = sum.size(1);
  const Chunks chunks(tokens);
  Partial weight_sums(dweight.has_value(), chunks, dim, storage);
  Partial bias_sums(dbias.has_value(), chunks, dim, storage);
  LayerNorm op{};
  op.storage = storage;
  op.dim = dim;
  op.rms = rms;
  op.stream = streams(sum);
  op.dropout = dropout(seed, dropout_p);
  op.sum = matrix(sum, storage, tokens, dim);
  op.dy = matrix(dy, storage, tokens, dim);
  op.dsum = matrix(dsum, storage, tokens, dim);
  op.dx = matrix(dx, storage, tokens, dim);
  op.dresidual = matrix(dresidual, storage, tokens, dim);
  op.weight = parameter(weight, storage, dim);
  op.mean = parameter(mean, storage, tokens);
  op.rstd = parameter(rstd, storage, tokens);
  op.dweight = weight_sums.get();
  op.dbias = bias_sums.get();
  chunks.run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).layer_norm_backward(op, begin, end, chunk);
  });
  weight_sums.sum_into(parameter(dweight, storage, dim));
  bias_sums.sum_into(parameter(dbias, storage, dim));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepfast, CPU, m) {
  m.impl("layer_norm_forward", TORCH_BOX(&layer_norm_forward));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
}

}  // namespace deepfast
