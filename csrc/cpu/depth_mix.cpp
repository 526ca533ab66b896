// deepfast::mix_rows, pull_rows and depth_mix_{forward,backward} on the CPU.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "op.h"

namespace deepfast {
namespace {

// Asks for huge pages behind a new buffer of states. Each step touches the whole buffer once, and
// page faults on small pages cost a tenth of the step. It is only a hint, so a refusal is no error.
void advise_states(Tensor states) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = 1 << 21;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(states.mutable_data_ptr());
  const uintptr_t end = begin + states.size(0) * states.stride(0) * states.element_size();
  const uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge, last = end / kHuge * kHuge;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)states;
#endif
}

void mix_rows(Tensor states, Indices sources, Tensor weight, Indices rows,
              OptionalTensor norm_weight, OptionalTensor norm_bias, Tensor out, Indices out_rows,
              bool accumulate) {
  check_buffer(states);
  check_buffer(out, states);
  const Storage storage = storage_of(states);
  const int64_t tokens = states.size(1), dim = states.size(2), size = compute_size(storage);
  DEEPFAST_CHECK(rows.size() == out_rows.size(), "mix_rows: expected ", rows.size(),
                 " out_rows, got ", out_rows.size());
  const Weights w(weight, storage, dim);
  const auto source = slots(states, sources);
  const auto target = slots(out, out_rows);
  const auto norm_weights =
      rows_of(parameter(norm_weight, storage, w.columns * dim), sources, dim, size);
  const auto norm_biases =
      rows_of(parameter(norm_bias, storage, w.columns * dim), sources, dim, size);
  const auto weights = w.pick(rows, sources);
  Mix op{};
  op.storage = storage;
  op.dim = dim;
  op.rows = static_cast<int64_t>(rows.size());
  op.sources = static_cast<int64_t>(sources.size());
  op.per_channel = weight.dim() == 3;
  op.accumulate = accumulate;
  op.source = source.data();
  op.norm_weight = norm_weights.data();
  op.norm_bias = norm_biases.data();
  op.weight = weights.data();
  op.out = target.data();
  Chunks(tokens).run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).mix(op, begin, end, chunk);
  });
}

void pull_rows(Tensor grads, Indices grad_slots, Indices rows, Tensor states, Indices sources,
               Tensor weight, OptionalTensor norm_weight, OptionalTensor norm_bias, Tensor out,
               Indices out_rows, bool accumulate, OptionalTensor dweight) {
  check_buffer(states);
  check_buffer(grads, states);
  check_buffer(out, states);
  const Storage storage = storage_of(states);
  const int64_t tokens = states.size(1), dim = states.size(2), size = compute_size(storage);
  DEEPFAST_CHECK(sources.size() == out_rows.size() && rows.size() == grad_slots.size(),
                 "pull_rows: expected as many out_rows as sources and grad_slots as rows");
  const Weights w(weight, storage, dim);
  const auto grad = slots(grads, grad_slots);
  const auto source = slots(states, sources);
  const auto target = slots(out, out_rows);
  const auto norm_weights =
      rows_of(parameter(norm_weight, storage, w.columns * dim), sources, dim, size);
  const auto norm_biases =
      rows_of(parameter(norm_bias, storage, w.columns * dim), sources, dim, size);
  const auto weights = w.pick(rows, sources);
  // One weight per channel has D times the partial sums: fewer chunks keep them small.
  const Chunks chunks(tokens, w.width > 1 ? 8 : 32);
  const int64_t pairs = static_cast<int64_t>(rows.size() * sources.size());
  Partial sums(dweight.has_value(), chunks, pairs * w.width, storage);
  Pull op{};
  op.storage = storage;
  op.dim = dim;
  op.rows = static_cast<int64_t>(rows.size());
  op.sources = static_cast<int64_t>(sources.size());
  op.per_channel = weight.dim() == 3;
  op.accumulate = accumulate;
  op.need_dweight = dweight.has_value();
  op.grad = grad.data();
  op.source = source.data();
  op.norm_weight = norm_weights.data();
  op.norm_bias = norm_biases.data();
  op.weight = weights.data();
  op.out = target.data();
  op.dweight = sums.get();
  chunks.run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).pull(op, begin, end, chunk);
  });
  if (!dweight.has_value()) return;
  std::vector<int64_t> offsets;
  for (int64_t r : rows)
    for (int64_t c : sources) offsets.push_back(w.offset(r, c));
  sums.scatter_into(static_cast<char*>(parameter(dweight, storage, w.rows * w.columns * w.width)),
                    offsets, w.width);
}

