// The GPU launchers as torch ops (`launch_*`): tensors and tables in, one launch each. fastaccum/gpu.py
// calls them; it defines their schemas and makes their tables. LibTorch stable ABI only.
//
// What is checked here keeps a wrong call from reaching memory that is not its own, as far as the host
// can see it: a table's entries lie on the device. The same file, with FASTACCUM_CUDA_ON_CPU, registers
// the emulated kernels for CPU tensors in the tests.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <limits>
#include <optional>

#include "gpu.h"

#if defined(FASTACCUM_CUDA_ON_CPU)
#define FASTACCUM_GPU_KEY CPU
#else
#include "current_stream.h"
#define FASTACCUM_GPU_KEY CUDA
#endif

namespace fastaccum::binding_gpu {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

//--------------------------------------------------------------------------------- device and stream

bool on_gpu(const Tensor& tensor) {
#if defined(FASTACCUM_CUDA_ON_CPU)
  return tensor.is_cpu();
#else
  return tensor.is_cuda();
#endif
}

// Makes a tensor's device the current one, and knows its current stream.
struct Place {
#if defined(FASTACCUM_CUDA_ON_CPU)
  explicit Place(const Tensor&) {}
  gpu::Stream stream = nullptr;
#else
  torch::stable::accelerator::DeviceGuard guard;
  gpu::Stream stream = nullptr;

