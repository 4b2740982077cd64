// Builds for races: what every access of a kernel must satisfy.
//
// The compiler's -fsanitize=thread puts a call before each access; its library is not linked, the calls
// come here. An access must lie in a buffer, be aligned, read only what was written, and be ordered with
// every conflicting access to the same bytes. What orders, as in CUDA: the barriers of a block,
// __syncwarp for its lanes, and across blocks __threadfence before an atomic in one thread, an atomic of
// the same word before __threadfence in another. Shuffles and votes order nothing. Each thread counts its
// steps and carries the last step of others that is ordered before its own (a vector clock, sparse
// beyond the block), so a race is found in any order of execution.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "internal.h"

namespace cuda_on_cpu {

bool instrumented = false;
bool checking = false;

namespace {

std::unordered_map<Address, Seen> atomic_words;  // what atomics of the word have handed on

void see(Seen& seen, ThreadId thread, Clock clock) {
  Clock& known = seen[thread];
  known = std::max(known, clock);
}

bool ordered(const Thread& t, ThreadId other, Clock clock) {
  if (other == t.id) return true;
  const ThreadId index = other - (t.id - t.index);
  const BlockSeen& block = *run->seen;
  if (index < block.own.size()) {
    if (block.own[index] >= clock) return true;
  } else if (const auto found = block.others.find(other);
             found != block.others.end() && found->second >= clock) {
    return true;
  }
  const auto found = t.seen.find(other);
  return found != t.seen.end() && found->second >= clock;
}

//------------------------------------------------------------------------------------------ reports

// The line of an instruction, the innermost of inlined calls that is not in the emulation's header.
std::string line_of(Address code) {
  char line[600] = "?";
  char hex[32];
  std::snprintf(hex, sizeof hex, "0x%lx", static_cast<unsigned long>(code - 1 - module().base));
  const std::string command = "addr2line -sie '" + module().path + "' " + hex + " 2>/dev/null";
  if (FILE* out = popen(command.c_str(), "r")) {
    while (std::fgets(line, sizeof line, out) != nullptr)
      if (std::strstr(line, "cuda_on_cpu.h") == nullptr) break;
    pclose(out);
  }
  std::string text = line;
  text = text.substr(0, text.find(" (discr"));
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

// The place in the kernel file: through the callers where the access is in the emulation's header.
std::string place_of(Address code) {
  std::string place = line_of(code);
  for (std::size_t i = current->callers.size(); i-- > 0 && place.starts_with("cuda_on_cpu.h");)
    place = line_of(current->callers[i]);
  return place;
}

std::string bytes_of(const Buffer& buffer, Address a, std::size_t bytes) {
  const bool global = buffer.kind == Buffer::Kind::kGlobal;
  return std::to_string(bytes) + " bytes at byte " + std::to_string(a - buffer.begin) + " of " +
         (global ? "buffer" : "shared memory") + " '" + buffer.name + "' (" +
         std::to_string(buffer.end - buffer.begin) + " bytes)";
}

struct Access {
  Address address;
  std::size_t bytes;
  bool write, atomic;
  Address code;

  const char* verb() const { return write ? "write" : "read"; }
};

[[noreturn]] void report_race(const Buffer& buffer, const Access& a, bool other_write, bool other_atomic,
                              ThreadId other, std::uint32_t other_code) {
  report(std::string("data race: ") + (a.atomic ? "atomic " : "") + a.verb() + " of " +
         bytes_of(buffer, a.address, a.bytes) + " at " + place_of(a.code) + ", unordered with the earlier " +
         (other_atomic ? "atomic " : "") + (other_write ? "write" : "read") + " by block " +
         std::to_string(other / run->block_size) + " thread " + std::to_string(other % run->block_size) +
         " at " + line_of(module().base + other_code));
}

[[noreturn]] void report_outside(const Access& a) {
  std::string near = "no buffer is below it";
  const auto next = buffers.upper_bound(a.address);
  if (next != buffers.begin()) {
    const Buffer& below = std::prev(next)->second;
    near = "the nearest below is '" + below.name + "', " + std::to_string(a.address - below.end) +
           " bytes past its end";
  }
  report(std::string("out of bounds: ") + a.verb() + " of " + std::to_string(a.bytes) + " bytes at " +
         place_of(a.code) + "; " + near);
}

//------------------------------------------------------------------------------------------- checks

void check_order(Buffer& buffer, std::size_t at, const Access& a) {
  Cell& c = buffer.cells[at];
  const Thread& t = *current;
  if ((c.flags & kHasWrite) && !(a.atomic && (c.flags & kAtomicWrite)) &&
      !ordered(t, c.writer, c.write_clock))
    report_race(buffer, a, true, c.flags & kAtomicWrite, c.writer, c.write_code);
  if (!a.write) return;
  if ((c.flags & kHasRead) && !(a.atomic && (c.flags & kAtomicRead)) && !ordered(t, c.reader, c.read_clock))
    report_race(buffer, a, false, c.flags & kAtomicRead, c.reader, c.read_code);
  if (c.flags & kManyReads) {
    for (const Read& r : buffer.reads[at])
      if (!ordered(t, r.reader, r.clock)) report_race(buffer, a, false, false, r.reader, r.code);
    buffer.reads.erase(at);
    c.flags &= static_cast<std::uint8_t>(~kManyReads);
  }
}

void note(Buffer& buffer, std::size_t at, const Access& a) {
  Cell& c = buffer.cells[at];
  const Thread& t = *current;
  const auto code = static_cast<std::uint32_t>(a.code - module().base);
  unsigned flags = c.flags;
  if (a.write) {
    c.writer = t.id;
    c.write_clock = t.clock;
    c.write_code = code;
    flags &= ~unsigned{kAtomicWrite | kHasRead | kAtomicRead};
    flags |= kHasWrite | kWritten | (a.atomic ? kAtomicWrite : 0);
  } else {
    if ((flags & kHasRead) && c.reader != t.id && !ordered(t, c.reader, c.read_clock)) {
      auto& reads = buffer.reads[at];
      std::erase_if(reads, [&t](const Read& r) { return ordered(t, r.reader, r.clock); });
      reads.push_back({c.reader, c.read_clock, c.read_code});
      flags |= kManyReads;
    }
    c.reader = t.id;
    c.read_clock = t.clock;
    c.read_code = code;
    flags &= ~unsigned{kAtomicRead};
    flags |= kHasRead | (a.atomic ? kAtomicRead : 0);
  }
  c.flags = static_cast<std::uint8_t>(flags);
}

bool is_constant(const Access& a) {
  if (a.write) return false;
  const auto arguments = reinterpret_cast<Address>(run->launch->arguments);
  if (a.address - arguments + a.bytes <= run->launch->argument_bytes) return true;
  for (const auto& [begin, end] : module().constant)
    if (a.address >= begin && a.address < end) return true;
  return false;
}

void check(const Access& a, bool natural_alignment) {
  if (on_a_stack(a.address)) {
    if (!on_own_stack(a.address)) report("access to another thread's stack at " + place_of(a.code));
    return;
  }
  if (a.address - reinterpret_cast<Address>(&builtins) < sizeof builtins || !checking) return;
  ++counts.accesses;
  Buffer* buffer = find_buffer(a.address);
  // A copy of a small structure may be one of a vector type, which has to be aligned.
  const bool vector = (a.bytes == 8 || a.bytes == 16 ? options.vector_align >= 1
                                                     : a.bytes == 32 && options.vector_align >= 2) &&
                      (buffer == nullptr || buffer->kind != Buffer::Kind::kModule);
  if ((natural_alignment || vector) && a.address % a.bytes != 0 && !is_constant(a)) {
    const std::string place = buffer != nullptr ? bytes_of(*buffer, a.address, a.bytes) : "no buffer";
    report("misaligned " + std::to_string(a.bytes) + "-byte " + a.verb() + ", " + place + " at " +
           place_of(a.code));
  }
  if (buffer == nullptr) {
    if (is_constant(a) || options.unknown_memory) return;
    report_outside(a);
  }
  if (a.address + a.bytes > buffer->end)
    report(std::string("out of bounds: ") + a.verb() + " of " + bytes_of(*buffer, a.address, a.bytes) +
           " at " + place_of(a.code));
  buffer->touched = true;
  const std::size_t first = a.address - buffer->begin;
  for (std::size_t at = first; at < first + a.bytes; ++at) {
    if (!a.write && options.init_check && buffer->kind != Buffer::Kind::kModule &&
        !(buffer->cells[at].flags & kWritten))
      report("read of memory that was never written: " + bytes_of(*buffer, a.address, a.bytes) + " at " +
             place_of(a.code));
    if (options.race_check) check_order(*buffer, at, a);
    note(*buffer, at, a);
  }
}

}  // namespace

//-------------------------------------------------------------------------------------------- order

void forget_order() {
  atomic_words.clear();
  if (!checking) return;
  for (auto& [begin, buffer] : buffers) {
    if (!buffer.touched) continue;
    buffer.touched = false;
    for (Cell& c : buffer.cells) {
      const bool written = c.flags & kWritten;
      c = {};
      if (written) c.flags = kWritten;
    }
    buffer.reads.clear();
  }
}

void start_order(Thread& t) {
  t.callers.clear();
  t.clock = 1;
  t.seen.clear();
  t.acquired.clear();
  t.released = {};
}

void order_barrier() {
  if (!checking || !options.race_check) return;
  Run& r = *run;
  if (r.seen.use_count() > 1) r.seen = std::make_shared<BlockSeen>(*r.seen);  // a fence has kept the old
  const ThreadId first = r.threads[0].id;
  for (Thread& t : r.threads) {
    if (t.state == Thread::State::kReturned) continue;
    r.seen->own[t.index] = t.clock++;
    for (const auto& [thread, clock] : t.seen) {
      if (thread - first >= r.block_size)
        see(r.seen->others, thread, clock);
      else
        r.seen->own[thread - first] = std::max(r.seen->own[thread - first], clock);
    }
    t.seen.clear();
  }
}

void order_warp(std::uint32_t warp, unsigned members) {
  if (!checking || !options.race_check) return;
  Seen all;
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    if (!((members >> lane) & 1u)) continue;
    Thread& t = run->threads[warp * 32 + lane];
    see(all, t.id, t.clock++);
    for (const auto& [thread, clock] : t.seen) see(all, thread, clock);
  }
  for (std::uint32_t lane = 0; lane < 32; ++lane)
    if ((members >> lane) & 1u) run->threads[warp * 32 + lane].seen = all;
}

void order_fence() {
  if (!checking || !options.race_check) return;
  Thread& t = *current;
  for (const auto& [thread, clock] : t.acquired) see(t.seen, thread, clock);
  t.acquired.clear();
  t.released = {run->seen, t.seen, t.clock++};
}

void order_atomic(Address target, std::size_t bytes, Address code) {
  if (!checking) return;
  check({target, bytes, false, true, code}, true);
  check({target, bytes, true, true, code}, true);
  if (!options.race_check) return;
  Thread& t = *current;
  Seen& word = atomic_words[target];
  for (const auto& [thread, clock] : word) see(t.acquired, thread, clock);
  if (t.released.block == nullptr) return;
  const ThreadId first = t.id - t.index;
  for (std::uint32_t i = 0; i < t.released.block->own.size(); ++i)
    if (t.released.block->own[i] != 0) see(word, first + i, t.released.block->own[i]);
  for (const auto& [thread, clock] : t.released.block->others) see(word, thread, clock);
  for (const auto& [thread, clock] : t.released.seen) see(word, thread, clock);
  see(word, t.id, t.released.clock);
}

}  // namespace cuda_on_cpu

