// tables: what all launchers share on the host, and how a table gets to the device.
#include <atomic>
#include <vector>

#include "rows.h"

namespace fastaccum::gpu {
namespace {

template <typename Table>
struct Params {
  Entry* table;
  std::int64_t count;
  Table words;
};

template <typename Table>
__global__ void store_kernel(FASTACCUM_GRID_CONSTANT(Params<Table>) p) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < p.count) p.table[i] = p.words.at(i);
}

std::vector<const void*>& known_kernels() {
  static std::vector<const void*> kernels;
  return kernels;
}

}  // namespace

bool remember(const void* kernel) {
  known_kernels().push_back(kernel);
  return true;
}

Status load_kernels() {
  for (const void* kernel : known_kernels()) {
    cudaFuncAttributes attributes;
    cudaFuncGetAttributes(&attributes, kernel);
  }
  return status();
}

namespace {

// Not what the device has, but what the code that was loaded for it was compiled for: a device of compute
// capability 10.0 may run code made from 9.0's PTX, in which the wide kernels are empty.
int compiled_width() {
  cudaFuncAttributes attributes{};
  const void* any = reinterpret_cast<const void*>(&store_kernel<OnDevice>);
  if (cudaFuncGetAttributes(&attributes, any) != cudaSuccess) return kNarrow;
  return attributes.ptxVersion >= 100 ? kWide : kNarrow;
}

}  // namespace

int vector_width() {
#if !defined(FASTACCUM_CUDA_ON_CPU)  // there the tests change it
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess && device < kDevices) {
    if (known[device].load(std::memory_order_relaxed) == 0) known[device].store(compiled_width());
    return known[device].load(std::memory_order_relaxed);
  }
#endif
  return compiled_width();
}

Status status() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

Status use_device(int device) {
  int current = -1;
  if (cudaGetDevice(&current) == cudaSuccess && current == device) return nullptr;
  cudaSetDevice(device);
  return status();
}

bool capturing(Stream stream) {
  cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &state) == cudaSuccess && state != cudaStreamCaptureStatusNone;
}

Status store(Entry* table, const Entry* words, std::int64_t count, Stream stream) {
  if (count == 0) return nullptr;
  return with_table(Words{words, nullptr, count}, [&](const auto& by_value) {
    using Table = std::decay_t<decltype(by_value)>;
    constexpr int kThreads = 128;
    const Params<Table> params{table, count, by_value};
    return launch<store_kernel<Table>>((count + kThreads - 1) / kThreads, kThreads, stream, params);
  });
}

Status upload(void* device, const void* pinned, std::int64_t bytes, Stream stream) {
  cudaMemcpyAsync(device, pinned, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice, stream);
  return status();
}

}  // namespace fastaccum::gpu
