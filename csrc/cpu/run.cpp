// The launches of the table on the CPU: checks, chunks of tokens for the threads, and partial sums.
// The LSTM, whose threads take sentences, has its own file.
#include "op.h"

namespace deepfast {

// ---- layer_norm ---------------------------------------------------------------------------------

namespace {

template <class Launch>
void check_layer_norm(const Launch& a) {
  check_seed(a);
  DEEPFAST_CHECK(a.rms == (a.mean == nullptr), "layer_norm: expected mean, or rms without it");
}

}  // namespace

void run(LayerNormForward& a) {
  check_layer_norm(a);
  Chunks(a.T).run(&Kernels::layer_norm_forward, a);
}

void run(LayerNormBackward& a) {
  check_layer_norm(a);
  run_sums(Chunks(a.T), &Kernels::layer_norm_backward, a, {{a.dweight, a.D}, {a.dbias, a.D}});
}

// ---- activation ---------------------------------------------------------------------------------

void run(ActivationForward& a) {
  check_seed(a);
  Chunks(a.T).run(&Kernels::activation_forward, a);
}

void run(ActivationBackward& a) {
  // The result of relu says where dropout made it 0, so that no mask is drawn.
  if (a.kind != ActivationBackward::Kind::relu) check_seed(a);
  run_sums(Chunks(a.T), &Kernels::activation_backward, a, {{a.dbias, a.D}});
}

// ---- cross_entropy ------------------------------------------------------------------------------

void run(CrossEntropy& a) {
  // Rows are long, so a few rows are enough work for a thread.
  Chunks(a.T, 32, 4).run(&Kernels::cross_entropy, a);
}

// ---- depth_mix ----------------------------------------------------------------------------------

namespace {

template <class Launch>
void check_depth_mix(const Launch& a) {
  DEEPFAST_CHECK(!a.norm || (a.mean != nullptr && a.rstd != nullptr),
                 "depth_mix: mean or rstd is missing");
}

}  // namespace

void run(MixRows& a) {
  check_equal(a.rows, a.out_rows, "rows", "out_rows");
  Chunks(a.T).run(&Kernels::mix_rows, a);
}

void run(PullRows& a) {
  check_equal(a.sources, a.out_rows, "sources", "out_rows");
  check_equal(a.rows, a.grad_slots, "rows", "grad_slots");
  // One weight per channel has D times the partial sums: fewer chunks keep them small.
  const Chunks chunks(a.T, a.weight.per_channel ? 8 : 32);
  const int64_t width = a.weight.width;
  const Partial dweight(a.dweight.data, chunks.count(), a.rows.count * a.sources.count * width,
                        a.storage);
  chunks.run(&Kernels::pull_rows, a);
  dweight.scatter(places(a.rows, a.sources, a.R, width), width);
}

void run(DepthMixForward& a) {
  check_depth_mix(a);
  Chunks(a.T).run(&Kernels::depth_mix_forward, a);
}

void run(DepthMixBackward& a) {
  check_depth_mix(a);
  run_sums(Chunks(a.T, 8), &Kernels::depth_mix_backward, a,
           {{a.dweight.data, a.K * a.weight.width},
            {a.dnorm_weight, a.K * a.D},
            {a.dnorm_bias, a.K * a.D}});
}

// ---- depth_attention ----------------------------------------------------------------------------

namespace {

template <class Launch>
void check_depth_attention(const Launch& a) {
  DEEPFAST_CHECK((a.query != nullptr) != (a.scores != nullptr),
                 "depth_attention: expected a query or scores, and not both");
  DEEPFAST_CHECK(!a.norm || a.query != nullptr,
                 "depth_attention: only a query's scores have a norm");
  DEEPFAST_CHECK(
      (a.most != nullptr) == (a.total != nullptr) && (a.most != nullptr || a.scores != nullptr),
      "depth_attention: expected most and total, or neither of them and scores");
}

}  // namespace

void run(DepthAttentionForward& a) {
  check_depth_attention(a);
  Chunks(a.T).run(&Kernels::depth_attention_forward, a);
}

void run(DepthAttentionBackward& a) {
  check_depth_attention(a);
  DEEPFAST_CHECK((a.out != nullptr) == (a.most != nullptr),
                 "depth_attention: expected out with most");
  run_sums(Chunks(a.T, 8), &Kernels::depth_attention_backward, a, {{a.dquery, a.H * a.D}});
}

// ---- attention ----------------------------------------------------------------------------------

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

// ---- boundary -----------------------------------------------------------------------------------

void run(BoundaryForward& a) {
  check_seed(a);
  check_output(a, a.out);
  DEEPFAST_CHECK(!a.norm_source || a.branch.data == nullptr || a.source_rstd != nullptr,
                 "boundary: source_rstd is missing");
  Chunks(a.T).run(&Kernels::boundary_forward, a);
}

void run(BoundaryBackward& a) {
  check_seed(a);
  check_output(a, a.dout);
  check_equal(a.pull_rows, a.pull_slots, "pull_rows", "pull_slots");
  DEEPFAST_CHECK(a.dx.data != nullptr || a.dout.data != nullptr, "boundary: no gradient came in");
  DEEPFAST_CHECK(!a.norm_source || a.source_rstd != nullptr, "boundary: source_rstd is missing");
  const Chunks chunks(a.T, a.weight.per_channel ? 8 : 32);
  const int64_t width = a.weight.width;
  const Partial dweight(a.dweight.data, chunks.count(), a.pull_rows.count * width, a.storage);
  run_sums(chunks, &Kernels::boundary_backward, a,
           {{a.dnorm_weight, a.D},
            {a.dnorm_bias, a.D},
            {a.dout_norm_weight, a.D},
            {a.dout_norm_bias, a.D}});
  dweight.scatter(places(a.pull_rows, {&a.k, 1}, a.R, width), width);
}

// ---- attention_boundary -------------------------------------------------------------------------

namespace {

// A softmax has statistics, ReLU has none.
template <class Launch>
void check_stats(const Launch& a, const void* stats, const char* name) {
  DEEPFAST_CHECK((a.kind == Launch::Kind::softmax) == (stats != nullptr), Launch::kSignature.name,
                 ": softmax, and it alone, needs ", name);
}

template <class Launch>
void check_boundary(const Launch& a) {
  check_seed(a);
  check_stats(a, a.stats, "stats");
  DEEPFAST_CHECK(a.kind != Launch::Kind::softmax ||
                     (a.partial.data != nullptr) == (a.partial_stats != nullptr),
                 "attention_boundary: partial and partial_stats belong together");
}

// The sums of dquery and dbias over the tokens, for the rows that a launch pulls into `columns`.
template <class Launch>
class QuerySums {
 public:
  QuerySums(Launch& a, const Indices& rows, const Indices& columns, const Chunks& chunks)
      : D_(a.D),
        query_at_(places(rows, Indices{&kZero, 1}, 1, a.D)),
        bias_at_(places(rows, columns, a.R, 1)),
        query_(a.dquery, chunks.count(), rows.count * a.D, a.storage),
        bias_(a.dbias, chunks.count(), rows.count * columns.count, a.storage) {
    DEEPFAST_CHECK(a.bias != nullptr || a.dbias == nullptr, Launch::kSignature.name,
                   ": dbias needs a bias");
  }
  // Adds the gradients of queries and sets those of biases.
  void store() const {
    query_.scatter(query_at_, D_, true);
    bias_.scatter(bias_at_, 1);
  }

