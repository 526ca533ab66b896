// Asynchronous copies from global to shared memory, several states before they are used.
//
// copy_async   sm_80 and newer: 16 bytes by the thread that asks. If no thread reads what
//              another copied, no barrier is needed.
// copy_bulk    sm_90 and newer: one thread asks the copy engine for a whole piece of a state. It
//              counts down the bytes on a Barrier in shared memory on which the readers wait.
#pragma once

#include "vector.h"

#if defined(DEEPFAST_EMULATE) || defined(__CUDACC__)

namespace deepfast {

#if !defined(DEEPFAST_EMULATE)
DEEPFAST_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes for this thread; zeros where `exists` is false.
DEEPFAST_DEVICE void copy_async(void* shared, const void* global, bool exists) {
  const int bytes = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}
// Copies 16 bytes that exist, which saves three instructions. `kCached`: through L1, where another
// copy reads the other half of the same 32 bytes.
template <bool kCached>
DEEPFAST_DEVICE void copy_words(Words* shared, const Words* global) {
  if (kCached)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
                 "l"(global)
                 : "memory");
  else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
                 "l"(global)
                 : "memory");
}
DEEPFAST_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `left` of this thread's groups are in flight.
template <int left>
DEEPFAST_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

// A barrier in shared memory. Phases alternate between 0 and 1; each ends when `arrivals` threads
// have arrived and all expected bytes have come.
class Barrier {
 public:
  DEEPFAST_DEVICE void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state_)),
                 "r"(arrivals)
                 : "memory");
  }
  // After init by one thread and before __syncthreads: makes the barrier visible to the copy
  // engine.
  static DEEPFAST_DEVICE void publish() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  DEEPFAST_DEVICE void arrive() {
    asm volatile("{.reg .b64 token; mbarrier.arrive.shared::cta.b64 token, [%0];}" ::"r"(
                     shared_address(&state_))
                 : "memory");
  }
  DEEPFAST_DEVICE void arrive_and_expect(uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{.reg .b64 token; mbarrier.arrive.expect_tx.shared::cta.b64 token, [%0], %1;}" ::"r"(
            shared_address(&state_)),
        "r"(bytes)
        : "memory");
#else
    (void)bytes;
    __trap();
#endif
  }
  // Returns when the phase of this parity has ended.
  DEEPFAST_DEVICE void wait(uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}" ::"r"(shared_address(&state_)),
        "r"(parity)
        : "memory");
#else
    (void)parity;
    __trap();
#endif
  }

 private:
  friend DEEPFAST_DEVICE void copy_bulk(void*, const void*, uint32_t, Barrier&);
  uint64_t state_;
};

// Copies `bytes` from global to shared memory and counts them on `done`. The two addresses and
// `bytes` are multiples of 16.
DEEPFAST_DEVICE void copy_bulk(void* shared, const void* global, uint32_t bytes, Barrier& done) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(&done.state_))
      : "memory");
#else
  (void)shared, (void)global, (void)bytes, (void)done;
  __trap();
#endif
}

// Whether this code runs where copy_bulk exists.
DEEPFAST_DEVICE constexpr bool has_bulk_copies() {
#if __CUDA_ARCH__ >= 900
  return true;
#else
  return false;
#endif
}
#endif

}  // namespace deepfast

#endif
