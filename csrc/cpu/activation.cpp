// activation_{forward,backward} on the CPU.
#include "op.h"

namespace deepfast {

void run(ActivationForward& a) {
  check_seed(a);
  Chunks(a.T).run(&Kernels::activation_forward, a);
}

void run(ActivationBackward& a) {
  // The result of relu says where dropout made it 0, so that no mask is drawn.
  if (a.kind != ActivationBackward::Kind::relu) check_seed(a);
  const Chunks chunks(a.T);
  const Partial dbias(a.dbias, chunks.count(), a.D, a.storage);
  chunks.run(&Kernels::activation_backward, a);
  dbias.sum();
}

}  // namespace deepfast
