// scale: target = clamp(source * factor) for a table of tensors; `clip` when given a clip's factor.
#include "rows.h"

namespace fastaccum::gpu {
namespace {

enum Row_ : int { kSource = 0, kTarget = 1, kIndex = 2 };

struct Params {
  Layout layout;
  const Entry* table;
  const double* factor;
  std::int64_t n_factors;
  double max_value;
};

template <typename real, int kVector, bool kWholeRows>
FASTACCUM_DEVICE void scale_strand(const Array& source, const Array& target, real factor, real high,
                                   const Access<real, kVector, kWholeRows> access) {
  constexpr int kUnrolled = kWholeRows ? unrolled<real, kVector>() : 1;
#pragma unroll 1
  for (int row = 0; row < kRows; row += kUnrolled) {
    if (row * kLanes >= access.left) break;
    Row<real, kVector> raw[kUnrolled];
#pragma unroll
    for (int u = 0; u < kUnrolled; ++u) raw[u] = access.read(source, row + u);
#pragma unroll
    for (int u = 0; u < kUnrolled; ++u) {
      real values[kVector];
      access.widen_row(source, raw[u], values);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const real x = values[j] * factor;
        values[j] = x > high ? high : (x < -high ? -high : x);
      }
      access.write(target, row + u, values);
    }
  }
}

template <typename real, int kVector>
FASTACCUM_DEVICE void scale_strand(const Array& source, const Array& target, double factor, double high,
                                   int first, int left) {
  const bool whole = left == kStrand && source.template vectorises<real, kVector>() &&
                     target.template vectorises<real, kVector>();
  if (whole) {
    scale_strand(source, target, static_cast<real>(factor), static_cast<real>(high),
                 Access<real, kVector, true>{first, left});
  } else {
    scale_strand(source, target, static_cast<real>(factor), static_cast<real>(high),
                 Access<real, kVector, false>{first, left});
  }
}

template <int kVector>
__global__ void __launch_bounds__(threads(kVector)) scale_kernel(FASTACCUM_GRID_CONSTANT(Params) p) {
  if constexpr (compiled<kVector>()) {
    const auto place = Place<kVector>::find(p.layout);
    if (place.segment < 0) return;
    const std::int64_t n = p.layout.n_segments;
    const Array source = Array::of(p.table[kSource * n + place.segment], place.from);
    const Array target = Array::of(p.table[kTarget * n + place.segment], place.from);
    const Entry index = p.table[kIndex * n + place.segment];
    FASTACCUM_ASSERT(index < static_cast<Entry>(p.n_factors));
    const double factor = p.factor[index];
    if (!source.exists()) return;
    const bool unclamped = p.max_value > 1.7976931348623157e308;
    if (source.data == target.data && factor == 1.0 && unclamped) return;
    if (source.dtype == DType::kFloat64 || target.dtype == DType::kFloat64) {
      scale_strand<double, kVector>(source, target, factor, p.max_value, place.first, place.left);
    } else {
      scale_strand<float, kVector>(source, target, factor, p.max_value, place.first, place.left);
    }
  }
}

}  // namespace

Status scale(const ScaleArgs& args, Stream stream) {
  if (args.layout.n_chunks == 0) return nullptr;
  const Params params{args.layout, args.table, args.factor, args.n_factors, args.max_value};
  const std::int64_t blocks = params.layout.n_chunks;
  if (vector_width() == kWide) return launch<scale_kernel<kWide>>(blocks, threads(kWide), stream, params);
  return launch<scale_kernel<kNarrow>>(blocks, threads(kNarrow), stream, params);
}

}  // namespace fastaccum::gpu
