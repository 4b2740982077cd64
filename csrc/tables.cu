// tables: what all launchers share on the host, and how a table gets to the device.
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

int vector_width() {
  int device = 0, major = 0;
  // Both read what the runtime has cached; neither synchronises.
  if (cudaGetDevice(&device) != cudaSuccess) return kNarrow;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major >= 10 ? kWide : kNarrow;
}

Status status() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
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
