// The exponential function, lane by lane.
#pragma once

#include "simd.h"

namespace deepfast {
namespace DEEPFAST_ISA {

// exp(x) = 2^n * exp(r) with n = round(x / log 2), and exp(r) by its Taylor series, |r| < 0.35.
// log 2 is subtracted in two parts, so that r is right to the last place (Cody, Waite 1980).
//
//            terms    first omitted term, at most     lowest x with a normal result
//   fp32     8        0.35^8 / 8!   = 5e-9          -87.3
//   fp64     14       0.35^14 / 14! = 5e-18           -708.3
template <class A>
struct Exponential;

template <>
struct Exponential<float> {
  using Bits = uint32_t;
  static constexpr int kTerms = 8, kFraction = 23;
  static constexpr Bits kBias = 127;
  static constexpr float kLowest = -87.3f;
  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits.
  static constexpr float kRounder = 12582912.0f;
  static constexpr float kPerLog2 = 1.44269504f;
  static constexpr float kHigh = 0.693359375f, kLow = -2.12194440e-4f;
};

template <>
struct Exponential<double> {
  using Bits = uint64_t;
  static constexpr int kTerms = 14, kFraction = 52;
  static constexpr Bits kBias = 1023;
  static constexpr double kLowest = -708.3;
  static constexpr double kRounder = 6755399441055744.0;
  static constexpr double kPerLog2 = 1.4426950408889634;
  static constexpr double kHigh = 0.693145751953125, kLow = 1.4286068203094173e-6;
};

// exp(x) = power * (1 + rest) for x from kLowest to 0, where power is a power of two.
template <class A, int N>
struct ExpParts {
  vec_t<A, N> power, rest;
};

template <class A, int N>
DEEPFAST_INLINE ExpParts<A, N> exp_parts(Lanes<N> lanes, vec_t<A, N> x) {
  using E = Exponential<A>;
  using Bits = vec_t<typename E::Bits, N>;
  const auto rounded = x * E::kPerLog2 + E::kRounder;
  const auto n = rounded - E::kRounder;
  const auto r = (x - n * E::kHigh) - n * E::kLow;
  auto sum = broadcast(lanes, A(1));
  for (int k = E::kTerms - 1; k > 1; --k) sum = sum * (r * (A(1) / static_cast<A>(k))) + A(1);
  // Moves n from the low bits of `rounded` into the exponent of 2^n.
  const Bits power = (bits_as<Bits>(rounded) + E::kBias) << E::kFraction;
  return {bits_as<vec_t<A, N>>(power), sum * r};
}

// For x <= 0. A subnormal result becomes 0, and NaN stays NaN.
template <class A, int N>
DEEPFAST_INLINE vec_t<A, N> exponential(Lanes<N> lanes, vec_t<A, N> x) {
  const auto zero = broadcast(lanes, A(0));
  const auto tiny = x < Exponential<A>::kLowest;
  const auto e = exp_parts<A>(lanes, tiny ? zero : x);
  return tiny ? zero : (e.rest + A(1)) * e.power;
}

// 1 / (1 + exp(-x)) for any x; NaN stays NaN.
template <class A, int N>
DEEPFAST_INLINE vec_t<A, N> logistic(Lanes<N> lanes, vec_t<A, N> x) {
  const auto e = exponential<A>(lanes, x < 0 ? x : -x);
  const auto one = broadcast(lanes, A(1));
  return (x < 0 ? e : one) / (one + e);
}

// -m / (2 + m) with m = exp(-2 |x|) - 1, computed without cancellation for small x. NaN stays NaN.
template <class A, int N>
DEEPFAST_INLINE vec_t<A, N> hyperbolic_tangent(Lanes<N> lanes, vec_t<A, N> x) {
  const auto y = (x < 0 ? x : -x) * A(2);
  const auto low = broadcast(lanes, Exponential<A>::kLowest);
  const auto e = exp_parts<A>(lanes, y < low ? low : y);
  const auto m = e.power * e.rest + (e.power - A(1));
  const auto t = m / (A(2) + m);
  return x < 0 ? t : -t;
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
