// CUDA C++ for a host compiler: runs a kernel file on the CPU, in tests.
//
// Each CUDA thread of a block is a fiber, blocks run one after another; barriers, shuffles, atomics and
// fences are calls into the run time (launch.cpp). No CUDA toolkit is needed. build.py compiles a kernel
// file in one of three modes:
//   plain     optimised. Buffers end at unmapped pages; shared memory starts as NaN; barriers and warp
//             intrinsics that do not match, and deadlocks, are reported.
//   sanitize  with the address and undefined-behaviour sanitizers. Shared memory is not refilled.
//   races     every memory access is checked (races.cpp): bounds, alignment, memory never written,
//             and data races by CUDA's rules whether or not they show in this order of threads.
//
// What a kernel file keeps to, beyond including gpu_language.h:
//   FASTACCUM_LAUNCH(kernel, grid, block, shared, stream, arguments...) instead of <<< >>>;
//   FASTACCUM_DYNAMIC_SHARED(type, name) instead of extern __shared__;
//   FASTACCUM_GRID_CONSTANT(type) name instead of const __grid_constant__ type name for a large parameter:
//   here that is a reference, so the threads share one copy, and reads beyond its end are seen (a plain
//   one works too: every thread copies it to its stack);
//   no inline PTX, no thread_local variable inside a function, no spinning on another block.
//
// Not modelled: weak memory order in time, clusters, cooperative groups, textures, contraction of
// a * b + c (kernels must be compiled with it switched off, here and by nvcc).
#pragma once

#include <math.h>  // not <cmath>: fma(float, float, float) must be the float one, as in CUDA

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <tuple>
#include <type_traits>
#include <utility>

//------------------------------------------------------------------------------------- qualifiers

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline
#if defined(__clang__)
#if __has_feature(address_sanitizer)
#define CUDA_ON_CPU_ADDRESS_SANITIZER
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define CUDA_ON_CPU_ADDRESS_SANITIZER
#endif
// The run time finds the variables in the module's thread-local block, refills them before every block
// and checks accesses to them. (A section attribute would be plainer, but g++ 12 ignores it on statics
// of templates.) The address sanitizer puts no red zones around thread-local variables.
#if defined(CUDA_ON_CPU_ADDRESS_SANITIZER)
#define __shared__ static
#else
#define __shared__ static thread_local
#endif
#if !defined(__clang__)
#define __builtin_assume(condition) ((void)0)
#endif
// Reads and writes of the emulation itself, inlined into kernels, are not the kernel's.
#define CUDA_ON_CPU_UNCHECKED __attribute__((no_sanitize("thread")))

//----------------------------------------------------------------------------------- vector types

#define CUDA_ON_CPU_VECTORS(T, name, align2, align4)                    \
  struct alignas(align2) name##2 { T x, y; };                           \
  struct name##3 { T x, y, z; };                                        \
  struct alignas(align4) name##4 { T x, y, z, w; };                     \
  constexpr name##2 make_##name##2(T x, T y) { return {x, y}; }         \
  constexpr name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_ON_CPU_VECTORS(short, short, 4, 8)
CUDA_ON_CPU_VECTORS(unsigned short, ushort, 4, 8)
CUDA_ON_CPU_VECTORS(int, int, 8, 16)
CUDA_ON_CPU_VECTORS(unsigned, uint, 8, 16)
CUDA_ON_CPU_VECTORS(float, float, 8, 16)
CUDA_ON_CPU_VECTORS(double, double, 16, 16)
CUDA_ON_CPU_VECTORS(long long, longlong, 16, 16)
CUDA_ON_CPU_VECTORS(unsigned long long, ulonglong, 16, 16)
#undef CUDA_ON_CPU_VECTORS
struct alignas(32) double4_32a {
  double x, y, z, w;
};
struct alignas(32) ulonglong4_32a {
  unsigned long long x, y, z, w;
};
constexpr double4_32a make_double4_32a(double x, double y, double z, double w) { return {x, y, z, w}; }
constexpr ulonglong4_32a make_ulonglong4_32a(unsigned long long x, unsigned long long y, unsigned long long z,
                                             unsigned long long w) {
  return {x, y, z, w};
}
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

