// The only file that sees torch: turns tensors into the core's tables and registers the CPU ops.
//
// Schemas, fakes and the checks with readable messages live in fastaccum/ops.py. What is checked again
// here is what keeps a wrong call from touching memory that is not its own. LibTorch stable ABI only.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "cpu/core.h"
#include "finish.h"
#include "norm.h"

namespace fastaccum::binding {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

//----------------------------------------------------------------------------------- reading tensors

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
  STD_TORCH_CHECK(false, "fastaccum: ", argument,
                  " must be float32, bfloat16, float16 or float64; convert it first");
}

template <typename T>
ScalarType scalar_type_of();
template <>
ScalarType scalar_type_of<double>() {
  return ScalarType::Double;
}
template <>
ScalarType scalar_type_of<float>() {
  return ScalarType::Float;
}
template <>
ScalarType scalar_type_of<std::int64_t>() {
  return ScalarType::Long;
}
template <>
ScalarType scalar_type_of<std::int32_t>() {
  return ScalarType::Int;
}
template <>
ScalarType scalar_type_of<std::uint8_t>() {
  return ScalarType::Byte;
}

// A contiguous CPU table of one dtype with at least `numel` elements.
template <typename T>
T* table(const Tensor& tensor, const char* argument, std::int64_t numel) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == scalar_type_of<T>() &&
                      tensor.numel() >= numel,
                  "fastaccum: ", argument,
                  " must be a contiguous CPU tensor of the documented dtype with at least ", numel,
                  " elements, got ", tensor.numel());
  return static_cast<T*>(const_cast<void*>(tensor.const_data_ptr()));
}

double scalar(const std::optional<Tensor>& tensor, const char* argument, double otherwise) {
  return tensor.has_value() ? *table<double>(*tensor, argument, 1) : otherwise;
}

// The elements lie in `numel` consecutive places, in some order of dimensions.
bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  std::int64_t last = 0;
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (strides[d] < 0 || (sizes[d] > 1 && strides[d] == 0)) return false;
    last += (sizes[d] - 1) * strides[d];
  }
  return last + 1 == tensor.numel();
}

struct Layout {
  const std::int64_t* rows;  // [n, 2]: offset, numel
  std::int64_t n;
  std::int64_t n_chunks;

  explicit Layout(const Tensor& segments) {
    STD_TORCH_CHECK(segments.dim() == 2 && segments.size(1) == 2,
                    "fastaccum: segments must have shape [n, 2] (offset, numel)");
    n = segments.size(0);
    rows = table<std::int64_t>(segments, "segments", 2 * n);
    std::int64_t end = 0;
    for (std::int64_t k = 0; k < n; ++k) {
      STD_TORCH_CHECK(rows[2 * k] >= end && rows[2 * k] % kStrand == 0 && rows[2 * k + 1] >= 0,
                      "fastaccum: segments must be sorted, must not overlap and must start on multiples of ",
                      kStrand, "; row ", k, " does not");
      end = rows[2 * k] + rows[2 * k + 1];
    }
    n_chunks = (end + kChunk - 1) / kChunk;
  }
  cpu::Segment at(std::int64_t k) const { return {rows[2 * k], rows[2 * k + 1]}; }
};

// Segment numbers of a tensor list: ascending, so that tables come out sorted.
const std::int64_t* index_of(const Tensor& index, std::size_t count, const Layout& layout,
                             const char* argument) {
  const std::int64_t* k = table<std::int64_t>(index, argument, static_cast<std::int64_t>(count));
  for (std::size_t i = 0; i < count; ++i)
    STD_TORCH_CHECK(k[i] >= 0 && k[i] < layout.n && (i == 0 || k[i] > k[i - 1]), "fastaccum: ", argument,
                    " must hold ascending segment numbers below ", layout.n, ", got ", k[i], " at ", i);
  return k;
}

// One tensor of a segment: on the CPU, dense, of the segment's size.
struct Data {
  void* pointer;
  DType dtype;
};
Data data_of(const Tensor& tensor, const cpu::Segment& at, const char* argument, std::size_t i) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.numel() == at.numel && is_dense(tensor), "fastaccum: ", argument,
                  "[", i, "] must be a dense CPU tensor of ", at.numel, " elements, got ", tensor.numel());
  return {const_cast<void*>(tensor.const_data_ptr()), dtype_of(tensor, argument)};
}

