// A list of separate sources for depth_mix: checked, and split into launches.
#pragma once

#include <algorithm>

#include "op.h"

namespace deepfast {

// Tensors of one launch: their pointers and strides are kernel arguments, which take at most 4 KB.
constexpr int kSources = 120;

struct SourceList {
  Storage storage;
  int64_t count, tokens, dim, weights;  // count: sources; weights: values of the weight
  std::vector<Matrix> source;
  const float *weight, *norm_weight, *norm_bias;
  float *mean, *rstd;
  bool per_channel, aligned;

  SourceList(const std::vector<Tensor>& sources, const Tensor& weight_,
             const OptionalTensor& norm_weight_, const OptionalTensor& norm_bias_, bool norm,
             const OptionalTensor& mean_, const OptionalTensor& rstd_) {
    DEEPFAST_CHECK(!sources.empty(), "depth_mix: expected at least one source, got none");
    DEEPFAST_CHECK(sources[0].dim() == 2 && sources[0].size(1) > 0,
                   "depth_mix: expected sources of shape (T, D)");
    storage = storage_of(sources[0]);
    count = static_cast<int64_t>(sources.size());
    tokens = sources[0].size(0), dim = sources[0].size(1);
    check_dim(dim);
    per_channel = weight_.dim() == 2;
    weights = count * (per_channel ? dim : 1);
    weight = floats(OptionalTensor(weight_), weights);
    norm_weight = floats(norm_weight_, count * dim), norm_bias = floats(norm_bias_, count * dim);
    DEEPFAST_CHECK(tokens < int64_t{1} << 29, "depth_mix: expected fewer than 2^29 tokens, got ",
                   tokens);
    DEEPFAST_CHECK(!norm || (mean_.has_value() && rstd_.has_value()),
                   "depth_mix: expected mean and rstd with norm, got None");
    mean = norm ? floats(mean_, count * tokens) : nullptr;
    rstd = norm ? floats(rstd_, count * tokens) : nullptr;
    aligned =
        Alignment(storage, dim).values({per_channel ? weight : nullptr, norm_weight, norm_bias});
    source = matrices(sources);
  }
  // How threads hold a row, once all tensors are known.
  int chunks() const { return row_chunks(dim, aligned); }
  int lanes() const { return row_lanes(dim, chunks()); }
  int threads() const { return row_threads(lanes()); }
  int rows() const { return threads() / lanes(); }

  // Another (T, D) tensor of the call.
  Matrix one(const Tensor& t) {
    const Matrix m = matrix(t, storage, tokens, dim);
    aligned = aligned && Alignment(storage, dim).rows({m});
    return m;
  }
  std::vector<Matrix> matrices(const std::vector<Tensor>& tensors) {
    std::vector<Matrix> all;
    for (const Tensor& t : tensors) all.push_back(one(t));
    return all;
  }
  // Row `first` of a parameter with `width` values a row.
  template <class P>
  static P* from(P* p, int64_t first, int64_t width) {
    return p == nullptr ? nullptr : p + first * width;
  }
  // Fills an argument struct: what depends on the first source of a launch, and what all launches
  // share.
  template <class Op>
  int fill(Op& op, int64_t first) const {
    op.sources = static_cast<int>(std::min<int64_t>(kSources, count - first));
    std::copy_n(source.begin() + first, op.sources, op.source);
    op.weight = from(weight, first, per_channel ? dim : 1);
    op.norm_weight = from(norm_weight, first, dim);
    op.mean = from(mean, first, tokens), op.rstd = from(rstd, first, tokens);
    op.tokens = tokens, op.dim = static_cast<int>(dim), op.lanes = lanes();
    op.per_channel = per_channel;
    return op.sources;
  }
};

}  // namespace deepfast
