// Asynchronous copies from global to shared memory, several rows before they are used, by the thread
// that asks: no thread reads what another copied, so no barrier is needed.
#pragma once

#include "vector.h"

#if !defined(DEEPFAST_EMULATE) && defined(__CUDACC__)

namespace deepfast {

// Copies 16 bytes. `kCached`: through L1, where another copy reads the other half of the same 32
// bytes.
template <bool kCached>
DEEPFAST_DEVICE void copy_words(Words* shared, const Words* global) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if (kCached)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
DEEPFAST_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `left` of this thread's groups are in flight.
template <int left>
DEEPFAST_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

}  // namespace deepfast

#endif
