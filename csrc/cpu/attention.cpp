// attention_{forward,backward} on the CPU.
#include "op.h"

namespace deepfast {
namespace {

// Where sentences begin must rise from 0 to `tokens`.
void check_begins(const int32_t* begin, int64_t count, int64_t tokens) {
  bool rises = begin[0] == 0 && begin[count] == tokens;
  for (int64_t i = 0; i < count; ++i) rises &= begin[i + 1] >= begin[i];
  DEEPFAST_CHECK(rises, "attention: expected sentences from 0 to ", tokens);
}

template <class Launch>
void run_pairs(Launch& a, Kernel<Launch>* Kernels::* kernel) {
  check_seed(a);
  DEEPFAST_CHECK(a.G > 0 && a.H % a.G == 0, "attention: expected heads of k that divide the ", a.H,
                 " of q");
  check_begins(a.cu_seqlens_q, a.N, a.T);
  check_begins(a.cu_seqlens_k, a.N, a.Q);
  // No sentence is that long, and places of keys then stay in range.
  constexpr int64_t kLongest = int64_t{1} << 40;
  a.left = std::min(a.left, kLongest), a.right = std::min(a.right, kLongest);
  // Each pair of a sentence and a head of k is computed by one thread.
  Chunks(a.N * a.G, 256, 1).run(kernel, a);
}

}  // namespace

void run(AttentionForward& a) { run_pairs(a, &Kernels::attention_forward); }

void run(AttentionBackward& a) { run_pairs(a, &Kernels::attention_backward); }

}  // namespace deepfast
