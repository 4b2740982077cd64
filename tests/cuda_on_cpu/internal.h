// What the run time's files share. They are never compiled with a sanitizer.
//   fibers.cpp  stacks, and the switch between the scheduler and a thread
//   launch.cpp  blocks, the order of threads, barriers and warp intrinsics, deadlocks
//   memory.cpp  buffers, shared variables, invalid accesses
//   races.cpp   the checks of every access, in builds that report them
//   host.cpp    the host calls of CUDA, and control.h
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "control.h"
#include "cuda_on_cpu.h"

// There in programs that are linked with the address sanitizer.
extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void**, const void*, std::size_t);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void*, const void**, std::size_t*);
__attribute__((weak)) void __asan_poison_memory_region(const volatile void*, std::size_t);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void*, std::size_t);
}

namespace cuda_on_cpu {

using Address = std::uintptr_t;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kGuard = 1 << 20;  // unmapped, on either side of a buffer

struct Options {
  long order = 0;               // of threads that can run: 0 ascending, 1 descending, 2 random
  long seed = 1;                // of the random order
  long shuffle_blocks = 1;      // the random order is also that of the blocks
  long poison_shared = 1;       // shared memory starts as 0xFF bytes (NaN)
  long allow_early_exit = 1;    // 0: a barrier that returned threads never reach is an error
  long race_check = 1;          // in "races" builds: data races,
  long init_check = 1;          //   reads of memory that was never written,
  long vector_align = 1;        //   8- and 16-byte (2: also 32-byte) structures copied unaligned,
  long unknown_memory = 0;      //   1: accesses outside every buffer are let through
  long alignment = 16;          // of buffers: the last bytes of one may lie this far from the unmapped page
  long stack_bytes = 0;         // of a thread; 0: 64 KB, or 256 KB under the address sanitizer
  long compute_capability = 9;  // major
  long capturing = 0;           // streams say that a graph is being captured
  long next_error = 0;          // what cudaGetLastError returns, once
};
extern Options options;

struct Counts {
  long copies = 0, threads = 0, switches = 0, barriers = 0, exchanges = 0, accesses = 0;
};
extern Counts counts;

//------------------------------------------------------------------------------------------ threads

using Clock = std::uint32_t;
using ThreadId = std::uint32_t;                    // in the grid
using Seen = std::unordered_map<ThreadId, Clock>;  // the last step of other threads that is ordered before

// What every thread of the block knows since its last barrier.
struct BlockSeen {
  std::vector<Clock> own;  // the block's threads
  Seen others;             // threads of other blocks
};

// What a thread knew at its last fence: an atomic after it hands this on.
struct Released {
  std::shared_ptr<const BlockSeen> block;
  Seen seen;
  Clock clock = 0;
};

struct Thread {
  enum class State : std::uint8_t { kReady, kAtBarrier, kAtWarp, kReturned };
  State state = State::kReady;
  std::uint32_t index = 0;  // in the block
  ThreadId id = 0;
  uint3 position{};
  // Its fiber.
  void* context = nullptr;
  int stack = -1;
  void* sanitizer_stack = nullptr;
  // What it waits for, and what it got.
  Where where;
  const char* waits_in = "";
  unsigned mask = 0;
  Lanes lanes{};
  int vote = 0;
  // "races" builds: callers (for reports), its step, what it knows beyond its block.
  std::vector<Address> callers;
  Clock clock = 1;
  Seen seen, acquired;
  Released released;
};

// Lanes that meet in a warp intrinsic. Two sets of values: a lane may still read one while a faster lane
// enters the next exchange.
struct Meeting {
  unsigned mask = 0, arrived = 0;
  Exchange kind{};
  std::size_t bytes = 0;
  Where where;
  unsigned generation = 0;
  alignas(16) unsigned char values[2][32][16];
};

struct Warp {
  std::deque<Meeting> meetings;
  unsigned live = 0;
};

struct Run {
  const Launch* launch = nullptr;
  std::string name;
  std::uint32_t block_size = 0;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::deque<std::uint32_t> ready;
  std::uint32_t alive = 0, at_barrier = 0;
  Vote vote{};
  int votes = 0, voters = 0;
  std::vector<unsigned char> shared_storage;
  unsigned char* shared = nullptr;
  std::shared_ptr<BlockSeen> seen;
  std::uint64_t random = 1;
  bool failed = false;
};

extern Run* run;         // null outside a launch
extern Thread* current;  // null outside a thread

std::uint64_t next_random();
void make_ready(std::uint32_t index);
std::string block_name();

//------------------------------------------------------------------------------------------- fibers

void prepare_stacks(std::size_t by_value_bytes);
bool on_a_stack(Address a);  // of any thread
// Of the current one.
extern Address own_stack;
extern std::size_t own_stack_bytes;
inline bool on_own_stack(Address a) { return a - own_stack < own_stack_bytes; }
void resume(Thread& thread);  // runs it until it calls leave
void leave(bool for_good);    // back to the scheduler
void release_stack(Thread& thread);

//------------------------------------------------------------------------------------------- memory

// What was last done to a byte.
struct Cell {
  ThreadId writer = 0, reader = 0;
  Clock write_clock = 0, read_clock = 0;
  std::uint32_t write_code = 0, read_code = 0;  // the instruction's offset in the module
  std::uint8_t flags = 0;
};
enum CellFlags : std::uint8_t {
  kAtomicWrite = 1,
  kAtomicRead = 2,
  kWritten = 4,
  kHasWrite = 8,
  kHasRead = 16,
  kManyReads = 32
};
struct Read {
  ThreadId reader;
  Clock clock;
  std::uint32_t code;
};

struct Buffer {
  enum class Kind : std::uint8_t { kGlobal, kShared, kModule };
  Address begin, end;
  std::string name;
  Kind kind;
  char* pages = nullptr;  // if it is ours
  std::size_t page_bytes = 0;
  bool touched = false;  // by this launch
  std::vector<Cell> cells;
  std::map<std::size_t, std::vector<Read>> reads;  // of bytes with several unordered readers
};
extern std::map<Address, Buffer> buffers;  // by their begin

Buffer* find_buffer(Address a);
void add_buffer(Address begin, std::size_t bytes, const std::string& name, Buffer::Kind kind, bool written);
void mark_written(Address begin, std::size_t bytes);

// The program or library that holds the kernels, and this run time.
struct Module {
  Address base = 0;
  std::string path;
  std::vector<std::pair<Address, Address>> constant, variable;
  struct Shared {
    Address offset;  // in the thread-local block
    std::size_t bytes;
    std::string name;
  };
  std::vector<Shared> shared;
  std::map<Address, std::string> functions;  // mangled
};
const Module& module();
std::string kernel_name(const Launch& launch);

void prepare_memory();  // before a launch
void refill_shared();   // before a block
struct FaultReports {   // while it lives, invalid accesses are reported before the process ends
  FaultReports();
  ~FaultReports();
};

//-------------------------------------------------------------------------------------------- races

extern bool instrumented;  // the kernels were built with hooks
extern bool checking;      // and this launch looks at them
void order_barrier();
void order_warp(std::uint32_t warp, unsigned members);
void order_fence();
void order_atomic(Address target, std::size_t bytes, Address code);
void forget_order();          // before a launch
void start_order(Thread& t);  // before a block

//------------------------------------------------------------------------------------------ reports

[[noreturn]] void report(const std::string& text);  // of the current thread, or of the host
void throw_error(const std::string& text);
void stop_with(const std::string& text);  // ends the launch from the scheduler
extern std::string last_error;
std::string to_text(Where where);

//--------------------------------------------------------------------------------------------- host

extern std::vector<std::string> launched;
void run_copies(cudaStream_t stream);

}  // namespace cuda_on_cpu
