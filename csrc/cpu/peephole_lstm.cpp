// peephole_lstm_{forward,backward} on the CPU.
#include <new>
#include <numeric>

#include "op.h"

namespace deepfast {
namespace {

// The sentences of a call, divided among the threads.
class Sentences {
 public:
  Sentences(const int64_t* lengths, int64_t steps, int64_t batch) : length_(batch, steps) {
    for (int64_t b = 0; lengths != nullptr && b < batch; ++b)
      length_[b] = std::clamp<int64_t>(lengths[b], 0, steps);
    std::vector<int64_t> longest_first(batch);
    std::iota(longest_first.begin(), longest_first.end(), 0);
    std::stable_sort(longest_first.begin(), longest_first.end(),
                     [&](int64_t a, int64_t b) { return length_[a] > length_[b]; });
    // Fewer than four sentences would leave a thread's products too small.
    const int64_t shares = std::clamp<int64_t>(batch / 4, 1, threads());
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
    in_parallel(shares, [&](int64_t first, int64_t last) {
      for (int64_t c = first; c < last; ++c) kernel(begin_[c], begin_[c + 1], c);
    });
  }

 private:
  std::vector<int64_t> length_, order_, begin_;
};

// The weight packed into the panels that the products read: see kernels.h.
template <class Launch>
class Packed {
 public:
  Packed(Lstm<Launch>& op, int64_t depth, int64_t width, Kernel<Launch>* kernel) {
    const int64_t size = compute_size(op.storage), panels = (width * size + bytes_ - 1) / bytes_;
    data_ = ::operator new(std::max<int64_t>(1, panels * depth * bytes_), alignment_);
    op.packed = data_;
    in_parallel(panels, [&](int64_t first, int64_t last) { kernel(op, first, last, 0); });
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

}  // namespace

void run(PeepholeLstmForward& a) {
  DEEPFAST_CHECK((a.c != nullptr) == (a.gates != nullptr), "expected both c and gates or neither");
  const Sentences sentences(a.lengths, a.P, a.N);
  Lstm<PeepholeLstmForward> op{a, sentences.length(), sentences.order(), nullptr};
  const Packed packed(op, a.H, 4 * a.H, kernels(a.storage).peephole_lstm_pack);
  sentences.run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(a.storage).peephole_lstm_forward(op, begin, end, chunk);
  });
}

void run(PeepholeLstmBackward& a) {
  const Sentences sentences(a.lengths, a.P, a.N);
  // One sum for each sentence, so the result does not depend on the threads.
  const Partial dpeephole(a.dpeephole, a.N, 3 * a.H, a.storage);
  Lstm<PeepholeLstmBackward> op{a, sentences.length(), sentences.order(), nullptr};
  const Packed packed(op, 4 * a.H, a.H, kernels(a.storage).peephole_lstm_pack_transposed);
  sentences.run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(a.storage).peephole_lstm_backward(op, begin, end, chunk);
  });
  dpeephole.sum();
}

}  // namespace deepfast
