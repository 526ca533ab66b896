// cross_entropy on the CPU.
#include "op.h"

namespace deepfast {

void run(CrossEntropy& a) {
  // Rows are long, so a few rows are enough work for a thread.
  Chunks(a.T, 32, 4).run(&Kernels::cross_entropy, a);
}

}  // namespace deepfast