cpu::NormSpec norm_spec(double norm_type, double scale) {
  const Norm norm = norm_type == 2.0                                       ? Norm::kTwo
                    : norm_type == 1.0                                     ? Norm::kOne
                    : norm_type == std::numeric_limits<double>::infinity() ? Norm::kInf
                                                                           : Norm::kPower;
  return {norm, norm_type, usable_scale(scale)};
}

struct Partials {
  double* sums = nullptr;
  double* nonfinite = nullptr;
};
Partials partials_of(const Tensor& partials, std::int64_t n_chunks) {
  STD_TORCH_CHECK(
      partials.dim() == 2 && partials.size(0) == 2 && partials.size(1) >= n_chunks && partials.is_cpu() &&
          partials.scalar_type() == ScalarType::Double && (partials.stride(1) == 1 || partials.size(1) <= 1),
      "fastaccum: partials must be float64 [2, n_chunks] on the CPU with at least ", n_chunks, " columns");
  double* sums = static_cast<double*>(partials.mutable_data_ptr());
  return {sums, sums + partials.stride(0)};
}

const cpu::ParallelFor kTorchThreads{
    [](std::int64_t count, void (*body)(std::int64_t, std::int64_t, void*), void* context) {
      torch::stable::parallel_for(
          0, count, 1, [body, context](std::int64_t begin, std::int64_t end) { body(begin, end, context); });
    }};

//-------------------------------------------------------------------------------------------- the ops

void gather_(const Tensor& buffer, const Tensor& present, const std::optional<Tensor>& partials,
             const Tensor& segments, const Tensors& fresh, const Tensor& fresh_index, const Tensors& kept,
             const Tensor& kept_index, const std::optional<Tensor>& weight,
             const std::optional<Tensor>& kept_weight, double norm_type) {
  const Layout layout(segments);
  std::uint8_t* here = table<std::uint8_t>(present, "present", layout.n);
  const std::int64_t end = layout.n == 0 ? 0 : layout.at(layout.n - 1).offset + layout.at(layout.n - 1).numel;
  STD_TORCH_CHECK(buffer.is_cpu() && buffer.is_contiguous() && buffer.numel() >= end,
                  "fastaccum: buffer must be a contiguous CPU tensor of at least ", end, " elements");
  std::vector<cpu::GatherSegment> rows(static_cast<std::size_t>(layout.n));
  for (std::int64_t k = 0; k < layout.n; ++k)
    rows[k] = {layout.at(k), nullptr, nullptr, DType::kFloat32, DType::kFloat32, here[k] != 0};
  const std::int64_t* k_fresh = index_of(fresh_index, fresh.size(), layout, "fresh_index");
  for (std::size_t i = 0; i < fresh.size(); ++i) {
    const Data data = data_of(fresh[i], layout.at(k_fresh[i]), "fresh", i);
    rows[k_fresh[i]].fresh = data.pointer;
    rows[k_fresh[i]].fresh_dtype = data.dtype;
  }
  const std::int64_t* k_kept = index_of(kept_index, kept.size(), layout, "kept_index");
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const Data data = data_of(kept[i], layout.at(k_kept[i]), "kept", i);
    STD_TORCH_CHECK(here[k_kept[i]] == 0, "fastaccum: kept[", i, "] is already in the buffer");
    rows[k_kept[i]].kept = data.pointer;
    rows[k_kept[i]].kept_dtype = data.dtype;
  }
  Partials sums;
  std::int64_t first_chunk = 0, n_chunks = layout.n_chunks;
  if (partials.has_value()) {
    sums = partials_of(*partials, n_chunks);
  } else {
    // A bucket brings a few segments of many: the others are not walked over, and threads share these.
    // Empty tensors have no address and go with the others; they only become present.
    const auto idle = [](const cpu::GatherSegment& s) { return s.fresh == nullptr && s.kept == nullptr; };
    rows.erase(std::remove_if(rows.begin(), rows.end(), idle), rows.end());
    n_chunks = 0;
    if (!rows.empty()) {
      first_chunk = rows.front().at.offset / kChunk;
      n_chunks = (rows.back().at.offset + rows.back().at.numel + kChunk - 1) / kChunk - first_chunk;
      for (cpu::GatherSegment& s : rows) s.at.offset -= first_chunk * kChunk;
    }
  }
  const DType dtype = dtype_of(buffer, "buffer");
  char* start = static_cast<char*>(buffer.mutable_data_ptr()) + first_chunk * kChunk * size_of(dtype);
  cpu::gather({start, dtype, rows.data(), static_cast<std::int64_t>(rows.size()), n_chunks,
               scalar(weight, "weight", 1.0), scalar(kept_weight, "kept_weight", 1.0), sums.sums,
               sums.nonfinite, norm_spec(norm_type, 1.0)},
              kTorchThreads);
  for (std::size_t i = 0; i < fresh.size(); ++i) here[k_fresh[i]] = 1;
  for (std::size_t i = 0; i < kept.size(); ++i) here[k_kept[i]] = 1;
}

