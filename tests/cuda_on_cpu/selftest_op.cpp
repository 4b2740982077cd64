// The kernels of the self-test as torch ops on the stable ABI, as a project would register its own.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "selftest.h"

namespace {

using torch::stable::Tensor;

float* data(const Tensor& t) { return static_cast<float*>(const_cast<void*>(t.const_data_ptr())); }

void copy(const Tensor& in, const Tensor& out, int64_t n) {
  copy_on_stream(data(in), data(out), static_cast<int>(n), nullptr);
}

// The copy is still waiting when the staging tensor goes back to the caller.
void upload(const Tensor& staging, const Tensor& in) {
  cudaMemcpyAsync(data(in), data(staging), static_cast<std::size_t>(staging.numel()) * sizeof(float),
                  cudaMemcpyHostToDevice, nullptr);
}

void exchange(const Tensor& out, bool sync_warp) { neighbours(data(out), sync_warp); }

}  // namespace

STABLE_TORCH_LIBRARY(cuda_on_cpu_selftest, m) {
  m.def("copy(Tensor input, Tensor(a!) output, int n) -> ()");
  m.def("exchange(Tensor(a!) output, bool sync_warp) -> ()");
  m.def("upload(Tensor staging, Tensor(a!) input) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(cuda_on_cpu_selftest, CPU, m) {
  m.impl("copy", TORCH_BOX(&copy));
  m.impl("exchange", TORCH_BOX(&exchange));
  m.impl("upload", TORCH_BOX(&upload));
}
