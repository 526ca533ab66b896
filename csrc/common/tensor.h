// Views of tensors and the checks that guard memory, for the ops of every device.
//
// Shapes and dtypes are validated once, in deepfast/ops and deepfast/depth.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "matrix.h"

namespace deepfast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Indices = std::vector<int64_t>;

// Each device has a namespace, because `is_here` differs.
#if defined(__CUDACC__)
inline namespace on_cuda {
inline bool is_here(const Tensor& t) { return t.is_cuda(); }
#else
inline namespace on_cpu {
inline bool is_here(const Tensor& t) { return t.is_cpu(); }
#endif

inline Storage storage_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return Storage::f32;
    case ScalarType::Double:
      return Storage::f64;
    case ScalarType::BFloat16:
      return Storage::bf16;
    case ScalarType::Half:
      return Storage::f16;
    default:
      DEEPFAST_CHECK(false, "expected float32, float64, bfloat16 or float16");
  }
}

inline int64_t compute_size(Storage s) { return s == Storage::f64 ? 8 : 4; }

// A (T, D) tensor with contiguous columns.
inline Matrix matrix(const Tensor& t, Storage storage, int64_t tokens, int64_t dim) {
  DEEPFAST_CHECK(is_here(t) && t.dim() == 2 && t.size(0) == tokens && t.size(1) == dim,
                 "expected a tensor of shape (", tokens, ", ", dim, ")");
  DEEPFAST_CHECK(storage_of(t) == storage, "tensors of one call must share one dtype");
  DEEPFAST_CHECK(t.stride(1) == 1 || dim == 1 || tokens == 0,
                 "the last dimension must be contiguous");
  return {t.mutable_data_ptr(), t.stride(0)};
}

inline Matrix matrix(const OptionalTensor& t, Storage storage, int64_t tokens, int64_t dim) {
  return t.has_value() ? matrix(*t, storage, tokens, dim) : Matrix{};
}

// Slot `i` of an (N, T, D) buffer.
inline Matrix slot(const Tensor& buffer, int64_t i) {
  DEEPFAST_CHECK(i >= 0 && i < buffer.size(0), "slot ", i, " of a buffer of ", buffer.size(0));
  char* p = static_cast<char*>(buffer.mutable_data_ptr());
  return {p + i * buffer.stride(0) * static_cast<int64_t>(buffer.element_size()), buffer.stride(1)};
}

inline std::vector<Matrix> slots(const Tensor& buffer, const Indices& indices) {
  std::vector<Matrix> out;
  out.reserve(indices.size());
  for (int64_t i : indices) out.push_back(slot(buffer, i));
  return out;
}

inline void check_buffer(const Tensor& t) {
  DEEPFAST_CHECK(
      is_here(t) && t.dim() == 3 && t.size(2) > 0 && (t.stride(2) == 1 || t.size(2) == 1),
      "expected a buffer of shape (N, T, D)");
}

// A buffer whose slots are like those of `states`.
inline void check_buffer(const Tensor& t, const Tensor& states) {
  check_buffer(t);
  DEEPFAST_CHECK(storage_of(t) == storage_of(states) && t.size(1) == states.size(1) &&
                     t.size(2) == states.size(2),
                 "expected a buffer of the states' tokens, channels and dtype");
}

// A contiguous tensor of the compute type with `count` values, or null.
inline void* parameter(const OptionalTensor& t, Storage storage, int64_t count) {
  if (!t.has_value()) return nullptr;
  const auto expected = storage == Storage::f64 ? ScalarType::Double : ScalarType::Float;
  DEEPFAST_CHECK(
      is_here(*t) && t->scalar_type() == expected && t->is_contiguous() && t->numel() == count,
      "expected ", count, " contiguous values of the compute dtype, got ", t->numel());
  return t->mutable_data_ptr();
}

// The smallest 16-bit draw that dropout keeps, and the factor of the elements that it keeps.
struct DropoutFactors {
  int32_t threshold;
  double scale;
};

inline DropoutFactors dropout_factors(double p) {
  constexpr double kRange = 65536;
  const auto threshold = static_cast<int32_t>(p * kRange + 0.5);
  return {threshold, threshold < kRange ? kRange / (kRange - threshold) : 0.0};
}

// The same for a launch that draws a mask: it needs the seed.
inline DropoutFactors dropout_factors(const OptionalTensor& seed, double p) {
  if (p == 0) return {0, 1.0};
  DEEPFAST_CHECK(seed.has_value(), "dropout_p is ", p, " and the seed is missing");
  DEEPFAST_CHECK(is_here(*seed) && seed->dim() == 0 && seed->scalar_type() == ScalarType::Long,
                 "expected the seed as one int64 without dimensions, where the rows are");
  return dropout_factors(p);
}

// Pointers to rows of `width` values of a parameter; null where the parameter is absent.
inline std::vector<const void*> rows_of(const void* base, const Indices& indices, int64_t width,
                                        int64_t value_size) {
  std::vector<const void*> out;
  out.reserve(indices.size());
  for (int64_t i : indices)
    out.push_back(base == nullptr ? nullptr
                                  : static_cast<const char*>(base) + i * width * value_size);
  return out;
}

// The matrix of depth weights, (R, K) or (R, K, D) for one weight per channel.
struct Weights {
  const char* base;
  int64_t rows, columns, width, value_size;

  Weights(const Tensor& w, Storage storage, int64_t dim)
      : rows(w.size(0)),
        columns(w.size(1)),
        width(w.dim() == 3 ? dim : 1),
        value_size(compute_size(storage)) {
    base = static_cast<const char*>(parameter(OptionalTensor(w), storage, rows * columns * width));
  }
  int64_t offset(int64_t row, int64_t column) const {
    DEEPFAST_CHECK(row >= 0 && row < rows && column >= 0 && column < columns, "weight (", row, ", ",
                   column, ") outside (", rows, ", ", columns, ")");
    return (row * columns + column) * width * value_size;
  }
  std::vector<const void*> pick(const Indices& r, const Indices& c) const {
    std::vector<const void*> out;
    out.reserve(r.size() * c.size());
    for (int64_t i : r)
      for (int64_t j : c) out.push_back(base + offset(i, j));
    return out;
  }
};

}  // namespace on_cpu or on_cuda
}  // namespace deepfast