 private:
  static constexpr int64_t kZero = 0;
  int64_t D_;
  std::vector<int64_t> query_at_, bias_at_;
  Partial query_, bias_;
};

}  // namespace

void run(AttendRows& a) {
  check_equal(a.rows, a.out_rows, "rows", "out_rows");
  check_stats(a, a.out_stats, "out_stats");
  Chunks(a.T).run(&Kernels::attend_rows, a);
}

void run(AttendPull& a) {
  check_equal(a.sources, a.out_rows, "sources", "out_rows");
  check_equal(a.rows, a.grad_slots, "rows", "grad_slots");
  check_stats(a, a.stats, "stats");
  // The partial sums of all queries are large: few chunks keep them small.
  const Chunks chunks(a.T, 8);
  const QuerySums<AttendPull> sums(a, a.rows, a.sources, chunks);
  chunks.run(&Kernels::attend_pull, a);
  sums.store();
}

void run(AttentionBoundaryForward& a) {
  check_boundary(a);
  check_output(a, a.out);
  Chunks(a.T).run(&Kernels::attention_boundary_forward, a);
}

void run(AttentionBoundaryBackward& a) {
  check_boundary(a);
  check_output(a, a.dout);
  check_equal(a.pull_rows, a.pull_slots, "pull_rows", "pull_slots");
  DEEPFAST_CHECK(a.dx.data != nullptr || a.dout.data != nullptr,
                 "attention_boundary: no gradient came in");
  const Chunks chunks(a.T, 8);
  const QuerySums<AttentionBoundaryBackward> sums(a, a.pull_rows, {&a.k, 1}, chunks);
  run_sums(chunks, &Kernels::attention_boundary_backward, a,
           {{a.dout_norm_weight, a.D}, {a.dout_norm_bias, a.D}});
  sums.store();
}

}  // namespace deepfast
