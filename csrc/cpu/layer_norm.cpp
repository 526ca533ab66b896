// layer_norm_{forward,backward} on the CPU.
#include "op.h"

namespace deepfast {
namespace {

template <class Launch>
void check(const Launch& a) {
  check_seed(a);
  DEEPFAST_CHECK(a.rms == (a.mean == nullptr), "layer_norm: expected mean, or rms without it");
}

}  // namespace

void run(LayerNormForward& a) {
  check(a);
  Chunks(a.T).run(&Kernels::layer_norm_forward, a);
}

void run(LayerNormBackward& a) {
  check(a);
  const Chunks chunks(a.T);
  const Partial dweight(a.dweight, chunks.count(), a.D, a.storage);
  const Partial dbias(a.dbias, chunks.count(), a.D, a.storage);
  chunks.run(&Kernels::layer_norm_backward, a);
  dweight.sum();
  dbias.sum();
}

}  // namespace deepfast
