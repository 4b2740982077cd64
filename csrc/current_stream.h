// torch's current CUDA stream, without linking to the library that only CUDA builds of torch have.
#pragma once

#include <dlfcn.h>

namespace fastaccum {

// Of libtorch_cuda's C interface (stable ABI): writes the stream, returns 0 if all is well.
using CurrentStream = int (*)(int device, void** stream);

// Null where no CUDA build of torch is loaded. A weak reference would not do: Python loads torch's libraries
// with local scope, and ours depends on none that depends on libtorch_cuda, so the reference would stay null
// in every process. RTLD_NOLOAD finds what is loaded and never loads it.
inline CurrentStream current_stream_of_torch() {
  static const CurrentStream found = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    void* symbol = library != nullptr ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    return reinterpret_cast<CurrentStream>(symbol);
  }();
  return found;
}

}  // namespace fastaccum
