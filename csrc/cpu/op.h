// What every CPU op needs: partial sums over tokens, parallel loops.
//
// Shapes and dtypes are validated once, in deepfast/ops and deepfast/depth; the checks here guard memory.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "../common/tensor.h"
#include "kernels.h"

namespace deepfast {

// The seed of a mask is a tensor, so that a device can read it without waiting for the host. It may
// be missing where nothing is dropped.
inline Dropout dropout(const OptionalTensor& seed, double p) {
  const DropoutFactors factors = dropout_factors(seed, p);
  if (p == 0) return {};
  return {static_cast<uint64_t>(*seed->const_data_ptr<int64_t>()), factors.threshold,
          factors.scale};
}

// A contiguous tensor of `count` integers.
inline const int64_t* integers(const Tensor& t, int64_t count) {
  DEEPFAST_CHECK(is_here(t) && t.scalar_type() == ScalarType::Long && t.is_contiguous() &&
                     t.dim() == 1 && t.size(0) == count,
                 "expected ", count, " contiguous values in int64, got ", t.numel());
  return t.const_data_ptr<int64_t>();
}

// Sums over tokens, deterministic on any number of threads. Each chunk of tokens has one partial
// row. The chunks depend on the shape alone, and their rows are added up in order.
class Chunks {
 public:
  explicit Chunks(int64_t tokens, int64_t most = 32, int64_t smallest = 32) : tokens_(tokens) {
    count_ = std::clamp<int64_t>(tokens / smallest, 1, most);
  }
  int64_t count() const { return count_; }
  template <class F>
  void run(const F& kernel) const {
    // An unknown DEEPFAST_CPU_CAPABILITY raises here. Inside the parallel loop its message would be
    // lost.
    kernels();
    torch::stable::parallel_for(0, count_, 1, [&](int64_t first, int64_t last) {
      for (int64_t c = first; c < last; ++c)
        kernel(tokens_ * c / count_, tokens_ * (c + 1) / count_, c);
    });
  }

 private:
  int64_t tokens_, count_;
};

class Partial {
 public:
  Partial(bool wanted, const Chunks& chunks, int64_t width, Storage storage)
      : Partial(wanted, chunks.count(), width, storage) {}
  // Any number of partial rows; the sum of no rows is 0.
  Partial(bool wanted, int64_t rows, int64_t width, Storage storage)
      : chunks_(std::max<int64_t>(1, rows)), width_(width), wide_(storage == Storage::f64) {
    if (wanted) data_.assign(chunks_ * width_ * compute_size(storage), 0);
  }
  void* get() { return data_.empty() ? nullptr : data_.data(); }
  // Reduces into `out`, which holds `width` values.
  void sum_into(void* out) const {
    if (data_.empty() || out == nullptr) return;
    wide_ ? reduce(static_cast<double*>(out)) : reduce(static_cast<float*>(out));
  }
  // Reduces into separate places: values [i * piece, (i + 1) * piece) go to base + offsets[i]
  // bytes.
  void scatter_into(char* base, const std::vector<int64_t>& offsets, int64_t piece) const {
    if (data_.empty()) return;
    std::vector<char> flat(width_ * (wide_ ? 8 : 4));
    sum_into(flat.data());
    const int64_t bytes = piece * (wide_ ? 8 : 4);
    for (size_t i = 0; i < offsets.size(); ++i)
      std::memcpy(base + offsets[i], flat.data() + i * bytes, bytes);
  }
  // The same, added to what is there.
  void add_into(char* base, const std::vector<int64_t>& offsets, int64_t piece) const {
    if (data_.empty()) return;
    std::vector<char> flat(width_ * (wide_ ? 8 : 4));
    sum_into(flat.data());
    for (size_t i = 0; i < offsets.size(); ++i) {
      const int64_t at = static_cast<int64_t>(i) * piece;
      wide_ ? add(flat.data(), at, base + offsets[i], piece, double{})
            : add(flat.data(), at, base + offsets[i], piece, float{});
    }
  }

 private:
  template <class A>
  static void add(const char* from, int64_t at, char* to, int64_t count, A) {
    const A* values = reinterpret_cast<const A*>(from) + at;
    for (int64_t i = 0; i < count; ++i) reinterpret_cast<A*>(to)[i] += values[i];
  }
  template <class A>
  void reduce(A* out) const {
    const A* p = reinterpret_cast<const A*>(data_.data());
    std::copy(p, p + width_, out);
    for (int64_t c = 1; c < chunks_; ++c)
      for (int64_t i = 0; i < width_; ++i) out[i] += p[c * width_ + i];
  }
  int64_t chunks_, width_;
  bool wide_;
  std::vector<char> data_;
};

}  // namespace deepfast