//-------------------------------------------------------------------------------------- host side

struct CUstream_st;
using cudaStream_t = CUstream_st*;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone,
  cudaStreamCaptureStatusActive,
  cudaStreamCaptureStatusInvalidated
};
enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76
};
struct cudaFuncAttributes {
  std::size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
  int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion;
};

// Waits until the next launch on the stream (or cuda_on_cpu_synchronize) and reads the source only then,
// as a copy from pinned memory may. Throws while the option "capturing" is set.
cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaGetLastError();  // the option "next_error", once; a bad launch throws instead
cudaError_t cudaPeekAtLastError();
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
template <typename... P>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(P...)) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}

#define FASTACCUM_LAUNCH(kernel, grid, block, shared, stream, ...) \
  ::cuda_on_cpu::launch(#kernel, (grid), (block), (shared), (stream), kernel __VA_OPT__(, ) __VA_ARGS__)
#define FASTACCUM_GRID_CONSTANT(...) const __VA_ARGS__&
#define FASTACCUM_DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(::cuda_on_cpu::dynamic_shared())

namespace cuda_on_cpu {

using Where = std::source_location;  // of an intrinsic's call, for reports

struct Launch {
  const char* expression;  // as written
  const void* kernel;
  dim3 grid, block;
  std::size_t shared;
  cudaStream_t stream;
  void (*call)(const void*);  // runs one thread
  const void* arguments;
  std::size_t argument_bytes;
  std::size_t by_value_bytes;  // copied to each thread's stack
};
void launch(const Launch& launch);

// Makes the calling thread's block of this module's thread-local variables exist.
CUDA_ON_CPU_UNCHECKED inline void touch_thread_locals() {
  static thread_local char anchor;
  *const_cast<volatile char*>(&anchor) = 0;
}

template <typename... P, typename... A>
void launch(const char* expression, dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream,
            void (*kernel)(P...), A&&... arguments) {
  using Call = std::pair<void (*)(P...), std::tuple<std::decay_t<P>...>>;
  const Call call(kernel, std::tuple<std::decay_t<P>...>(static_cast<P>(std::forward<A>(arguments))...));
  touch_thread_locals();
  launch({expression, reinterpret_cast<const void*>(kernel), grid, block, shared, stream,
          [](const void* raw) {
            const auto* one = static_cast<const Call*>(raw);
            std::apply(one->first, one->second);
          },
          &call, sizeof(Call), (std::size_t{0} + ... + (std::is_reference_v<P> ? 0 : sizeof(P)))});
}

//---------------------------------------------------------------------------- calls of the threads

struct Builtins {
  uint3 thread{}, block{};
  dim3 threads{}, blocks{};
};
extern Builtins builtins;

enum class Vote { kCount, kAnd, kOr };
enum class Exchange { kSync, kShuffle, kVote };

struct Lanes {
  unsigned members;                   // the lanes that took part
  const unsigned char (*values)[16];  // of each lane
};

void sync_block(Where where);
int sync_block_vote(Vote vote, bool predicate, Where where);
Lanes exchange(Exchange kind, unsigned mask, const void* value, std::size_t bytes, Where where);
void fence(bool other_blocks, Where where);
void before_atomic(void* target, std::size_t bytes, Where where);
unsigned live_lanes();
unsigned lane();
void* dynamic_shared();
[[noreturn]] void fail(const char* what, Where where);

}  // namespace cuda_on_cpu

#define threadIdx (::cuda_on_cpu::builtins.thread)
#define blockIdx (::cuda_on_cpu::builtins.block)
#define blockDim (::cuda_on_cpu::builtins.threads)
#define gridDim (::cuda_on_cpu::builtins.blocks)
inline constexpr int warpSize = 32;

//----------------------------------------------------------------------------- barriers and fences

#define CUDA_ON_CPU_WHERE ::cuda_on_cpu::Where where = ::cuda_on_cpu::Where::current()

namespace cuda_on_cpu {

inline void require(bool condition, const char* text, CUDA_ON_CPU_WHERE) {
  if (!condition) fail(text, where);
}

}  // namespace cuda_on_cpu

inline void __syncthreads(CUDA_ON_CPU_WHERE) { cuda_on_cpu::sync_block(where); }
inline int __syncthreads_count(int p, CUDA_ON_CPU_WHERE) {
  return cuda_on_cpu::sync_block_vote(cuda_on_cpu::Vote::kCount, p != 0, where);
}
inline int __syncthreads_and(int p, CUDA_ON_CPU_WHERE) {
  return cuda_on_cpu::sync_block_vote(cuda_on_cpu::Vote::kAnd, p != 0, where);
}
inline int __syncthreads_or(int p, CUDA_ON_CPU_WHERE) {
  return cuda_on_cpu::sync_block_vote(cuda_on_cpu::Vote::kOr, p != 0, where);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_ON_CPU_WHERE) {
  cuda_on_cpu::exchange(cuda_on_cpu::Exchange::kSync, mask, nullptr, 0, where);
}
inline void __threadfence_block(CUDA_ON_CPU_WHERE) { cuda_on_cpu::fence(false, where); }
inline void __threadfence(CUDA_ON_CPU_WHERE) { cuda_on_cpu::fence(true, where); }
inline void __threadfence_system(CUDA_ON_CPU_WHERE) { cuda_on_cpu::fence(true, where); }
inline unsigned __activemask() { return cuda_on_cpu::live_lanes(); }

//------------------------------------------------------------------------------- shuffles and votes

namespace cuda_on_cpu {

// `inside`: whether `source` lies in the caller's part of the warp; if not, a lane keeps its value.
template <typename T>
CUDA_ON_CPU_UNCHECKED inline T shuffle(unsigned mask, T value, int source, bool inside, Where where) {
  static_assert(sizeof(T) <= 16 && std::is_trivially_copyable_v<T>);
  const Lanes lanes = exchange(Exchange::kShuffle, mask, &value, sizeof(T), where);
  if (!inside) return value;
  if (!((lanes.members >> source) & 1u))
    fail("a shuffle reads a lane that is not in the mask or has returned", where);
  T result;
  std::memcpy(&result, lanes.values[source], sizeof(T));
  return result;
}

}  // namespace cuda_on_cpu

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUDA_ON_CPU_WHERE) {
  const int base = static_cast<int>(cuda_on_cpu::lane()) & ~(width - 1);
  return cuda_on_cpu::shuffle(mask, value, base + (source & (width - 1)), true, where);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_ON_CPU_WHERE) {
  const int lane = static_cast<int>(cuda_on_cpu::lane()), d = static_cast<int>(delta);
  return cuda_on_cpu::shuffle(mask, value, lane + d, (lane & (width - 1)) + d < width, where);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_ON_CPU_WHERE) {
  const int lane = static_cast<int>(cuda_on_cpu::lane()), d = static_cast<int>(delta);
  return cuda_on_cpu::shuffle(mask, value, lane - d, (lane & (width - 1)) >= d, where);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, CUDA_ON_CPU_WHERE) {
  const int lane = static_cast<int>(cuda_on_cpu::lane()), source = lane ^ bits;
  const bool inside = (source & ~(width - 1)) <= (lane & ~(width - 1));
  return cuda_on_cpu::shuffle(mask, value, source, inside, where);
}

