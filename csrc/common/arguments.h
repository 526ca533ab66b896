// The arguments of a launch as the dispatcher hands them over, and their checks. No torch headers,
// so that the files of ops compile quickly; launches.cpp, written by the build, calls it.
#pragma once

#include <initializer_list>
#include <memory>

#include "views.h"

namespace torch::stable {
class Tensor;
}

namespace deepfast {

// The types of the schema: Tensor, Tensor?, Tensor[], int, int[], float, bool, str.
enum class Type { tensor, optional, tensors, integer, indices, number, flag, word };

struct Operand {
  const char* name;
  Type type;
};

struct Signature {
  const char* name;
  int count;
  const Operand* operands;
};

// Where a size is found: a dimension of an operand, or -1 for the length of a list, less `added`.
struct SizeAt {
  int operand, dimension, added;
};

// The storage type of a tensor; `name` is its own in an error.
Storage storage_of(const torch::stable::Tensor& t, const char* launch, const char* name);

// Takes the arguments from the dispatcher's stack and owns them. `i` is an operand's number. A
// missing tensor is null; any other that does not fit raises one sentence with its name.
class Arguments {
 public:
  Arguments(const Signature& signature, uint64_t* stack, bool on_cuda);
  ~Arguments();
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  Storage storage(int i) const;
  // In the first operand of `places` that is given.
  int64_t size(std::initializer_list<SizeAt> places) const;
  // Of the storage type; `sums` are of the compute type.
  Matrix matrix(int i, int64_t rows, int64_t columns, bool sums = false) const;
  Slots slots(int i, int64_t tokens, int64_t dim, bool sums = false) const;
  Heads heads(int i, int64_t tokens, int64_t heads, int64_t dim) const;
  Matrices matrices(int i, int64_t rows, int64_t columns) const;
  // Contiguous tensors of the compute type and of the storage type.
  void* compute(int i, std::initializer_list<int64_t> shape) const;
  void* dense(int i, std::initializer_list<int64_t> shape) const;
  Weights weights(int i, std::initializer_list<int64_t> shape, int64_t width) const;
  const int32_t* int32(int i, std::initializer_list<int64_t> shape) const;
  const int64_t* int64(int i, std::initializer_list<int64_t> shape) const;
  int64_t integer(int i) const;
  // A number from 0 to `limit`, which is not included.
  int64_t index(int i, int64_t limit) const;
  Indices indices(int i, int64_t limit) const;
  double number(int i) const;
  bool flag(int i) const;
  // The place of a word among `words`.
  int word(int i, std::initializer_list<const char*> words) const;

  const torch::stable::Tensor& first_tensor() const;

 private:
  struct Values;
  std::unique_ptr<Values> values_;
};

}  // namespace deepfast
