// The only file that knows MindSpore's calling convention for operators compiled ahead of time: turns what
// such an operator is handed into the core's tables. No header of MindSpore is needed.
//
// An operator is int f(int nparam, void** params, int* ndims, int64_t** shapes, const char** dtypes,
// void* stream, void* extra): the tensors of the inputs, then those of the outputs, dense and in row-major
// order, and 0 for success. Inputs that are parameters are written in place; every operator has an output,
// as MindSpore wants one. All tensors are checked before anything is written. Arguments in the order of
// fastaccum/mindspore/operators.py, which describes them.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/core.h"
#include "cpu/pool.h"
#include "finish.h"

namespace fastaccum::mindspore {
namespace {

// Columns of the tensors that hold a window's numbers, all float64.
enum Window : int { kMicroBatches = 0, kWeight, kWeighted, kWindowColumns };
enum Weight : int { kFactorOf = 0, kCountsFor, kIsWeight, kWeightColumns };
enum Outcome : int { kGlobalNorm = 0, kFactor, kSkip, kSkipped, kOutcomeColumns };
enum Control : int { kMaxNorm = 0, kLossScale, kMean, kSkipNonfinite, kControlColumns };

// Flags of a hyper-parameter row beyond the core's: MindSpore's own forms of Adam.
enum MindsporeFlag : int {
  kEpsilonHat = 16,   // eps beside sqrt(v) before its bias correction (Kingma & Ba 2015, end of section 2)
  kUncorrected = 32,  // no bias correction
};

//---------------------------------------------------------------------------------- reading tensors

struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Data {
  void* pointer;
  DType dtype;
};

// The tensors of one call, taken in order.
class Call {
 public:
  Call(int count, void** params, const int* ndims, std::int64_t** shapes, const char** dtypes)
      : count_(count), params_(params), ndims_(ndims), shapes_(shapes), dtypes_(dtypes) {}

  int left() const { return count_ - at_; }

  // The next tensor, of exactly this dtype and at least that many elements (exactly, if so said).
  template <typename T>
  T* table(const char* argument, std::int64_t numel, bool exactly = true) {
    const int i = next(argument);
    const std::int64_t have = numel_of(i);
    if (std::strcmp(dtypes_[i], name_of(T{})) != 0 || (exactly ? have != numel : have < numel)) {
      refuse(argument, i,
             std::string(name_of(T{})) + " with " + (exactly ? "" : "at least ") + std::to_string(numel) +
                 " elements");
    }
    return static_cast<T*>(params_[i]);
  }

  // The next tensor, of a floating dtype.
  Data data(const char* argument, std::int64_t numel, bool exactly = true) {
    const int i = next(argument);
    const std::int64_t have = numel_of(i);
    DType dtype;
    if (!dtype_of(dtypes_[i], &dtype) || (exactly ? have != numel : have < numel)) {
      refuse(argument, i,
             "float32, bfloat16, float16 or float64 with " + std::string(exactly ? "" : "at least ") +
                 std::to_string(numel) + " elements");
    }
    return {params_[i], dtype};
  }

  // Elements of the tensor that comes next.
  std::int64_t next_numel() const { return at_ < count_ ? numel_of(at_) : 0; }

 private:
  static const char* name_of(double) { return "float64"; }
  static const char* name_of(float) { return "float32"; }
  static const char* name_of(std::int64_t) { return "int64"; }
  static const char* name_of(std::int32_t) { return "int32"; }
  static const char* name_of(std::uint8_t) { return "uint8"; }

  static bool dtype_of(const char* name, DType* dtype) {
    constexpr struct {
      const char* name;
      DType dtype;
    } kKnown[] = {{"float32", DType::kFloat32},
                  {"bfloat16", DType::kBFloat16},
                  {"float16", DType::kFloat16},
                  {"float64", DType::kFloat64}};
    for (const auto& known : kKnown) {
      if (std::strcmp(name, known.name) == 0) {
        *dtype = known.dtype;
        return true;
      }
    }
    return false;
  }

