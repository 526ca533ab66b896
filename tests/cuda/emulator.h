// CUDA on a processor, for tests: enough of the language to run csrc/cuda/*.cu without a GPU.
//
// Blocks run one after another. Each thread of a block is a fiber that runs until it must wait: at
// a barrier, in an operation of its warp, for a copy. Shared memory is NaN at first. An
// asynchronous copy arrives as late as allowed, and until then its target is NaN, so a missing wait
// is found. EMULATOR_ORDER gives the order of the fibers (0: ascending, 1: descending, otherwise
// shuffled with that seed), so code that needs one order is found too. If no thread of a block can
// continue, the program aborts and prints what its threads wait for.
#pragma once

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <tuple>
#include <type_traits>
#include <vector>

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_ = 1) : x(x_) {}
};

// ---- the runtime -------------------------------------------------------------------------------

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0;
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 0;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }

namespace emulator {

// EMULATOR_SHARED: the KB of shared memory that a block may have; 227 of sm_90, 163 of sm_80, 99 of
// sm_86, sm_89 and sm_120.
inline int64_t shared_limit() {
  const char* chosen = std::getenv("EMULATOR_SHARED");
  return (chosen == nullptr ? 227 : std::atol(chosen)) << 10;
}

}  // namespace emulator

inline cudaError_t cudaFuncSetAttribute(const void*, int, int bytes) {
  return bytes <= emulator::shared_limit() ? cudaSuccess : 1;
}

namespace emulator {

[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "emulator: %s\n", why);
  std::abort();
}

// Bytes of an asynchronous copy.
constexpr size_t kCopied = 16;

struct Copy {
  void* shared;
  const void* global;
};

// What a lane shows to its warp. Two buffers alternate: a lane is never two operations ahead.
struct Shown {
  unsigned char bytes[2][64];
  uint64_t count = 0;
};

// A point to continue from: registers and a stack. ucontext makes a system call at each switch,
// which would take most of the tests' time; x86-64 has a few instructions in emulated.cpp instead.
#if defined(__x86_64__)
extern "C" void deepfast_emulator_switch(void** from, void* to);

struct Context {
  void* stack_pointer = nullptr;
  void start(char* stack, size_t bytes, void (*entry)()) {
    const auto end = (reinterpret_cast<uintptr_t>(stack) + bytes) / 16 * 16;
    void** top = reinterpret_cast<void**>(end);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    stack_pointer = top;
  }
  void switch_to(Context& other) { deepfast_emulator_switch(&stack_pointer, other.stack_pointer); }
};
#else
struct Context {
  ucontext_t context;
  void start(char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  void switch_to(Context& other) { swapcontext(&context, &other.context); }
};
#endif

constexpr size_t kStackBytes = 64 << 10;

// Made once, used by every launch.
inline char* stack_of(unsigned thread) {
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() <= thread) stacks.emplace_back(new char[kStackBytes]);
  return stacks[thread].get();
}

struct Fiber {
  Context context;
  unsigned thread = 0;
  bool done = false;
  const char* waits_for = "";
  std::function<bool()> ready;
  uint64_t barriers = 0, neighbours = 0;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Shown> shown;
  std::vector<char> shared;
  Context scheduler;
  unsigned current = 0;
  dim3 block, blocks, threads;
  std::function<void()> body;
};

inline Block*& block() {
  static Block* running = nullptr;
  return running;
}
inline Fiber& self() { return block()->fibers[block()->current]; }

// Suspends the fiber until `ready`.
template <class Ready>
void wait_until(const char* what, const Ready& ready) {
  if (ready()) return;
  Fiber& fiber = self();
  fiber.waits_for = what;
  fiber.ready = ready;
  fiber.context.switch_to(block()->scheduler);
  fiber.ready = nullptr;
}

inline void entry() {
  block()->body();
  self().done = true;
  self().context.switch_to(block()->scheduler);
}

inline std::vector<unsigned> order(unsigned count) {
  std::vector<unsigned> threads(count);
  std::iota(threads.begin(), threads.end(), 0u);
  const char* chosen = std::getenv("EMULATOR_ORDER");
  const long seed = chosen == nullptr ? 0 : std::atol(chosen);
  if (seed == 1) return {threads.rbegin(), threads.rend()};
  if (seed > 1) {
    static std::mt19937 shuffle(static_cast<unsigned>(seed));
    std::shuffle(threads.begin(), threads.end(), shuffle);
  }
  return threads;
}

inline void run_block(Block& b) {
  const unsigned count = b.threads.x;
  std::memset(b.shared.data(), 0xff, b.shared.size());
  b.shown.assign(count, Shown{});
  for (unsigned t = 0; t < count; ++t) {
    Fiber& fiber = b.fibers[t];
    fiber = Fiber{};
    fiber.thread = t;
    fiber.context.start(stack_of(t), kStackBytes, entry);
  }
  for (unsigned left = count; left > 0;) {
    bool moved = false;
    for (unsigned t : order(count)) {
      Fiber& fiber = b.fibers[t];
      if (fiber.done || (fiber.ready && !fiber.ready())) continue;
      b.current = t;
      b.scheduler.switch_to(fiber.context);
      moved = true;
      if (fiber.done) --left;
    }
    if (!moved) {
      for (const Fiber& fiber : b.fibers)
        if (!fiber.done)
          std::fprintf(stderr, "  thread %u waits for %s\n", fiber.thread, fiber.waits_for);
      fail("a block can go no further");
    }
  }
  for (const Fiber& fiber : b.fibers)
    for (const auto& group : fiber.groups)
      if (!group.empty()) fail("a thread ended before its copies");
}

