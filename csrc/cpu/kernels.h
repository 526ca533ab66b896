// The interface between an op (checks, allocation, threads) and its kernels (arithmetic).
//
// An op fills one of these plain structures and calls the kernel of the chosen instruction set on
// ranges of tokens. A kernel never allocates an output and never starts a thread. `chunk` is the
// number of the range: a sum over tokens goes to the partial row of its chunk, and the partial rows
// are added up in a fixed order.
#pragma once

#include "../common/matrix.h"

namespace deepfast {

// Dropout by counter: element (t, d) is kept, and multiplied by `scale`, when its 16-bit draw is at
// least `threshold`. A threshold of 0 drops nothing.
struct Dropout {
  uint64_t seed = 0;
  int32_t threshold = 0;
  double scale = 1.0;
};

// Every `void*` below that is not a Matrix points to the compute type: fp32, or fp64 for f64.
struct LayerNorm {
  Storage storage;
  int64_t dim;
  bool rms;     // no mean is subtracted
  bool stream;  // y and dx are too large to be found in the caches later
  double eps;
  Dropout dropout;
  Matrix x, residual;         // s = residual + dropout(x)
  Matrix sum, y;              // y = (s - mean) * rstd * weight + bias
  const void *weight, *bias;  // (D)
  void *mean, *rstd;          // (T); with rms no mean
  Matrix dy, dsum, dx, dresidual;
  void *dweight, *dbias;  // (chunks, D) partial sums
};

// A weighted sum over sources: weight (rows, sources) or, per channel, (rows, sources, D).
struct Mix {
  Storage storage;
  int64_t dim, rows, sources;
  bool per_channel, accumulate;
  const Matrix* source;  // [sources], n_k
  // z_k = n_k * norm_weight + norm_bias; a null pointer omits its term.
  const void* const* norm_weight;  // [sources]
  const void* const* norm_bias;    // [sources]
  const void* const* weight;       // [rows * sources], one value or D values each
  const Matrix* out;               // [rows]
};

// The transpose of Mix: u_j = sum_l weight[l, j] g_l, and dweight[l, j] = <g_l, z_j>.
struct Pull {
  Storage storage;
  int64_t dim, rows, sources;
  bool per_channel, accumulate, need_dweight;
  const Matrix* grad;    // [rows], g_l
  const Matrix* source;  // [sources], n_j
  const void* const* norm_weight;
  const void* const* norm_bias;
  const void* const* weight;  // [rows * sources]
  const Matrix* out;          // [sources], u_j
  void* dweight;              // (chunks, rows, sources) or (chunks, rows, sources, D)
};

// Everything between two layers' matrix products, one token at a time:
//   y = residual + dropout(branch);  n = norm(y) or y;  x = partial + sum_j weight_j z_j;
//   out = norm(x). With source_rms norm(y), and with out_rms norm(x), subtracts no mean.
// Without a branch the state is only read: backward recomputes a layer's input this way.
struct Boundary {
  Storage storage;
  int64_t dim, near;  // near: sources read here, the pushed one last if it is read
  bool per_channel, norm_source, source_rms, out_rms;
  double source_eps, out_eps;
  Dropout dropout;
  Matrix branch, residual;
  Matrix state;                    // slot of the pushed state
  const Matrix* source;            // [near]
  const void* const* norm_weight;  // [near]
  const void* const* norm_bias;    // [near]
  const void* const* weight;       // [near]
  Matrix partial;                  // older blocks' share of x
  Matrix x, out;
  const void *out_norm_weight, *out_norm_bias;
  void* source_rstd;          // (T)
  void *out_mean, *out_rstd;  // (T); with out_rms no mean
};

// Backward of Boundary. The row's gradient g is written to `grad`. The gradient of the pushed state
// is u = pulled + sum_l weight_l g_l over the rows l of the block, this row first.
struct BoundaryGrad {
  Boundary forward;
  Matrix dx, dout, grad;
  int64_t pulls;                   // rows of this block that read the pushed state
  bool own_row_reads;              // this row is the first of them
  const Matrix* pull_grad;         // [pulls]
  const void* const* pull_weight;  // [pulls]
  Matrix pulled;                   // later blocks' share of u
  const void *state_norm_weight, *state_norm_bias;
  Matrix dbranch, dresidual;
  bool need_dweight;
  void* dweight;                            // (chunks, pulls) or (chunks, pulls, D)
  void *dnorm_weight, *dnorm_bias;          // (chunks, D)
  void *dout_norm_weight, *dout_norm_bias;  // (chunks, D)
};

// Weights of each token: p = softmax or relu of score[r, k] = <query_r, v_k> * rstd_k + bias[r, k].
struct Attend {
  Storage storage;
  int64_t dim, rows, sources;
  bool softmax, accumulate;
  const Matrix* source;      // [sources], v_k
  const void* const* rstd;   // [sources], (T) each
  const void* const* query;  // [rows], (D) each
  const void* const* bias;   // [rows * sources], one value each, or null
  const Matrix* out;         // [rows]: the mean weighted by p, or for relu the sum
  void* const* most;         // [rows], (T) each: the largest score; not for relu
  void* const* total;        // [rows], (T) each: sum exp(score - most)
};

// The transpose of Attend: what the rows l add to the gradients of the sources.
struct AttendPull {
  Storage storage;
  int64_t dim, rows, sources;
  bool softmax, accumulate;
  const Matrix* grad;    // [rows], g_l
  const Matrix* source;  // [sources], v_j
  const void *const *rstd, *const *query, *const *bias;
  const void* const* most;   // [rows], (T) each
  const void* const* total;  // [rows], (T) each
  const void* const* delta;  // [rows], (T) each: <g_l, x_l>
  const Matrix* out;         // [sources]
  void* dquery;              // (chunks, rows, D), or null
  void* dbias;               // (chunks, rows, sources), or null
};

// A Boundary whose weights are those of Attend. `weight` is not used.
struct AttentionBoundary {
  Boundary base;
  bool softmax;
  double eps;
  const void* query;                         // (D)
  const void* const* rstd;                   // [near], (T) each
  const void* const* bias;                   // [near], one value each, or null
  const void *partial_most, *partial_total;  // (T)
  void* own_rstd;                            // (T), of the pushed state
  void *most, *total;                        // (T), of this row
};

// Its backward. `forward` in `base` is that of `forward`.
struct AttentionBoundaryGrad {
  AttentionBoundary forward;
  BoundaryGrad base;
  const void* const* pull_query;  // [pulls], (D) each
  const void* const* pull_bias;   // [pulls], one value each, or null
  const void *const *pull_most, *const *pull_total, *const *pull_delta;  // [pulls], (T) each
  void* delta;                                                           // (T), of this row
  void* dquery;  // (chunks, pulls, D), or null
  void* dbias;   // (chunks, pulls), or null
};

// depth_mix over separate tensors, statistics included.
struct DepthMix {
  Storage storage;
  int64_t dim, sources, tokens;
  bool per_channel, norm, need_dweight;
  double eps;
  const Matrix* source;                 // [sources], y_k
  const void *norm_weight, *norm_bias;  // (sources, D)
  const void* weight;                   // (sources) or (sources, D)
  Matrix out;
  void *mean, *rstd;  // (sources, T)
  Matrix dout;
  const Matrix* dsource;            // [sources]
  void* dweight;                    // (chunks, sources) or (chunks, sources, D)
  void *dnorm_weight, *dnorm_bias;  // (chunks, sources, D)
};

// Attention over separate tensors: one softmax over the sources for each token and hop.
struct DepthAttention {
  Storage storage;
  int64_t dim, sources, hops;
  bool norm, accumulate;  // accumulate: backward adds to dsource
  double eps;
  const Matrix* source;      // [sources]
  const void* query;         // (hops, D), or null where scores are given
  const void* scores;        // (T, sources, hops), or null
  Matrix out;                // (T * hops, D), row t * hops + h
  void *lse, *most, *total;  // (T, hops), or null where scores are the weights, without a softmax
  Matrix dout;
  const void* dlse;       // (T, hops) or null
  const Matrix* dsource;  // [sources]
  void* dquery;           // (chunks, hops, D)
  void* dscores;          // (T, sources, hops)
};

enum class ActivationKind { relu, gelu };

// out = dropout(act(h + bias)). The gradient reads h and bias for gelu and out for relu; for relu
// it needs no draws.
struct Activation {
  Storage storage;
  int64_t dim;
  ActivationKind kind;
  Dropout dropout;
  Matrix h, out;
  const void* bias;  // (D)
  Matrix dout, saved, dh;
  void* dbias;  // (chunks, D) partial sums
};

// The loss and negative log-likelihood of a row of logits. The loss's gradient overwrites the
// logits.
struct CrossEntropy {
  Storage storage;
  int64_t vocabulary, ignore_index;
  double smoothing;
  bool write_grad;
  Matrix logits;          // (T, V)
  const int64_t* target;  // (T)
  void *loss, *nll;       // (T)
};

// Tokens of several heads, channels contiguous.
struct Heads {
  void* data;
  int64_t token_stride, head_stride;
};

// Attention within packed sentences, and its backward. A unit of work is sentence n with head g of
// the keys, and has the number n * kv_heads + g.
struct Attention {
  Storage storage;
  int64_t heads, kv_heads, dim, tokens;  // H, G, d, T
  int64_t left, right;                   // of the window, -1 for a side without end
  double scale;
  Dropout dropout;                   // row t * H + h of the mask, channels are keys
  const int32_t *begin_q, *begin_k;  // (N + 1)
  Heads q, k, v, o, dout, dq, dk, dv;
  void* lse;  // (H, T)
};

// Cached keys or values (B, G, N, d) with contiguous channels.
struct CacheView {
  void* data;
  int64_t batch, group, column;  // strides
  int64_t at(int64_t sentence, int64_t g) const { return sentence * batch + g * group; }
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

// An LSTM layer with peepholes over (T, B) positions, and its backward. The packed weight consists
// of panels, each with 4 * kPanel values for each of `depth` rows. Forward packs the four gates of
// kPanel channels, backward 4 * kPanel channels of the transposed weight.
struct PeepholeLstm {
  Storage storage;
  int64_t steps, batch, dim;  // T, B, H
  bool reverse;
  const int64_t* length;  // (B), at most T
  const int64_t* order;   // (B), a thread takes a range of it, longest sentence first
  const void *weight, *h0, *f, *dh, *dh_last;  // in the storage type
  void *h, *h_last, *gates, *df, *dh0;         // in the storage type
  const void *peephole, *c0, *dc_last;
  void *packed, *c_last, *c, *dc0;
  void* dpeephole;  // (B, 3, H), one sum per sentence
};

// Bytes of one gate in a row of a panel: one of the widest registers.
constexpr int64_t kPanelBytes = 64;

// Every kernel with its structure. A table's members, its declarations and its entries are all
// generated from this list, so their orders cannot differ.
#define DEEPFAST_KERNELS(KERNEL)                             \
  KERNEL(layer_norm_forward, LayerNorm)                      \
  KERNEL(layer_norm_backward, LayerNorm)                     \
  KERNEL(mix, Mix)                                           \
  KERNEL(pull, Pull)                                         \
  KERNEL(boundary_forward, Boundary)                         \
  KERNEL(boundary_backward, BoundaryGrad)                    \
  KERNEL(attend, Attend)                                     \
  KERNEL(attend_pull, AttendPull)                            \
  KERNEL(attention_boundary_forward, AttentionBoundary)      \
  KERNEL(attention_boundary_backward, AttentionBoundaryGrad) \
  KERNEL(depth_mix_forward, DepthMix)                        \
  KERNEL(depth_mix_backward, DepthMix)                       \
  KERNEL(depth_attention_forward, DepthAttention)            \
  KERNEL(depth_attention_backward, DepthAttention)           \
  KERNEL(activation_forward, Activation)                     \
  KERNEL(activation_backward, Activation)                    \
  KERNEL(cross_entropy, CrossEntropy)                        \
  KERNEL(attention_forward, Attention)                       \
  KERNEL(attention_backward, Attention)                      \
  KERNEL(cached_attention, CachedAttention)                  \
  KERNEL(best_tokens, BestTokens)                            \
  KERNEL(peephole_lstm_pack, PeepholeLstm)                   \
  KERNEL(peephole_lstm_pack_transposed, PeepholeLstm)        \
  KERNEL(peephole_lstm_forward, PeepholeLstm)                \
  KERNEL(peephole_lstm_backward, PeepholeLstm)

// Runs on the tokens (or sentences, or panels) from `begin` to `end`.
template <class Operands>
using Kernel = void(const Operands&, int64_t begin, int64_t end, int64_t chunk);

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
