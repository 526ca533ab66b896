#include "arguments.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <string>
#include <variant>
#include <vector>

#include "check.h"

namespace deepfast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using Shape = std::initializer_list<int64_t>;

namespace {

constexpr int kMostOperands = 40;

std::string shown(const int64_t* sizes, size_t count) {
  std::string text = "(";
  for (size_t i = 0; i < count; ++i) text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
  return text + ")";
}

std::string shape_of(const Tensor& t) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < t.dim(); ++i) sizes.push_back(t.size(i));
  return shown(sizes.data(), sizes.size());
}

const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return "another dtype";
  }
}

bool has_shape(const Tensor& t, Shape shape) {
  if (t.dim() != static_cast<int64_t>(shape.size())) return false;
  int64_t i = 0;
  for (int64_t size : shape)
    if (t.size(i++) != size) return false;
  return true;
}

// A tensor without elements may have no memory, but a null pointer says that an operand is missing.
void* data_of(const Tensor& t) {
  alignas(64) static char nothing;
  void* data = t.mutable_data_ptr();
  return data != nullptr ? data : &nothing;
}

// Rows of (T, D), or of slots, are read with contiguous channels.
bool has_channels(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return last < 0 || t.stride(last) == 1 || t.size(last) == 1 || t.numel() == 0;
}

}  // namespace

Storage storage_of(const Tensor& t, const char* launch, const char* name) {
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
      DEEPFAST_CHECK(false, launch, ": ", name, ": expected float32, float64, bfloat16 or float16");
  }
}

struct Arguments::Values {
  using Value = std::variant<std::monostate, Tensor, Tensors, std::vector<int64_t>, std::string,
                             int64_t, double, bool>;
  const Signature& signature;
  const bool on_cuda;
  std::array<Value, kMostOperands> all;
  mutable std::vector<std::vector<Matrix>> lists;
  mutable ScalarType storage = ScalarType::Float;

  const Tensor* tensor(int i) const { return std::get_if<Tensor>(&all[i]); }

  bool is_here(const Tensor& t) const { return on_cuda ? t.is_cuda() : t.is_cpu(); }

  // Says what was expected of operand i, and what it is.
  [[noreturn]] void refuse(int i, const Tensor& t, Shape shape, ScalarType type,
                           const char* layout) const {
    DEEPFAST_CHECK(false, signature.name, ": ", signature.operands[i].name, ": expected ",
                   shown(shape.begin(), shape.size()), " in ", name_of(type), " on ",
                   on_cuda ? "cuda" : "cpu", ", ", layout, ", got ", shape_of(t), " in ",
                   name_of(t.scalar_type()), is_here(t) ? "" : " on another device",
                   has_channels(t) ? "" : " with channels apart",
                   t.is_contiguous() ? "" : ", not contiguous");
    __builtin_unreachable();
  }
  void check_rows(int i, const Tensor& t, Shape shape, bool sums = false) const {
    const ScalarType type = sums ? compute() : storage;
    if (!is_here(t) || !has_shape(t, shape) || t.scalar_type() != type || !has_channels(t))
      refuse(i, t, shape, type, "channels contiguous");
  }
  void* contiguous(int i, ScalarType type, Shape shape) const {
    const Tensor* t = tensor(i);
    if (t == nullptr) return nullptr;
    if (!is_here(*t) || !has_shape(*t, shape) || t->scalar_type() != type || !t->is_contiguous())
      refuse(i, *t, shape, type, "contiguous");
    return data_of(*t);
  }
  ScalarType compute() const {
    return storage == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  }
};

Arguments::Arguments(const Signature& signature, uint64_t* stack, bool on_cuda)
    : values_(new Values{signature, on_cuda, {}, {}}) {
  using torch::stable::detail::to;
  for (int i = 0; i < signature.count; ++i) {
    auto& value = values_->all[i];
    switch (signature.operands[i].type) {
      case Type::tensor:
        value = to<Tensor>(stack[i]);
        break;
      case Type::optional:
        if (auto t = to<std::optional<Tensor>>(stack[i])) value = *std::move(t);
        break;
      case Type::tensors:
        value = to<Tensors>(stack[i]);
        break;
      case Type::integer:
        value = to<int64_t>(stack[i]);
        break;
      case Type::indices:
        value = to<std::vector<int64_t>>(stack[i]);
        break;
      case Type::number:
        value = to<double>(stack[i]);
        break;
      case Type::flag:
        value = to<bool>(stack[i]);
        break;
      case Type::word:
        value = to<std::string>(stack[i]);
        break;
    }
  }
}

Arguments::~Arguments() = default;

Storage Arguments::storage(int i) const {
  const Tensors* list = std::get_if<Tensors>(&values_->all[i]);
  const Signature& signature = values_->signature;
  DEEPFAST_CHECK(list == nullptr || !list->empty(), signature.name, ": ",
                 signature.operands[i].name, ": expected at least one tensor, got none");
  const Tensor& t = list != nullptr ? list->front() : *values_->tensor(i);
  values_->storage = t.scalar_type();
  return storage_of(t, signature.name, signature.operands[i].name);
}

