// The tests' side of cuda_on_cpu: options, buffers, what was launched. One C interface for the C++
// drivers and for Python (emulator.py).
#pragma once

#include <cstddef>
#include <stdexcept>

namespace cuda_on_cpu {

// What a launch (or a host call) throws when it finds something wrong. The text says it all.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace cuda_on_cpu

#define CUDA_ON_CPU_API extern "C" __attribute__((visibility("default")))

// Sets an option; 0 if there is none of this name. All are described in internal.h (struct Options).
CUDA_ON_CPU_API int cuda_on_cpu_set(const char* option, long value);

// A "device" buffer on pages of its own: its last byte (rounded up to the option "alignment") lies before
// an unmapped megabyte, its first page lies after one. Filled with 0xFF bytes (NaN). `written`: 0 if reading
// a byte before a kernel (or a copy, or cuda_on_cpu_mark_written) wrote it is a mistake. Null if there is no
// memory.
CUDA_ON_CPU_API void* cuda_on_cpu_allocate(std::size_t bytes, const char* name, int written);
// Returns null, or a text when the bytes next to the buffer were overwritten or it is no such buffer.
CUDA_ON_CPU_API const char* cuda_on_cpu_free(void* buffer);

// Memory that something else owns (a tensor): only "races" builds look at it. An overlapping buffer
// that was added before is forgotten: its memory has a new owner.
CUDA_ON_CPU_API void cuda_on_cpu_add_buffer(const void* buffer, std::size_t bytes, const char* name,
                                            int written);
CUDA_ON_CPU_API void cuda_on_cpu_drop_buffer(const void* buffer);
CUDA_ON_CPU_API void cuda_on_cpu_mark_written(const void* from, std::size_t bytes);

// Runs the copies that still wait on any stream. Returns null or what went wrong.
CUDA_ON_CPU_API const char* cuda_on_cpu_synchronize();

// "launches", "copies" (done), "waiting_copies", "threads", "switches", "barriers", "exchanges",
// "accesses" (checked), "instrumented" (1 in "races" builds); -1 for another name.
CUDA_ON_CPU_API long cuda_on_cpu_count(const char* what);
// The kernels launched since the last reset, one name a line.
CUDA_ON_CPU_API const char* cuda_on_cpu_launch_names();
// Forgets the launches, the counts, the waiting copies and the last error.
CUDA_ON_CPU_API void cuda_on_cpu_reset();
// The text of the last error that was thrown; "" if there was none.
CUDA_ON_CPU_API const char* cuda_on_cpu_last_error();
