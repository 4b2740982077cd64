// Runs the kernels of selftest.cu, built with or without a planted mistake.
//   selftest accumulate   the accumulation, in several shapes and orders; stops at the first failure
//   selftest language     every feature, in every order; and the host calls
//   selftest mistakes     what must be reported by an error, one line each
//   selftest NAME         one mistake that may end the process: past, below, null, padding, freed, wide
#include "selftest.h"

#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "control.h"

namespace {

int failures = 0;

#define CHECK(condition)                                                                   \
  do {                                                                                     \
    if (!(condition)) ++failures, std::printf("FAIL line %d: %s\n", __LINE__, #condition); \
  } while (0)

template <typename T>
struct Device {
  T* data;
  std::size_t n;
  Device(std::size_t n, const char* name, bool written = true)
      : data(static_cast<T*>(cuda_on_cpu_allocate(n * sizeof(T), name, written))), n(n) {}
  Device(const Device&) = delete;
  ~Device() {
    const char* error = cuda_on_cpu_free(data);
    if (error != nullptr) ++failures, std::printf("FAIL %s\n", error);
  }
  T& operator[](std::size_t i) { return data[i]; }
};

// The text of the error that `action` throws; "" if it throws none.
std::string error_of(auto action) {
  try {
    action();
  } catch (const cuda_on_cpu::Error& error) {
    return error.what();
  }
  return "";
}

void set_order(int i) {
  cuda_on_cpu_set("order", i < 2 ? i : 2);
  cuda_on_cpu_set("seed", i);
}

//--------------------------------------------------------------------------------------- accumulation

struct Shape {
  std::vector<std::int64_t> sizes;
  int blocks;
  bool aligned;
};

const std::vector<Shape> kShapes = {{{1}, 1, true},
                                    {{7, 8, 9}, 2, true},
                                    {{1024, 1025, 1, 3081, 333}, 3, true},
                                    {{5, 1024, 77, 2047}, 5, false},
                                    {{5000, 13}, 7, true}};

// Two steps; "" or what is wrong.
std::string run_accumulate(const Shape& shape) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  Table table{};
  std::vector<std::unique_ptr<Device<std::uint16_t>>> grads;
  std::int64_t size = 0;
  for (std::size_t k = 0; k < shape.sizes.size(); ++k) {
    const std::int64_t n = shape.sizes[k];
    auto& grad =
        *grads.emplace_back(std::make_unique<Device<std::uint16_t>>(n, ("grad" + std::to_string(k)).c_str()));
    for (std::int64_t i = 0; i < n; ++i) grad[i] = __float_as_uint(normal(random)) >> 16;
    table.grad[k] = grad.data;
    table.offset[k] = size;
    table.numel[k] = n;
    table.first_chunk[k + 1] = table.first_chunk[k] + static_cast<int>((n + kChunk - 1) / kChunk);
    size += shape.aligned ? (n + 7) / 8 * 8 : n;
  }
  table.count = static_cast<int>(shape.sizes.size());
  Device<float> acc(size, "acc"), partials(shape.blocks, "partials", false), norm(1, "norm", false);
  Device<unsigned> ticket(1, "ticket");
  ticket[0] = 0;
  std::vector<float> expected(size);
  for (std::int64_t i = 0; i < size; ++i) expected[i] = acc[i] = normal(random);
  for (int step = 0; step < 2; ++step) {
    double squares = 0.0;
    for (int k = 0; k < table.count; ++k)
      for (std::int64_t i = 0; i < table.numel[k]; ++i) {
        float& e = expected[table.offset[k] + i];
        const float product = 0.25f * __uint_as_float(unsigned{(*grads[k])[i]} << 16);
        e = e + product;
        squares += double{e} * e;
      }
    norm[0] = 0.0f;
    cuda_on_cpu_mark_written(norm.data, sizeof(float));
    accumulate(table, acc.data, 0.25f, partials.data, ticket.data, norm.data, shape.blocks);
    for (std::int64_t i = 0; i < size; ++i)
      if (acc[i] != expected[i]) return "wrong numbers: element " + std::to_string(i);
    if (!(std::abs(norm[0] - std::sqrt(squares)) < 1e-5 * std::sqrt(squares))) return "wrong numbers: norm";
  }
  return "";
}

void run_accumulates() {
  cuda_on_cpu_set("allow_early_exit", 0);
  for (const Shape& shape : kShapes)
    for (int order = 0; order < 5; ++order) {
      set_order(order);
      std::string wrong, error = error_of([&] { wrong = run_accumulate(shape); });
      if (wrong.empty() && error.empty()) continue;
      ++failures;
      std::printf("FAIL %s%s\n", wrong.c_str(), error.c_str());
      return;
    }
}

//------------------------------------------------------------------------------------------ language

void run_features(dim3 block) {
  const int size = static_cast<int>(block.x * block.y);
  Device<float> in(size, "in"), out(2, "out");
  Device<unsigned> words(136, "words");
  float sum = 1.0f;
  for (int i = 0; i < size; ++i) sum += in[i] = static_cast<float>(i % 7);
  for (int i = 0; i < 8; ++i) words[i] = 0;
  out[0] = 1.0f;
  words[4] = 99999;
  words[5] = 7;
  features(block, in.data, size, out.data, words.data);
  CHECK(out[0] == sum && out[1] == 6.0f);
  CHECK(words[0] == 0xaaaaaaaau);
  CHECK(words[1] == static_cast<unsigned>(size + 2) / 3);
  CHECK(words[2] == 12);
  CHECK(words[3] == static_cast<unsigned>(size) - 1 && words[4] == 1 && words[5] == 9);
  CHECK(words[6] == 0 && words[7] == 0);
  for (unsigned lane = 0; lane < 32; ++lane) {
    CHECK(words[8 + lane] == (lane ^ 1));
    CHECK(words[40 + lane] == ((lane & 7) < 3 ? lane : lane - 3));
    CHECK(words[72 + lane] == (lane & 16) + 5);
    CHECK(words[104 + lane] == (lane < 30 ? lane + 2 : lane));
  }
}

void run_large() {
  auto large = std::make_unique<Large>();
  std::int64_t expected = 0;
  for (int i = 0; i < 4000; ++i) expected += large->values[i] = i * 3 + 1;
  for (const bool by_value : {false, true}) {
    Device<std::int64_t> sums(256, "sums", false);
    sum_large(*large, sums.data, by_value);
    std::int64_t sum = 0;
    for (int i = 0; i < 256; ++i) sum += sums[i];
    CHECK(sum == expected);
  }
}

void run_copies() {
  static CUstream_st* const streams[] = {nullptr, reinterpret_cast<CUstream_st*>(16)};
  Device<float> in(32, "in", false), out(32, "out", false);
  float staging[32] = {};
  const auto fill = [&](float x) { std::fill(staging, staging + 32, x); };

  // The copy runs before the next launch on its stream: the staging buffer was overwritten meanwhile.
  fill(1.0f);
  cudaMemcpyAsync(in.data, staging, sizeof staging, cudaMemcpyHostToDevice, streams[1]);
  CHECK(std::isnan(in[0]) && cuda_on_cpu_count("waiting_copies") == 1);
  fill(2.0f);
  copy_on_stream(in.data, out.data, 32, streams[1]);
  CHECK(in[31] == 2.0f && out[31] == 2.0f && cuda_on_cpu_count("waiting_copies") == 0);

  // A launch on another stream does not wait for it.
  fill(3.0f);
  cudaMemcpyAsync(in.data, staging, sizeof staging, cudaMemcpyHostToDevice, streams[1]);
  copy_on_stream(in.data, out.data, 32, streams[0]);
  CHECK(out[0] == 2.0f);
  CHECK(cuda_on_cpu_synchronize() == nullptr && in[0] == 3.0f);

  cudaStreamCaptureStatus status;
  CHECK(cudaStreamIsCapturing(nullptr, &status) == cudaSuccess && status == cudaStreamCaptureStatusNone);
  cuda_on_cpu_set("capturing", 1);
  CHECK(cudaStreamIsCapturing(nullptr, &status) == cudaSuccess && status == cudaStreamCaptureStatusActive);
  cuda_on_cpu_set("capturing", 0);
}

void run_host_calls() {
  int value = -1;
  CHECK(cudaGetDevice(&value) == cudaSuccess && value == 0);
  CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && value == 9);
  cuda_on_cpu_set("compute_capability", 10);
  CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && value == 10);
  cuda_on_cpu_set("compute_capability", 9);
  CHECK(cudaGetLastError() == cudaSuccess);
  cuda_on_cpu_set("next_error", cudaErrorInvalidConfiguration);
  CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration && cudaGetLastError() == cudaSuccess);
  CHECK(std::string(cudaGetErrorString(cudaErrorInvalidValue)) == "invalid argument");
  cudaFuncAttributes attributes;
  CHECK(cudaFuncGetAttributes(&attributes, &features) == cudaSuccess && attributes.localSizeBytes == 0);
  CHECK(cuda_on_cpu_set("no_such_option", 1) == 0);

  cuda_on_cpu_reset();
  Device<double> in(8, "in"), out(8, "out");
  Device<unsigned> ticket(1, "ticket");
  ticket[0] = 0;
  for (int i = 0; i < 8; ++i) in[i] = i;
  wide(in.data, out.data, 8, true);
  CHECK(out[7] == 7.0);
  Device<float> looked_up(192, "looked up", false);
  count_and_look_up(looked_up.data);
  CHECK(looked_up[5] == 2.0f && looked_up[191] == 8.0f);
  run_accumulate(kShapes[0]);
  CHECK(std::string(cuda_on_cpu_launch_names()) ==
        "wide_kernel\ncount_and_look_up_kernel\naccumulate_kernel<256>\naccumulate_kernel<256>");
  CHECK(cuda_on_cpu_count("launches") == 4);
}