  int next(const char* argument) {
    if (at_ >= count_)
      throw Refusal(std::string(argument) + " is missing: got " + std::to_string(count_) + " tensors");
    if (params_[at_] == nullptr && numel_of(at_) > 0) throw Refusal(std::string(argument) + " has no memory");
    return at_++;
  }

  std::int64_t numel_of(int i) const {
    std::int64_t numel = 1;
    for (int d = 0; d < ndims_[i]; ++d) numel *= shapes_[i][d];
    return numel;
  }

  [[noreturn]] void refuse(const char* argument, int i, const std::string& wanted) const {
    throw Refusal(std::string(argument) + " (tensor " + std::to_string(i) + ") must be " + wanted + ", got " +
                  dtypes_[i] + " with " + std::to_string(numel_of(i)));
  }

  int count_, at_ = 0;
  void** params_;
  const int* ndims_;
  std::int64_t** shapes_;
  const char** dtypes_;
};

struct Layout {
  const std::int64_t* rows;  // [n, 2]: offset, numel
  std::int64_t n;
  std::int64_t end = 0;
  std::int64_t n_chunks;

  explicit Layout(Call& call) {
    n = call.next_numel() / 2;
    rows = call.table<std::int64_t>("segments", 2 * n);
    for (std::int64_t k = 0; k < n; ++k) {
      if (rows[2 * k] < end || rows[2 * k] % kStrand != 0 || rows[2 * k + 1] < 0)
        throw Refusal("segments must ascend and start on multiples of " + std::to_string(kStrand) + "; row " +
                      std::to_string(k) + " does not");
      end = rows[2 * k] + rows[2 * k + 1];
    }
    n_chunks = (end + kChunk - 1) / kChunk;
  }
  cpu::Segment at(std::int64_t k) const { return {rows[2 * k], rows[2 * k + 1]}; }
};

// A list of tensors, one per segment.
std::vector<Data> list_of(Call& call, const Layout& layout, const char* argument) {
  std::vector<Data> list(static_cast<std::size_t>(layout.n));
  for (std::int64_t k = 0; k < layout.n; ++k) list[k] = call.data(argument, layout.at(k).numel);
  return list;
}

void nothing_left(const Call& call) {
  if (call.left() != 0) throw Refusal(std::to_string(call.left()) + " tensors too many");
}

constexpr cpu::NormSpec kGlobal2Norm{Norm::kTwo, 2.0, 1.0};

//---------------------------------------------------------------------------------------- operators

void accumulate(Call& call) {
  const Layout layout(call);
  const double* weight = call.table<double>("weight", kWeightColumns);
  double* window = call.table<double>("window", kWindowColumns);
  std::uint8_t* present = call.table<std::uint8_t>("present", layout.n);
  double* partials = call.table<double>("partials", 2 * layout.n_chunks);
  const Data buffer = call.data("buffer", layout.end, false);
  const std::vector<Data> grads = list_of(call, layout, "gradients");
  float* done = call.table<float>("done", 1);
  nothing_left(call);
  std::vector<cpu::GatherSegment> rows(grads.size());
  for (std::int64_t k = 0; k < layout.n; ++k)
    rows[k] = {layout.at(k), nullptr, grads[k].pointer, DType::kFloat32, grads[k].dtype, present[k] != 0};
  cpu::gather({buffer.pointer, buffer.dtype, rows.data(), layout.n, layout.n_chunks, weight[kFactorOf], 1.0,
               partials, partials + layout.n_chunks, kGlobal2Norm},
              cpu::kPool);
  std::memset(present, 1, static_cast<std::size_t>(layout.n));
  window[kMicroBatches] += 1.0;
  window[kWeight] += weight[kCountsFor];
  if (weight[kIsWeight] != 0.0) window[kWeighted] = 1.0;
  *done = 1.0f;
}

void clear(Call& call) {
  double* window = call.table<double>("window", kWindowColumns);
  const std::int64_t n = call.next_numel();
  std::uint8_t* present = call.table<std::uint8_t>("present", n);
  float* done = call.table<float>("done", 1);
  nothing_left(call);
  // What the buffer holds does not count any more: the next window overwrites it.
  std::memset(present, 0, static_cast<std::size_t>(n));
  for (int i = 0; i < kWindowColumns; ++i) window[i] = 0.0;
  *done = 1.0f;
}

// What MindSpore's Adams do otherwise, once the core has written the scalars of one parameter.
void adapt(const double* hyper, double* scalars) {
  const int flags = static_cast<int>(hyper[kHyperFlags]);
  if ((flags & kEpsilonHat) != 0) {
    scalars[kStepSize] = scalars[kStepSize] / scalars[kInvBias2Sqrt];
    scalars[kInvBias2Sqrt] = 1.0;
  } else if ((flags & kUncorrected) != 0) {
    scalars[kStepSize] = scalars[kLrNow];
    scalars[kInvBias2Sqrt] = 1.0;
  }
}

void finish(Call& call) {
  const double* control = call.table<double>("control", kControlColumns);
  const std::int64_t n = call.next_numel() / kHyperColumns;
  const double* hyper = call.table<double>("hyper", n * kHyperColumns);
  const double* window = call.table<double>("window", kWindowColumns);
  const std::int64_t n_chunks = call.next_numel() / 2;
  const double* partials = call.table<double>("partials", 2 * n_chunks);
  double* outcome = call.table<double>("outcome", kOutcomeColumns);
  double* scalars = call.table<double>("scalars", n * kScalarColumns);
  std::int32_t* step = call.table<std::int32_t>("step", 1);
  float* beta_powers[2] = {nullptr, nullptr};
  if (call.left() == 3)
    for (float*& power : beta_powers) power = call.table<float>("beta powers", 1);
  float* done = call.table<float>("done", 1);
  nothing_left(call);
  std::vector<float> steps(static_cast<std::size_t>(n), static_cast<float>(*step));
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(n));
  for (std::int64_t k = 0; k < n; ++k) numbers[k] = k;
  const cpu::Span span{0, 0, n_chunks};
  cpu::FinishArgs args{};
  args.partials = partials;
  args.nonfinite = partials + n_chunks;
  args.spans = &span;
  args.n_spans = 1;
  args.max_norm = control + kMaxNorm;
  args.n_norm_groups = 1;
  args.weight = window[kWeight];
  args.divisor = (control[kMean] != 0.0 ? window[kWeight] : 1.0) * control[kLossScale];
  args.skip_nonfinite = control[kSkipNonfinite] != 0.0;
  args.spec = kGlobal2Norm;
  args.row = args.group = numbers.data();
  args.n = n;
  args.hyper = hyper;
  args.steps = steps.data();
  args.scalars = scalars;
  float norm = 0.0f;
  double group_norm = 0.0;
  std::int32_t skip = 0;
  std::int64_t skipped = 0;
  args.norm = &norm;
  args.group_norms = &group_norm;
  args.factor = outcome + kFactor;
  args.skip = &skip;
  args.skipped = &skipped;
  cpu::finish(args);
  for (std::int64_t k = 0; k < n; ++k) adapt(hyper + k * kHyperColumns, scalars + k * kScalarColumns);
  outcome[kGlobalNorm] = norm;
  outcome[kSkip] = skip;
  outcome[kSkipped] += static_cast<double>(skipped);
  if (skip == 0) *step += 1;
  if (skip == 0 && beta_powers[0] != nullptr && n > 0) {
    *beta_powers[0] = static_cast<float>(integer_power(hyper[kBeta1], *step));
    *beta_powers[1] = static_cast<float>(integer_power(hyper[kBeta2], *step));
  }
  *done = 1.0f;
}

// What both updates are handed first.
struct Update {
  Layout layout;
  const double* hyper;
  const double* scalars;
  const double* outcome;
  Data buffer;

