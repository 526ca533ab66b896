// Vectors of `N` lanes and conversions between storage and compute types.
//
// Kernel files are compiled once per instruction set (DEEPFAST_ISA names it). Everything here is in
// a namespace of that name, so the linker can never replace a portable inline function by one built
// for AVX-512. For the same reason kernels use no standard templates.
#pragma once

#include <stdint.h>
#include <string.h>

#include <new>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define DEEPFAST_INLINE inline __attribute__((always_inline))

// Before a loop of constant length whose arrays must stay in registers.
#if defined(__clang__)
#define DEEPFAST_UNROLL _Pragma("unroll")
#else
#define DEEPFAST_UNROLL _Pragma("GCC unroll 16")
#endif

namespace deepfast {
namespace DEEPFAST_ISA {

// Storage types of 16 bits; arithmetic on them is always in fp32.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <class T>
struct compute {
  using type = float;
};
template <>
struct compute<double> {
  using type = double;
};
template <class T>
using compute_t = typename compute<T>::type;

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// Lanes of one vector register of compute type A.
template <class A>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(A));

template <class A, int N>
struct vec {
  typedef A type __attribute__((vector_size(N * sizeof(A))));
};
template <class A, int N>
using vec_t = typename vec<A, N>::type;

// A compile-time number of lanes, passed as an argument.
template <int N>
struct Lanes {
  static constexpr int n = N;
};

template <class To, class From>
DEEPFAST_INLINE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bits_as needs equal sizes");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// ---- loads -------------------------------------------------------------------------------------

template <int N>
DEEPFAST_INLINE vec_t<float, N> load(Lanes<N>, const float* p) {
  vec_t<float, N> v;
  memcpy(&v, p, sizeof(v));
  return v;
}

template <int N>
DEEPFAST_INLINE vec_t<double, N> load(Lanes<N>, const double* p) {
  vec_t<double, N> v;
  memcpy(&v, p, sizeof(v));
  return v;
}

// 16-bit values in wider lanes. GCC itself widens 8 of them in two halves, with five instructions.
template <class To, int N>
DEEPFAST_INLINE To widen(vec_t<uint16_t, N> h) {
#if defined(__AVX2__)
  if constexpr (N == 8 && sizeof(To) == 32)
    return bits_as<To>(_mm256_cvtepu16_epi32(bits_as<__m128i>(h)));
#endif
  return __builtin_convertvector(h, To);
}

template <int N>
DEEPFAST_INLINE vec_t<float, N> load(Lanes<N>, const bf16* p) {
#if defined(__AVX512BW__)
  // One permutation puts a zero half word below each half word.
  if constexpr (N == 16) {
    constexpr vec_t<uint16_t, 32> kSpread = {0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,
                                             0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
    __m256i h;
    memcpy(&h, p, sizeof(h));
    return bits_as<vec_t<float, N>>(_mm512_maskz_permutexvar_epi16(
        0xAAAAAAAAu, bits_as<__m512i>(kSpread), _mm512_castsi256_si512(h)));
  }
#endif
  vec_t<uint16_t, N> h;
  memcpy(&h, p, sizeof(h));
  return bits_as<vec_t<float, N>>(widen<vec_t<uint32_t, N>, N>(h) << 16);
}

// Half to float by rescaling: exact for subnormals; infinities stay and NaNs keep their payload.
template <int N>
DEEPFAST_INLINE vec_t<float, N> load(Lanes<N>, const f16* p) {
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    __m256i h;
    memcpy(&h, p, sizeof(h));
    return bits_as<vec_t<float, N>>(_mm512_cvtph_ps(h));
  }
#endif
#if defined(__F16C__)
  if constexpr (N == 8) {
    __m128i h;
    memcpy(&h, p, sizeof(h));
    return bits_as<vec_t<float, N>>(_mm256_cvtph_ps(h));
  }
#endif
  vec_t<uint16_t, N> h16;
  memcpy(&h16, p, sizeof(h16));
  using U = vec_t<uint32_t, N>;
  const U h = __builtin_convertvector(h16, U);
  const U sign = (h & 0x8000u) << 16;
  const auto scaled = bits_as<vec_t<float, N>>((h & 0x7fffu) << 13) * 0x1p112f;
  const U special = bits_as<U>((h & 0x7c00u) == 0x7c00u);
  const U bits = (special & (0x7f800000u | ((h & 0x3ffu) << 13))) | (~special & bits_as<U>(scaled));
  return bits_as<vec_t<float, N>>(bits | sign);
}

// ---- stores, rounding to nearest even ----------------------------------------------------------

template <int N>
DEEPFAST_INLINE void store(Lanes<N>, float* p, vec_t<float, N> v) {
  memcpy(p, &v, sizeof(v));
}

template <int N>
DEEPFAST_INLINE void store(Lanes<N>, double* p, vec_t<double, N> v) {
  memcpy(p, &v, sizeof(v));
}

// Values below 2^16 in lanes of 16 bits.
template <int N>
DEEPFAST_INLINE vec_t<uint16_t, N> narrow(vec_t<uint32_t, N> u) {
#if defined(__AVX2__)
  if constexpr (N == 8) {
    const auto all = bits_as<__m256i>(u);
    return bits_as<vec_t<uint16_t, N>>(
        _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
  }
#endif
  return __builtin_convertvector(u, vec_t<uint16_t, N>);
}

template <int N>
DEEPFAST_INLINE void store(Lanes<N>, bf16* p, vec_t<float, N> v) {
#if defined(__AVX512BF16__)
  // One instruction rounds all lanes, but it flushes subnormal values to zero: round those in
  // integers.
  if constexpr (N == 16) {
    const auto x = bits_as<__m512>(v);
    constexpr int kSubnormal = 0x20;
    if (__builtin_expect(_mm512_fpclass_ps_mask(x, kSubnormal) == 0, 1)) {
      const __m256bh h = _mm512_cvtneps_pbh(x);
      memcpy(p, &h, sizeof(h));
      return;
    }
  }
#endif
  using U = vec_t<uint32_t, N>;
  const U u = bits_as<U>(v);
  const U rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const U nan = U{} + 0x7fc0u;
  const auto h = narrow<N>(v == v ? rounded : nan);
  memcpy(p, &h, sizeof(h));
}

template <int N>
DEEPFAST_INLINE void store(Lanes<N>, f16* p, vec_t<float, N> v) {
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    const __m256i h = _mm512_cvtps_ph(bits_as<__m512>(v), _MM_FROUND_TO_NEAREST_INT);
    memcpy(p, &h, sizeof(h));
    return;
  }
#endif
#if defined(__F16C__)
  if constexpr (N == 8) {
    const __m128i h = _mm256_cvtps_ph(bits_as<__m256>(v), _MM_FROUND_TO_NEAREST_INT);
    memcpy(p, &h, sizeof(h));
    return;
  }
#endif
  // Normal halves: rebias the exponent and round in integers. Subnormal halves: adding 0.5 moves
  // the last bit of the half to the last bit of the float, so the addition itself rounds.
  using U = vec_t<uint32_t, N>;
  const U u = bits_as<U>(v);
  const U sign = (u >> 16) & 0x8000u;
  const U a = u & 0x7fffffffu;
  const U normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  const U tiny = bits_as<U>(bits_as<vec_t<float, N>>(a) + 0.5f) - 0x3f000000u;
  const U is_tiny = bits_as<U>(a < 0x38800000u);
  const U is_big = bits_as<U>(a >= 0x477ff000u);
  const U is_nan = bits_as<U>(a > 0x7f800000u);
  U h = (is_tiny & tiny) | (~is_tiny & normal);
  h = (is_big & 0x7c00u) | (~is_big & h);
  h = (is_nan & 0x7e00u) | (~is_nan & h);
  const auto out = __builtin_convertvector(h | sign, vec_t<uint16_t, N>);
  memcpy(p, &out, sizeof(out));
}

// ---- stores past the caches ---------------------------------------------------------------------

// Results from this size on are stored past the caches: they are larger than one core's share of them,
// so most of them would have left them before they are read.
constexpr int64_t kStreamBytes = int64_t{8} << 20;

// Whether a row at `p` can be stored so: each whole vector must be aligned.
template <class T>
DEEPFAST_INLINE bool can_stream(const T* p) {
  return sizeof(T) <= 4 && reinterpret_cast<uintptr_t>(p) % (kLanes<float> * sizeof(T)) == 0;
}

// A store that does not read the line from memory first. A later read finds nothing in the caches.
template <int N, class T, class V>
DEEPFAST_INLINE void stream(Lanes<N> lanes, T* p, V v) {
#if defined(__AVX2__)
  if constexpr (sizeof(T) <= 4 && N == kLanes<float>) {
    T whole[N];
    store(lanes, whole, v);
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return _mm512_stream_ps(p, bits_as<__m512>(whole));
#endif
    constexpr int kBytes = N * sizeof(T);
    auto* to = reinterpret_cast<__m128i*>(p);
    if constexpr (kBytes == 16) return _mm_stream_si128(to, bits_as<__m128i>(whole));
    if constexpr (kBytes == 32)
      return _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bits_as<__m256i>(whole));
  }
#endif
  store(lanes, p, v);
}

