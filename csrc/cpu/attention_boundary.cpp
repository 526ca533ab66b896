// attention_boundary_{forward,backward}, attend_rows and attend_pull on the CPU.
#include "op.h"

namespace deepfast {
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
  const Partial dout_norm_weight(a.dout_norm_weight, chunks.count(), a.D, a.storage);
  const Partial dout_norm_bias(a.dout_norm_bias, chunks.count(), a.D, a.storage);
  chunks.run(&Kernels::attention_boundary_backward, a);
  dout_norm_weight.sum();
  dout_norm_bias.sum();
  sums.store();
}

}  // namespace deepfast
