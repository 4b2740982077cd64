// gather: adds a micro-batch's gradients into the flat buffer in one launch, and sums the norm of the result.
#include "rows.h"

namespace fastaccum::gpu {
namespace {

constexpr int kNoSum = -1;  // in place of a Norm: no partials wanted

template <typename Table>
struct Params {
  Layout layout;
  char* buffer;
  DType buffer_dtype;
  const Entry* kept;
  Scalar weight, kept_weight;
  Partials partials;
  Table fresh;
};

template <typename real>
struct Terms {
  Array buffer, base, fresh;  // base: what the fresh gradient is added to
  real base_weight, weight;

  // The case worth a loop of its own: everything is of the accumulator's dtype, so nothing is converted.
  static constexpr DType kUsual = sizeof(real) == 4 ? DType::kFloat32 : DType::kFloat64;
  FASTACCUM_DEVICE bool usual() const {
    return buffer.dtype == kUsual && base.exists() && base.dtype == kUsual && fresh.exists() &&
           fresh.dtype == kUsual;
  }
  // The same with constants, for the compiler to see.
  FASTACCUM_DEVICE Terms as_usual() const {
    return {{buffer.data, kUsual}, {base.data, kUsual}, {fresh.data, kUsual}, base_weight, weight};
  }
};

// One strand: buffer = base * base_weight + fresh * weight, and the sum over what was stored.
template <int kUnrolled, typename real, int kVector, bool kWholeRows, typename Sums>
FASTACCUM_DEVICE void add_strand(const Terms<real>& terms, const Access<real, kVector, kWholeRows> access,
                                 Sums* sums) {
  const bool has_base = terms.base.exists(), has_fresh = terms.fresh.exists();
  const bool writes = has_fresh || terms.base.data != terms.buffer.data;
  const bool rounds = terms.buffer.dtype == DType::kBFloat16 || terms.buffer.dtype == DType::kFloat16;
#pragma unroll 1
  for (int row = 0; row < kRows; row += kUnrolled) {
    if (row * kLanes >= access.left) break;
    Row<real, kVector> base[kUnrolled], fresh[kUnrolled];
#pragma unroll
    for (int u = 0; u < kUnrolled; ++u) {
      if (has_fresh) fresh[u] = access.template read<Reuse::kNone>(terms.fresh, row + u);
      if (has_base) base[u] = access.read(terms.base, row + u);
    }
#pragma unroll
    for (int u = 0; u < kUnrolled; ++u) {
      real sum[kVector], term[kVector];
      if (has_base) {
        access.widen_row(terms.base, base[u], sum);
#pragma unroll
        for (int j = 0; j < kVector; ++j) sum[j] = weighted(sum[j], terms.base_weight);
      }
      if (has_fresh) {
        access.widen_row(terms.fresh, fresh[u], term);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const real product = weighted(term[j], terms.weight);
          sum[j] = has_base ? sum[j] + product : product;
        }
      }
      if (writes) access.write(terms.buffer, row + u, sum);
      if (sums != nullptr) {
        if (sizeof(real) == 4 && rounds) {  // the norm is that of what was stored
#pragma unroll
          for (int j = 0; j < kVector; ++j) sum[j] = rounded(sum[j], terms.buffer.dtype);
        }
        sums->add(sum);
      }
    }
  }
  if (sums != nullptr) sums->template close<real>();
}

// Blocks per multiprocessor. float needs no more than 56 registers (72 at 32 bytes) and must not take more;
// double is rare, and would spill at that.
template <typename real, int kVector>
constexpr int kBlocks = sizeof(real) == 8  ? 1
                        : kVector == kWide ? 14
                                           : 9;

template <int kSum, int kVector>
struct SumsOf {
  using type = LaneSums<static_cast<Norm>(kSum), kVector>;
};
template <int kVector>
struct SumsOf<kNoSum, kVector> {
  using type = LaneSums<Norm::kTwo, kVector>;  // never used
};

template <typename real, int kSum, int kVector, typename Table>
__global__ void __launch_bounds__(threads(kVector), kBlocks<real, kVector>)
    gather_kernel(FASTACCUM_GRID_CONSTANT(Params<Table>) p) {
  if constexpr (compiled<kVector>()) {
    typename SumsOf<kSum, kVector>::type sums({});
    auto* const used = kSum == kNoSum ? nullptr : &sums;
    const auto place = Place<kVector>::find(p.layout);
    if (place.segment >= 0) {
      const Entry entry = p.fresh.at(place.segment);
      Terms<real> terms;
      terms.buffer = {p.buffer + place.strand * kStrand * size_of(p.buffer_dtype), p.buffer_dtype};
      terms.fresh = Array::of(entry, place.from);
      terms.weight = static_cast<real>(load(p.weight));
      terms.base_weight = real(1);
      terms.base = {nullptr, DType::kFloat32};
      if ((entry & kPresent) != 0) {
        terms.base = terms.buffer;
      } else if (p.kept != nullptr) {
        terms.base = Array::of(p.kept[place.segment], place.from);
        terms.base_weight = static_cast<real>(load(p.kept_weight));
      }
      // Without a fresh gradient, what the buffer holds is read only to be summed.
      const bool idle = !terms.fresh.exists() &&
                        (!terms.base.exists() || (kSum == kNoSum && terms.base.data == terms.buffer.data));
      const bool whole = place.left == kStrand && terms.buffer.template vectorises<real, kVector>() &&
                         terms.base.template vectorises<real, kVector>() &&
                         terms.fresh.template vectorises<real, kVector>();
      if (idle) {
      } else if (!whole) {
        add_strand<1>(terms, Access<real, kVector, false>{place.first, place.left}, used);
      } else if (!terms.usual()) {
        constexpr int kUnrolled = (unrolled<real, kVector>() + 1) / 2;
        add_strand<kUnrolled>(terms, Access<real, kVector, true>{place.first, place.left}, used);
      } else {
        constexpr int kUnrolled = unrolled<real, kVector>();
        add_strand<kUnrolled>(terms.as_usual(), Access<real, kVector, true>{place.first, place.left}, used);
      }
    }
    if constexpr (kSum != kNoSum) sums.store(p.partials);
  }
}

template <typename real, int kSum, int kVector, typename Table>
Status run(const GatherArgs& args, const Table& fresh, Stream stream) {
  const Params<Table> params{args.layout,       static_cast<char*>(args.buffer),
                             args.buffer_dtype, args.kept,
                             args.weight,       args.kept_weight,
                             args.partials,     fresh};
  return launch<gather_kernel<real, kSum, kVector, Table>>(args.layout.n_chunks, threads(kVector), stream,
                                                           params);
}

template <typename real, int kSum, typename Table>
Status run(const GatherArgs& args, const Table& fresh, Stream stream) {
  if (vector_width() == kWide) return run<real, kSum, kWide, Table>(args, fresh, stream);
  return run<real, kSum, kNarrow, Table>(args, fresh, stream);
}

template <typename real, typename Table>
Status run(const GatherArgs& args, const Table& fresh, Stream stream) {
  if (args.partials.sums == nullptr) return run<real, kNoSum, Table>(args, fresh, stream);
  switch (args.norm) {
    case Norm::kOne:
      return run<real, static_cast<int>(Norm::kOne), Table>(args, fresh, stream);
    case Norm::kInf:
      return run<real, static_cast<int>(Norm::kInf), Table>(args, fresh, stream);
    default:
      return run<real, static_cast<int>(Norm::kTwo), Table>(args, fresh, stream);
  }
}

template <typename real>
Status run(const GatherArgs& args, Stream stream) {
  return with_table(args.fresh, [&](const auto& fresh) { return run<real>(args, fresh, stream); });
}

}  // namespace

Status gather(const GatherArgs& args, Stream stream) {
  if (args.layout.n_chunks == 0) return nullptr;
  if (args.buffer_dtype == DType::kFloat64) return run<double>(args, stream);
  return run<float>(args, stream);
}

}  // namespace fastaccum::gpu
