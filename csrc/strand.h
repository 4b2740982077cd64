// The flat index space that every backend shares: strands, chunks and the one order of summation.
//
// A strand is 512 consecutive elements, seen as 16 rows of 32 lanes. A segment (one parameter) starts
// on a strand, a block of work is a chunk of 16 strands. Sums run down the rows of a lane, then fold
// adjacent lanes, then adjacent strands: one float64 partial per chunk. The bits of a norm therefore
// depend on the layout alone, never on threads, vector width or the split into launches.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FASTACCUM_HOST_DEVICE __host__ __device__ __forceinline__
#else
// Always inlined: the same functions are compiled at several instruction levels, and an out-of-line
// copy made with AVX-512 must never be the one that the linker keeps for the baseline.
#define FASTACCUM_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace fastaccum {

constexpr int kLanes = 32;
constexpr int kRows = 16;
constexpr int kStrand = kLanes * kRows;  // 512 elements
constexpr int kStrandsPerChunk = 16;
constexpr int kChunk = kStrand * kStrandsPerChunk;  // 8192 elements
constexpr int kFinishLanes = 1024;  // running sums over the chunks' partials, folded at the end

enum class DType : std::int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

FASTACCUM_HOST_DEVICE std::int64_t size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// Square root, absolute value and power as functions that are inlined at every level (std::'s need not
// be). The square root is IEEE's on every device.
#if defined(__CUDA_ARCH__)
FASTACCUM_HOST_DEVICE float square_root(float x) { return __fsqrt_rn(x); }
FASTACCUM_HOST_DEVICE double square_root(double x) { return __dsqrt_rn(x); }
FASTACCUM_HOST_DEVICE double magnitude(double x) { return fabs(x); }
FASTACCUM_HOST_DEVICE double raised(double x, double power) { return pow(x, power); }
#else
FASTACCUM_HOST_DEVICE float square_root(float x) { return __builtin_sqrtf(x); }
FASTACCUM_HOST_DEVICE double square_root(double x) { return __builtin_sqrt(x); }
FASTACCUM_HOST_DEVICE double magnitude(double x) { return __builtin_fabs(x); }
FASTACCUM_HOST_DEVICE double raised(double x, double power) { return __builtin_pow(x, power); }
#endif

// A gradient times its weight. A weight of 0 (a micro-batch without items) selects nothing, where 0 * NaN,
// the gradient of a mean over nothing, would be NaN.
template <typename real>
FASTACCUM_HOST_DEVICE real weighted(real gradient, real weight) {
  return weight == real(0) ? real(0) : gradient * weight;
}

enum class Norm : std::int32_t { kTwo = 0, kOne = 1, kInf = 2, kPower = 3 };

}  // namespace fastaccum
