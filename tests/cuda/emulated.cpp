// The launches of csrc/cuda as ops of their own on the CPU: torch.ops.deepfast_emulated.
#include <torch/csrc/stable/library.h>

#include "schemas.h"

STABLE_TORCH_LIBRARY(deepfast_emulated, m) { define_launches(m); }

#if defined(__x86_64__)
// Saves what a called function must keep, and its stack; continues where the other one left.
asm(R"(
  .text
  .globl deepfast_emulator_switch
  .type deepfast_emulator_switch, @function
deepfast_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size deepfast_emulator_switch, .-deepfast_emulator_switch
)");
#endif