void norm_(const Tensor& partials, const Tensor& segments, const Tensors& tensors, const Tensor& index,
           double norm_type, const std::optional<Tensor>& scale) {
  const Layout layout(segments);
  const std::int64_t* k = index_of(index, tensors.size(), layout, "index");
  std::vector<cpu::NormSegment> rows(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Data data = data_of(tensors[i], layout.at(k[i]), "tensors", i);
    rows[i] = {layout.at(k[i]), data.pointer, data.dtype};
  }
  const Partials sums = partials_of(partials, layout.n_chunks);
  cpu::norm({rows.data(), static_cast<std::int64_t>(rows.size()), layout.n_chunks, sums.sums, sums.nonfinite,
             norm_spec(norm_type, scalar(scale, "scale", 1.0))},
            kTorchThreads);
}

// Hyper-parameter rows, with the learning rates that are tensors read into them.
std::vector<double> hyper_rows(const Tensor& hyper, const Tensors& lrs,
                               const std::optional<Tensor>& lr_groups) {
  STD_TORCH_CHECK(hyper.dim() == 2 && hyper.size(1) == kHyperColumns,
                  "fastaccum: hyper must have shape [groups, ", static_cast<std::int64_t>(kHyperColumns),
                  "]");
  const double* first = table<double>(hyper, "hyper", hyper.numel());
  std::vector<double> rows(first, first + hyper.numel());
  if (lrs.empty()) return rows;
  STD_TORCH_CHECK(lr_groups.has_value(), "fastaccum: lrs needs lr_groups");
  const std::int64_t* g = table<std::int64_t>(*lr_groups, "lr_groups", static_cast<std::int64_t>(lrs.size()));
  for (std::size_t i = 0; i < lrs.size(); ++i) {
    STD_TORCH_CHECK(g[i] >= 0 && g[i] < hyper.size(0), "fastaccum: lr_groups[", i, "] is out of range");
    STD_TORCH_CHECK(lrs[i].is_cpu() && lrs[i].numel() == 1, "fastaccum: lrs[", i,
                    "] must be one element on the CPU");
    double& lr = rows[g[i] * kHyperColumns + kLr];
    if (dtype_of(lrs[i], "lrs") == DType::kFloat64) {
      lr = *static_cast<const double*>(lrs[i].const_data_ptr());
    } else {
      lr = *table<float>(lrs[i], "lrs", 1);
    }
  }
  return rows;
}

const std::int64_t* groups_of(const Tensor& group, std::int64_t n, const Tensor& hyper) {
  const std::int64_t* g = table<std::int64_t>(group, "group", n);
  for (std::int64_t i = 0; i < n; ++i)
    STD_TORCH_CHECK(g[i] >= 0 && g[i] < hyper.size(0), "fastaccum: group[", i, "] is out of range");
  return g;
}

// Rows of `scalars` (and of `steps`), one per parameter.
const std::int64_t* rows_of(const Tensor& row, std::int64_t n, const Tensor& scalars) {
  STD_TORCH_CHECK(scalars.dim() == 2 && scalars.size(1) == kScalarColumns,
                  "fastaccum: scalars must have shape [n, ", static_cast<std::int64_t>(kScalarColumns), "]");
  const std::int64_t* r = table<std::int64_t>(row, "row", n);
  for (std::int64_t i = 0; i < n; ++i)
    STD_TORCH_CHECK(r[i] >= 0 && r[i] < scalars.size(0), "fastaccum: row[", i, "] is beyond scalars");
  return r;
}

