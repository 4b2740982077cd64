// An accumulation with the pattern of the last block, for the test of the emulation itself. BUG_* plants a
// mistake that a mode must catch.
#include "selftest.h"

// The sum over the block, in thread 0. (Not in the unnamed namespace: two libraries in a process must not
// share warp_sums.)
template <int kSize>
__device__ float block_sum(float x) {
  __shared__ float warp_sums[kSize / 32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#if defined(BUG_REDUCE_OFFSET)
  for (int d = 8; d > 0; d /= 2) x += __shfl_down_sync(0xffffffffu, x, d);
#else
  for (int d = 16; d > 0; d /= 2) x += __shfl_down_sync(0xffffffffu, x, d);
#endif
#if defined(BUG_UNWRITTEN_SHARED)
  if (lane == 0 && warp != 3) warp_sums[warp] = x;
#else
  if (lane == 0) warp_sums[warp] = x;
#endif
#if !defined(BUG_NO_SYNC)
  __syncthreads();
#endif
#if defined(BUG_SHARED_OUT_OF_BOUNDS)
  x = lane <= kSize / 32 ? warp_sums[lane] : 0.0f;
#else
  x = lane < kSize / 32 ? warp_sums[lane] : 0.0f;
#endif
  if (warp == 0) {
#if defined(BUG_MASK)
    if (lane < 16)
#endif
      for (int d = kSize / 64; d > 0; d /= 2) x += __shfl_down_sync(0xffffffffu, x, d);
  }
#if !defined(BUG_NO_SECOND_SYNC)
  __syncthreads();  // warp_sums may be used again
#endif
  return x;
}

namespace {

__device__ float from_bfloat16(unsigned bits) { return __uint_as_float(bits << 16); }

__device__ int tensor_of(const Table& t, int chunk) {
  int k = 0;
  while (t.first_chunk[k + 1] <= chunk) ++k;
  return k;
}

template <int kSize>
__global__ void __launch_bounds__(kSize)
    accumulate_kernel(FASTACCUM_GRID_CONSTANT(Table) t, float* __restrict__ acc, float scale, float* partials,
                      unsigned* ticket, float* norm) {
  float sum = 0.0f, spare = 0.0f;
#if defined(BUG_SAME_CHUNK)
  const int stride = gridDim.x > 1 ? gridDim.x - 1 : 1;
#else
  const int stride = gridDim.x;
#endif
  for (int chunk = blockIdx.x; chunk < t.first_chunk[t.count]; chunk += stride) {
    const int k = tensor_of(t, chunk);
    const std::int64_t begin = std::int64_t{chunk - t.first_chunk[k]} * kChunk;
    const int n = static_cast<int>(min(t.numel[k] - begin, std::int64_t{kChunk}));
    const std::uint16_t* source = t.grad[k] + begin;
    float* target = acc + t.offset[k] + begin;
#if defined(BUG_MISALIGNED)
    const bool vector = true;
#else
    const bool vector =
        ((reinterpret_cast<std::uintptr_t>(source) | reinterpret_cast<std::uintptr_t>(target)) & 15) == 0;
#endif
#if defined(BUG_OUT_OF_BOUNDS)
    const int n_vectors = vector ? (n + 7) / 8 : 0;
#else
    const int n_vectors = vector ? n / 8 : 0;
#endif
    for (int i = threadIdx.x; i < n_vectors; i += kSize) {
      const uint4 raw = __ldcs(reinterpret_cast<const uint4*>(source) + i);
      const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
      float4* place = reinterpret_cast<float4*>(target) + 2 * i;
      float4 old[2] = {place[0], place[1]};
      float* values = &old[0].x;
      for (int j = 0; j < 8; ++j) {
        values[j] += scale * from_bfloat16(words[j / 2] >> (j % 2 * 16) & 0xffff);
        sum += values[j] * values[j];
      }
      place[0] = old[0];
      place[1] = old[1];
    }
    for (int i = n_vectors * 8 + threadIdx.x; i < n; i += kSize) {
      const float value = target[i] + scale * from_bfloat16(source[i]);
      sum += value * value;
      target[i] = value;
    }
#if defined(BUG_DIVERGENT_BARRIER)
    if (static_cast<int>(threadIdx.x) < n % kSize) __syncthreads();
#endif
  }

  sum = block_sum<kSize>(sum);
  spare = block_sum<kSize>(spare);
  __shared__ bool last;
#if defined(BUG_EARLY_RETURN)
  if (threadIdx.x == 77) return;
#endif
  if (threadIdx.x == 0) {
    partials[blockIdx.x] = sum + spare;
#if defined(BUG_PLAIN_WORD)
    norm[0] = norm[0] + 1.0f;
#endif
#if !defined(BUG_NO_FENCE_BEFORE)
    __threadfence();
#endif
    last = atomicAdd(ticket, 1u) == gridDim.x - 1;
#if !defined(BUG_NO_FENCE_AFTER)
    __threadfence();
#endif
  }
  __syncthreads();
  if (!last) return;

  float total = 0.0f;
  for (unsigned i = threadIdx.x; i < gridDim.x; i += kSize) total += partials[i];
  total = block_sum<kSize>(total);
  if (threadIdx.x == 0) {
    norm[0] = __fsqrt_rn(total);
#if !defined(BUG_TICKET_NOT_RESET)
    *ticket = 0;
#endif
  }
}

}  // namespace

void accumulate(const Table& table, float* acc, float scale, float* partials, unsigned* ticket, float* norm,
                int blocks) {
  FASTACCUM_LAUNCH((accumulate_kernel<kThreads>), blocks, kThreads, 0, nullptr, table, acc, scale, partials,
                   ticket, norm);
}
