// norm: sums |x|^p over each chunk of a table of tensors, in float64 and in strand order.
#include "rows.h"

namespace fastaccum::gpu {
namespace {

struct Params {
  Layout layout;
  const Entry* pointers;
  Partials partials;
  NormSpec spec;
};

template <typename real, int kVector, bool kWholeRows, typename Sums>
FASTACCUM_DEVICE void sum_strand(const Array& array, const Access<real, kVector, kWholeRows> access,
                                 Sums& sums) {
  constexpr int kUnrolled = kWholeRows ? unrolled<real, kVector>() : 1;
#pragma unroll 1
  for (int row = 0; row < kRows; row += kUnrolled) {
    if (row * kLanes >= access.left) break;
    Row<real, kVector> raw[kUnrolled];
#pragma unroll
    for (int u = 0; u < kUnrolled; ++u) raw[u] = access.read(array, row + u);
#pragma unroll
    for (int u = 0; u < kUnrolled; ++u) {
      real values[kVector];
      access.widen_row(array, raw[u], values);
      sums.add(values);
    }
  }
  sums.template close<real>();
}

template <Norm kNorm, int kVector>
__global__ void __launch_bounds__(threads(kVector)) norm_kernel(FASTACCUM_GRID_CONSTANT(Params) p) {
  if constexpr (compiled<kVector>()) {
    LaneSums<kNorm, kVector> sums({p.spec.power, kNorm == Norm::kPower ? power_scale(p.spec) : 1.0});
    const auto place = Place<kVector>::find(p.layout);
    const Array array = place.segment < 0 ? Array{nullptr, DType::kFloat32}
                                          : Array::of(p.pointers[place.segment], place.from);
    if (array.exists()) {
      const bool whole = place.left == kStrand && array.template vectorises<double, kVector>();
      if (!whole) {
        sum_strand(array, Access<double, kVector, false>{place.first, place.left}, sums);
      } else if (array.dtype == DType::kFloat64) {
        sum_strand(array, Access<double, kVector, true>{place.first, place.left}, sums);
      } else {
        sum_strand(array, Access<float, kVector, true>{place.first, place.left}, sums);
      }
    }
    sums.store(p.partials);
  }
}

template <Norm kNorm>
Status run(const Params& params, Stream stream) {
  const std::int64_t blocks = params.layout.n_chunks;
  if (vector_width() == kWide)
    return launch<norm_kernel<kNorm, kWide>>(blocks, threads(kWide), stream, params);
  return launch<norm_kernel<kNorm, kNarrow>>(blocks, threads(kNarrow), stream, params);
}

}  // namespace

Status norm(const NormArgs& args, Stream stream) {
  if (args.layout.n_chunks == 0) return nullptr;
  const Params params{args.layout, args.pointers, args.partials, args.spec};
  switch (args.spec.norm) {
    case Norm::kTwo:
      return run<Norm::kTwo>(params, stream);
    case Norm::kOne:
      return run<Norm::kOne>(params, stream);
    case Norm::kInf:
      return run<Norm::kInf>(params, stream);
    default:
      return run<Norm::kPower>(params, stream);
  }
}

}  // namespace fastaccum::gpu