  explicit Place(const Tensor& tensor) : guard(tensor.get_device_index()) {
    void* current = nullptr;
    const CurrentStream current_stream = current_stream_of_torch();
    STD_TORCH_CHECK(current_stream != nullptr,
                    "fastaccum: libtorch_cuda is not loaded: this is a CPU build of torch");
    STD_TORCH_CHECK(current_stream(tensor.get_device_index(), &current) == 0,
                    "fastaccum: torch did not tell its current CUDA stream");
    stream = static_cast<gpu::Stream>(current);
    const gpu::Status status = gpu::use_device(tensor.get_device_index());
    STD_TORCH_CHECK(status == nullptr, "fastaccum: the device cannot be used: ", status);
  }
#endif
};

void check(gpu::Status status, const char* op) {
  STD_TORCH_CHECK(status == nullptr, "fastaccum: ", op, ": the launch failed: ", status);
}

//----------------------------------------------------------------------------------- reading tensors

template <typename T>
struct ScalarTypeOf;
template <>
struct ScalarTypeOf<float> {
  static constexpr ScalarType value = ScalarType::Float;
};
template <>
struct ScalarTypeOf<double> {
  static constexpr ScalarType value = ScalarType::Double;
};
template <>
struct ScalarTypeOf<std::int32_t> {
  static constexpr ScalarType value = ScalarType::Int;
};
template <>
struct ScalarTypeOf<std::int64_t> {
  static constexpr ScalarType value = ScalarType::Long;
};

// A contiguous table on the GPU of one dtype with at least `numel` elements.
template <typename T>
T* table(const Tensor& tensor, const char* argument, std::int64_t numel) {
  STD_TORCH_CHECK(on_gpu(tensor) && tensor.is_contiguous() &&
                      tensor.scalar_type() == ScalarTypeOf<T>::value && tensor.numel() >= numel,
                  "fastaccum: ", argument,
                  " must be a contiguous tensor on the GPU, of the documented dtype, with at least ", numel,
                  " elements, got ", tensor.numel());
  return static_cast<T*>(const_cast<void*>(tensor.const_data_ptr()));
}

gpu::Entry* entries(const Tensor& tensor, const char* argument, std::int64_t numel) {
  return reinterpret_cast<gpu::Entry*>(table<std::int64_t>(tensor, argument, numel));
}

// Words on the CPU travel by value, on the GPU they are read there.
gpu::Words words(const Tensor& tensor, const char* argument, std::int64_t numel) {
  STD_TORCH_CHECK(
      tensor.is_contiguous() && tensor.scalar_type() == ScalarType::Long && tensor.numel() >= numel,
      "fastaccum: ", argument, " must be contiguous int64 with at least ", numel, " elements, got ",
      tensor.numel());
  const auto* data = static_cast<const gpu::Entry*>(tensor.const_data_ptr());
#if defined(FASTACCUM_CUDA_ON_CPU)
  // All tensors are the CPU's: what would be too long by value must have been put on the device.
  if (tensor.numel() > gpu::kFinishWords) return {nullptr, data, tensor.numel()};
#else
  if (!tensor.is_cpu()) return {nullptr, entries(tensor, argument, numel), tensor.numel()};
#endif
  return {data, nullptr, tensor.numel()};
}

gpu::Scalar scalar(const Optional& tensor, const char* argument, double otherwise) {
  if (!tensor.has_value()) return {nullptr, otherwise};
  STD_TORCH_CHECK(tensor->numel() == 1 && tensor->scalar_type() == ScalarType::Double,
                  "fastaccum: ", argument, " must be one float64 element");
  const auto* data = static_cast<const double*>(tensor->const_data_ptr());
  if (tensor->is_cpu()) return {nullptr, *data};
  return {data, otherwise};
}

gpu::Layout layout(const Tensor& strand_segment, const Tensor& segments) {
  static_assert(sizeof(gpu::Segment) == 2 * sizeof(std::int64_t));
  STD_TORCH_CHECK(strand_segment.numel() % kStrandsPerChunk == 0 && segments.numel() % 2 == 0,
                  "fastaccum: strand_segment must name whole chunks' strands, segments must be [n, 2]");
  return {table<std::int32_t>(strand_segment, "strand_segment", 0),
          reinterpret_cast<const gpu::Segment*>(table<std::int64_t>(segments, "segments", 0)),
          segments.numel() / 2, strand_segment.numel() / kStrandsPerChunk};
}

gpu::Partials partials_of(const Tensor& partials, std::int64_t n_chunks) {
  STD_TORCH_CHECK(
      partials.dim() == 2 && partials.size(0) == 2 && partials.size(1) >= n_chunks && on_gpu(partials) &&
          partials.scalar_type() == ScalarType::Double && (partials.stride(1) == 1 || partials.size(1) <= 1),
      "fastaccum: partials must be float64 [2, n_chunks] on the GPU with at least ", n_chunks, " columns");
  double* sums = static_cast<double*>(partials.mutable_data_ptr());
  return {sums, sums + partials.stride(0)};
}

gpu::NormSpec norm_spec(double norm_type, const Optional& scale) {
  const Norm norm = norm_type == 2.0                                       ? Norm::kTwo
                    : norm_type == 1.0                                     ? Norm::kOne
                    : norm_type == std::numeric_limits<double>::infinity() ? Norm::kInf
                                                                           : Norm::kPower;
  return {norm, norm_type, scalar(scale, "scale", 1.0)};
}

DType dtype_of(const Tensor& tensor, const char* argument) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::Double:
      return DType::kFloat64;
    default:
      break;
  }
  STD_TORCH_CHECK(false, "fastaccum: ", argument, " must be float32, bfloat16, float16 or float64");
}

//-------------------------------------------------------------------------------------------- the ops

void launch_gather(const Tensor& buffer, const Optional& partials, const Tensor& strand_segment,
                   const Tensor& segments, const Tensor& fresh, const Optional& kept, const Optional& weight,
                   const Optional& kept_weight, double norm_type) {
  gpu::GatherArgs args{};
  args.layout = layout(strand_segment, segments);
  const std::int64_t n_chunks = args.layout.n_chunks;
  STD_TORCH_CHECK(on_gpu(buffer) && buffer.is_contiguous() && buffer.numel() > (n_chunks - 1) * kChunk,
                  "fastaccum: buffer must be contiguous, on the GPU, and reach into chunk ", n_chunks);
  args.buffer = buffer.mutable_data_ptr();
  args.buffer_dtype = dtype_of(buffer, "buffer");
  args.fresh = words(fresh, "fresh", args.layout.n_segments);
  if (kept.has_value()) args.kept = entries(*kept, "kept", args.layout.n_segments);
  args.weight = scalar(weight, "weight", 1.0);
  args.kept_weight = scalar(kept_weight, "kept_weight", 1.0);
  if (partials.has_value()) args.partials = partials_of(*partials, n_chunks);
  args.norm = norm_spec(norm_type, {}).norm;
  const Place place(buffer);
  check(gpu::gather(args, place.stream), "launch_gather");
}

