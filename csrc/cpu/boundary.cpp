// deepfast::boundary_{forward,backward} on the CPU: what lies between two layers.
#include "op.h"

namespace deepfast {
namespace {

// The operands that forward and backward share, and the tables that Boundary points into.
struct Operands {
  std::vector<Matrix> source;
  std::vector<const void*> gain, shift, weight;
  Boundary op{};

  Operands(const Tensor& states, int64_t slot_index, const Indices& near, const Weights& w,
           int64_t row, const OptionalTensor& gain_all, const OptionalTensor& shift_all,
           bool norm_source, const OptionalTensor& partial, const OptionalTensor& out_weight,
           const OptionalTensor& out_bias, double dropout_p, const OptionalTensor& seed) {
    const Storage storage = storage_of(states);
    const int64_t tokens = states.size(1), dim = states.size(2), size = compute_size(storage);
    source = slots(states, near);
    gain = rows_of(parameter(gain_all, storage, w.columns * dim), near, dim, size);
    shift = rows_of(parameter(shift_all, storage, w.columns * dim), near, dim, size);
    weight = w.pick({row}, near);
    op.storage = storage;
    op.dim = dim;
    op.near = static_cast<int64_t>(near.size());
    op.per_channel = w.width > 1;
    op.norm_source = norm_source;
    op.dropout = dropout(seed, dropout_p);
    op.state = slot(states, slot_index);
    op.source = source.data();
    op.gain = gain.data();
    op.shift = shift.data();
    op.weight = weight.data();
    op.partial = matrix(partial, storage, tokens, dim);
    op.out_weight = parameter(out_weight, storage, dim);
    op.out_bias = parameter(out_bias, storage, dim);
  }
};

void boundary_forward(OptionalTensor branch, OptionalTensor residual, double dropout_p,
                      OptionalTensor seed, Tensor states, int64_t slot_index, Indices near,
                      Tensor weight, int64_t row, OptionalTensor gain, OptionalTensor shift,
                      bool norm_source, double source_eps, OptionalTensor partial,
                      OptionalTensor out_weight, OptionalTensor out_bias, double out_eps,
                      OptionalTensor x, OptionalTensor out, OptionalTensor source_rstd,
                      OptionalTensor out_mean, OptionalTensor out_rstd) {
  check_buffer(states);
  const Storage storage = storage_of(states);
  const int64_t tokens = states.size(1), dim = states.size(2);
  const Weights w(weight, storage, dim);
  Operands operands(states, slot_index, near, w, row, gain, shift, norm_source, partial, out_weight,
                    out_bias, dropout_p, seed);
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
  DEEPFAST_CHECK(!out.has_value() || (out_mean.has_value() && out_rstd.has_value()),
                 "boundary: out_mean or out_rstd is missing");
  Chunks(tokens).run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels().boundary_forward(op, begin, end, chunk);
  });
}

void boundary_backward(Tensor states, int64_t slot_index, Indices near, Tensor weight, int64_t row,
                       OptionalTensor gain, OptionalTensor shift, bool norm_source,
                       OptionalTensor partial, OptionalTensor out_weight, OptionalTensor out_bias,
                       OptionalTensor source_rstd, OptionalTensor out_mean, OptionalTensor out_rstd,
                       double dropout_p, OptionalTensor seed, OptionalTensor dx,
                       OptionalTensor dout, Tensor grads, int64_t grad_slot, int64_t column,
                       Indices pull_rows, Indices pull_slots, OptionalTensor pulled,
                       OptionalTensor dbranch, OptionalTensor dresidual, OptionalTensor dweight,
                       OptionalTensor dgain, OptionalTensor dshift, OptionalTensor dout_weight,
                       OptionalTensor dout_bias) {
  check_buffer(states);
  check_buffer(grads, states);
  const Storage storage = storage_of(states);
  const int64_t tokens = states.size(1), dim = states.size(2), size = compute_size(storage);
  const Weights w(weight, storage, dim);
  Operands operands(states, slot_index, near, w, row, gain, shift, norm_source, partial, out_weight,
                    out_bias, dropout_p, seed);
  Boundary& forward = operands.op;
  forward.source_rstd = parameter(source_rstd, storage, tokens);
  forward.out_mean = parameter(out_mean, storage, tokens);
  forward.out_rstd = parameter(out_rstd, storage, tokens);
  DEEPFAST_CHECK(dx.has_value() || dout.has_value(), "boundary: no gradient came in");
  DEEPFAST_CHECK(!norm_source || source_rstd.has_value(), "boundary: source_rstd is missing");
  DEEPFAST_CHECK(!dout.has_value() || (out_mean.has_value() && out_rstd.has_value()),
                 "boundary: out_mean or out_rstd is missing");
  DEEPFAST_CHECK(pull_rows.size() == pull_slots.size(), "boundary: expected ", pull_rows.size(),
                 " pull_slots, got ", pull_slots.size());
  w.offset(row, column);

  const Chunks chunks(tokens, w.width > 1 ? 8 : 32);
  const auto pull_grad = slots(grads, pull_slots);
  const auto pull_weight = w.pick(pull_rows, {column});
  const int64_t pulls = static_cast<int64_t>(pull_rows.size());
  Partial weight_sums(dweight.has_value() && pulls > 0, chunks, pulls * w.width, storage);
  Partial gain_sums(dgain.has_value(), chunks, dim, storage);
  Partial shift_sums(dshift.has_value(), chunks, dim, storage);
  Partial out_weight_sums(dout_weight.has_value(), chunks, dim, storage);
  Partial out_bias_sums(dout_bias.has_value(), chunks, dim, storage);

  BoundaryGrad op{};
  op.forward = forward;
  op.dx = matrix(dx, storage, tokens, dim);
  op.dout = matrix(dout, storage, tokens, dim);
  op.grad = slot(grads, grad_slot);
  op.pulls = pulls;
  op.own_row_reads = pulls > 0 && pull_rows[0] == row;
  op.pull_grad = pull_grad.data();
  op.pull_weight = pull_weight.data();
  op.pulled = matrix(pulled, storage, tokens, dim);
  op.state_gain = rows_of(parameter(gain, storage, w.columns * dim), {column}, dim, size)[0];
  op.state_shift = rows_of(parameter(shift, storage, w.columns * dim), {column}, dim, size)[0];
  op.dbranch = matrix(dbranch, storage, tokens, dim);
  op.dresidual = matrix(dresidual, storage, tokens, dim);
  op.need_dweight = weight_sums.get() != nullptr;
  op.dweight = weight_sums.get();
  op.dgain = gain_sums.get();
  op.dshift = shift_sums.get();
  op.dout_weight = out_weight_sums.get();
  op.dout_bias = out_bias_sums.get();
  chunks.run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels().boundary_backward(op, begin, end, chunk);
  });

  gain_sums.sum_into(parameter(dgain, storage, dim));
  shift_sums.sum_into(parameter(dshift, storage, dim));
  out_weight_sums.sum_into(parameter(dout_weight, storage, dim));
  out_bias_sums.sum_into(parameter(dout_bias, storage, dim));
  if (op.need_dweight) {
    std::vector<int64_t> offsets;
    for (int64_t r : pull_rows) offsets.push_back(w.offset(r, column));
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
