// The part of the update kernels that does not depend on the rule: which strands take part, and how one
// strand's gradient, parameter and states are read, updated and written.
#pragma once

#include "rows.h"

namespace fastaccum::gpu {

template <typename Table>
struct UpdateParams {
  UpdateArgs args;
  Table groups;
};

constexpr int kMaxStates = 3;

struct Tensors {
  Array grad, param, copy;
  Array states[kMaxStates];
};

// `update(g, p, states)` on every element. One rounding on the way back, also into `copy`.
template <int kStates, typename real, int kVector, bool kWholeRows, typename Update>
FASTACCUM_DEVICE void update_strand(const Tensors& t, const Access<real, kVector, kWholeRows> access,
                                    const Update& update) {
  using RowType = Row<real, kVector>;
#pragma unroll 1
  for (int row = 0; row < kRows; ++row) {
    if (row * kLanes >= access.left) break;
    RowType raw_states[kStates > 0 ? kStates : 1];
    const RowType raw_grad = access.template read<Reuse::kNone>(t.grad, row);
    const RowType raw_param = access.read(t.param, row);
#pragma unroll
    for (int s = 0; s < kStates; ++s) raw_states[s] = access.read(t.states[s], row);
    real g[kVector], p[kVector], states[kMaxStates][kVector];
    access.widen_row(t.grad, raw_grad, g);
    access.widen_row(t.param, raw_param, p);
#pragma unroll
    for (int s = 0; s < kMaxStates; ++s) {
      if (s < kStates) {
        access.widen_row(t.states[s], raw_states[s], states[s]);
      } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j) states[s][j] = real(0);
      }
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) update(g[j], p[j], states[0][j], states[1][j], states[2][j]);
#pragma unroll
    for (int s = 0; s < kStates; ++s) access.write(t.states[s], row, states[s]);
    access.write(t.param, row, p);
    if (t.copy.exists()) access.write(t.copy, row, p);
  }
}

template <int kStates, typename real, int kVector>
FASTACCUM_DEVICE bool vectorises(const Tensors& t) {
  bool all = t.grad.template vectorises<real, kVector>() && t.param.template vectorises<real, kVector>() &&
             t.copy.template vectorises<real, kVector>();
#pragma unroll
  for (int s = 0; s < kStates; ++s) all = all && t.states[s].template vectorises<real, kVector>();
  return all;
}

// The case worth a loop of its own: everything is float32, and the compiler may see it.
template <int kStates>
FASTACCUM_DEVICE bool all_float32(const Tensors& t) {
  bool all = t.grad.dtype == DType::kFloat32 && t.param.dtype == DType::kFloat32 && !t.copy.exists();
#pragma unroll
  for (int s = 0; s < kStates; ++s) all = all && t.states[s].dtype == DType::kFloat32;
  return all;
}
FASTACCUM_DEVICE Tensors as_float32(const Tensors& t) {
  constexpr DType k = DType::kFloat32;
  return {{t.grad.data, k},
          {t.param.data, k},
          {nullptr, k},
          {{t.states[0].data, k}, {t.states[1].data, k}, {t.states[2].data, k}}};
}

// float64 goes in pieces of half a row's share and a ragged strand element by element: whole shares would
// cost every strand of every dtype their registers.
template <int kStates, typename real, int kVector, typename Update>
FASTACCUM_DEVICE void update_strand(const Tensors& t, const Place<kVector>& place, const Update& update) {
  constexpr int kPieces = sizeof(real) == 8 ? 2 : 1;
  constexpr int kPiece = kVector / kPieces;
  const bool whole = place.left == kStrand && vectorises<kStates, real, kPiece>(t);
  if (sizeof(real) == 4 && whole && all_float32<kStates>(t)) {
    update_strand<kStates>(as_float32(t), Access<real, kVector, true>{place.first, place.left}, update);
  } else if (whole) {
#pragma unroll 1
    for (int piece = 0; piece < kPieces; ++piece)
      update_strand<kStates>(t, Access<real, kPiece, true>{place.first + piece * kPiece, place.left}, update);
  } else {
#pragma unroll 1
    for (int lane = place.first; lane < place.first + kVector; ++lane)
      update_strand<kStates>(t, Access<real, 1, false>{lane, place.left}, update);
  }
}

// A strand's part in the update: calls Rule::run<real, kFull>(tensors, place, hypers, scalars, factor).
// The full kernel also knows what is rare (float64, amsgrad), whose registers would cost the others a third
// of the threads in flight.
template <typename Rule, bool kFull, int kVector, typename Table>
__global__ void __launch_bounds__(threads(kVector))
    update_kernel(FASTACCUM_GRID_CONSTANT(UpdateParams<Table>) p) {
  if constexpr (compiled<kVector>()) {
    const UpdateArgs& args = p.args;
    const auto place = Place<kVector>::find(args.layout);
    if (place.segment < 0 || *args.skip != 0) return;
    const Entry grad = args.grads[place.segment];
    if ((grad & kAddressMask) == 0) return;
    const Entry* const row = args.table + place.segment;
    const std::int64_t n = args.layout.n_segments;
    Tensors t;
    t.grad = Array::of(grad, place.from);
    t.param = Array::of(row[kParam * n], place.from);
    t.copy = Array::of(row[kCopy * n], place.from);
#pragma unroll
    for (int s = 0; s < kMaxStates; ++s) t.states[s] = Array::of(row[(kState + s) * n], place.from);
    const Entry meta = row[kMeta * n];
    FASTACCUM_ASSERT(static_cast<std::int64_t>(meta & 0xffffffffu) * kGroupWords < args.groups.count);
    FASTACCUM_ASSERT(static_cast<std::int64_t>(meta >> 32) < args.n_slots);
    const Hypers h = group_of(p.groups, static_cast<std::int64_t>(meta & 0xffffffffu));
    const double* scalars = args.scalars + static_cast<std::int64_t>(meta >> 32) * kScalarColumns;
    FASTACCUM_ASSERT(h.norm_group >= 0 && h.norm_group < args.n_norm_groups);
    const double factor = args.factor[h.norm_group];
    const bool wide = t.param.dtype == DType::kFloat64 || t.grad.dtype == DType::kFloat64;
    if constexpr (kFull) {
      if (wide) return Rule::template run<double, kFull>(t, place, h, scalars, factor);
    }
    FASTACCUM_ASSERT(!wide);
    Rule::template run<float, kFull>(t, place, h, scalars, factor);
  }
}

template <typename Rule, bool kFull, int kVector>
Status update(const UpdateArgs& args, Stream stream) {
  return with_table(args.groups, [&](const auto& groups) {
    using Table = std::decay_t<decltype(groups)>;
    const UpdateParams<Table> params{args, groups};
    return launch<update_kernel<Rule, kFull, kVector, Table>>(args.layout.n_chunks, threads(kVector), stream,
                                                              params);
  });
}

template <typename Rule>
Status update(const UpdateArgs& args, Stream stream) {
  if (args.layout.n_chunks == 0) return nullptr;
  if (vector_width() == kWide)
    return args.full ? update<Rule, true, kWide>(args, stream) : update<Rule, false, kWide>(args, stream);
  return args.full ? update<Rule, true, kNarrow>(args, stream) : update<Rule, false, kNarrow>(args, stream);
}

}  // namespace fastaccum::gpu