//--------------------------------------------------------------------------------- compiler's calls

using namespace cuda_on_cpu;

// Kernel code only: host code of an instrumented file runs too, maybe on another thread just now.
static bool in_a_thread() {
  return current != nullptr && on_own_stack(reinterpret_cast<Address>(__builtin_frame_address(0)));
}

static void seen_access(const volatile void* p, std::size_t bytes, bool write, const void* code,
                        bool natural_alignment) {
  // Most accesses are to the thread's own variables.
  if (current == nullptr || bytes == 0 || on_own_stack(reinterpret_cast<Address>(p))) return;
  if (in_a_thread())
    check({reinterpret_cast<Address>(p), bytes, write, false, reinterpret_cast<Address>(code)},
          natural_alignment);
}

#define CODE __builtin_return_address(0)
#define ACCESSES(n)                                                                 \
  void __tsan_read##n(void* p) { seen_access(p, n, false, CODE, true); }            \
  void __tsan_write##n(void* p) { seen_access(p, n, true, CODE, true); }            \
  void __tsan_volatile_read##n(void* p) { seen_access(p, n, false, CODE, true); }   \
  void __tsan_volatile_write##n(void* p) { seen_access(p, n, true, CODE, true); }   \
  void __tsan_unaligned_read##n(void* p) { seen_access(p, n, false, CODE, false); } \
  void __tsan_unaligned_write##n(void* p) { seen_access(p, n, true, CODE, false); }

extern "C" {
void __tsan_init() { instrumented = true; }
void __tsan_func_entry(void* caller) {
  if (in_a_thread()) current->callers.push_back(reinterpret_cast<Address>(caller));
}
void __tsan_func_exit() {
  if (in_a_thread() && !current->callers.empty()) current->callers.pop_back();
}
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, std::size_t n) { seen_access(p, n, false, CODE, false); }
void __tsan_write_range(void* p, std::size_t n) { seen_access(p, n, true, CODE, false); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
// clang's, for structure copies and library calls
void* __tsan_memcpy(void* to, const void* from, std::size_t n) {
  seen_access(from, n, false, CODE, false);
  seen_access(to, n, true, CODE, false);
  return std::memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, std::size_t n) {
  seen_access(from, n, false, CODE, false);
  seen_access(to, n, true, CODE, false);
  return std::memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, std::size_t n) {
  seen_access(to, n, true, CODE, false);
  return std::memset(to, value, n);
}
}
