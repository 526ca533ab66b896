// A ring of stages in shared memory, through which a block's threads read states.
//
//      copies          | 4 | 5 | 6 |   in flight, up to kStages - 1 steps ahead of
//      threads     | 3 |               the stage that all of them read
//
// A `Copies` says what a step copies. The ring continues from tile to tile: while the threads
// finish one tile, the first states of the next one are in flight. On sm_90 and newer one warp,
// always the same for a stage, issues bulk copies, and each stage has two barriers: one says that
// the stage is full, the other that all threads have read it. On sm_80 each thread copies its share
// and the block synchronises once a step.
#pragma once

#include "async.h"

#if defined(DEEPFAST_EMULATE) || defined(__CUDACC__)

namespace deepfast {

// A Copies has
//   kBytes                             bytes of a stage, a multiple of 128
//   tiles, steps                       how many tiles there are, and steps in each
//   bulk(stage, tile, step, done)      by one whole warp: bulk copies that count on `done`
//   async<kThreads>(stage, tile, step) by all threads: copies of 16 bytes, without commit
template <class Copies, int kStages, int kWarps>
class Ring {
 public:
  static constexpr int kBytes = kStages * (Copies::kBytes + 2 * static_cast<int>(sizeof(Barrier)));

  // `shared`: kBytes, 128-byte aligned. Each thread of the block makes a ring.
  DEEPFAST_DEVICE Ring(const Copies& copies, char* shared)
      : copies_(copies),
        stages_(shared),
        full_(reinterpret_cast<Barrier*>(shared + kStages * Copies::kBytes)),
        empty_(full_ + kStages),
        tile_(copies.steps > 0 ? static_cast<int>(blockIdx.x) : copies.tiles) {}

  // Starts the first copies; includes a barrier of the block.
  DEEPFAST_DEVICE void start() {
    if (has_bulk_copies() && threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) full_[s].init(1), empty_[s].init(kWarps);
      Barrier::publish();
    }
    __syncthreads();
    for (int s = 0; s < kStages - 1; ++s) copy(s, 0);
  }

  // Returns the next step's stage when it is full. Steps come in the order of this block's tiles.
  DEEPFAST_DEVICE const char* take() {
    // The step that is kStages - 1 ahead overwrites the stage that was read last.
    const int last = stage_ == 0 ? kStages - 1 : stage_ - 1;
    const uint32_t last_phase = stage_ == 0 ? phase_ : phase_ ^ 1;
    if (has_bulk_copies()) {
      copy(last, last_phase);
      full_[stage_].wait(phase_);
    } else {
      wait_copies<kStages - 2>();
      // All shares of this stage have arrived, and no thread reads the previous stage any more.
      __syncthreads();
      copy(last, last_phase);
    }
    return stages_ + stage_ * Copies::kBytes;
  }

  // Says that this warp has read the stage.
  DEEPFAST_DEVICE void give_back() {
    if (has_bulk_copies()) {
      __syncwarp();
      if (threadIdx.x % kWarp == 0) empty_[stage_].arrive();
    }
    if (++stage_ == kStages) stage_ = 0, phase_ ^= 1;
  }

 private:
  // Starts the copies of the next step that is not copied yet.
  DEEPFAST_DEVICE void copy(int stage, uint32_t phase) {
    if (tile_ < copies_.tiles) {
      char* shared = stages_ + stage * Copies::kBytes;
      if (has_bulk_copies()) {
        if (static_cast<int>(threadIdx.x) / kWarp == stage % kWarps) {
          // In the first round a stage is empty before anyone has read it.
          empty_[stage].wait(phase ^ 1);
          copies_.bulk(shared, tile_, step_, full_[stage]);
        }
      } else {
        copies_.template async<kWarps * kWarp>(shared, tile_, step_);
      }
      if (++step_ == copies_.steps) step_ = 0, tile_ += static_cast<int>(gridDim.x);
    }
    if (!has_bulk_copies()) commit_copies();
  }

  const Copies& copies_;
  char* stages_;
  Barrier *full_, *empty_;
  int tile_, step_ = 0;  // of the next copies
  int stage_ = 0;        // of the next step to be read
  uint32_t phase_ = 0;
};

}  // namespace deepfast

#endif