void run_language() {
  cuda_on_cpu_set("stack_bytes", 24 << 10);  // less than the large parameter needs: the stacks must grow
  for (int order = 0; order < 4; ++order) {
    set_order(order);
    for (const dim3 block : {dim3(64), dim3(96), dim3(31, 32), dim3(1024)}) run_features(block);
    run_large();
    run_copies();
    run_host_calls();
    Device<float> out(32, "out", false);
    neighbours(out.data, true);
    CHECK(out[4] == 5.0f);
  }
}

//------------------------------------------------------------------------------------------ mistakes

void report(const char* name, auto action) {
  const std::string error = error_of(action);
  std::printf("%s: %s\n", name, error.empty() ? "nothing" : error.c_str());
  if (error != cuda_on_cpu_last_error()) std::printf("FAIL last_error is not the text\n");
  cuda_on_cpu_reset();
}

void run_mistakes() {
  Device<float> out(32, "out", false), in(32, "in", false);
  Device<unsigned> words(32, "words");
  Device<double> wide_in(9, "wide_in");
  Device<double> wide_out(9, "wide_out");
  static float staging[64];
  report("outside a mask", [&] { vote(words.data, 0); });
  report("reads outside", [&] { vote(words.data, 1); });
  report("different intrinsics", [&] { vote(words.data, 2); });
  report("different masks", [&] { vote(words.data, 3); });
  neighbours(out.data, true);
  report("no __syncwarp", [&] { neighbours(out.data, false); });
  std::printf("shared memory: %s\n", std::isnan(out[0]) ? "NaN again" : "as it was");
  cuda_on_cpu_set("init_check", 0);
  report("no __syncwarp, race", [&] { neighbours(out.data, false); });
  cuda_on_cpu_set("init_check", 1);
  report("unwritten", [&] { copy_on_stream(in.data, out.data, 32, nullptr); });
  report("wide", [&] { wide(wide_in.data + 1, wide_out.data + 1, 8, true); });
  report("other stack", [&] { other_stack(out.data); });
  report("nested", [&] { nested(out.data); });
  report("no threads", [&] { features(dim3(0), nullptr, 0, nullptr, nullptr); });
  report("too many threads", [&] { features(dim3(1025), nullptr, 0, nullptr, nullptr); });
  cuda_on_cpu_set("capturing", 1);
  report("capture", [&] { cudaMemcpyAsync(in.data, staging, 4, cudaMemcpyHostToDevice, nullptr); });
  cuda_on_cpu_set("capturing", 0);
  report("long copy", [&] {
    cudaMemcpyAsync(in.data, staging, 33 * 4, cudaMemcpyHostToDevice, nullptr);
    copy_on_stream(in.data, out.data, 0, nullptr);
  });
  const char* error = cuda_on_cpu_free(staging);
  std::printf("foreign: %s\n", error != nullptr ? error : "nothing");
}

