// boundary_{forward,backward} on the CPU: all work between two layers.
#include "op.h"

namespace deepfast {

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
  const int64_t count = chunks.count(), width = a.weight.width;
  const Partial dweight(a.dweight.data, count, a.pull_rows.count * width, a.storage);
  const Partial dnorm_weight(a.dnorm_weight, count, a.D, a.storage);
  const Partial dnorm_bias(a.dnorm_bias, count, a.D, a.storage);
  const Partial dout_norm_weight(a.dout_norm_weight, count, a.D, a.storage);
  const Partial dout_norm_bias(a.dout_norm_bias, count, a.D, a.storage);
  chunks.run(&Kernels::boundary_backward, a);
  for (const Partial* sums : {&dnorm_weight, &dnorm_bias, &dout_norm_weight, &dout_norm_bias})
    sums->sum();
  dweight.scatter(places(a.pull_rows, {&a.k, 1}, a.R, width), width);
}

}  // namespace deepfast
