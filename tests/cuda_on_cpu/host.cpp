// The host calls of CUDA that launchers make, and the tests' interface to the rest.
#include <cstring>
#include <mutex>

#include "internal.h"

namespace cuda_on_cpu {

std::vector<std::string> launched;

namespace {

struct Copy {
  void* target;
  const void* source;
  std::size_t bytes;
};
std::map<cudaStream_t, std::vector<Copy>> waiting;

void run_copy(const Copy& c) {
  const Address target = reinterpret_cast<Address>(c.target);
  if (const Buffer* buffer = find_buffer(target); buffer != nullptr && target + c.bytes > buffer->end)
    throw_error("a copy of " + std::to_string(c.bytes) + " bytes to byte " +
                std::to_string(target - buffer->begin) + " runs past buffer '" + buffer->name + "' (" +
                std::to_string(buffer->end - buffer->begin) + " bytes)");
  std::memmove(c.target, c.source, c.bytes);
  mark_written(target, c.bytes);
  ++counts.copies;
}

}  // namespace

void run_copies(cudaStream_t stream) {
  const auto found = waiting.find(stream);
  if (found == waiting.end()) return;
  const std::vector<Copy> copies = std::move(found->second);
  waiting.erase(found);
  for (const Copy& c : copies) run_copy(c);
}

}  // namespace cuda_on_cpu

using namespace cuda_on_cpu;

//--------------------------------------------------------------------------------------- CUDA's calls

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  if (options.capturing)
    throw_error("cudaMemcpyAsync while a graph is being captured: a replay would read the source again");
  if (bytes != 0) waiting[stream].push_back({target, source, bytes});
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = options.capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (options.capturing) throw_error("cudaStreamSynchronize while a graph is being captured");
  run_copies(stream);
  return cudaSuccess;
}

cudaError_t cudaPeekAtLastError() { return static_cast<cudaError_t>(options.next_error); }

cudaError_t cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  options.next_error = 0;
  return error;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
  }
  return "unrecognized error code";
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return cudaErrorInvalidValue;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = 4;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = static_cast<int>(options.compute_capability);
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->ptxVersion = attributes->binaryVersion = static_cast<int>(10 * options.compute_capability);
  return cudaSuccess;
}

//---------------------------------------------------------------------------------------- control.h

int cuda_on_cpu_set(const char* option, long value) {
  static const std::map<std::string, long Options::*> members = {
      {"order", &Options::order},
      {"seed", &Options::seed},
      {"shuffle_blocks", &Options::shuffle_blocks},
      {"poison_shared", &Options::poison_shared},
      {"allow_early_exit", &Options::allow_early_exit},
      {"race_check", &Options::race_check},
      {"init_check", &Options::init_check},
      {"vector_align", &Options::vector_align},
      {"unknown_memory", &Options::unknown_memory},
      {"alignment", &Options::alignment},
      {"stack_bytes", &Options::stack_bytes},
      {"compute_capability", &Options::compute_capability},
      {"capturing", &Options::capturing},
      {"next_error", &Options::next_error},
  };
  const auto found = members.find(option);
  if (found == members.end()) return 0;
  options.*found->second = value;
  return 1;
}

const char* cuda_on_cpu_synchronize() {
  try {
    while (!waiting.empty()) run_copies(waiting.begin()->first);
  } catch (const Error&) {
    return last_error.c_str();
  }
  return nullptr;
}

long cuda_on_cpu_count(const char* what) {
  long copies = 0;
  for (const auto& [stream, list] : waiting) copies += static_cast<long>(list.size());
  const std::map<std::string, long> values = {
      {"launches", static_cast<long>(launched.size())},
      {"copies", counts.copies},
      {"waiting_copies", copies},
      {"threads", counts.threads},
      {"switches", counts.switches},
      {"barriers", counts.barriers},
      {"exchanges", counts.exchanges},
      {"accesses", counts.accesses},
      {"instrumented", instrumented},
  };
  const auto found = values.find(what);
  return found == values.end() ? -1 : found->second;
}

const char* cuda_on_cpu_launch_names() {
  static std::string text;
  text.clear();
  for (const std::string& name : launched) text += (text.empty() ? "" : "\n") + name;
  return text.c_str();
}

void cuda_on_cpu_reset() {
  launched.clear();
  counts = {};
  waiting.clear();
  last_error.clear();
}

const char* cuda_on_cpu_last_error() { return last_error.c_str(); }