  explicit Update(Call& call)
      : layout(call),
        hyper(call.table<double>("hyper", layout.n * kHyperColumns)),
        scalars(call.table<double>("scalars", layout.n * kScalarColumns)),
        outcome(call.table<double>("outcome", kOutcomeColumns)),
        buffer(call.data("buffer", layout.end, false)) {}

  // How many lists of one tensor per segment are left before the output.
  std::int64_t lists(const Call& call) const { return layout.n == 0 ? 0 : (call.left() - 1) / layout.n; }

  cpu::UpdateSegment row(std::int64_t k, const Data& param) const {
    cpu::UpdateSegment row{};
    row.at = layout.at(k);
    row.grad = static_cast<const char*>(buffer.pointer) + row.at.offset * size_of(buffer.dtype);
    row.grad_dtype = buffer.dtype;
    row.param = param.pointer;
    row.param_dtype = param.dtype;
    row.hyper = hyper + k * kHyperColumns;
    row.scalars = scalars + k * kScalarColumns;
    row.factor = outcome[kFactor];
    return row;
  }
};

void adam(Call& call) {
  const Update update(call);
  const std::int64_t lists = update.lists(call);
  if (lists != 3 && lists != 4) throw Refusal("Adam takes three lists of tensors, with amsgrad four");
  std::vector<std::vector<Data>> tensors;
  for (const char* name : {"params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"})
    if (static_cast<std::int64_t>(tensors.size()) < lists)
      tensors.push_back(list_of(call, update.layout, name));
  float* done = call.table<float>("done", 1);
  nothing_left(call);
  std::vector<cpu::UpdateSegment> rows(static_cast<std::size_t>(update.layout.n));
  for (std::int64_t k = 0; k < update.layout.n; ++k) {
    rows[k] = update.row(k, tensors[0][k]);
    if ((static_cast<int>(rows[k].hyper[kHyperFlags]) & kAmsgrad) != 0 && lists == 3)
      throw Refusal("amsgrad needs a fourth list of tensors");
    for (std::int64_t j = 1; j < lists; ++j) {
      rows[k].states[j - 1] = tensors[j][k].pointer;
      rows[k].state_dtypes[j - 1] = tensors[j][k].dtype;
    }
  }
  if (update.outcome[kSkip] == 0.0)
    cpu::adam({rows.data(), update.layout.n, update.layout.n_chunks}, cpu::kPool);
  *done = 1.0f;
}

// Of a parameter's third tensor, filled with 1 until its first update and with 0 from then on.
bool is_first(const Data& stat) {
  switch (stat.dtype) {
    case DType::kFloat64:
      return *static_cast<const double*>(stat.pointer) > 0.0;
    case DType::kFloat32:
      return *static_cast<const float*>(stat.pointer) > 0.0f;
    default: {  // 16 bits: positive, and neither zero nor a sign
      std::uint16_t bits;
      std::memcpy(&bits, stat.pointer, sizeof bits);
      return bits != 0 && (bits & 0x8000u) == 0;
    }
  }
}

void sgd(Call& call) {
  const Update update(call);
  const std::int64_t lists = update.lists(call);
  if (lists != 2 && lists != 3)
    throw Refusal("SGD takes two lists of tensors, or three with first-step marks");
  const std::vector<Data> params = list_of(call, update.layout, "params");
  const std::vector<Data> buffers = list_of(call, update.layout, "momentum_buffers");
  std::vector<Data> marks;
  if (lists == 3) marks = list_of(call, update.layout, "stats");
  float* done = call.table<float>("done", 1);
  nothing_left(call);
  const std::int64_t n = update.layout.n;
  std::vector<cpu::UpdateSegment> rows(static_cast<std::size_t>(n));
  std::vector<double> scalars(update.scalars, update.scalars + n * kScalarColumns);
  for (std::int64_t k = 0; k < n; ++k) {
    rows[k] = update.row(k, params[k]);
    rows[k].states[0] = buffers[k].pointer;
    rows[k].state_dtypes[0] = buffers[k].dtype;
    const bool first = !marks.empty() && update.layout.at(k).numel > 0 && is_first(marks[k]);
    scalars[k * kScalarColumns + kFirst] = first ? 1.0 : 0.0;
    rows[k].scalars = scalars.data() + k * kScalarColumns;
  }
  if (update.outcome[kSkip] == 0.0) {
    cpu::sgd({rows.data(), n, update.layout.n_chunks}, cpu::kPool);
    for (std::int64_t k = 0; k < static_cast<std::int64_t>(marks.size()); ++k)
      if (scalars[k * kScalarColumns + kFirst] != 0.0 && rows[k].hyper[kMomentum] != 0.0)
        std::memset(marks[k].pointer, 0,
                    static_cast<std::size_t>(update.layout.at(k).numel * size_of(marks[k].dtype)));
  }
  *done = 1.0f;
}

// The finished gradients, one output per segment.
void finished(Call& call) {
  const Layout layout(call);
  const double* outcome = call.table<double>("outcome", kOutcomeColumns);
  const Data buffer = call.data("buffer", layout.end, false);
  const std::vector<Data> out = list_of(call, layout, "out");
  nothing_left(call);
  std::vector<cpu::ScaleSegment> rows(out.size());
  for (std::int64_t k = 0; k < layout.n; ++k) {
    const cpu::Segment at = layout.at(k);
    const char* source = static_cast<const char*>(buffer.pointer) + at.offset * size_of(buffer.dtype);
    rows[k] = {at, source, out[k].pointer, buffer.dtype, out[k].dtype, outcome[kFactor]};
  }
  cpu::scale({rows.data(), layout.n, layout.n_chunks, std::numeric_limits<double>::infinity()}, cpu::kPool);
}

//------------------------------------------------------------------------------------------- errors

// The last refusal, for the Python side: MindSpore tells only that a call has failed.
std::mutex message_mutex;
std::string& message() {
  static std::string text;
  return text;
}

int guarded(const char* name, void (*run)(Call&), Call call) {
  std::string text;
  try {
    run(call);
    return 0;
  } catch (const std::exception& error) {
    text = "fastaccum: " + std::string(name) + ": " + error.what() + "; nothing was changed";
  }
  std::fprintf(stderr, "%s\n", text.c_str());
  const std::lock_guard<std::mutex> lock(message_mutex);
  message() = text;
  return 1;
}

}  // namespace
}  // namespace fastaccum::mindspore