void finish_(const Tensor& norm, const Tensor& group_norms, const Tensor& factor, const Tensor& skip,
             const Tensor& skipped, const Tensor& partials, const Tensor& spans, const Tensor& max_norm,
             const Tensor& weight, const Tensor& divisor, const std::optional<Tensor>& steps,
             const std::optional<Tensor>& scalars, const std::optional<Tensor>& row,
             const std::optional<Tensor>& group, const std::optional<Tensor>& hyper, const Tensors& lrs,
             const std::optional<Tensor>& lr_groups, double norm_type, const std::optional<Tensor>& scale,
             bool skip_nonfinite, const std::optional<Tensor>& found_inf) {
  STD_TORCH_CHECK(spans.dim() == 2 && spans.size(1) == 3,
                  "fastaccum: spans must have shape [n, 3] (norm group, first chunk, end chunk)");
  const std::int64_t n_groups = max_norm.numel();
  const std::int64_t n_spans = spans.size(0);
  const std::int64_t* rows = table<std::int64_t>(spans, "spans", 3 * n_spans);
  std::int64_t n_chunks = 0;
  for (std::int64_t s = 0; s < n_spans; ++s) {
    STD_TORCH_CHECK(rows[3 * s] >= 0 && rows[3 * s] < n_groups && rows[3 * s + 1] >= 0 &&
                        rows[3 * s + 2] >= rows[3 * s + 1],
                    "fastaccum: spans row ", s, " is out of range");
    n_chunks = rows[3 * s + 2] > n_chunks ? rows[3 * s + 2] : n_chunks;
  }
  const Partials sums = partials_of(partials, n_chunks);
  cpu::FinishArgs args{};
  std::vector<double> hypers;
  if (steps.has_value()) {
    STD_TORCH_CHECK(scalars.has_value() && row.has_value() && group.has_value() && hyper.has_value(),
                    "fastaccum: steps needs scalars, row, group and hyper");
    args.n = row->numel();
    args.row = rows_of(*row, args.n, *scalars);
    args.group = groups_of(*group, args.n, *hyper);
    hypers = hyper_rows(*hyper, lrs, lr_groups);
    args.hyper = hypers.data();
    args.steps = table<float>(*steps, "steps", scalars->size(0));
    args.scalars = table<double>(*scalars, "scalars", scalars->numel());
  }
  args.partials = sums.sums;
  args.nonfinite = sums.nonfinite;
  args.spans = reinterpret_cast<const cpu::Span*>(rows);
  args.n_spans = n_spans;
  args.max_norm = table<double>(max_norm, "max_norm", n_groups);
  args.n_norm_groups = n_groups;
  args.weight = *table<double>(weight, "weight", 1);
  args.divisor = *table<double>(divisor, "divisor", 1);
  args.skip_nonfinite = skip_nonfinite;
  args.spec = norm_spec(norm_type, scalar(scale, "scale", 1.0));
  args.norm = table<float>(norm, "norm", 1);
  args.group_norms = table<double>(group_norms, "group_norms", n_groups);
  args.factor = table<double>(factor, "factor", n_groups);
  args.skip = table<std::int32_t>(skip, "skip", 1);
  args.skipped = table<std::int64_t>(skipped, "skipped", 1);
  if (found_inf.has_value()) args.found_inf = table<float>(*found_inf, "found_inf", 1);
  cpu::finish(args);
}

void scale_into(const Tensors& out, const Tensors& tensors, const Tensor& factor, const Tensor& factor_index,
                double max_value) {
  STD_TORCH_CHECK(out.size() == tensors.size(), "fastaccum: as many outputs as tensors, got ",
                  static_cast<std::int64_t>(out.size()), " and ", static_cast<std::int64_t>(tensors.size()));
  const std::int64_t n = static_cast<std::int64_t>(out.size());
  const std::int64_t* f = table<std::int64_t>(factor_index, "factor_index", n);
  const double* factors = table<double>(factor, "factor", 1);
  std::vector<cpu::ScaleSegment> rows(out.size());
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    STD_TORCH_CHECK(f[i] >= 0 && f[i] < factor.numel(), "fastaccum: factor_index[", i, "] is out of range");
    const cpu::Segment at{offset, tensors[i].numel()};
    const Data from = data_of(tensors[i], at, "tensors", i);
    const Data to = data_of(out[i], at, "out", i);
    rows[i] = {at, from.pointer, to.pointer, from.dtype, to.dtype, factors[f[i]]};
    offset += (at.numel + kStrand - 1) / kStrand * kStrand;
  }
  cpu::scale({rows.data(), n, (offset + kChunk - 1) / kChunk, max_value}, kTorchThreads);
}

void scale_(const Tensors& tensors, const Tensor& factor, const Tensor& factor_index, double max_value) {
  scale_into(tensors, tensors, factor, factor_index, max_value);
}