void run_one(const std::string& name) {
  cuda_on_cpu_set("alignment", 32);
  Device<float> out(1032, "out"), in(1032, "in");
  if (name == "past") scatter(out.data, 1032, false);
  if (name == "below") scatter(out.data, -5000, true);  // before its pages
  if (name == "null") scatter(nullptr, 0, true);
  if (name == "padding") {
    auto* padded = static_cast<float*>(cuda_on_cpu_allocate(12, "padded", 1));
    scatter(padded, 3, true);  // within the last 16 bytes, which a page cannot guard
    const char* error = cuda_on_cpu_free(padded);
    if (error != nullptr) ++failures, std::printf("FAIL %s\n", error);
  }
  if (name == "freed") {
    auto staging = std::make_unique<float[]>(32);
    cudaMemcpyAsync(in.data, staging.get(), 32 * sizeof(float), cudaMemcpyHostToDevice, nullptr);
    staging.reset();
    copy_on_stream(in.data, out.data, 32, nullptr);
  }
  if (name == "wide") {
    cuda_on_cpu_set("vector_align", 2);
    wide(reinterpret_cast<double*>(in.data) + 2, reinterpret_cast<double*>(out.data), 8, false);
  }
}

}  // namespace

int main(int, char** argv) {
  const std::string what = argv[1];
  if (what == "accumulate")
    run_accumulates();
  else if (what == "language")
    run_language();
  else if (what == "mistakes")
    run_mistakes();
  else if (const std::string error = error_of([&] { run_one(what); }); !error.empty())
    ++failures, std::printf("FAIL %s\n", error.c_str());
  if (failures == 0) std::printf("ok: %ld accesses checked\n", cuda_on_cpu_count("accesses"));
  return failures != 0;
}