int64_t Arguments::size(std::initializer_list<SizeAt> places) const {
  const Signature& signature = values_->signature;
  for (const SizeAt& at : places) {
    const Tensors* list = std::get_if<Tensors>(&values_->all[at.operand]);
    if (at.dimension < 0) return static_cast<int64_t>(list->size());
    const Tensor* t = list != nullptr ? &list->front() : values_->tensor(at.operand);
    if (t == nullptr) continue;
    DEEPFAST_CHECK(t->dim() > at.dimension, signature.name, ": ",
                   signature.operands[at.operand].name, ": expected more than ", at.dimension,
                   " dimensions, got ", shape_of(*t));
    return t->size(at.dimension) - at.added;
  }
  std::string names;
  for (const SizeAt& at : places)
    names += (names.empty() ? "" : " or ") + std::string(signature.operands[at.operand].name);
  DEEPFAST_CHECK(false, signature.name, ": expected ", names, ", got neither");
}

Matrix Arguments::matrix(int i, int64_t rows, int64_t columns, bool sums) const {
  const Tensor* t = values_->tensor(i);
  if (t == nullptr) return {};
  values_->check_rows(i, *t, {rows, columns}, sums);
  return {data_of(*t), t->stride(0)};
}

Slots Arguments::slots(int i, int64_t tokens, int64_t dim, bool sums) const {
  const Tensor& t = *values_->tensor(i);
  const int64_t count = t.dim() == 3 ? t.size(0) : 0;
  values_->check_rows(i, t, {count, tokens, dim}, sums);
  return {data_of(t), count, t.stride(0), t.stride(1), static_cast<int64_t>(t.element_size())};
}

Heads Arguments::heads(int i, int64_t tokens, int64_t heads, int64_t dim) const {
  const Tensor& t = *values_->tensor(i);
  values_->check_rows(i, t, {tokens, heads, dim});
  return {data_of(t), t.stride(0), t.stride(1)};
}

Matrices Arguments::matrices(int i, int64_t rows, int64_t columns) const {
  auto& list = values_->lists.emplace_back();
  for (const Tensor& t : std::get<Tensors>(values_->all[i])) {
    values_->check_rows(i, t, {rows, columns});
    list.push_back({data_of(t), t.stride(0)});
  }
  return {list.data(), static_cast<int64_t>(list.size())};
}

void* Arguments::compute(int i, Shape shape) const {
  return values_->contiguous(i, values_->compute(), shape);
}

void* Arguments::dense(int i, Shape shape) const {
  return values_->contiguous(i, values_->storage, shape);
}

Weights Arguments::weights(int i, Shape shape, int64_t width) const {
  const Tensor* t = values_->tensor(i);
  if (t == nullptr) return {};
  if (t->dim() != static_cast<int64_t>(shape.size()) + 1)
    return {values_->contiguous(i, values_->compute(), shape), false, 1};
  const int64_t* sizes = shape.begin();
  void* data = shape.size() == 1
                   ? values_->contiguous(i, values_->compute(), {sizes[0], width})
                   : values_->contiguous(i, values_->compute(), {sizes[0], sizes[1], width});
  return {data, true, width};
}

const int32_t* Arguments::int32(int i, Shape shape) const {
  return static_cast<const int32_t*>(values_->contiguous(i, ScalarType::Int, shape));
}

const int64_t* Arguments::int64(int i, Shape shape) const {
  return static_cast<const int64_t*>(values_->contiguous(i, ScalarType::Long, shape));
}

int64_t Arguments::integer(int i) const { return std::get<int64_t>(values_->all[i]); }

int64_t Arguments::index(int i, int64_t limit) const {
  const int64_t value = integer(i);
  DEEPFAST_CHECK(value >= 0 && value < limit, values_->signature.name, ": ",
                 values_->signature.operands[i].name, ": expected an index below ", limit, ", got ",
                 value);
  return value;
}

Indices Arguments::indices(int i, int64_t limit) const {
  const auto& list = std::get<std::vector<int64_t>>(values_->all[i]);
  for (int64_t value : list)
    DEEPFAST_CHECK(value >= 0 && value < limit, values_->signature.name, ": ",
                   values_->signature.operands[i].name, ": expected indices below ", limit,
                   ", got ", value);
  return {list.data(), static_cast<int64_t>(list.size())};
}

double Arguments::number(int i) const { return std::get<double>(values_->all[i]); }

bool Arguments::flag(int i) const { return std::get<bool>(values_->all[i]); }

int Arguments::word(int i, std::initializer_list<const char*> words) const {
  const auto& given = std::get<std::string>(values_->all[i]);
  std::string all;
  int place = 0;
  for (const char* word : words) {
    if (given == word) return place;
    all += (place++ > 0 ? " or " : "") + std::string(word);
  }
  DEEPFAST_CHECK(false, values_->signature.name, ": ", values_->signature.operands[i].name,
                 ": expected ", all, ", got ", given);
}

const Tensor& Arguments::first_tensor() const {
  for (const auto& value : values_->all) {
    if (const auto* t = std::get_if<Tensor>(&value)) return *t;
    if (const auto* list = std::get_if<Tensors>(&value)) return list->front();
  }
  DEEPFAST_CHECK(false, values_->signature.name, ": expected a tensor, got none");
}

}  // namespace deepfast
