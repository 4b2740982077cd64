// The language of the *.cu files: CUDA under nvcc, or the layer that runs them on a CPU in the tests.
#pragma once

#if defined(FASTACCUM_CUDA_ON_CPU)
#include "cuda_on_cpu.h"
#else
#include <cuda_runtime.h>
#define FASTACCUM_LAUNCH(kernel, grid, block, shared, stream, ...) \
  kernel<<<(grid), (block), (shared), (stream)>>>(__VA_ARGS__)
#define FASTACCUM_GRID_CONSTANT(...) const __grid_constant__ __VA_ARGS__
#endif

// What holds if the tables are right. Looked at in debug builds and in the tests; a release build would
// pay for it in every strand.
#if defined(FASTACCUM_DEBUG) && defined(__CUDA_ARCH__)
#define FASTACCUM_ASSERT(condition) \
  do {                              \
    if (!(condition)) __trap();     \
  } while (false)
#elif defined(FASTACCUM_CUDA_ON_CPU)
#define FASTACCUM_ASSERT(condition) ::cuda_on_cpu::require((condition), #condition)
#else
#define FASTACCUM_ASSERT(condition) static_cast<void>(0)
#endif
