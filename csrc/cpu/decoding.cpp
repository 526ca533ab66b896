// The ops of one step of decoding on the CPU: checks, threads, registration. Neither has kernels
// for other devices, so neither is in the table of launches.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>

#include "op.h"

namespace deepfast {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// A (T, D) tensor with contiguous columns.
Matrix matrix(const Tensor& t, Storage storage, int64_t tokens, int64_t dim) {
  DEEPFAST_CHECK(t.is_cpu() && t.dim() == 2 && t.size(0) == tokens && t.size(1) == dim &&
                     storage_of(t, "decoding", "a tensor") == storage &&
                     (t.stride(1) == 1 || dim == 1 || tokens == 0),
                 "expected a tensor of shape (", tokens, ", ", dim,
                 "), in the dtype of the call, with contiguous columns");
  return {t.mutable_data_ptr(), t.stride(0)};
}

// `count` contiguous values of the compute type.
void* values_of(const Tensor& t, Storage storage, int64_t count) {
  const auto expected = storage == Storage::f64 ? ScalarType::Double : ScalarType::Float;
  DEEPFAST_CHECK(
      t.is_cpu() && t.scalar_type() == expected && t.is_contiguous() && t.numel() == count,
      "expected ", count, " contiguous values of the compute dtype, got ", t.numel());
  return t.mutable_data_ptr();
}

// Keys or values (B, G, N, d) with contiguous channels.
CacheView cache_view(const Tensor& t, Storage storage) {
  DEEPFAST_CHECK(t.is_cpu() && t.dim() == 4 &&
                     storage_of(t, "cached_attention", "keys") == storage &&
                     (t.stride(3) == 1 || t.size(3) == 1),
                 "expected keys and values (B, G, N, d) in the dtype of q");
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

// A contiguous tensor of `count` integers.
const int64_t* integers(const Tensor& t, int64_t count) {
  DEEPFAST_CHECK(t.is_cpu() && t.scalar_type() == ScalarType::Long && t.is_contiguous() &&
                     t.dim() == 1 && t.size(0) == count,
                 "expected ", count, " contiguous values in int64, got ", t.numel());
  return t.const_data_ptr<int64_t>();
}

void check_range(const int64_t* p, int64_t count, int64_t end, const char* what) {
  bool inside = true;
  for (int64_t i = 0; i < count; ++i) inside &= p[i] >= 0 && p[i] < end;
  DEEPFAST_CHECK(inside, "cached_attention: expected ", what, " below ", end);
}

void cached_attention(Tensor q, OptionalTensor key, OptionalTensor value, Tensor keys,
                      Tensor values, Tensor sentences, OptionalTensor columns,
                      OptionalTensor padding, Tensor out) {
  CachedAttention op{};
  op.storage = storage_of(q, "cached_attention", "q");
  op.keys = cache_view(keys, op.storage);
  op.values = cache_view(values, op.storage);
  const int64_t rows = q.size(0), batch = keys.size(0), length = keys.size(2);
  op.groups = keys.size(1), op.width = keys.size(3);
  for (int64_t i = 0; i < 4; ++i)
    DEEPFAST_CHECK(keys.size(i) == values.size(i), "cached_attention: keys and values differ");
  const int64_t channels = op.groups * op.width;
  DEEPFAST_CHECK(q.dim() == 2 && channels > 0 && q.size(1) > 0 && q.size(1) % channels == 0,
                 "cached_attention: expected q (R, H d) with H a multiple of ", op.groups,
                 " and d ", op.width);
  op.heads = q.size(1) / op.width;
  op.q = matrix(q, op.storage, rows, q.size(1));
  op.out = matrix(out, op.storage, rows, q.size(1));
  op.sentence = integers(sentences, rows);
  check_range(op.sentence, rows, batch, "sentences");
  op.count = length;
  DEEPFAST_CHECK(key.has_value() == value.has_value() && key.has_value() == columns.has_value(),
                 "cached_attention: key, value and columns go together");
  if (columns.has_value()) {
    op.key = matrix(*key, op.storage, rows, channels);
    op.value = matrix(*value, op.storage, rows, channels);
    DEEPFAST_CHECK(columns->is_cpu() && columns->scalar_type() == ScalarType::Long &&
                       columns->dim() == 2 && columns->size(0) == rows && columns->size(1) > 0 &&
                       (columns->stride(1) == 1 || columns->size(1) == 1),
                   "cached_attention: expected columns (R, T) in int64");
    op.columns = columns->const_data_ptr<int64_t>();
    op.columns_stride = columns->stride(0);
    op.count = columns->size(1);
    for (int64_t row = 0; row < rows; ++row)
      check_range(op.columns + row * op.columns_stride, op.count, length, "columns");
  }
  if (padding.has_value()) {
    DEEPFAST_CHECK(!columns.has_value() && padding->is_cpu() &&
                       padding->scalar_type() == ScalarType::Bool && padding->is_contiguous() &&
                       padding->dim() == 2 && padding->size(0) == batch &&
                       padding->size(1) == length,
                   "cached_attention: expected padding (B, N) in bool, and no columns");
    op.padding = static_cast<const uint8_t*>(padding->mutable_data_ptr());
  }
  Chunks(rows, 32, 4).run(&Kernels::cached_attention, op);
}

void best_tokens(Tensor logits, std::vector<int64_t> banned, int64_t eos, Tensor values,
                 Tensor tokens, Tensor of_eos) {
  BestTokens op{};
  op.storage = storage_of(logits, "best_tokens", "logits");
  const int64_t rows = logits.size(0);
  op.vocabulary = logits.size(1);
  op.logits = matrix(logits, op.storage, rows, op.vocabulary);
  DEEPFAST_CHECK(eos >= 0 && eos < op.vocabulary, "best_tokens: expected eos below ", op.vocabulary,
                 ", got ", eos);
  op.eos = eos;
  op.banned = banned.data(), op.bans = static_cast<int64_t>(banned.size());
  DEEPFAST_CHECK(tokens.is_cpu() && tokens.dim() == 2 && tokens.size(0) == rows &&
                     tokens.size(1) > 0 && tokens.is_contiguous() &&
                     tokens.scalar_type() == ScalarType::Long,
                 "best_tokens: expected tokens (R, K) in int64");
  op.count = tokens.size(1);
  op.tokens = tokens.mutable_data_ptr<int64_t>();
  op.values = values_of(values, op.storage, rows * op.count);
  op.of_eos = values_of(of_eos, op.storage, rows);
  Chunks(rows, 32, 4).run(&Kernels::best_tokens, op);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepfast, m) {
  m.def(
      "cached_attention(Tensor q, Tensor? key, Tensor? value, Tensor(a!) keys, Tensor(b!) values, "
      "Tensor sentences, Tensor? columns, Tensor? padding, Tensor(c!) out) -> ()");
  m.def(
      "best_tokens(Tensor logits, int[] banned, int eos, Tensor(a!) values, Tensor(b!) tokens, "
      "Tensor(c!) of_eos) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(deepfast, CPU, m) {
  m.impl("cached_attention", TORCH_BOX(&cached_attention));
  m.impl("best_tokens", TORCH_BOX(&best_tokens));
}

}  // namespace deepfast
