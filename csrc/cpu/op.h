// What every CPU op needs: parallel loops, and partial sums over tokens.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "../common/arguments.h"
#include "../common/check.h"
#include "kernels.h"

namespace deepfast {

template <class Launch>
void check_seed(const Launch& a) {
  DEEPFAST_CHECK(a.dropout_p == 0 || a.seed != nullptr, "dropout_p is ", a.dropout_p,
                 " and the seed is missing");
}

// The norm of a boundary's output, of which backward needs what forward kept.
template <class Launch>
void check_output(const Launch& a, const Matrix& out) {
  DEEPFAST_CHECK(
      out.data == nullptr || (a.out_rms == (a.out_mean == nullptr) && a.out_rstd != nullptr),
      "boundary: expected out_rstd, and out_mean or out_rms");
}

inline void check_equal(const Indices& a, const Indices& b, const char* a_name,
                        const char* b_name) {
  DEEPFAST_CHECK(a.count == b.count, "expected as many ", b_name, " as ", a_name, ", ", a.count,
                 ", got ", b.count);
}

// Calls f(first, last) for parts of [0, count), on torch's threads: see bindings.cpp.
int64_t threads();
void in_parallel(int64_t count, void (*f)(int64_t, int64_t, void*), void* context);

template <class F>
void in_parallel(int64_t count, const F& f) {
  in_parallel(
      count,
      [](int64_t first, int64_t last, void* context) {
        (*static_cast<const F*>(context))(first, last);
      },
      const_cast<F*>(&f));
}

// Sums over tokens, deterministic on any number of threads. Each chunk of tokens has one partial
// row. The chunks depend on the shape alone, and their rows are added up in order.
class Chunks {
 public:
  explicit Chunks(int64_t tokens, int64_t most = 32, int64_t smallest = 32) : tokens_(tokens) {
    count_ = std::clamp<int64_t>(tokens / smallest, 1, most);
  }
  int64_t count() const { return count_; }
  // Runs a kernel of the table on the chunks.
  template <class Launch>
  void run(Kernel<Launch>* Kernels::* kernel, const Launch& a) const {
    run([&](int64_t begin, int64_t end, int64_t c) {
      (kernels(a.storage).*kernel)(a, begin, end, c);
    });
  }
  template <class F>
  void run(const F& kernel) const {
    // An unknown DEEPFAST_CPU_CAPABILITY raises here. Inside the parallel loop its message would be
    // lost.
    kernels();
    in_parallel(count_, [&](int64_t first, int64_t last) {
      for (int64_t c = first; c < last; ++c)
        kernel(tokens_ * c / count_, tokens_ * (c + 1) / count_, c);
    });
  }

 private:
  int64_t tokens_, count_;
};

// Takes the place of a sum that a launch writes: `target` then points to partial rows of `width`
// zeros. A null one stays null.
class Partial {
 public:
  Partial(void*& target, int64_t rows, int64_t width, Storage storage)
      : out_(target),
        rows_(std::max<int64_t>(1, rows)),
        width_(width),
        wide_(storage == Storage::f64) {
    if (target == nullptr || width == 0) {
      target = nullptr;
      return;
    }
    data_.assign(rows_ * width_ * value_size(), 0);
    target = data_.data();
  }
  // The sum of the rows.
  void sum() const {
    if (!data_.empty()) sum_into(out_);
  }
  // The same in pieces: values [i * piece, (i + 1) * piece) go to value offsets[i] and on, or are
  // added to what is there.
  void scatter(const std::vector<int64_t>& offsets, int64_t piece, bool add = false) const {
    if (data_.empty()) return;
    std::vector<char> flat(width_ * value_size());
    sum_into(flat.data());
    for (size_t i = 0; i < offsets.size(); ++i) {
      char* to = static_cast<char*>(out_) + offsets[i] * value_size();
      const char* from = flat.data() + i * piece * value_size();
      if (!add)
        std::memcpy(to, from, piece * value_size());
      else
        wide_ ? add_values(from, to, piece, double{}) : add_values(from, to, piece, float{});
    }
  }

 private:
  int64_t value_size() const { return wide_ ? 8 : 4; }
  void sum_into(void* out) const {
    wide_ ? reduce(static_cast<double*>(out)) : reduce(static_cast<float*>(out));
  }
  template <class A>
  static void add_values(const char* from, char* to, int64_t count, A) {
    for (int64_t i = 0; i < count; ++i)
      reinterpret_cast<A*>(to)[i] += reinterpret_cast<const A*>(from)[i];
  }
  template <class A>
  void reduce(A* out) const {
    const A* p = reinterpret_cast<const A*>(data_.data());
    std::copy(p, p + width_, out);
    for (int64_t c = 1; c < rows_; ++c)
      for (int64_t i = 0; i < width_; ++i) out[i] += p[c * width_ + i];
  }
  void* out_;
  int64_t rows_, width_;
  bool wide_;
  std::vector<char> data_;
};

// What a launch sums over all tokens, and the number of its values.
struct Sum {
  void*& target;
  int64_t width;
};

// Runs a kernel of the table on the chunks, each with its partial row of every sum.
template <class Launch>
void run_sums(const Chunks& chunks, Kernel<Launch>* Kernels::* kernel, Launch& a,
              std::initializer_list<Sum> sums) {
  std::vector<Partial> partials;
  for (const Sum& s : sums) partials.emplace_back(s.target, chunks.count(), s.width, a.storage);
  chunks.run(kernel, a);
  for (const Partial& partial : partials) partial.sum();
}

// The places of values (row, column) of a table with `columns` columns and `width` values each.
inline std::vector<int64_t> places(const Indices& rows, const Indices& columns, int64_t count,
                                   int64_t width) {
  std::vector<int64_t> all;
  for (int64_t row : rows)
    for (int64_t column : columns) all.push_back((row * count + column) * width);
  return all;
}

}  // namespace deepfast
