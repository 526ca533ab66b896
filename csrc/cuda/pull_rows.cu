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
void add_up(const Device& device, const Tensor& partial, int64_t P, const Pull<T>& op, float* to) {
  const int64_t width = op.per_channel ? op.from.dim : 1, L = op.from.count, J = op.sources;
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
              Pull<T>& op, const Tensor& like, float* dweight) {
  if (dweight == nullptr || op.from.count == 0) {
    launch(kernel, grid, device.stream(), op);
    return;
  }
  const int64_t width = op.per_channel ? op.from.dim : 1;
  const Tensor partial = scratch(like, P * op.from.count * op.sources * width);
  op.partial = floats(partial);
  launch(kernel, grid, device.stream(), op);
  add_up(device, partial, P, op, dweight);
}

template <class T, int kSources, bool kGeneral>
void launch_pull(const Device& device, Pull<T>& op, const Tensor& like, float* dweight) {
  using At = PullLayout<T, kSources>;
  const int64_t blocks = stream_blocks(device, op.from), slices = op.from.slices;
  const int64_t shared =
      At::kSums + (op.per_channel ? At::kChannelBytes : At::kRowBytes * op.from.count);
  run_pull(pull_rows_kernel<T, kSources, kGeneral>, device, {blocks, kPullThreads, shared},
           op.per_channel ? blocks / slices : blocks, op, like, dweight);
}

// The slots as rows of T * D elements, on tensor cores.
template <class T>
void launch_pull_dot(const Device& device, Pull<T>& op, const Tensor& like, float* dweight) {
  const int64_t shared = DotLayout<T>::bytes(op.from.count);
  const int64_t tiles = (op.from.tokens * op.from.dim + kDotTile - 1) / kDotTile;
  DEEPFAST_CHECK(tiles < int64_t{1} << 31,
                 "pull_rows: expected fewer than 2^31 tiles of 512 elements, got ", tiles);
  const int64_t blocks = device.blocks(tiles, 2 * shared <= device.shared() ? 2 : 1);
  run_pull(pull_rows_dot_kernel<T>, device, {blocks, kPullThreads, shared}, blocks, op, like,
           dweight);
}

void pull_rows(const PullRows& a, const Tensor& like) {
  DEEPFAST_CHECK(a.rows.count == a.grad_slots.count, "pull_rows: expected ", a.rows.count,
                 " grad_slots, one for each row, got ", a.grad_slots.count);
  DEEPFAST_CHECK(a.sources.count == a.out_rows.count, "pull_rows: expected ", a.sources.count,
                 " out_rows, one for each source, got ", a.out_rows.count);
  const int64_t dim = a.D;
  const auto is_aligned = [&](const Slots& x) { return bool(Alignment(a.storage, dim).slots(x)); };
  const bool aligned = is_aligned(a.grads), states_aligned = is_aligned(a.states);
  const bool out_aligned = Alignment(Storage::f32, dim).slots(a.out);
  const bool per_channel = a.weight.per_channel;
  const bool channels_aligned =
      Alignment(a.storage, dim).values({a.weight.data, a.norm_weight, a.norm_bias});
  const bool general =
      per_channel || !aligned || !states_aligned || !channels_aligned || !out_aligned;
  const bool dot = a.storage != Storage::f32 && !general && a.grads.row_stride == dim &&
                   a.states.row_stride == dim && a.out.row_stride == dim;
  float* const dweight = floats(a.dweight.data);
  const Device device(like);
  dispatch(a.storage, [&](auto type) {
    using T = decltype(type);
    const bool four = sizeof(T) == 2 ? !dot : general;
    const int64_t most_sources = four ? 4 : kMostSources;
    // 96 rows need 93 KB of shared memory, 128 need 102. A longer list takes several launches.
    const int64_t most_rows = device.shared() < (104 << 10) ? 96 : Stream<T>::kMost;
    for (int64_t j = 0; j < a.sources.count; j += most_sources) {
      int64_t l = 0;
      do {
        Pull<T> op{};
        op.sources = static_cast<int>(std::min(most_sources, a.sources.count - j));
        op.from = stream_of<T>(a.grads, a.T, dim, kPullWarps * (op.sources <= 4 ? 4 : 2), aligned);
        op.from.count = static_cast<int>(std::min(most_rows, a.rows.count - l));
        op.states = static_cast<const T*>(a.states.data);
        op.slot_stride = a.states.slot_stride, op.row_stride = a.states.row_stride;
        op.norm_weight = floats(a.norm_weight), op.norm_bias = floats(a.norm_bias);
        op.weight = floats(a.weight.data), op.per_channel = per_channel;
        op.columns = static_cast<int>(a.R);
        op.states_aligned = states_aligned;
        op.channels_aligned = channels_aligned;
        op.out = floats(a.out.data);
        op.out_stride = a.out.slot_stride, op.out_row_stride = a.out.row_stride;
        op.out_aligned = out_aligned;
        op.accumulate = a.accumulate || l > 0;
        for (int i = 0; i < op.from.count; ++i) {
          op.from.slot[i] = static_cast<int32_t>(a.grad_slots[l + i]);
          op.row[i] = static_cast<int32_t>(a.rows[l + i]);
        }
        for (int i = 0; i < op.sources; ++i) {
          op.source[i] = static_cast<int32_t>(a.sources[j + i]);
          op.out_row[i] = static_cast<int32_t>(a.out_rows[j + i]);
        }
        if constexpr (sizeof(T) == 2) {
          dot ? launch_pull_dot<T>(device, op, like, dweight)
              : launch_pull<T, 4, true>(device, op, like, dweight);
        } else {
          const auto run = general           ? launch_pull<T, 4, true>
                           : op.sources <= 4 ? launch_pull<T, 4, false>
                                             : launch_pull<T, 8, false>;
          run(device, op, like, dweight);
        }
        l += most_rows;
      } while (l < a.rows.count);
    }
  });
}

}  // namespace

DEEPFAST_CUDA_OPS(m) { m.impl("pull_rows", &boxed<PullRows, pull_rows>); }

}  // namespace deepfast
