// deepfast::depth_attention_{forward,backward} on the CPU: checks, threads, registration.
#include "op.h"

namespace deepfast {
namespace {

DepthAttention attention(const std::vector<Tensor>& sources, const OptionalTensor& query,
                         const OptionalTensor& scores, bool norm, double eps,
                         const OptionalTensor& out, const OptionalTensor& most,
                         const OptionalTensor& total, std::vector<Matrix>& source) {
  DEEPFAST_CHECK(!sources.empty(), "depth_attention: expected at least one source");
  DEEPFAST_CHECK(query.has_value() != scores.has_value(),
                 "depth_attention: expected a query or scores, and not both");
  DEEPFAST_CHECK(!norm || query.has_value(), "depth_attention: only a query's scores have a norm");
  DEEPFAST_CHECK(most.has_value() == total.has_value() && (most.has_value() || scores.has_value()),
                 "depth_attention: expected most and total, or neither of them and scores");
  DEEPFAST_CHECK(query.has_value() ? query->dim() == 2 : scores->dim() == 3,
                 "depth_attention: expected a query (H, D) or scores (T, K, H)");
  DepthAttention op{};
  op.storage = storage_of(sources[0]);
  const int64_t tokens = sources[0].size(0);
  op.dim = sources[0].size(1);
  op.sources = static_cast<int64_t>(sources.size());
  op.hops = query.has_value() ? query->size(0) : scores->size(2);
  op.norm = norm;
  op.eps = eps;
  for (const Tensor& s : sources) source.push_back(matrix(s, op.storage, tokens, op.dim));
  op.source = source.data();
  op.query = parameter(query, op.storage, op.hops * op.dim);
  op.scores = parameter(scores, op.storage, tokens * op.sources * op.hops);
  if (out.has_value()) op.out = matrix(*out, op.storage, tokens * op.hops, op.dim);
  op.most = parameter(most, op.storage, tokens * op.hops);
  op.total = parameter(total, op.storage, tokens * op.hops);
  return op;
}

void depth_attention_forward(std::vector<Tensor> sources, OptionalTensor query,
                             OptionalTensor scores, bool norm, double eps, Tensor out,
                             OptionalTensor lse, OptionalTensor most, OptionalTensor total) {
  std::vector<Matrix> source;
  DepthAttention op = attention(sources, query, scores, norm, eps, out, most, total, source);
  op.lse = parameter(lse, op.storage, sources[0].size(0) * op.hops);
  Chunks(sources[0].size(0)).run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).depth_attention_forward(op, begin, end, chunk);
  });
}

void depth_attention_backward(std::vector<Tensor> sources, OptionalTensor query,
                              OptionalTensor scores, bool norm, double eps, OptionalTensor out,
                              OptionalTensor most, OptionalTensor total, Tensor dout,
                              OptionalTensor dlse, std::vector<Tensor> dsources, bool accumulate,
                              OptionalTensor dquery, OptionalTensor dscores) {
  std::vector<Matrix> source, dsource;
  DepthAttention op = attention(sources, query, scores, norm, eps, out, most, total, source);
  DEEPFAST_CHECK(out.has_value() == most.has_value(), "depth_attention: expected out with most");
  const int64_t tokens = sources[0].size(0), count = op.hops * op.dim;
  // Either all sources need a gradient or none does.
  for (const Tensor& s : dsources) dsource.push_back(matrix(s, op.storage, tokens, op.dim));
  dsource.resize(sources.size());
  op.dsource = dsource.data();
  op.accumulate = accumulate;
  op.dout = matrix(dout, op.storage, tokens * op.hops, op.dim);
  op.dlse = parameter(dlse, op.storage, tokens * op.hops);
  op.dscores = parameter(dscores, op.storage, tokens * op.sources * op.hops);
  const Chunks chunks(tokens, 8);
  Partial sums(dquery.has_value(), chunks, count, op.storage);
  op.dquery = sums.get();
  chunks.run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).depth_attention_backward(op, begin, end, chunk);
  });
  sums.sum_into(parameter(dquery, op.storage, count));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepfast, CPU, m) {
  m.impl("depth_attention_forward", TORCH_BOX(&depth_attention_forward));
  m.impl("depth_attention_backward", TORCH_BOX(&depth_attention_backward));
}

}  // namespace deepfast