// Streamed rows reach memory before anything that another thread does after it sees the end of this
// one.
DEEPFAST_INLINE void end_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// ---- helpers -----------------------------------------------------------------------------------

template <class A, int N>
DEEPFAST_INLINE vec_t<A, N> broadcast(Lanes<N>, A a) {
  return a - vec_t<A, N>{};
}

// The product of the low 32 bits of each lane with b: one instruction that compilers do not find.
template <int N>
DEEPFAST_INLINE vec_t<uint64_t, N> multiply_low_halves(vec_t<uint64_t, N> a, uint32_t b) {
  using U = vec_t<uint64_t, N>;
  const U factor = U{} + uint64_t{b};
#if defined(__AVX512F__)
  if constexpr (N == 8)
    return bits_as<U>(_mm512_mul_epu32(bits_as<__m512i>(a), bits_as<__m512i>(factor)));
#elif defined(__AVX2__)
  if constexpr (N == 4)
    return bits_as<U>(_mm256_mul_epu32(bits_as<__m256i>(a), bits_as<__m256i>(factor)));
#elif defined(__SSE2__)
  if constexpr (N == 2)
    return bits_as<U>(_mm_mul_epu32(bits_as<__m128i>(a), bits_as<__m128i>(factor)));
#endif
  return (a & uint64_t{0xffffffffu}) * factor;
}

