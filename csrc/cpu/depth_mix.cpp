// mix_rows, pull_rows and depth_mix_{forward,backward} on the CPU.
#include "op.h"

namespace deepfast {

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

namespace {

template <class Launch>
void check(const Launch& a) {
  DEEPFAST_CHECK(!a.norm || (a.mean != nullptr && a.rstd != nullptr),
                 "depth_mix: mean or rstd is missing");
}

}  // namespace

void run(DepthMixForward& a) {
  check(a);
  Chunks(a.T).run(&Kernels::depth_mix_forward, a);
}

void run(DepthMixBackward& a) {
  check(a);
  const Chunks chunks(a.T, 8);
  const int64_t count = chunks.count();
  const Partial dweight(a.dweight.data, count, a.K * a.weight.width, a.storage);
  const Partial dnorm_weight(a.dnorm_weight, count, a.K * a.D, a.storage);
  const Partial dnorm_bias(a.dnorm_bias, count, a.K * a.D, a.storage);
  chunks.run(&Kernels::depth_mix_backward, a);
  for (const Partial* sums : {&dweight, &dnorm_weight, &dnorm_bias}) sums->sum();
}

}  // namespace deepfast