DepthMix separate(const std::vector<Tensor>& sources, const Tensor& weight,
                  const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, bool norm,
                  const OptionalTensor& mean, const OptionalTensor& rstd,
                  std::vector<Matrix>& source) {
  DEEPFAST_CHECK(!sources.empty(), "depth_mix: expected at least one source");
  DepthMix op{};
  op.storage = storage_of(sources[0]);
  op.tokens = sources[0].size(0);
  op.dim = sources[0].size(1);
  op.sources = static_cast<int64_t>(sources.size());
  op.per_channel = weight.dim() == 2;
  op.norm = norm;
  for (const Tensor& s : sources) source.push_back(matrix(s, op.storage, op.tokens, op.dim));
  op.source = source.data();
  op.weight =
      parameter(OptionalTensor(weight), op.storage, op.sources * (op.per_channel ? op.dim : 1));
  op.norm_weight = parameter(norm_weight, op.storage, op.sources * op.dim);
  op.norm_bias = parameter(norm_bias, op.storage, op.sources * op.dim);
  DEEPFAST_CHECK(!norm || (mean.has_value() && rstd.has_value()),
                 "depth_mix: mean or rstd is missing");
  op.mean = parameter(mean, op.storage, op.sources * op.tokens);
  op.rstd = parameter(rstd, op.storage, op.sources * op.tokens);
  return op;
}

void depth_mix_forward(std::vector<Tensor> sources, Tensor weight, OptionalTensor norm_weight,
                       OptionalTensor norm_bias, bool norm, double eps, Tensor out,
                       OptionalTensor mean, OptionalTensor rstd) {
  std::vector<Matrix> source;
  DepthMix op = separate(sources, weight, norm_weight, norm_bias, norm, mean, rstd, source);
  op.eps = eps;
  op.out = matrix(out, op.storage, op.tokens, op.dim);
  Chunks(op.tokens).run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).depth_mix_forward(op, begin, end, chunk);
  });
}

void depth_mix_backward(std::vector<Tensor> sources, Tensor weight, OptionalTensor norm_weight,
                        OptionalTensor norm_bias, bool norm, OptionalTensor mean,
                        OptionalTensor rstd, Tensor dout, std::vector<Tensor> dsources,
                        OptionalTensor dweight, OptionalTensor dnorm_weight,
                        OptionalTensor dnorm_bias) {
  std::vector<Matrix> source, dsource;
  DepthMix op = separate(sources, weight, norm_weight, norm_bias, norm, mean, rstd, source);
  // Either all sources need a gradient or none does.
  for (const Tensor& s : dsources) dsource.push_back(matrix(s, op.storage, op.tokens, op.dim));
  dsource.resize(sources.size());
  op.dsource = dsource.data();
  op.dout = matrix(dout, op.storage, op.tokens, op.dim);
  op.need_dweight = dweight.has_value();
  const int64_t count = op.sources * (op.per_channel ? op.dim : 1);
  const Chunks chunks(op.tokens, 8);
  Partial weight_sums(dweight.has_value(), chunks, count, op.storage);
  Partial norm_weight_sums(dnorm_weight.has_value(), chunks, op.sources * op.dim, op.storage);
  Partial norm_bias_sums(dnorm_bias.has_value(), chunks, op.sources * op.dim, op.storage);
  op.dweight = weight_sums.get();
  op.dnorm_weight = norm_weight_sums.get();
  op.dnorm_bias = norm_bias_sums.get();
  chunks.run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).depth_mix_backward(op, begin, end, chunk);
  });
  weight_sums.sum_into(parameter(dweight, op.storage, count));
  norm_weight_sums.sum_into(parameter(dnorm_weight, op.storage, op.sources * op.dim));
  norm_bias_sums.sum_into(parameter(dnorm_bias, op.storage, op.sources * op.dim));
}

}  // namespace

// Not a launch: no other backend needs it.
STABLE_TORCH_LIBRARY_FRAGMENT(deepfast, m) { m.def("advise_states(Tensor states) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(deepfast, CPU, m) {
  m.impl("advise_states", TORCH_BOX(&advise_states));
  m.impl("mix_rows", TORCH_BOX(&mix_rows));
  m.impl("pull_rows", TORCH_BOX(&pull_rows));
  m.impl("depth_mix_forward", TORCH_BOX(&depth_mix_forward));
  m.impl("depth_mix_backward", TORCH_BOX(&depth_mix_backward));
}

}  // namespace deepfast
