// The module deepfast._C: importing it registers the ops; build_info() says how it was built.
//
// Each backend registers its implementations in its own files.
#include <pybind11/pybind11.h>
#include <torch/csrc/stable/library.h>

#include <string>

#include "cpu/kernels.h"
#include "schemas.h"

#define DEEPFAST_STRING_(x) #x
#define DEEPFAST_STRING(x) DEEPFAST_STRING_(x)

STABLE_TORCH_LIBRARY(deepfast, m) { define_launches(m); }

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
