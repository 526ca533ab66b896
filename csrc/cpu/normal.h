// The standard normal distribution, on vectors.
//
//   M(t) = erfcx(t / sqrt(2)) / 2,   Phi(-t) = M(t) exp(-t^2 / 2),   Phi(t) = 1 - Phi(-t),   t >= 0
//
// M falls smoothly from 1/2 and approaches 1 / (t sqrt(2 pi)) for large t. So (t + 2) M is one
// polynomial in (t - 2) / (t + 2) on the whole line, and the density uses the same exponential.
// Nothing cancels for negative x, where erf is near -1. Measured: for x > -12.5, x Phi(x) is off by
// at most 4.1 units in the last place, 3.1 for x > -1 and 1.4 for x > 1.
//
// The map and the factor: Shepherd, Laframboise, Chebyshev approximation of (1 + 2x) exp(x^2)
// erfc(x) in 0 <= x < inf, Mathematics of Computation 36, 1981. The coefficients are our own
// minimax fits of the relative error: 0.5 * 2^-24 for M, 0.06 * 2^-24 for the exponential.
#pragma once

#include "simd.h"

namespace deepfast {
namespace DEEPFAST_ISA {

template <class A, int N>
struct Normal {
  vec_t<A, N> cdf, pdf;
};

// c[0] + c[1] x + c[2] x^2 + ...
template <int kCount, int N>
DEEPFAST_INLINE vec_t<float, N> polynomial(Lanes<N> lanes, vec_t<float, N> x,
                                           const float (&c)[kCount]) {
  auto sum = broadcast(lanes, c[kCount - 1]);
  for (int i = kCount - 2; i >= 0; --i) sum = sum * x + c[i];
  return sum;
}

// exp(-t^2 / 2) for 0 <= t <= 13.2, where the result is not subnormal.
template <int N>
DEEPFAST_INLINE vec_t<float, N> exp_of_square(Lanes<N> lanes, vec_t<float, N> t) {
  using V = vec_t<float, N>;
  using I = vec_t<int32_t, N>;
  constexpr float kLog2 = 1.44269504f;
  // ln(2) in two parts: n times the first is exact.
  constexpr float kLn2 = 0.693359375f, kLn2Rest = -2.12194440e-4f;
  // Added to a number, it puts the nearest integer into the lowest bits.
  constexpr float kRound = 12582912.0f;
  constexpr float kExp[] = {0.49999994f, 0.16666517f, 0.041668285f, 0.00836925f, 0.0013820468f};
  // t^2 in two parts, the first exact. A rounded t^2 would cost the exponential as many units in
  // the last place as its exponent has.
  const V high = bits_as<V>(bits_as<I>(t) & ~0xfff), low = (t - high) * (t + high);
  const V x = high * high * -0.5f;
  const V shifted = x * kLog2 + kRound, n = shifted - kRound;
  const V r = ((x - n * kLn2) - n * kLn2Rest) - 0.5f * low;
  const V fraction = (r * r * polynomial(lanes, r, kExp) + r) + 1.0f;
  const I exponent = bits_as<I>(shifted) - bits_as<int32_t>(kRound) + 127;
  return fraction * bits_as<V>(exponent << 23);
}

template <int N>
DEEPFAST_INLINE Normal<float, N> normal(Lanes<N> lanes, vec_t<float, N> x) {
  using V = vec_t<float, N>;
  constexpr float kFar = 13.2f, kDensity = 0.398942280f;
  constexpr float kM[] = {0.672408f,       -0.33140442f,   0.02879874f,    0.0367181f,
                          -0.00048569305f, -0.006731181f,  -0.0018800999f, 0.0008399052f,
                          0.000698728f,    6.3746855e-05f, -5.3536125e-05f};
  const V zero = {}, size = x < 0.0f ? -x : x;
  // A NaN counts as far; the caller multiplies by x, which makes the result NaN again.
  const auto near = size < kFar;
  const V t = near ? size : zero + kFar;
  const V e = near ? exp_of_square(lanes, t) : zero;
  // A division, because the rounding of an inverse would count twice.
  const V shifted = t + 2.0f, tail = polynomial(lanes, (t - 2.0f) / shifted, kM) / shifted * e;
  return {x < 0.0f ? tail : 1.0f - tail, e * kDensity};
}

template <int N>
DEEPFAST_INLINE Normal<double, N> normal(Lanes<N>, vec_t<double, N> x) {
  constexpr double kHalfRoot = 0.70710678118654752440, kDensity = 0.39894228040143267794;
  Normal<double, N> at;
  for (int i = 0; i < N; ++i) {
    at.cdf[i] = 0.5 * __builtin_erfc(-x[i] * kHalfRoot);
    at.pdf[i] = kDensity * __builtin_exp(-0.5 * x[i] * x[i]);
  }
  return at;
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
