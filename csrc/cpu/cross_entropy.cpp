// deepfast::cross_entropy on the CPU: checks, threads, registration.
#include "op.h"

namespace deepfast {
namespace {

void cross_entropy(Tensor logits, Tensor target, double label_smoothing, int64_t ignore_index,
                   bool write_grad, Tensor loss, Tensor nll) {
  const Storage storage = storage_of(logits);
  const int64_t tokens = logits.size(0), vocabulary = logits.size(1);
  CrossEntropy op{};
  op.storage = storage;
  op.vocabulary = vocabulary;
  op.ignore_index = ignore_index;
  op.smoothing = label_smoothing;
  op.write_grad = write_grad;
  op.logits = matrix(logits, storage, tokens, vocabulary);
  op.target = integers(target, tokens);
  op.loss = parameter(loss, storage, tokens);
  op.nll = parameter(nll, storage, tokens);
  // Rows are long, so a few rows are enough work for a thread.
  Chunks(tokens, 32, 4).run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).cross_entropy(op, begin, end, chunk);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepfast, CPU, m) { m.impl("cross_entropy", TORCH_BOX(&cross_entropy)); }

}  // namespace deepfast
