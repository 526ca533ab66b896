// deepfast::boundary_{forward,backward} on the CPU: all work between two layers.
#include "op.h"

namespace deepfast {
namespace {

// The operands that forward and backward share, and the tables that Boundary points into.
struct Operands {
  std::vector<Matrix> source;
  std::vector<const void*> norm_weight, norm_bias, weight;
  Boundary op{};

  Operands(const Tensor& states, int64_t k, const Indices& near, const Weights& w,
           const OptionalTensor& norm_weight_all, const OptionalTensor& norm_bias_all,
           bool norm_source, bool source_rms, const OptionalTensor& partial,
           const OptionalTensor& out_norm_weight, const OptionalTensor& out_norm_bias, bool out_rms,
           double dropout_p, const OptionalTensor& seed) {
    const Storage storage = storage_of(states);
    const int64_t tokens = states.size(1), dim = states.size(2), size = compute_size(storage);
    source = slots(states, near);
    norm_weight = rows_of(parameter(norm_weight_all, storage, w.columns * dim), near, dim, size);
    norm_bias = rows_of(parameter(norm_bias_all, storage, w.columns * dim), near, dim, size);
    weight = w.pick({k}, near);
    op.storage = storage;
    op.dim = dim;
    op.near = static_cast<int64_t>(near.size());
    op.per_channel = w.width > 1;
    op.norm_source = norm_source;
    op.source_rms = source_rms;
    op.out_rms = out_rms;
    op.dropout = dropout(seed, dropout_p);
    op.state = slot(states, k);
    op.source = source.data();
    op.norm_weight = norm_weight.data();
    op.norm_bias = norm_bias.data();
    op.weight = weight.data();
    op.partial = matrix(partial, storage, tokens, dim);
    op.out_norm_weight = parameter(out_norm_weight, storage, dim);
    op.out_norm_bias = parameter(out_norm_bias, storage, dim);
  }
};

void boundary_forward(OptionalTensor branch, OptionalTensor residual, double dropout_p,
                      OptionalTensor seed, Tensor states, int64_t k, Indices near, Tensor weight,
                      OptionalTensor norm_weight, OptionalTensor norm_bias, bool norm_source,
                      double source_eps, bool source_rms, OptionalTensor partial,
                      OptionalTensor out_norm_weight, OptionalTensor out_norm_bias, double out_eps,
                      bool out_rms, OptionalTensor x, OptionalTensor out,
                      OptionalTensor source_rstd, OptionalTensor out_mean,
                      OptionalTensor out_rstd) {
  check_buffer(states);
  const Storage storage = storage_of(states);
  const int64_t tokens = states.size(1), dim = states.size(2);
  const Weights w(weight, storage, dim);
  Operands operands(states, k, near, w, norm_weight, norm_bias, norm_source, source_rms, partial,
                    out_norm_weight, out_norm_bias, out_rms, dropout_p, seed);
  Boundary& op = operands.op;
  op.source_eps = source_eps;
  op.out_eps = out_eps;
  op.branch = matrix(branch, storage, tokens, dim);
  op.residual = matrix(residual, storage, tokens, dim);
  op.x = matrix(x, storage, tokens, dim);
  op.out = matrix(out, storage, tokens, dim);
  op.source_rstd = parameter(source_rstd, storage, tokens);
  op.out_mean = parameter(out_mean, storage, tokens);
  op.out_rstd = parameter(out_rstd, storage, tokens);
  DEEPFAST_CHECK(!norm_source || !branch.has_value() || source_rstd.has_value(),
                 "boundary: source_rstd is missing");
  DEEPFAST_CHECK(!out.has_value() || (out_rms != out_mean.has_value() && out_rstd.has_value()),
                 "boundary: expected out_rstd, and out_mean or out_rms");
  Chunks(tokens).run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).boundary_forward(op, begin, end, chunk);
  });
}