// Lane i is lane I_i of a and b, whose lanes are counted after those of a.
template <class V, int... I>
DEEPFAST_INLINE V shuffle(V a, V b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, decltype(a == b){I...});
#endif
}

// Lanes that lie By apart change places. A processor moves lanes within 16 bytes fastest, which a
// rotation would leave.
template <int By, class V, int... I>
DEEPFAST_INLINE V exchange_lanes(V v, std::integer_sequence<int, I...>) {
  return shuffle(v, v, std::integer_sequence<int, (I ^ By)...>{});
}
// Each lane is the sum, or the largest value, of the lanes that lie a multiple of Apart from it.
template <class A, int N, int Apart = 1, int By = N / 2>
DEEPFAST_INLINE vec_t<A, N> sums_over_lanes(vec_t<A, N> v) {
  if constexpr (By < Apart)
    return v;
  else
    return sums_over_lanes<A, N, Apart, By / 2>(
        v + exchange_lanes<By>(v, std::make_integer_sequence<int, N>{}));
}
template <class A, int N, int Apart = 1, int By = N / 2>
DEEPFAST_INLINE vec_t<A, N> max_over_lanes(vec_t<A, N> v) {
  if constexpr (By < Apart) {
    return v;
  } else {
    const auto other = exchange_lanes<By>(v, std::make_integer_sequence<int, N>{});
    return max_over_lanes<A, N, Apart, By / 2>(v > other ? v : other);
  }
}
template <class A, int N>
DEEPFAST_INLINE A sum_lanes(vec_t<A, N> v) {
  return sums_over_lanes<A, N>(v)[0];
}
template <class A, int N>
DEEPFAST_INLINE A max_lanes(vec_t<A, N> v) {
  return max_over_lanes<A, N>(v)[0];
}

