// deepfast::peephole_lstm_{forward,backward} on the CPU: checks, threads, registration.
#include <new>
#include <numeric>

#include "op.h"

namespace deepfast {
namespace {

// A contiguous tensor of `count` values in the storage type.
void* values(const Tensor& t, Storage storage, int64_t count) {
  DEEPFAST_CHECK(is_here(t) && storage_of(t) == storage && t.is_contiguous() && t.numel() == count,
                 "expected ", count, " contiguous values of the dtype of f, got ", t.numel());
  return t.mutable_data_ptr();
}

void* values(const OptionalTensor& t, Storage storage, int64_t count) {
  return t.has_value() ? values(*t, storage, count) : nullptr;
}

// The sentences of a call, divided among the threads.
class Sentences {
 public:
  Sentences(const OptionalTensor& lengths, int64_t steps, int64_t batch) : length_(batch, steps) {
    if (lengths.has_value()) {
      const int64_t* given = integers(*lengths, batch);
      for (int64_t b = 0; b < batch; ++b) length_[b] = std::clamp<int64_t>(given[b], 0, steps);
    }
    std::vector<int64_t> longest_first(batch);
    std::iota(longest_first.begin(), longest_first.end(), 0);
    std::stable_sort(longest_first.begin(), longest_first.end(),
                     [&](int64_t a, int64_t b) { return length_[a] > length_[b]; });
    // Fewer than four sentences would leave a thread's products too small.
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t shares = std::clamp<int64_t>(batch / 4, 1, threads);
    begin_.push_back(0);
    for (int64_t c = 0; c < shares; ++c) {
      for (int64_t i = c; i < batch; i += shares) order_.push_back(longest_first[i]);
      begin_.push_back(static_cast<int64_t>(order_.size()));
    }
  }
  const int64_t* length() const { return length_.data(); }
  const int64_t* order() const { return order_.data(); }
  template <class F>
  void run(const F& kernel) const {
    const int64_t shares = static_cast<int64_t>(begin_.size()) - 1;
    torch::stable::parallel_for(0, shares, 1, [&](int64_t first, int64_t last) {
      for (int64_t c = first; c < last; ++c) kernel(begin_[c], begin_[c + 1], c);
    });
  }

 private:
  std::vector<int64_t> length_, order_, begin_;
};

// The weight packed into the panels that the products read: see kernels.h.
class Packed {
 public:
  Packed(PeepholeLstm& op, int64_t depth, int64_t width, Kernel<PeepholeLstm>* kernel) {
    const int64_t size = compute_size(op.storage), panels = (width * size + bytes_ - 1) / bytes_;
    data_ = ::operator new(std::max<int64_t>(1, panels * depth * bytes_), alignment_);
    op.packed = data_;
    torch::stable::parallel_for(0, panels, 1,
                                [&](int64_t first, int64_t last) { kernel(op, first, last, 0); });
  }
  ~Packed() { ::operator delete(data_, alignment_); }
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;

 private:
  // Bytes of one row of a panel.
  static constexpr int64_t bytes_ = 4 * kPanelBytes;
  static constexpr std::align_val_t alignment_{kPanelBytes};
  void* data_;
};

PeepholeLstm shape_of(const Tensor& gates, const Tensor& weight, const Tensor& peephole,
                      const Sentences& sentences, bool reverse) {
  PeepholeLstm op{};
  op.storage = storage_of(gates);
  op.steps = gates.size(0);
  op.batch = gates.size(1);
  op.dim = gates.size(2) / 4;
  op.reverse = reverse;
  op.length = sentences.length();
  op.order = sentences.order();
  op.weight = values(weight, op.storage, 4 * op.dim * op.dim);
  op.peephole = parameter(peephole, op.storage, 3 * op.dim);
  return op;
}

void peephole_lstm_forward(Tensor f, Tensor weight, Tensor peephole, OptionalTensor h0,
                           OptionalTensor c0, OptionalTensor lengths, bool reverse, Tensor h,
                           Tensor h_last, Tensor c_last, OptionalTensor c, OptionalTensor gates) {
  DEEPFAST_CHECK(f.dim() == 3 && f.size(2) % 4 == 0, "expected f of shape (T, B, 4H)");
  const Sentences sentences(lengths, f.size(0), f.size(1));
  PeepholeLstm op = shape_of(f, weight, peephole, sentences, reverse);
  const int64_t state = op.batch * op.dim, all = op.steps * state;
  op.f = values(f, op.storage, 4 * all);
  op.h0 = values(h0, op.storage, state);
  op.c0 = parameter(c0, op.storage, state);
  op.h = values(h, op.storage, all);
  op.h_last = values(h_last, op.storage, state);
  op.c_last = parameter(c_last, op.storage, state);
  op.c = parameter(c, op.storage, all);
  op.gates = values(gates, op.storage, 4 * all);
  DEEPFAST_CHECK(c.has_value() == gates.has_value(), "expected both c and gates or neither");
  const Packed packed(op, op.dim, 4 * op.dim, kernels(op.storage).peephole_lstm_pack);
  sentences.run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).peephole_lstm_forward(op, begin, end, chunk);
  });
}

void peephole_lstm_backward(OptionalTensor dh, OptionalTensor dh_last, OptionalTensor dc_last,
                            Tensor weight, Tensor peephole, OptionalTensor c0,
                            OptionalTensor lengths, bool reverse, Tensor c, Tensor gates, Tensor df,
                            OptionalTensor dh0, OptionalTensor dc0, Tensor dpeephole) {
  DEEPFAST_CHECK(gates.dim() == 3 && gates.size(2) % 4 == 0, "expected gates of shape (T, B, 4H)");
  const Sentences sentences(lengths, gates.size(0), gates.size(1));
  PeepholeLstm op = shape_of(gates, weight, peephole, sentences, reverse);
  const int64_t state = op.batch * op.dim, all = op.steps * state;
  op.dh = values(dh, op.storage, all);
  op.dh_last = values(dh_last, op.storage, state);
  op.dc_last = parameter(dc_last, op.storage, state);
  op.c0 = parameter(c0, op.storage, state);
  op.c = parameter(c, op.storage, all);
  op.gates = values(gates, op.storage, 4 * all);
  op.df = values(df, op.storage, 4 * all);
  op.dh0 = values(dh0, op.storage, state);
  op.dc0 = parameter(dc0, op.storage, state);
  // One sum for each sentence, so the result does not depend on the threads.
  Partial sums(true, op.batch, 3 * op.dim, op.storage);
  op.dpeephole = sums.get();
  const Packed packed(op, 4 * op.dim, op.dim, kernels(op.storage).peephole_lstm_pack_transposed);
  sentences.run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).peephole_lstm_backward(op, begin, end, chunk);
  });
  sums.sum_into(parameter(dpeephole, op.storage, 3 * op.dim));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepfast, CPU, m) {
  m.impl("peephole_lstm_forward", TORCH_BOX(&peephole_lstm_forward));
  m.impl("peephole_lstm_backward", TORCH_BOX(&peephole_lstm_backward));
}

}  // namespace deepfast
