// Chooses the instruction set at run time, once.
//
// Compiled without instruction-set flags, so it runs on any processor of the architecture.
// DEEPFAST_CPU_CAPABILITY = avx512bf16 | avx512 | avx2 | portable forces one, for tests and bug
// reports.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

#define DEEPFAST_DECLARE(kernel, Operands) Kernel<Operands> kernel;
#define DEEPFAST_ENTRY(kernel, Operands) , kernel
#define DEEPFAST_TABLE(isa)                                      \
  namespace isa {                                                \
  DEEPFAST_KERNELS(DEEPFAST_DECLARE)                             \
  const Kernels table = {#isa DEEPFAST_KERNELS(DEEPFAST_ENTRY)}; \
  }

namespace deepfast {

DEEPFAST_TABLE(portable)
#if defined(DEEPFAST_X86)
DEEPFAST_TABLE(avx2)
DEEPFAST_TABLE(avx512)
DEEPFAST_TABLE(avx512bf16)
#endif

namespace {

#if defined(DEEPFAST_X86)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

const Kernels& choose() {
  const char* forced = std::getenv("DEEPFAST_CPU_CAPABILITY");
  const auto allowed = [&](const char* name) {
    return forced == nullptr || *forced == '\0' || std::strcmp(forced, name) == 0;
  };
#if defined(DEEPFAST_X86)
  if (has_avx512() && __builtin_cpu_supports("avx512bf16") && allowed("avx512bf16"))
    return avx512bf16::table;
  if (has_avx512() && allowed("avx512")) return avx512::table;
  if (has_avx2() && allowed("avx2")) return avx2::table;
#endif
  if (allowed("portable")) return portable::table;
  throw std::runtime_error(std::string("DEEPFAST_CPU_CAPABILITY: expected avx512bf16, ") +
                           "avx512, avx2 or portable and a processor that has it, got " + forced);
}

}  // namespace

const Kernels& kernels(Storage storage) {
  static const Kernels& chosen = choose();
#if defined(DEEPFAST_X86)
  if (&chosen == &avx512bf16::table && storage != Storage::bf16) return avx512::table;
#endif
  return chosen;
}

}  // namespace deepfast
