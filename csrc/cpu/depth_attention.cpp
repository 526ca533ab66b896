// depth_attention_{forward,backward} on the CPU.
#include "op.h"

namespace deepfast {
namespace {

template <class Launch>
void check(const Launch& a) {
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
  check(a);
  Chunks(a.T).run(&Kernels::depth_attention_forward, a);
}

void run(DepthAttentionBackward& a) {
  check(a);
  DEEPFAST_CHECK((a.out != nullptr) == (a.most != nullptr),
                 "depth_attention: expected out with most");
  const Chunks chunks(a.T, 8);
  const Partial dquery(a.dquery, chunks.count(), a.H * a.D, a.storage);
  chunks.run(&Kernels::depth_attention_backward, a);
  dquery.sum();
}

}  // namespace deepfast
