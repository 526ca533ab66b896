// The far pass of backward: the gradients of later rows, pulled into several states.
//
//     u_j (+)= sum_l W[l, j] g_l,  dW[l, j] = <g_l, z_j>
//     z_j = state_j * norm_weight_j + norm_bias_j
//
// One pass over the gradients g_l computes both, for eight sources at a time (four in the general
// case): (L + 2 J) T D values of memory. Reading the gradients bounds its time. bf16 and fp16 run
// on tensor cores (pull_dot.h), the rest by FMA (pull_fma.h). partials.cu adds up the blocks' sums
// of dW.
//
// Wang et al.: Learning Deep Transformer Models for Machine Translation, 2019, Eq. 8.
#include "pull_dot.h"
#include "pull_fma.h"

namespace deepfast {
namespace {

template <class T>
struct Scatter {
  const float* sums;  // (L, J, width)
  float* dweight;     // (., columns, width)
  int64_t columns, width;
  int sources;
  int32_t row[Stream<T>::kMost], source[kMostSources];
};

template <class T>
__global__ void scatter_kernel(const __grid_constant__ Scatter<T> op) {
  const int l = blockIdx.x / op.sources, j = blockIdx.x % op.sources;
  float* to = op.dweight + (op.row[l] * op.columns + op.source[j]) * op.width;
  for (int64_t i = threadIdx.x; i < op.width; i += blockDim.x)
    to[i] = op.sums[int64_t{blockIdx.x} * op.width + i];
}

// Adds up P blocks' sums into the entries of dweight that the lists of `op` name.
template <class T>
void add_up(const Device& device, const Tensor& partial, int64_t P, const Pull<T>& op,
            const Tensor& dweight) {
  const int64_t width = op.per_channel ? op.from.dim : 1, L = op.from.count, J = op.sources;
  float* to = floats(dweight);
  bool regular = true;
  for (int l = 1; l < L; ++l)
    regular = regular && op.row[l] - op.row[l - 1] == op.row[1] - op.row[0];
  for (int j = 1; j < J; ++j) regular = regular && op.source[j] - op.source[j - 1] == 1;
  if (regular) {
    const int64_t step = L > 1 ? op.row[1] - op.row[0] : 1;
    to += (int64_t{op.row[0]} * op.columns + op.source[0]) * width;
    sum_partials(device, floats(partial), P, 1, L, J * width,
                 Sums{{to}, {step * op.columns * width}});
    return;
  }
  const Tensor sums = scratch(partial, L * J * width);
  sum_partials(device, floats(partial), P, 1, L, J * width, Sums{{floats(sums)}, {J * width}});
  Scatter<T> scatter{};
  scatter.sums = floats(sums), scatter.dweight = to;
  scatter.columns = op.columns, scatter.width = width;
  scatter.sources = op.sources;
  std::copy(op.row, op.row + L, scatter.row);
  std::copy(op.source, op.source + J, scatter.source);
  launch(scatter_kernel<T>, {L * J, width > 1 ? 256 : kWarp}, device.stream(), scatter);
}

// Runs a kernel that writes P partial sums of dweight, and adds them up.
template <class T>
void run_pull(void (*kernel)(Pull<T>), const Device& device, const Grid& grid, int64_t P,
              Pull<T>& op, const OptionalTensor& dweight) {
  if (!dweight.has_value() || op.from.count == 0) {
    launch(kernel, grid, device.stream(), op);
    return;
  }
  const int64_t width = op.per_channel ? op.from.dim : 1;
  const Tensor partial = scratch(*dweight, P * op.from.count * op.sources * width);
  op.partial = floats(partial);
  launch(kernel, grid, device.stream(), op);
  add_up(device, partial, P, op, *dweight);
}

template <class T, int kSources, bool kGeneral>
void launch_pull(const Device& device, Pull<T>& op, const OptionalTensor& dweight) {
  using At = PullLayout<T, kSources>;
  const int64_t blocks = stream_blocks(device, op.from), slices = op.from.slices;
  const int64_t shared =
      At::kSums + (op.per_channel ? At::kChannelBytes : At::kRowBytes * op.from.count);
  run_pull(pull_rows_kernel<T, kSources, kGeneral>, device, {blocks, kPullThreads, shared},
           op.per_channel ? blocks / slices : blocks, op, dweight);
}

// The slots as rows of T * D elements, on tensor cores.
template <class T>
void launch_pull_dot(const Device& device, Pull<T>& op, const OptionalTensor& dweight) {
  const int64_t shared = DotLayout<T>::bytes(op.from.count);
  const int64_t tiles = (op.from.tokens * op.from.dim + kDotTile - 1) / kDotTile;
  DEEPFAST_CHECK(tiles < int64_t{1} << 31,
                 "pull_rows: expected fewer than 2^31 tiles of 512 elements, got ", tiles);
  const int64_t blocks = device.blocks(tiles, 2 * shared <= device.shared() ? 2 : 1);
  run_pull(pull_rows_dot_kernel<T>, device, {blocks, kPullThreads, shared}, blocks, op, dweight);
}

void pull_rows(Tensor grads, Indices grad_slots, Indices rows, Tensor states, Indices sources,
               Tensor weight, OptionalTensor norm_weight, OptionalTensor norm_bias, Tensor out,
               Indices out_rows, bool accumulate, OptionalTensor dweight) {
  check_buffer(states);
  check_buffer(grads, states);
  check_buffer(out, states);
  DEEPFAST_CHECK(rows.size() == grad_slots.size(), "pull_rows: expected ", rows.size(),
                 " grad_slots, one for each row, got ", grad_slots.size());
  DEEPFAST_CHECK(sources.size() == out_rows.size(), "pull_rows: expected ", sources.size(),
                 " out_rows, one for each source, got ", out_rows.size());
  const Storage storage = storage_of(states);
  const int64_t dim = states.size(2);
  const Weights w(weight, Storage::f32, dim);
  const float *norm_weight_ = floats(norm_weight, w.columns * dim),
              *norm_bias_ = floats(norm_bias, w.columns * dim);
  floats(dweight, w.rows * w.columns * w.width);
  for (int64_t l : grad_slots) slot(grads, l);
  for (int64_t j : sources) slot(states, j);
  for (int64_t j : out_rows) slot(out, j);
  for (int64_t l : rows) w.offset(l, 0);
  for (int64_t j : sources) w.offset(0, j);
  const bool aligned = Alignment(storage, dim).slots(grads), per_channel = w.width != 1;
  const bool states_aligned = Alignment(storage, dim).slots(states);
  const bool channels_aligned = Alignment(storage, dim).values({w.base, norm_weight_, norm_bias_});
  const bool out_aligned = Alignment(storage, dim).slots(out);
  const bool general =
      per_channel || !aligned || !states_aligned || !channels_aligned || !out_aligned;
  const bool dot = storage != Storage::f32 && !general && grads.stride(1) == dim &&
                   states.stride(1) == dim && out.stride(1) == dim;
  const Device device(states);
  dispatch(storage, [&](auto type) {
    using T = decltype(type);
    const bool four = sizeof(T) == 2 ? !dot : general;
    const size_t most_sources = four ? 4 : kMostSources;
    // 96 rows need 93 KB of shared memory, 128 need 102. A longer list is rounded between launches.
    const size_t most_rows = device.shared() < (104 << 10) ? 96 : Stream<T>::kMost;
    for (size_t j = 0; j < sources.size(); j += most_sources) {
      size_t l = 0;
      do {
        Pull<T> op{};
        op.sources = static_cast<int>(std::min(most_sources, sources.size() - j));
        op.from = stream_of<T>(grads, kPullWarps * (op.sources <= 4 ? 4 : 2), aligned);
        op.from.count = static_cast<int>(std::min(most_rows, rows.size() - l));
        op.states = static_cast<const T*>(states.const_data_ptr());
        op.slot_stride = states.stride(0), op.row_stride = states.stride(1);
        op.norm_weight = norm_weight_, op.norm_bias = norm_bias_;
        op.weight = reinterpret_cast<const float*>(w.base), op.per_channel = per_channel;
        op.columns = static_cast<int>(w.columns);
        op.states_aligned = states_aligned;
        op.channels_aligned = channels_aligned;
        op.out = static_cast<T*>(out.mutable_data_ptr());
        op.out_stride = out.stride(0), op.out_row_stride = out.stride(1);
        op.out_aligned = out_aligned;
        op.accumulate = accumulate || l > 0;
        for (int i = 0; i < op.from.count; ++i) {
          op.from.slot[i] = static_cast<int32_t>(grad_slots[l + i]);
          op.row[i] = static_cast<int32_t>(rows[l + i]);
        }
        for (int i = 0; i < op.sources; ++i) {
          op.source[i] = static_cast<int32_t>(sources[j + i]);
          op.out_row[i] = static_cast<int32_t>(out_rows[j + i]);
        }
        if constexpr (sizeof(T) == 2) {
          dot ? launch_pull_dot<T>(device, op, dweight)
              : launch_pull<T, 4, true>(device, op, dweight);
        } else {
          const auto run = general           ? launch_pull<T, 4, true>
                           : op.sources <= 4 ? launch_pull<T, 4, false>
                                             : launch_pull<T, 8, false>;
          run(device, op, dweight);
        }
        l += most_rows;
      } while (l < rows.size());
    }
  });
}

}  // namespace

DEEPFAST_CUDA_OPS(m) { m.impl("pull_rows", TORCH_BOX(&pull_rows)); }

}  // namespace deepfast
