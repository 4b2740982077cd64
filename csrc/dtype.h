// bfloat16 and float16 as bits: exact widening, round to nearest even on the way back, denormals kept.
#pragma once

#include <cstdint>
#include <cstring>

#include "strand.h"

namespace fastaccum {

struct bfloat16 {
  std::uint16_t bits;
};
struct float16 {
  std::uint16_t bits;
};

FASTACCUM_HOST_DEVICE float float_from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
FASTACCUM_HOST_DEVICE std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

FASTACCUM_HOST_DEVICE float widen(float x) { return x; }
FASTACCUM_HOST_DEVICE double widen(double x) { return x; }
FASTACCUM_HOST_DEVICE float widen(bfloat16 x) {
  return float_from_bits(static_cast<std::uint32_t>(x.bits) << 16);
}
FASTACCUM_HOST_DEVICE float widen(float16 x) {
#if defined(__CUDA_ARCH__)
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#else
  const std::uint32_t sign = (x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = (x.bits & 0x7fffu) << 13;
  // Move the exponent's bias from 15 to 127 by one exact multiplication, which also makes normal
  // floats of half's denormals; infinity and NaN get float32's full exponent instead.
  const std::uint32_t scaled = bits_of(float_from_bits(magnitude) * float_from_bits(0x77800000u));
  const std::uint32_t special = magnitude | 0x7f800000u;
  return float_from_bits((magnitude >= 0x0f800000u ? special : scaled) | sign);
#endif
}

FASTACCUM_HOST_DEVICE void narrow(float x, float* out) { *out = x; }
FASTACCUM_HOST_DEVICE void narrow(float x, double* out) { *out = static_cast<double>(x); }
FASTACCUM_HOST_DEVICE void narrow(double x, double* out) { *out = x; }
FASTACCUM_HOST_DEVICE void narrow(double x, float* out) { *out = static_cast<float>(x); }
// On a GPU one instruction rounds; the bits of a NaN are the only difference.
FASTACCUM_HOST_DEVICE void narrow(float x, bfloat16* out) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out->bits) : "f"(x));
#else
  const std::uint32_t u = bits_of(x);
  const std::uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  out->bits = static_cast<std::uint16_t>(nan ? ((u >> 16) | 0x0040u) : rounded);
#endif
}
FASTACCUM_HOST_DEVICE void narrow(float x, float16* out) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out->bits) : "f"(x));
#else
  const std::uint32_t u = bits_of(x);
  const std::uint32_t sign = (u >> 16) & 0x8000u;
  const std::uint32_t magnitude = u & 0x7fffffffu;
  // Below 2^-14 the result is a half denormal: adding 0.5 lines the mantissa up with its last bit
  // and lets the float32 adder round to nearest even.
  const std::uint32_t denormal = bits_of(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t odd = (magnitude >> 13) & 1u;
  const std::uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + odd) >> 13;
  const std::uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  std::uint32_t half = magnitude < 0x38800000u ? denormal : normal;
  half = magnitude >= 0x47800000u ? special : half;
  out->bits = static_cast<std::uint16_t>(half | sign);
#endif
}
FASTACCUM_HOST_DEVICE void narrow(double x, bfloat16* out) { narrow(static_cast<float>(x), out); }
FASTACCUM_HOST_DEVICE void narrow(double x, float16* out) { narrow(static_cast<float>(x), out); }

}  // namespace fastaccum