// Where lane i of a sum of two vectors comes from, each of which has the sums of Sums vectors in parts:
// half 0 or 1 of the parts. First within 16 bytes, because a processor takes longer to move lanes
// further, and then 16 bytes at a time.
template <class A, int N, int Sums>
constexpr int lane_of_sum(int i, int half) {
  constexpr int kBlock = 16 / static_cast<int>(sizeof(A));
  const int within = i % kBlock, part = within / Sums;
  if (Sums < kBlock)
    return i - within + half * kBlock / 2 + part / 2 * Sums + within % Sums + part % 2 * N;
  return 2 * (i - within) + half * kBlock + within;
}
template <class A, int N, int Sums, class V, int... I>
DEEPFAST_INLINE V sums_of_pairs(V a, V b, std::integer_sequence<int, I...>) {
  return shuffle(a, b, std::integer_sequence<int, lane_of_sum<A, N, Sums>(I, 0)...>{}) +
         shuffle(a, b, std::integer_sequence<int, lane_of_sum<A, N, Sums>(I, 1)...>{});
}
// Lane j is the sum of the lanes of v[j].
template <class A, int N, int Sums = 1>
DEEPFAST_INLINE vec_t<A, N> sums_of_lanes(vec_t<A, N>* v) {
  if constexpr (Sums == N) {
    return v[0];
  } else {
    DEEPFAST_UNROLL for (int j = 0; j < N / Sums / 2; ++j) v[j] =
        sums_of_pairs<A, N, Sums>(v[2 * j], v[2 * j + 1], std::make_integer_sequence<int, N>{});
    return sums_of_lanes<A, N, 2 * Sums>(v);
  }
}

// Calls f(Lanes<N>, i) over [0, n): whole vectors first, then single lanes.
template <class A, class F>
DEEPFAST_INLINE void for_lanes(int64_t n, const F& f) {
  constexpr int N = kLanes<A>;
  int64_t i = 0;
  for (; i + N <= n; i += N) f(Lanes<N>{}, i);
  for (; i < n; ++i) f(Lanes<1>{}, i);
}

template <int I>
struct Constant {
  DEEPFAST_INLINE constexpr operator int() const { return I; }
};
template <class F, int... I>
DEEPFAST_INLINE void each_of(const F& f, std::integer_sequence<int, I...>) {
  (f(Constant<I>{}), ...);
}
// Calls f(i) for i from 0 to count - 1, each a constant. An array with other indices than constants
// would not stay in registers.
template <int count, class F>
DEEPFAST_INLINE void each_of(const F& f) {
  each_of(f, std::make_integer_sequence<int, count>{});
}

// A sum over a row: one vector accumulator, and a scalar one for the tail.
template <class A>
struct RowSum {
  vec_t<A, kLanes<A>> wide = {};
  A tail = 0;
  DEEPFAST_INLINE void add(vec_t<A, kLanes<A>> v) { wide += v; }
  DEEPFAST_INLINE void add(vec_t<A, 1> v) { tail += v[0]; }
  DEEPFAST_INLINE void add(const RowSum& other) { wide += other.wide, tail += other.tail; }
  DEEPFAST_INLINE A total() const { return sum_lanes<A, kLanes<A>>(wide) + tail; }
};

// Two sums from one pass.
template <class A>
struct RowSums {
  RowSum<A> first, second;
  DEEPFAST_INLINE void add(const RowSums& other) {
    first.add(other.first), second.add(other.second);
  }
};

// Calls f(lanes, i, sums) over [0, n) and returns the sums. kWays independent accumulators, because
// one would wait for the latency of every addition. They are added up after 32 steps, because the
// rounding error of a sum grows with the number of its terms. The order of the additions depends on
// n alone.
template <class A, class Sums, int kWays = 4, class F>
DEEPFAST_INLINE Sums sum_over_lanes(int64_t n, const F& f) {
  static_assert(kWays == 1 || kWays == 2 || kWays == 4, "the sums are added in pairs");
  constexpr int N = kLanes<A>, kBlock = 32 * 4 * N;
  Sums total;
  for (int64_t i = 0; i < n;) {
    const int64_t end = n - i < kBlock ? n : i + kBlock;
    Sums s[kWays];
    for (; i + kWays * N <= end; i += kWays * N)
      each_of<kWays>([&](auto w) { f(Lanes<N>{}, i + w * N, s[w]); });
    for (; i + N <= end; i += N) f(Lanes<N>{}, i, s[0]);
    for (; i < end; ++i) f(Lanes<1>{}, i, s[0]);
    each_of<kWays / 2>([&](auto w) { s[2 * w].add(s[2 * w + 1]); });
    if constexpr (kWays == 4) s[0].add(s[2]);
    total.add(s[0]);
  }
  return total;
}

// Scratch memory of one kernel call, aligned for vectors.
template <class A>
class Scratch {
 public:
  explicit Scratch(int64_t n)
      : p_(static_cast<A*>(::operator new((n > 0 ? n : 1) * sizeof(A), std::align_val_t{64}))) {}
  ~Scratch() { ::operator delete(p_, std::align_val_t{64}); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  A* get() const { return p_; }
  operator A*() const { return p_; }

 private:
  A* p_;
};

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