void launch_norm(const Tensor& partials, const Tensor& strand_segment, const Tensor& segments,
                 const Tensor& pointers, double norm_type, const Optional& scale) {
  const gpu::Layout at = layout(strand_segment, segments);
  const gpu::NormArgs args{at, entries(pointers, "pointers", at.n_segments),
                           partials_of(partials, at.n_chunks), norm_spec(norm_type, scale)};
  const Place place(partials);
  check(gpu::norm(args, place.stream), "launch_norm");
}

void launch_finish(const Tensor& norm, const Tensor& group_norms, const Tensor& factor, const Tensor& skip,
                   const Tensor& skipped, const Tensor& steps, const Tensor& scalars, const Tensor& partials,
                   const Tensor& spans, const Tensor& packed, std::int64_t n_groups, const Tensor& weight,
                   const Tensor& divisor, const Tensor& group, double norm_type, const Optional& scale,
                   bool skip_nonfinite, const Optional& found_inf) {
  gpu::FinishArgs args{};
  args.partials = partials_of(partials, 0);
  STD_TORCH_CHECK(spans.numel() % 3 == 0, "fastaccum: spans must have shape [n, 3]");
  args.n_spans = spans.numel() / 3;
  args.spans = reinterpret_cast<const gpu::Span*>(table<std::int64_t>(spans, "spans", 3 * args.n_spans));
  args.n_groups = n_groups;
  args.n_norm_groups = factor.numel();
  args.n_slots = steps.numel();
  args.words =
      words(packed, "words", n_groups * gpu::kGroupWords + args.n_norm_groups + (args.n_slots + 63) / 64);
  args.weight = scalar(weight, "weight", 1.0);
  args.divisor = scalar(divisor, "divisor", 1.0);
  args.spec = norm_spec(norm_type, scale);
  args.skip_nonfinite = skip_nonfinite;
  args.group = table<std::int64_t>(group, "group", args.n_slots);
  args.steps = table<float>(steps, "steps", args.n_slots);
  args.scalars = table<double>(scalars, "scalars", args.n_slots * kScalarColumns);
  args.norm = table<float>(norm, "norm", 1);
  args.group_norms = table<double>(group_norms, "group_norms", args.n_norm_groups);
  args.factor = table<double>(factor, "factor", args.n_norm_groups);
  args.skip = table<std::int32_t>(skip, "skip", 1);
  args.skipped = table<std::int64_t>(skipped, "skipped", 1);
  if (found_inf.has_value()) args.found_inf = table<float>(*found_inf, "found_inf", 1);
  const Place place(partials);
  check(gpu::finish(args, place.stream), "launch_finish");
}

void launch_scale(const Tensor& strand_segment, const Tensor& segments, const Tensor& pointers,
                  const Tensor& factor, double max_value) {
  const gpu::Layout at = layout(strand_segment, segments);
  const gpu::ScaleArgs args{at, entries(pointers, "table", 3 * at.n_segments),
                            table<double>(factor, "factor", 1), factor.numel(), max_value};
  const Place place(factor);
  check(gpu::scale(args, place.stream), "launch_scale");
}