CUDA_ON_CPU_UNCHECKED inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_ON_CPU_WHERE) {
  const unsigned mine = predicate != 0;
  const auto lanes = cuda_on_cpu::exchange(cuda_on_cpu::Exchange::kVote, mask, &mine, sizeof mine, where);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i)
    if ((lanes.members >> i) & 1u) result |= static_cast<unsigned>(lanes.values[i][0] != 0) << i;
  return result;
}
inline int __any_sync(unsigned mask, int predicate, CUDA_ON_CPU_WHERE) {
  return __ballot_sync(mask, predicate, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUDA_ON_CPU_WHERE) {
  return __ballot_sync(mask, !predicate, where) == 0;
}

//------------------------------------------------------------------------------------------ atomics

namespace cuda_on_cpu {

template <typename T, typename F>
CUDA_ON_CPU_UNCHECKED inline T atomic(T* target, F update, Where where) {
  before_atomic(target, sizeof(T), where);
  const T old = *target;
  *target = update(old);
  return old;
}

}  // namespace cuda_on_cpu

#define CUDA_ON_CPU_ATOMIC(name, expression)                                                          \
  template <typename T>                                                                               \
  inline T name(T* target, std::type_identity_t<T> value, CUDA_ON_CPU_WHERE) {                        \
    return cuda_on_cpu::atomic(target, [value](T old) { return static_cast<T>(expression); }, where); \
  }
CUDA_ON_CPU_ATOMIC(atomicAdd, old + value)
CUDA_ON_CPU_ATOMIC(atomicSub, old - value)
CUDA_ON_CPU_ATOMIC(atomicMax, old < value ? value : old)
CUDA_ON_CPU_ATOMIC(atomicMin, value < old ? value : old)
CUDA_ON_CPU_ATOMIC(atomicAnd, old& value)
CUDA_ON_CPU_ATOMIC(atomicOr, old | value)
CUDA_ON_CPU_ATOMIC(atomicXor, old ^ value)
CUDA_ON_CPU_ATOMIC(atomicExch, ((void)old, value))
CUDA_ON_CPU_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
#undef CUDA_ON_CPU_ATOMIC
template <typename T>
inline T atomicCAS(T* target, std::type_identity_t<T> expected, std::type_identity_t<T> value,
                   CUDA_ON_CPU_WHERE) {
  return cuda_on_cpu::atomic(
      target, [expected, value](T old) { return old == expected ? value : old; }, where);
}

//--------------------------------------------------------------------------------- loads and stores

namespace cuda_on_cpu {

// A GPU faults on a vector access that is not aligned; a CPU need not.
template <typename T>
inline T* aligned(T* p, Where where) {
  if (reinterpret_cast<std::uintptr_t>(p) % alignof(T) != 0) fail("misaligned vector access", where);
  return p;
}

}  // namespace cuda_on_cpu

#define CUDA_ON_CPU_LOAD(name)                        \
  template <typename T>                               \
  inline T name(const T* source, CUDA_ON_CPU_WHERE) { \
    return *cuda_on_cpu::aligned(source, where);      \
  }
#define CUDA_ON_CPU_STORE(name)                                                          \
  template <typename T>                                                                  \
  inline void name(T* target, const std::type_identity_t<T>& value, CUDA_ON_CPU_WHERE) { \
    *cuda_on_cpu::aligned(target, where) = value;                                        \
  }
CUDA_ON_CPU_LOAD(__ldg)
CUDA_ON_CPU_LOAD(__ldca)
CUDA_ON_CPU_LOAD(__ldcg)
CUDA_ON_CPU_LOAD(__ldcs)
CUDA_ON_CPU_LOAD(__ldcv)
CUDA_ON_CPU_LOAD(__ldlu)
CUDA_ON_CPU_STORE(__stcg)
CUDA_ON_CPU_STORE(__stcs)
CUDA_ON_CPU_STORE(__stwb)
CUDA_ON_CPU_STORE(__stwt)
#undef CUDA_ON_CPU_LOAD
#undef CUDA_ON_CPU_STORE

//--------------------------------------------------------------------------------------------- maths

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double a) { return 1.0 / a; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __double2float_rn(double a) { return static_cast<float>(a); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }

namespace cuda_on_cpu {

template <typename To, typename From>
inline To bits(From from) {
  To to;
  static_assert(sizeof to == sizeof from);
  std::memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace cuda_on_cpu

inline unsigned __float_as_uint(float x) { return cuda_on_cpu::bits<unsigned>(x); }
inline int __float_as_int(float x) { return cuda_on_cpu::bits<int>(x); }
inline float __uint_as_float(unsigned x) { return cuda_on_cpu::bits<float>(x); }
inline float __int_as_float(int x) { return cuda_on_cpu::bits<float>(x); }
inline long long __double_as_longlong(double x) { return cuda_on_cpu::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return cuda_on_cpu::bits<double>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x != 0 ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <typename A, typename B>
inline std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <typename A, typename B>
inline std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}
