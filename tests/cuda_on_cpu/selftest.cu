// The language, in pieces, for the test of the emulation itself.
#include "selftest.h"

namespace {

__global__ void features_kernel(const float* in, int n, float* out, unsigned* words) {
  FASTACCUM_DYNAMIC_SHARED(float, scratch);
  const int t = threadIdx.x + blockDim.x * threadIdx.y, size = blockDim.x * blockDim.y, lane = t & 31;
  scratch[t] = t < n ? in[t] : 0.0f;
  __syncthreads();
  for (int s = 1; s < size; s *= 2) {
    const float x = t % (2 * s) == 0 && t + s < size ? scratch[t + s] : 0.0f;
    __syncthreads();
    scratch[t] += x;
    __syncthreads();
  }
  if (t == 0) atomicAdd(out, scratch[0]);
  const unsigned odd = __ballot_sync(0xffffffffu, t & 1);
  if (t == 0) words[0] = odd;
  const int flipped = __shfl_xor_sync(lane < 16 ? 0xffffu : 0xffff0000u, lane, 1);  // each half alone
  const double up = __shfl_up_sync(0xffffffffu, static_cast<double>(lane), 3, 8);
  const unsigned fifth = __shfl_sync(0xffffffffu, static_cast<unsigned>(lane), 5, 16);
  const float down = __shfl_down_sync(0xffffffffu, static_cast<float>(lane), 2);
  if (t < 32) {
    words[8 + t] = flipped;
    words[40 + t] = static_cast<unsigned>(up);
    words[72 + t] = fifth;
    words[104 + t] = static_cast<unsigned>(down);
  }
  const int thirds = __syncthreads_count(t % 3 == 0);
  const int any = __syncthreads_or(t == 5), all = __syncthreads_and(t != 5);
  if (t == 1) {
    words[1] = thirds;
    words[2] = 10 + 2 * any + all;
  }
  atomicMax(words + 3, static_cast<unsigned>(t));
  atomicMin(words + 4, static_cast<unsigned>(size - t));
  atomicCAS(words + 5, 7u, 9u);
  atomicInc(words + 7, static_cast<unsigned>(size - 1));
  if (t & 1)
    __syncwarp(0xaaaaaaaau);
  else
    __syncwarp(0x55555555u);
  if (lane == 0) scratch[t] = 3.0f;
  __syncwarp();
  if (scratch[t & ~31] != 3.0f) words[6] = 1;
  if (!__any_sync(0xffffffffu, lane == 31) || __all_sync(0xffffffffu, lane == 31)) words[6] = 2;
  const float third = 1.0f / 3.0f;
  static_assert(sizeof(fma(third, third, third)) == 4 && sizeof(sqrt(third)) == 4 &&
                sizeof(fabs(third)) == 4);
  if (isnan(third) || !isfinite(third) || isinf(third)) words[6] = 3;
  if (t >= 32) return;  // no barrier follows
  float largest = in[t];
  for (int d = 16; d > 0; d /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, d));
  if (t == 0) out[1] = largest;
}

__device__ unsigned counter = 5;
__constant__ float powers[4] = {1, 2, 4, 8};

__global__ void count_and_look_up_kernel(float* out) {
  atomicAdd(&counter, 1u);
  out[threadIdx.x + blockIdx.x * blockDim.x] = powers[threadIdx.x & 3];
}

__global__ void neighbours_kernel(float* out, bool sync_warp) {
  __shared__ float values[32];
  values[threadIdx.x] = threadIdx.x;
  if (sync_warp) __syncwarp();
  out[threadIdx.x] = values[threadIdx.x ^ 1];
}

__global__ void shared_by_all_kernel(FASTACCUM_GRID_CONSTANT(Large) large, std::int64_t* out) {
  std::int64_t sum = 0;
  for (int i = threadIdx.x; i < 4000; i += blockDim.x) sum += large.values[i];
  out[threadIdx.x] = sum;
}

