// The launches of csrc/cuda as ops of their own on the CPU: torch.ops.deepfast_emulated.
#include <torch/csrc/stable/library.h>

#include "common/schemas.h"

STABLE_TORCH_LIBRARY(deepfast_emulated, m) { deepfast::define_launches(m); }