gpu::UpdateArgs update_args(const Tensor& strand_segment, const Tensor& segments, const Tensor& pointers,
                            const Tensor& grads, const Tensor& groups, const Tensor& scalars,
                            const Tensor& factor, const Tensor& skip, bool full) {
  const gpu::Layout at = layout(strand_segment, segments);
  return {at,
          entries(pointers, "table", gpu::kTableRows * at.n_segments),
          entries(grads, "grads", at.n_segments),
          words(groups, "words", gpu::kGroupWords),
          table<double>(scalars, "scalars", kScalarColumns),
          table<double>(factor, "factor", 1),
          scalars.numel() / kScalarColumns,
          factor.numel(),
          table<std::int32_t>(skip, "skip", 1),
          full};
}

void launch_adam(const Tensor& strand_segment, const Tensor& segments, const Tensor& pointers,
                 const Tensor& grads, const Tensor& groups, const Tensor& scalars, const Tensor& factor,
                 const Tensor& skip, bool full) {
  const gpu::UpdateArgs args =
      update_args(strand_segment, segments, pointers, grads, groups, scalars, factor, skip, full);
  const Place place(factor);
  check(gpu::adam(args, place.stream), "launch_adam");
}

void launch_sgd(const Tensor& strand_segment, const Tensor& segments, const Tensor& pointers,
                const Tensor& grads, const Tensor& groups, const Tensor& scalars, const Tensor& factor,
                const Tensor& skip, bool full) {
  const gpu::UpdateArgs args =
      update_args(strand_segment, segments, pointers, grads, groups, scalars, factor, skip, full);
  const Place place(factor);
  check(gpu::sgd(args, place.stream), "launch_sgd");
}

void launch_store(const Tensor& target, const Tensor& values) {
  STD_TORCH_CHECK(values.is_cpu() && values.is_contiguous() && values.scalar_type() == ScalarType::Long &&
                      values.numel() <= gpu::kTableEntries,
                  "fastaccum: words must be contiguous int64 on the CPU, at most ",
                  static_cast<std::int64_t>(gpu::kTableEntries), ", got ", values.numel());
  gpu::Entry* const to = entries(target, "table", values.numel());
  const Place place(target);
  check(gpu::store(to, static_cast<const gpu::Entry*>(values.const_data_ptr()), values.numel(), place.stream),
        "launch_store");
}

void launch_upload(const Tensor& target, const Tensor& pinned) {
  STD_TORCH_CHECK(pinned.is_cpu() && pinned.is_contiguous() && pinned.scalar_type() == ScalarType::Long,
                  "fastaccum: pinned must be contiguous int64 on the CPU");
  gpu::Entry* const to = entries(target, "table", pinned.numel());
  const Place place(target);
  STD_TORCH_CHECK(!gpu::capturing(place.stream),
                  "fastaccum: a table would have to be copied while a CUDA graph is being captured, which "
                  "replays would read again from memory that has changed by then. Run one window with the "
                  "same tensors before the capture");
  check(gpu::upload(to, pinned.const_data_ptr(),
                    pinned.numel() * static_cast<std::int64_t>(sizeof(gpu::Entry)), place.stream),
        "launch_upload");
}

// Prepares the device: a first launch of a kernel may load code, which a capture does not allow. Returns
// the largest number of words that travel by value.
std::int64_t launch_prepare(const Tensor& any) {
  const Place place(any);
  check(gpu::load_kernels(), "launch_prepare");
  return gpu::kFinishWords;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastaccum, FASTACCUM_GPU_KEY, m) {
  m.impl("launch_gather", TORCH_BOX(&launch_gather));
  m.impl("launch_norm", TORCH_BOX(&launch_norm));
  m.impl("launch_finish", TORCH_BOX(&launch_finish));
  m.impl("launch_scale", TORCH_BOX(&launch_scale));
  m.impl("launch_adam", TORCH_BOX(&launch_adam));
  m.impl("launch_sgd", TORCH_BOX(&launch_sgd));
  m.impl("launch_store", TORCH_BOX(&launch_store));
  m.impl("launch_upload", TORCH_BOX(&launch_upload));
  m.impl("launch_prepare", TORCH_BOX(&launch_prepare));
}

}  // namespace fastaccum::binding_gpu