__global__ void by_value_kernel(const __grid_constant__ Large large, std::int64_t* out) {
  std::int64_t sum = 0;
  for (int i = threadIdx.x; i < 4000; i += blockDim.x) sum += large.values[i];
  out[threadIdx.x] = sum;
}

__global__ void wide_kernel(const double* in, double* out, int n, bool intrinsic) {
  const auto* source = reinterpret_cast<const double4_32a*>(in);
  auto* target = reinterpret_cast<double4_32a*>(out);
  for (int i = threadIdx.x; i < n / 4; i += blockDim.x) {
    if (intrinsic)
      __stcs(target + i, __ldcs(source + i));
    else
      target[i] = source[i];
  }
}

__global__ void scatter_kernel(float* out, std::int64_t at, bool write) {
  if (threadIdx.x != 3) return;
  if (write)
    out[at] = 1.0f;
  else
    out[0] = out[at];
}

// A thread's variables are its own, even at an address that others can form.
__global__ void other_stack_kernel(float* out) {
  __shared__ const float* published;
  const float mine = 1.0f;
  if (threadIdx.x == 0) published = &mine;
  __syncthreads();
  if (threadIdx.x == 1) out[1] = *published;
  __syncthreads();
}

__global__ void nested_kernel(float* out) { scatter(out, 0, true); }

__global__ void copy_kernel(const float* in, float* out, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = in[i];
}

__global__ void vote_kernel(unsigned* out, int what) {
  const unsigned lane = threadIdx.x;
  unsigned result = 0;
  if (what == 0) result = lane < 4 ? __ballot_sync(0xf0u, 1) : 0;          // not in its mask
  if (what == 1) result = lane < 16 ? __shfl_sync(0xffffu, lane, 20) : 0;  // reads outside it
  if (what == 2) result = lane < 16 ? __ballot_sync(0xffffffffu, 1) : __shfl_sync(0xffffffffu, lane, 0);
  if (what == 3) result = __ballot_sync(lane < 16 ? 0x00ffffffu : 0xffff00ffu, 1);  // masks overlap
  out[lane] = result;
}

}  // namespace

void sum_large(const Large& large, std::int64_t* out, bool by_value) {
  const auto kernel = &shared_by_all_kernel;  // a launch through a pointer
  if (by_value)
    FASTACCUM_LAUNCH(by_value_kernel, 1, 256, 0, nullptr, large, out);
  else
    FASTACCUM_LAUNCH(kernel, 1, 256, 0, nullptr, large, out);
}
void features(dim3 block, const float* in, int n, float* out, unsigned* words) {
  FASTACCUM_LAUNCH(features_kernel, 1, block, block.x * block.y * sizeof(float), nullptr, in, n, out, words);
}
void count_and_look_up(float* out) { FASTACCUM_LAUNCH(count_and_look_up_kernel, 3, 64, 0, nullptr, out); }
void neighbours(float* out, bool sync_warp) {
  FASTACCUM_LAUNCH(neighbours_kernel, 1, 32, 0, nullptr, out, sync_warp);
}
void wide(const double* in, double* out, int n, bool intrinsic) {
  FASTACCUM_LAUNCH(wide_kernel, 1, 32, 0, nullptr, in, out, n, intrinsic);
}
void scatter(float* out, std::int64_t at, bool write) {
  FASTACCUM_LAUNCH(scatter_kernel, 2, 32, 0, nullptr, out, at, write);
}
void copy_on_stream(const float* in, float* out, int n, cudaStream_t stream) {
  FASTACCUM_LAUNCH(copy_kernel, 1, 32, 0, stream, in, out, n);
}
void vote(unsigned* out, int what) { FASTACCUM_LAUNCH(vote_kernel, 1, 32, 0, nullptr, out, what); }
void nested(float* out) { FASTACCUM_LAUNCH(nested_kernel, 1, 1, 0, nullptr, out); }
void other_stack(float* out) { FASTACCUM_LAUNCH(other_stack_kernel, 1, 32, 0, nullptr, out); }
