// The module deepfast._C: importing it registers the ops; build_info() says how it was built.
//
// The CPU's launches are registered here, those of CUDA at the end of each of its files.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <pybind11/pybind11.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>

#include "common/arguments.h"
#include "cpu/op.h"
#include "schemas.h"

#define DEEPFAST_STRING_(x) #x
#define DEEPFAST_STRING(x) DEEPFAST_STRING_(x)

namespace deepfast {

int64_t threads() { return torch::stable::get_num_threads(); }

void in_parallel(int64_t count, void (*f)(int64_t, int64_t, void*), void* context) {
  torch::stable::parallel_for(0, count, 1,
                              [&](int64_t first, int64_t last) { f(first, last, context); });
}

// How the dispatcher calls a launch: it fills its struct from the arguments.
template <class Launch>
void run_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const Arguments in(Launch::kSignature, stack, false);
  Launch a(in);
  run(a);
}

namespace {

// Asks for huge pages behind a new buffer of states. Each step touches the whole buffer once, and
// page faults on small pages cost a tenth of the step. It is only a hint, so a refusal is not an error.
void advise_states(torch::stable::Tensor states) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = 1 << 21;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(states.mutable_data_ptr());
  const uintptr_t end = begin + states.size(0) * states.stride(0) * states.element_size();
  const uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge, last = end / kHuge * kHuge;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)states;
#endif
}

}  // namespace

STABLE_TORCH_LIBRARY(deepfast, m) {
  define_launches(m);
  // Not a launch: no other backend needs it.
  m.def("advise_states(Tensor states) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(deepfast, CPU, m) {
  register_launches(m);
  m.impl("advise_states", TORCH_BOX(&advise_states));
}

}  // namespace deepfast

namespace {

pybind11::dict build_info() {
  pybind11::dict info;
  info["compiler"] = DEEPFAST_STRING(DEEPFAST_COMPILER);
  info["torch"] = DEEPFAST_STRING(DEEPFAST_TORCH_VERSION);
  info["architecture"] = DEEPFAST_STRING(DEEPFAST_ARCHITECTURE);
  info["instruction_sets"] = DEEPFAST_STRING(DEEPFAST_ISAS);
  info["cpu"] = deepfast::kernels().name;
#if defined(DEEPFAST_CUDA)
  info["cuda"] = DEEPFAST_STRING(DEEPFAST_CUDA);
  info["nvcc"] = DEEPFAST_STRING(DEEPFAST_NVCC);
#else
  info["cuda"] = pybind11::none();
  info["no_cuda"] = DEEPFAST_NO_CUDA;
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled ops of deepfast; importing this module registers them with torch.";
  m.def("build_info", &build_info, "How this library was built and what it chose to run.");
}
