// Eight values at a time, between memory and fp32 registers.
//
// A chunk is eight neighbouring channels: the unit of a dropout counter, and 16 bytes of a 16-bit
// type or twice 16 of fp32. A row that is not aligned to 16 bytes is read and written element by
// element, by the same functions.
#pragma once

#include <stdint.h>
#include <string.h>

#include "device.h"

namespace deepfast {

// The 16-bit storage types, as bits.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

namespace detail {

template <class To, class From>
DEEPFAST_HOST_DEVICE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a value keeps its size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// fp16 to fp32 and back, to nearest even, for a host without such an instruction.
inline float wide_f16(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return bits_as<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // A normal number with the exponent moved; a subnormal one is its fraction times 2^-24.
  const float x = rest >= 0x400u ? bits_as<float>((rest << 13) + (uint32_t{112} << 23))
                                 : static_cast<float>(rest) * 5.9604644775390625e-8f;
  return bits_as<float>(bits_as<uint32_t>(x) | sign);
}
inline uint16_t narrow_f16(float x) {
  const uint32_t bits = bits_as<uint32_t>(x), rest = bits & 0x7fffffffu;
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  if (rest > 0x7f800000u) return sign | 0x7fffu;
  if (rest >= 0x477ff000u) return sign | 0x7c00u;
  // Below 2^-14 the last place is 2^-24 whatever the exponent: adding 0.5 rounds there.
  if (rest < 0x38800000u)
    return static_cast<uint16_t>(
        sign | (bits_as<uint32_t>(bits_as<float>(rest) + 0.5f) - bits_as<uint32_t>(0.5f)));
  return static_cast<uint16_t>(
      sign | ((rest + 0xfffu + ((rest >> 13) & 1u) - (uint32_t{112} << 23)) >> 13));
}
DEEPFAST_HOST_DEVICE uint16_t narrow_bf16(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace detail

// Two values in 32 bits, the first in the low half, and two floats.
struct Pair {
  float first, second;
};
template <class T>
DEEPFAST_HOST_DEVICE Pair unpack(uint32_t bits);
template <class T>
DEEPFAST_HOST_DEVICE uint32_t pack(float first, float second);

template <>
DEEPFAST_HOST_DEVICE Pair unpack<bf16>(uint32_t bits) {
  return {detail::bits_as<float>(bits << 16), detail::bits_as<float>(bits & 0xffff0000u)};
}
template <>
DEEPFAST_HOST_DEVICE uint32_t pack<bf16>(float first, float second) {
#if defined(__CUDA_ARCH__)
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
#else
  return detail::narrow_bf16(first) | uint32_t{detail::narrow_bf16(second)} << 16;
#endif
}
template <>
DEEPFAST_HOST_DEVICE Pair unpack<f16>(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  Pair values;
  asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %2;\n"
      " cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;}"
      : "=f"(values.first), "=f"(values.second)
      : "r"(bits));
  return values;
#else
  return {detail::wide_f16(static_cast<uint16_t>(bits)),
          detail::wide_f16(static_cast<uint16_t>(bits >> 16))};
#endif
}
template <>
DEEPFAST_HOST_DEVICE uint32_t pack<f16>(float first, float second) {
#if defined(__CUDA_ARCH__)
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
#else
  return detail::narrow_f16(first) | uint32_t{detail::narrow_f16(second)} << 16;
#endif
}

constexpr int kChunk = 8;

// 16 bytes; a plain structure, so that a host has it too.
struct alignas(16) Words {
  uint32_t w[4];
};

// Eight values, as stored.
template <class T>
struct Chunk {
  static constexpr int kWords = sizeof(T) * kChunk / sizeof(Words);
  Words words[kWords];
};

template <class T>
DEEPFAST_HOST_DEVICE Chunk<T> zero_chunk() {
  Chunk<T> c;
  for (int i = 0; i < Chunk<T>::kWords; ++i) c.words[i] = Words{{0, 0, 0, 0}};
  return c;
}

// Value i of a chunk; put_value expects that it is still zero.
template <class T>
DEEPFAST_HOST_DEVICE T value_of(const Chunk<T>& c, int i) {
  return {static_cast<uint16_t>(c.words[0].w[i / 2] >> (16 * (i % 2)))};
}
template <>
DEEPFAST_HOST_DEVICE float value_of(const Chunk<float>& c, int i) {
  return detail::bits_as<float>(c.words[i / 4].w[i % 4]);
}
template <class T>
DEEPFAST_HOST_DEVICE void put_value(Chunk<T>& c, int i, T x) {
  c.words[0].w[i / 2] |= uint32_t{x.bits} << (16 * (i % 2));
}
template <>
DEEPFAST_HOST_DEVICE void put_value(Chunk<float>& c, int i, float x) {
  c.words[i / 4].w[i % 4] = detail::bits_as<uint32_t>(x);
}

// The chunk's values in fp32.
template <class T>
DEEPFAST_HOST_DEVICE void widen(const Chunk<T>& c, float (&v)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const Pair p = unpack<T>(c.words[0].w[i]);
    v[2 * i] = p.first, v[2 * i + 1] = p.second;
  }
}
template <>
DEEPFAST_HOST_DEVICE void widen(const Chunk<float>& c, float (&v)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) v[i] = detail::bits_as<float>(c.words[i / 4].w[i % 4]);
}

// Eight fp32 values rounded to the storage type.
template <class T>
DEEPFAST_HOST_DEVICE Chunk<T> narrow(const float (&v)[kChunk]) {
  Chunk<T> c;
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) c.words[0].w[i] = pack<T>(v[2 * i], v[2 * i + 1]);
  return c;
}
template <>
DEEPFAST_HOST_DEVICE Chunk<float> narrow<float>(const float (&v)[kChunk]) {
  Chunk<float> c;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) c.words[i / 4].w[i % 4] = detail::bits_as<uint32_t>(v[i]);
  return c;
}

#if defined(DEEPFAST_EMULATE) || defined(__CUDACC__)

// The `count` (clamped to 0 to 8) values at p, zeros behind them. `aligned`: p is a multiple of 16
// bytes and count is 0 or at least 8.
template <class T>
DEEPFAST_DEVICE Chunk<T> load_chunk(const T* p, int count, bool aligned) {
  Chunk<T> c = zero_chunk<T>();
  if (aligned) {
    if (count <= 0) return c;
#pragma unroll
    for (int i = 0; i < Chunk<T>::kWords; ++i) c.words[i] = reinterpret_cast<const Words*>(p)[i];
    return c;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    if (i < count) put_value(c, i, p[i]);
  return c;
}

template <class T>
DEEPFAST_DEVICE void load_chunk(const T* p, int count, bool aligned, float (&v)[kChunk]) {
  widen(load_chunk(p, count, aligned), v);
}

template <class T>
DEEPFAST_DEVICE void store_chunk(T* p, int count, bool aligned, const Chunk<T>& c) {
  if (aligned) {
    if (count <= 0) return;
#pragma unroll
    for (int i = 0; i < Chunk<T>::kWords; ++i) reinterpret_cast<Words*>(p)[i] = c.words[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    if (i < count) p[i] = value_of(c, i);
}

#endif

}  // namespace deepfast