// Every lane shows its bytes; when all have done so, it reads those of all lanes.
template <class T, class Read>
auto in_warp(const T& mine, const Read& read) {
  static_assert(sizeof(T) <= 64, "a lane shows at most 64 bytes");
  Block& b = *block();
  const unsigned first = b.current / 32 * 32;
  if (first + 32 > b.threads.x) fail("an operation of a warp that is not whole");
  Shown& shown = b.shown[b.current];
  const uint64_t turn = shown.count++;
  std::memcpy(shown.bytes[turn % 2], &mine, sizeof(T));
  wait_until("its warp", [&b, first, turn] {
    for (unsigned l = first; l < first + 32; ++l)
      if (b.shown[l].count <= turn) return false;
    return true;
  });
  return read([&b, first, turn](unsigned lane) {
    T value;
    std::memcpy(&value, b.shown[first + lane].bytes[turn % 2], sizeof(T));
    return value;
  });
}

// Of all kernels together: a block that runs is known to everyone.
inline std::mutex& one_at_a_time() {
  static std::mutex mutex;
  return mutex;
}

inline unsigned lane() { return block()->current % 32; }

// EMULATOR_BLOCKS: how many blocks of a launch run, for runs whose results do not matter.
inline unsigned most_blocks() {
  const char* chosen = std::getenv("EMULATOR_BLOCKS");
  return chosen == nullptr ? ~0u : static_cast<unsigned>(std::atol(chosen));
}

}  // namespace emulator

template <class... Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Parameters... arguments) {
  std::lock_guard<std::mutex> lock(emulator::one_at_a_time());
  emulator::Block b;
  b.threads = config->blockDim;
  b.blocks = config->gridDim;
  b.fibers.resize(b.threads.x);
  b.shared.resize(config->dynamicSmemBytes + 128);
  b.body = [&] { kernel(arguments...); };
  emulator::block() = &b;
  const unsigned blocks = std::min(b.blocks.x, emulator::most_blocks());
  for (unsigned i = 0; i < blocks; ++i) {
    b.block = dim3(i);
    emulator::run_block(b);
  }
  emulator::block() = nullptr;
  return cudaSuccess;
}

// ---- the language ------------------------------------------------------------------------------

struct ThreadIndex {
  struct {
    operator unsigned() const { return emulator::block()->current; }
  } x;
};
struct BlockIndex {
  struct {
    operator unsigned() const { return emulator::block()->block.x; }
  } x;
};
struct BlockSize {
  struct {
    operator unsigned() const { return emulator::block()->threads.x; }
  } x;
};
struct GridSize {
  struct {
    operator unsigned() const { return emulator::block()->blocks.x; }
  } x;
};
inline constexpr ThreadIndex threadIdx{};
inline constexpr BlockIndex blockIdx{};
inline constexpr BlockSize blockDim{};
inline constexpr GridSize gridDim{};

inline void __syncthreads() {
  emulator::Block& b = *emulator::block();
  const uint64_t turn = ++emulator::self().barriers;
  emulator::wait_until("the block's barrier", [&b, turn] {
    for (const auto& fiber : b.fibers)
      if (!fiber.done && fiber.barriers < turn) return false;
    return true;
  });
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
  return emulator::in_warp(value, [&](auto of) { return of(emulator::lane() ^ mask); });
}

namespace deepfast {

inline void sync_neighbours(int threads) {
  emulator::Block& b = *emulator::block();
  const unsigned count = static_cast<unsigned>(threads), first = b.current / count * count;
  if (threads < 64 || first + count > b.threads.x || b.threads.x / count > 15)
    emulator::fail("a barrier of no neighbours");
  const uint64_t turn = ++emulator::self().neighbours;
  emulator::wait_until("its neighbours' barrier", [&b, first, count, turn] {
    for (unsigned t = first; t < first + count; ++t)
      if (!b.fibers[t].done && b.fibers[t].neighbours < turn) return false;
    return true;
  });
}

inline char* dynamic_shared() {
  const auto p = reinterpret_cast<uintptr_t>(emulator::block()->shared.data());
  return reinterpret_cast<char*>((p + 127) / 128 * 128);
}

template <bool kCached>
void copy_words(void* shared, const void* global) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0)
    emulator::fail("copy_words: target not aligned");
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0)
    emulator::fail("copy_words: source not aligned");
  std::memset(shared, 0xff, emulator::kCopied);
  emulator::self().open.push_back({shared, global});
}
inline void commit_copies() {
  auto& fiber = emulator::self();
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}
template <int left>
void wait_copies() {
  auto& groups = emulator::self().groups;
  while (static_cast<int>(groups.size()) > left) {
    for (const auto& copy : groups.front())
      std::memcpy(copy.shared, copy.global, emulator::kCopied);
    groups.pop_front();
  }
}

}  // namespace deepfast