#define FASTACCUM_OPERATOR(name)                                                                            \
  extern "C" FASTACCUM_API int fastaccum_##name(int nparam, void** params, int* ndims,                      \
                                                std::int64_t** shapes, const char** dtypes, void*, void*) { \
    namespace ms = fastaccum::mindspore;                                                                    \
    return ms::guarded(#name, &ms::name, ms::Call(nparam, params, ndims, shapes, dtypes));                  \
  }

FASTACCUM_OPERATOR(accumulate)
FASTACCUM_OPERATOR(clear)
FASTACCUM_OPERATOR(finish)
FASTACCUM_OPERATOR(adam)
FASTACCUM_OPERATOR(sgd)
FASTACCUM_OPERATOR(finished)

// Copies the last refusal, or an empty text, into `text`.
extern "C" FASTACCUM_API void fastaccum_last_refusal(char* text, std::size_t size) {
  if (size == 0) return;
  const std::lock_guard<std::mutex> lock(fastaccum::mindspore::message_mutex);
  std::snprintf(text, size, "%s", fastaccum::mindspore::message().c_str());
}

extern "C" FASTACCUM_API const char* fastaccum_instruction_level() { return fastaccum::cpu::isa_name(); }
extern "C" FASTACCUM_API int fastaccum_threads() { return fastaccum::cpu::pool_threads(); }