void update(void (*run)(const cpu::UpdateArgs&, cpu::ParallelFor), const Tensors& params,
            std::initializer_list<const Tensors*> states, const Tensors& copies, const Tensors& grads,
            const Tensor& segments, const Tensor& index, const Tensor& group, const Tensor& row,
            const Tensor& hyper, const Tensor& scalars, const Tensor& factor, const Tensor& skip) {
  if (*table<std::int32_t>(skip, "skip", 1) != 0) return;
  const Layout layout(segments);
  const std::int64_t n = static_cast<std::int64_t>(params.size());
  const std::int64_t* k = index_of(index, params.size(), layout, "index");
  const std::int64_t* g = groups_of(group, n, hyper);
  const std::vector<double> h = hyper_rows(hyper, {}, {});
  const std::int64_t* r = rows_of(row, n, scalars);
  const double* s = table<double>(scalars, "scalars", scalars.numel());
  const double* factors = table<double>(factor, "factor", 1);
  STD_TORCH_CHECK(grads.size() == params.size() && (copies.empty() || copies.size() == params.size()),
                  "fastaccum: as many grads (and copies, if any) as params");
  std::vector<cpu::UpdateSegment> table_rows(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    cpu::UpdateSegment& row = table_rows[i];
    row.at = layout.at(k[i]);
    const Data param = data_of(params[i], row.at, "params", i);
    const Data grad = data_of(grads[i], row.at, "grads", i);
    row.param = param.pointer;
    row.param_dtype = param.dtype;
    row.grad = grad.pointer;
    row.grad_dtype = grad.dtype;
    int j = 0;
    for (const Tensors* list : states) {
      if (list->empty()) continue;
      STD_TORCH_CHECK(list->size() == params.size(), "fastaccum: as many states as params");
      const Data state = data_of((*list)[i], row.at, "states", i);
      row.states[j] = state.pointer;
      row.state_dtypes[j] = state.dtype;
      ++j;
    }
    if (!copies.empty()) {
      const Data copy = data_of(copies[i], row.at, "copies", i);
      row.copy = copy.pointer;
      row.copy_dtype = copy.dtype;
    }
    row.hyper = h.data() + g[i] * kHyperColumns;
    row.scalars = s + r[i] * kScalarColumns;
    const std::int64_t norm_group = static_cast<std::int64_t>(row.hyper[kNormGroup]);
    STD_TORCH_CHECK(norm_group >= 0 && norm_group < factor.numel(),
                    "fastaccum: hyper's norm group is out of range");
    row.factor = factors[norm_group];
    const int flags = static_cast<int>(row.hyper[kHyperFlags]);
    const bool adam = run == &cpu::adam;
    const int needed = adam ? ((flags & kAmsgrad) != 0 ? 3 : 2) : (row.hyper[kMomentum] != 0.0 ? 1 : 0);
    STD_TORCH_CHECK(j >= needed, "fastaccum: this update needs ", needed,
                    " state tensors per parameter, got ", j);
  }
  run({table_rows.data(), n, layout.n_chunks}, kTorchThreads);
}

void adam_(const Tensors& params, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
           const Tensors& max_exp_avg_sqs, const Tensors& copies, const Tensors& grads,
           const Tensor& segments, const Tensor& index, const Tensor& group, const Tensor& row,
           const Tensor& hyper, const Tensor& scalars, const Tensor& factor, const Tensor& skip) {
  update(&cpu::adam, params, {&exp_avgs, &exp_avg_sqs, &max_exp_avg_sqs}, copies, grads, segments, index,
         group, row, hyper, scalars, factor, skip);
}

void sgd_(const Tensors& params, const Tensors& momentum_buffers, const Tensors& copies, const Tensors& grads,
          const Tensor& segments, const Tensor& index, const Tensor& group, const Tensor& row,
          const Tensor& hyper, const Tensor& scalars, const Tensor& factor, const Tensor& skip) {
  update(&cpu::sgd, params, {&momentum_buffers}, copies, grads, segments, index, group, row, hyper, scalars,
         factor, skip);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastaccum, CPU, m) {
  m.impl("gather_", TORCH_BOX(&gather_));
  m.impl("norm_", TORCH_BOX(&norm_));
  m.impl("finish_", TORCH_BOX(&finish_));
  m.impl("scale_", TORCH_BOX(&scale_));
  m.impl("scale_into_", TORCH_BOX(&scale_into));
  m.impl("adam_", TORCH_BOX(&adam_));
  m.impl("sgd_", TORCH_BOX(&sgd_));
}

}  // namespace fastaccum::binding
