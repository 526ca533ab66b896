// The interface between an op (checks, allocation, threads) and its kernels (arithmetic).
//
// A kernel takes the struct of its launch, which the build writes from deepfast/launches.py, and a
// range of tokens. A kernel never allocates an output and never starts a thread. `chunk` is the
// number of the range: a sum over tokens goes to the partial row of its chunk, and the op adds up
// the partial rows in a fixed order. Every `void*` of a launch that is not dense points to the
// compute type: fp32, or fp64 for f64.
#pragma once

#include "launches.h"

namespace deepfast {

// Cached keys or values (B, G, N, d) with contiguous channels.
struct CacheView {
  void* data;
  int64_t batch, group, column;  // strides
  DEEPFAST_VIEW int64_t at(int64_t sentence, int64_t g) const {
    return sentence * batch + g * group;
  }
};

// Attention of one position of each hypothesis, a row, to the cached keys of its sentence. With
// `columns` the row's own key and value are first written to the last of its columns.
struct CachedAttention {
  Storage storage;
  int64_t heads, groups, width, count;  // count: columns that a row sees at most
  Matrix q, out;                        // (R, H d)
  Matrix key, value;                    // (R, G d) or null
  CacheView keys, values;
  const int64_t* sentence;  // (R)
  const int64_t* columns;   // (R, count), or null for all columns without padding
  int64_t columns_stride;
  const uint8_t* padding;  // (B, count) or null
};

// The largest log-probabilities of each row of logits, best first, equal ones by token.
struct BestTokens {
  Storage storage;
  int64_t vocabulary, count, eos, bans;
  const int64_t* banned;  // [bans], tokens that are left out
  Matrix logits;          // (R, V)
  void* values;           // (R, count), -inf where there are no more tokens
  int64_t* tokens;        // (R, count), then -1
  void* of_eos;           // (R), the log-probability of eos
};

// An LSTM layer with peepholes, forward or backward. The packed weight consists of panels, each with
// 4 * kPanel values for each of `depth` rows. Forward packs the four gates of kPanel channels,
// backward 4 * kPanel channels of the transposed weight.
template <class Launch>
struct Lstm : Launch {
  const int64_t* length;  // (N), at most P
  const int64_t* order;   // (N), a thread takes a range of it, longest sentence first
  void* packed;
};

// Bytes of one gate in a row of a panel: one of the widest registers.
constexpr int64_t kPanelBytes = 64;

// What the kernel of a launch takes: the launch, or more.
template <class Launch>
struct OperandsOf {
  using type = Launch;
};
template <>
struct OperandsOf<PeepholeLstmForward> {
  using type = Lstm<PeepholeLstmForward>;
};
template <>
struct OperandsOf<PeepholeLstmBackward> {
  using type = Lstm<PeepholeLstmBackward>;
};

// Every kernel with its structure: one of the name of each launch, and those without a launch in the
// table. A table's members, its declarations and its entries are all generated from this list, so
// their orders cannot differ.
#define DEEPFAST_KERNELS(KERNEL)                  \
  DEEPFAST_LAUNCHES(KERNEL)                       \
  KERNEL(cached_attention, CachedAttention)       \
  KERNEL(best_tokens, BestTokens)                 \
  KERNEL(peephole_lstm_pack, PeepholeLstmForward) \
  KERNEL(peephole_lstm_pack_transposed, PeepholeLstmBackward)

// Runs on the tokens (or sentences, or panels) from `begin` to `end`.
template <class Launch>
using Kernel = void(const typename OperandsOf<Launch>::type&, int64_t begin, int64_t end,
                    int64_t chunk);

// The kernels of one instruction set.
struct Kernels {
  const char* name;
#define DEEPFAST_MEMBER(kernel, Operands) Kernel<Operands>* kernel;
  DEEPFAST_KERNELS(DEEPFAST_MEMBER)
#undef DEEPFAST_MEMBER
};

// The kernels for a storage type, of the best instruction set of this processor, which is chosen
// once.
const Kernels& kernels(Storage storage = Storage::bf16);

}  // namespace deepfast
