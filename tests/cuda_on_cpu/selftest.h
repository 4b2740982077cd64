// The kernels of selftest.cu, as a host calls them.
#pragma once

#include <cstdint>

#include "cuda_on_cpu.h"

constexpr int kMaxTensors = 64;
constexpr int kThreads = 256;
constexpr int kChunk = 1024;  // elements that a block handles at a time

struct Table {
  const std::uint16_t* grad[kMaxTensors];  // bfloat16
  std::int64_t offset[kMaxTensors];        // in the accumulator
  std::int64_t numel[kMaxTensors];
  int first_chunk[kMaxTensors + 1];
  int count;
};

// acc += scale * grad for every tensor; norm[0] = square root of the sum of the squares.
void accumulate(const Table& table, float* acc, float scale, float* partials, unsigned* ticket, float* norm,
                int blocks);

struct Large {
  std::int64_t values[4000];  // 32 000 bytes
};
void sum_large(const Large& large, std::int64_t* out, bool by_value);  // 256 threads, one sum each
void features(dim3 block, const float* in, int n, float* out, unsigned* words);
void count_and_look_up(float* out);
void neighbours(float* out, bool sync_warp);
void wide(const double* in, double* out, int n, bool intrinsic);
void scatter(float* out, std::int64_t at, bool write);
void other_stack(float* out);
void nested(float* out);  // a launch in a kernel
void copy_on_stream(const float* in, float* out, int n, cudaStream_t stream);
void vote(unsigned* out, int what);  // mistakes with warp intrinsics, one for each number
