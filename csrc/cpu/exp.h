// The exponential function, lane by lane.
#pragma once

#include "simd.h"

namespace deepfast {
namespace DEEPFAST_ISA {

// exp(x) = 2^n * exp(r) with n = round(x / log 2), and exp(r) by its Taylor series, |r| < 0.35.
// log 2 is taken off in two parts, so that r is right to the last place (Cody, Waite 1980).
//
//            terms    the first left out, at most     lowest x with a normal result
//   fp32     8        0.35^8 / 8!   = 5e-9            -87.3
//   fp64     14       0.35^14 / 14! = 5e-18           -708.3
template <class A>
struct Exponential;

template <>
struct Exponential<float> {
  using Bits = uint32_t;
  static constexpr int kTerms = 8, kFraction = 23;
  static constexpr Bits kBias = 127;
  static constexpr float kLowest = -87.3f;
  // 1.5 * 2^23: adding it rounds to an integer, which stands in the low bits.
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

// For x <= 0; a result below the normal numbers is 0, and NaN stays.
template <class A, int N>
DEEPFAST_INLINE vec_t<A, N> exponential(Lanes<N> lanes, vec_t<A, N> x) {
  using E = Exponential<A>;
  using Bits = vec_t<typename E::Bits, N>;
  const auto tiny = x < E::kLowest;
  const auto kept = tiny ? broadcast(lanes, A(0)) : x;
  const auto rounded = kept * E::kPerLog2 + E::kRounder;
  const auto n = rounded - E::kRounder;
  const auto r = (kept - n * E::kHigh) - n * E::kLow;
  auto sum = broadcast(lanes, A(1));
  for (int k = E::kTerms - 1; k > 0; --k) sum = sum * (r * (A(1) / static_cast<A>(k))) + A(1);
  // n from the low bits of `rounded`, put into the exponent of 2^n.
  const Bits power = (bits_as<Bits>(rounded) + E::kBias) << E::kFraction;
  return tiny ? broadcast(lanes, A(0)) : sum * bits_as<vec_t<A, N>>(power);
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
