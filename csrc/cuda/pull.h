// The arguments of both kernels of pull_rows, with the partial sums that they write.
#pragma once

#include "stream.h"

namespace deepfast {

constexpr int kPullWarps = 8, kPullThreads = kPullWarps * kWarp;
constexpr int kMostSources = 8;

template <class T>
struct Pull {
  Stream<T> from;  // the gradients
  const T* states;
  const float *norm_weight, *norm_bias;  // (columns, dim), or null
  const float* weight;                   // (., columns) or (., columns, dim)
  float* out;
  float* partial;  // (blocks, L, J) or (blocks of a slice, L, J, dim), or null
  int64_t slot_stride, row_stride, out_stride, out_row_stride;
  int columns, sources;
  bool per_channel, states_aligned, channels_aligned, out_aligned, accumulate;
  int32_t row[Stream<T>::kMost], source[kMostSources], out_row[kMostSources];
};

}  // namespace deepfast