void boundary_backward(Tensor states, int64_t k, Indices near, Tensor weight,
                       OptionalTensor norm_weight, OptionalTensor norm_bias, bool norm_source,
                       bool source_rms, OptionalTensor partial, OptionalTensor out_norm_weight,
                       OptionalTensor out_norm_bias, bool out_rms, OptionalTensor source_rstd,
                       OptionalTensor out_mean, OptionalTensor out_rstd, double dropout_p,
                       OptionalTensor seed, OptionalTensor dx, OptionalTensor dout, Tensor grads,
                       int64_t grad_slot, Indices pull_rows, Indices pull_slots,
                       OptionalTensor pulled, OptionalTensor dbranch, OptionalTensor dresidual,
                       OptionalTensor dweight, OptionalTensor dnorm_weight,
                       OptionalTensor dnorm_bias, OptionalTensor dout_norm_weight,
                       OptionalTensor dout_norm_bias) {
  check_buffer(states);
  check_buffer(grads, states);
  const Storage storage = storage_of(states);
  const int64_t tokens = states.size(1), dim = states.size(2), size = compute_size(storage);
  const Weights w(weight, storage, dim);
  Operands operands(states, k, near, w, norm_weight, norm_bias, norm_source, source_rms, partial,
                    out_norm_weight, out_norm_bias, out_rms, dropout_p, seed);
  Boundary& forward = operands.op;
  forward.source_rstd = parameter(source_rstd, storage, tokens);
  forward.out_mean = parameter(out_mean, storage, tokens);
  forward.out_rstd = parameter(out_rstd, storage, tokens);
  DEEPFAST_CHECK(dx.has_value() || dout.has_value(), "boundary: no gradient came in");
  DEEPFAST_CHECK(!norm_source || source_rstd.has_value(), "boundary: source_rstd is missing");
  DEEPFAST_CHECK(!dout.has_value() || (out_rms != out_mean.has_value() && out_rstd.has_value()),
                 "boundary: expected out_rstd, and out_mean or out_rms");
  DEEPFAST_CHECK(pull_rows.size() == pull_slots.size(), "boundary: expected ", pull_rows.size(),
                 " pull_slots, got ", pull_slots.size());
  w.offset(k, k);

  const Chunks chunks(tokens, w.width > 1 ? 8 : 32);
  const auto pull_grad = slots(grads, pull_slots);
  const auto pull_weight = w.pick(pull_rows, {k});
  const int64_t pulls = static_cast<int64_t>(pull_rows.size());
  Partial weight_sums(dweight.has_value() && pulls > 0, chunks, pulls * w.width, storage);
  Partial norm_weight_sums(dnorm_weight.has_value(), chunks, dim, storage);
  Partial norm_bias_sums(dnorm_bias.has_value(), chunks, dim, storage);
  Partial out_norm_weight_sums(dout_norm_weight.has_value(), chunks, dim, storage);
  Partial out_norm_bias_sums(dout_norm_bias.has_value(), chunks, dim, storage);

  BoundaryGrad op{};
  op.forward = forward;
  op.dx = matrix(dx, storage, tokens, dim);
  op.dout = matrix(dout, storage, tokens, dim);
  op.grad = slot(grads, grad_slot);
  op.pulls = pulls;
  op.own_row_reads = pulls > 0 && pull_rows[0] == k;
  op.pull_grad = pull_grad.data();
  op.pull_weight = pull_weight.data();
  op.pulled = matrix(pulled, storage, tokens, dim);
  op.state_norm_weight =
      rows_of(parameter(norm_weight, storage, w.columns * dim), {k}, dim, size)[0];
  op.state_norm_bias = rows_of(parameter(norm_bias, storage, w.columns * dim), {k}, dim, size)[0];
  op.dbranch = matrix(dbranch, storage, tokens, dim);
  op.dresidual = matrix(dresidual, storage, tokens, dim);
  op.need_dweight = weight_sums.get() != nullptr;
  op.dweight = weight_sums.get();
  op.dnorm_weight = norm_weight_sums.get();
  op.dnorm_bias = norm_bias_sums.get();
  op.dout_norm_weight = out_norm_weight_sums.get();
  op.dout_norm_bias = out_norm_bias_sums.get();
  chunks.run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.forward.storage).boundary_backward(op, begin, end, chunk);
  });

  norm_weight_sums.sum_into(parameter(dnorm_weight, storage, dim));
  norm_bias_sums.sum_into(parameter(dnorm_bias, storage, dim));
  out_norm_weight_sums.sum_into(parameter(dout_norm_weight, storage, dim));
  out_norm_bias_sums.sum_into(parameter(dout_norm_bias, storage, dim));
  if (op.need_dweight) {
    std::vector<int64_t> offsets;
    for (int64_t r : pull_rows) offsets.push_back(w.offset(r, k));
    weight_sums.scatter_into(
        static_cast<char*>(parameter(dweight, storage, w.rows * w.columns * w.width)), offsets,
        w.width);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepfast, CPU, m) {
  m.impl("boundary_forward", TORCH_BOX(&boundary_forward));
  m.impl("boundary_backward", TORCH_BOX(&boundary_backward));
}

}  // namespace deepfast
