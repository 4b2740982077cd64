// A launch: one block after another, the threads of a block in the order that was asked for; what
// barriers and warp intrinsics wait for, and what is said when they wait for ever.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "internal.h"

namespace cuda_on_cpu {

Builtins builtins;
Options options;
Counts counts;
Run* run = nullptr;
Thread* current = nullptr;
std::string last_error;

//------------------------------------------------------------------------------------------ reports

std::string to_text(Where where) {
  const char* file = where.file_name();
  const char* slash = std::strrchr(file, '/');
  return std::string(slash != nullptr ? slash + 1 : file) + ":" + std::to_string(where.line());
}

static std::string to_text(uint3 p) {
  return "(" + std::to_string(p.x) + "," + std::to_string(p.y) + "," + std::to_string(p.z) + ")";
}

std::string block_name() { return "kernel " + run->name + ", block " + to_text(builtins.block); }

void throw_error(const std::string& text) {
  last_error = "cuda_on_cpu: " + text;
  throw Error(last_error);
}

void stop_with(const std::string& text) {
  if (run->failed) return;
  last_error = "cuda_on_cpu: " + text;
  run->failed = true;
}

void report(const std::string& text) {
  if (current != nullptr) {
    stop_with(block_name() + ", thread " + to_text(current->position) + ": " + text);
    leave(true);  // the scheduler throws; this stack is given up
  }
  throw_error(text);
  __builtin_unreachable();
}

void fail(const char* what, Where where) { report(std::string(what) + " at " + to_text(where)); }

namespace {

void stop_at_deadlock() {
  std::map<std::string, std::pair<int, std::uint32_t>> groups;  // place: how many, the first
  int returned = 0;
  for (const Thread& t : run->threads) {
    if (t.state == Thread::State::kReturned) {
      ++returned;
      continue;
    }
    char mask[40] = "";
    if (t.state == Thread::State::kAtWarp) std::snprintf(mask, sizeof mask, " with mask %08x", t.mask);
    auto& [count, first] = groups[t.waits_in + std::string(mask) + " at " + to_text(t.where)];
    if (count++ == 0) first = t.index;
  }
  std::string text = block_name() + ": deadlock;";
  for (const auto& [place, who] : groups)
    text += " " + std::to_string(who.first) + " threads (first: " + std::to_string(who.second) +
            ") wait in " + place + ";";
  stop_with(text + " " + std::to_string(returned) + " have returned");
}

//----------------------------------------------------------------------------------------- barriers

void release_barrier() {
  Run& r = *run;
  order_barrier();
  int result = r.votes;
  if (r.vote == Vote::kAnd) result = r.votes == r.voters;
  if (r.vote == Vote::kOr) result = r.votes != 0;
  r.votes = r.voters = 0;
  r.at_barrier = 0;
  ++counts.barriers;
  const std::uint32_t n = r.block_size;
  for (std::uint32_t i = 0; i < n; ++i) {
    Thread& t = r.threads[options.order == 1 ? n - 1 - i : i];
    if (t.state != Thread::State::kAtBarrier) continue;
    t.vote = result;
    make_ready(t.index);
  }
}

// Threads that have returned are not waited for.
void check_barrier() {
  if (run->at_barrier == 0 || run->at_barrier != run->alive) return;
  if (!options.allow_early_exit && run->alive != run->block_size) {
    for (const Thread& t : run->threads)
      if (t.state == Thread::State::kAtBarrier)
        return stop_with(block_name() + ": " + std::to_string(run->block_size - run->alive) +
                         " threads returned without the barrier at " + to_text(t.where));
  }
  release_barrier();
}

//---------------------------------------------------------------------------------- warp intrinsics

const char* const kExchangeNames[] = {"__syncwarp", "a shuffle", "a vote"};

void finish_meeting(Meeting& m, std::uint32_t warp, unsigned members) {
  const auto* values = m.values[m.generation++ & 1];
  m.arrived = 0;
  ++counts.exchanges;
  if (m.kind == Exchange::kSync) order_warp(warp, members);
  for (unsigned i = 0; i < 32; ++i) {
    const unsigned lane = options.order == 1 ? 31 - i : i;
    if (!((members >> lane) & 1u)) continue;
    Thread& t = run->threads[warp * 32 + lane];
    t.lanes = {members, values};
    if (&t != current) make_ready(t.index);
  }
}

void after_return(Thread& t) {
  release_stack(t);
  --run->alive;
  Warp& warp = run->warps[t.index / 32];
  warp.live &= ~(1u << (t.index % 32));
  for (Meeting& m : warp.meetings)
    if (m.arrived != 0 && (m.arrived & warp.live) == (m.mask & warp.live))
      finish_meeting(m, t.index / 32, m.mask & warp.live);
  check_barrier();
}

//------------------------------------------------------------------------------------------- blocks

std::uint32_t take_ready() {
  auto& ready = run->ready;
  if (options.order == 2) std::swap(ready.front(), ready[next_random() % ready.size()]);
  const std::uint32_t index = ready.front();
  ready.pop_front();
  return index;
}

void start_block(std::uint64_t block) {
  Run& r = *run;
  const dim3 grid = r.launch->grid, size = r.launch->block;
  const std::uint32_t n = r.block_size;
  builtins.block = {static_cast<unsigned>(block % grid.x), static_cast<unsigned>(block / grid.x % grid.y),
                    static_cast<unsigned>(block / grid.x / grid.y)};
  r.threads.resize(n);
  r.warps.resize((n + 31) / 32);
  for (Warp& w : r.warps) {
    w.meetings.clear();
    w.live = 0;
  }
  for (std::uint32_t i = 0; i < n; ++i) {
    Thread& t = r.threads[i];
    t.index = i;
    t.id = static_cast<ThreadId>(block * n + i);
    t.position = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    t.context = t.sanitizer_stack = nullptr;
    start_order(t);
    r.warps[i / 32].live |= 1u << (i % 32);
  }
  if (checking) {
    r.seen = std::make_shared<BlockSeen>();
    r.seen->own.assign(n, 0);
  }
  r.alive = n;
  r.at_barrier = 0;
  r.votes = r.voters = 0;
  r.ready.clear();
  for (std::uint32_t i = 0; i < n; ++i) make_ready(options.order == 1 ? n - 1 - i : i);
  refill_shared();
  counts.threads += n;
}

void run_block(std::uint64_t block) {
  start_block(block);
  while (run->alive != 0 && !run->failed) {
    if (run->ready.empty()) {
      stop_at_deadlock();
      break;
    }
    Thread& t = run->threads[take_ready()];
    resume(t);
    if (t.state == Thread::State::kReturned) after_return(t);
  }
  if (run->failed)
    for (Thread& t : run->threads) release_stack(t);
}

void check_launch(const Launch& l) {
  const std::uint64_t threads = std::uint64_t{l.block.x} * l.block.y * l.block.z;
  const std::uint64_t blocks = std::uint64_t{l.grid.x} * l.grid.y * l.grid.z;
  if (threads == 0 || threads > 1024 || l.block.z > 64)
    throw_error("launch of " + std::string(l.expression) + ": invalid block of " + std::to_string(threads) +
                " threads");
  if (blocks == 0 || l.grid.x > 0x7fffffffu || l.grid.y > 65535 || l.grid.z > 65535)
    throw_error("launch of " + std::string(l.expression) + ": invalid grid");
  if (blocks * threads > 0xffffffffu) throw_error("more than 2^32 threads in a launch");
  if (l.shared > 227 * 1024) throw_error("too much dynamic shared memory");
  if (l.argument_bytes > 32764 + 512) throw_error("more than 32764 bytes of kernel arguments");
}

}  // namespace

std::uint64_t next_random() {
  std::uint64_t x = run->random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return run->random = x;
}

void make_ready(std::uint32_t index) {
  run->threads[index].state = Thread::State::kReady;
  run->ready.push_back(index);
}

void launch(const Launch& l) {
  if (on_a_stack(reinterpret_cast<Address>(__builtin_frame_address(0)))) report("a launch inside a kernel");
  static std::mutex one_at_a_time;  // host threads may launch at the same time
  const std::lock_guard lock(one_at_a_time);
  check_launch(l);
  run_copies(l.stream);
  prepare_stacks(l.by_value_bytes);

  Run r;
  r.launch = &l;
  r.name = kernel_name(l);
  r.block_size = l.block.x * l.block.y * l.block.z;
  r.random = static_cast<std::uint64_t>(options.seed) * 0x9E3779B97F4A7C15ull + 0x1234567;
  if (l.shared != 0) {
    r.shared_storage.resize(l.shared + 128);
    r.shared = reinterpret_cast<unsigned char*>((reinterpret_cast<Address>(r.shared_storage.data()) + 127) /
                                                128 * 128);
  }
  launched.push_back(r.name);
  run = &r;
  checking = instrumented && (options.race_check || options.init_check);
  prepare_memory();
  forget_order();
  builtins.threads = l.block;
  builtins.blocks = l.grid;

  const std::uint64_t blocks = std::uint64_t{l.grid.x} * l.grid.y * l.grid.z;
  std::vector<std::uint64_t> order;
  if (options.order == 2 && options.shuffle_blocks) {
    for (std::uint64_t i = 0; i < blocks; ++i) order.push_back(i);
    for (std::uint64_t i = blocks; i > 1; --i) std::swap(order[i - 1], order[next_random() % i]);
  }
  {
    const FaultReports reports;
    for (std::uint64_t i = 0; i < blocks && !r.failed; ++i)
      run_block(options.order == 1 ? blocks - 1 - i : order.empty() ? i : order[i]);
  }
  run = nullptr;
  checking = false;
  if (r.failed) throw Error(last_error);
}

//---------------------------------------------------------------------------- calls of the threads

void sync_block(Where where) {
  if (current == nullptr) fail("__syncthreads outside a kernel", where);
  if (run->at_barrier != 0) {
    const auto waiting = std::find_if(run->threads.begin(), run->threads.end(),
                                      [](const Thread& t) { return t.state == Thread::State::kAtBarrier; });
    if (waiting->where.line() != where.line() ||
        std::strcmp(waiting->where.file_name(), where.file_name()) != 0)
      report("divergent barrier: it reached __syncthreads at " + to_text(where) + " while thread " +
             to_text(waiting->position) + " waits at " + to_text(waiting->where));
  }
  current->state = Thread::State::kAtBarrier;
  current->where = where;
  current->waits_in = "__syncthreads";
  ++run->at_barrier;
  check_barrier();
  leave(false);
}

int sync_block_vote(Vote vote, bool predicate, Where where) {
  if (current == nullptr) fail("__syncthreads outside a kernel", where);
  run->vote = vote;
  run->votes += predicate;
  ++run->voters;
  const Thread* me = current;
  sync_block(where);
  return me->vote;
}

Lanes exchange(Exchange kind, unsigned mask, const void* value, std::size_t bytes, Where where) {
  if (current == nullptr) fail("a warp intrinsic outside a kernel", where);
  Thread* const me = current;
  const std::uint32_t number = me->index / 32;
  const unsigned bit = 1u << (me->index % 32);
  Warp& warp = run->warps[number];
  if (!(mask & bit)) fail("a warp intrinsic whose mask does not name the calling lane", where);

  char text[60];
  Meeting* meeting = nullptr;
  for (Meeting& m : warp.meetings) {
    if (m.mask == mask) {
      meeting = &m;
    } else if ((m.mask & bit) && (m.arrived & mask)) {  // they wait for this lane, and it for them
      std::snprintf(text, sizeof text, "warp masks disagree: %08x at ", mask);
      const std::string mine = text + to_text(where);
      std::snprintf(text, sizeof text, ", but other lanes wait with %08x at ", m.mask);
      report(mine + text + to_text(m.where));
    }
  }
  if (meeting == nullptr) {
    meeting = &warp.meetings.emplace_back();
    meeting->mask = mask;
  }
  if (meeting->arrived == 0) {
    meeting->kind = kind;
    meeting->bytes = bytes;
    meeting->where = where;
  } else if (meeting->kind != kind || meeting->bytes != bytes) {
    report(std::string("lanes of a warp disagree: ") + kExchangeNames[static_cast<int>(kind)] + " at " +
           to_text(where) + ", but other lanes wait in " + kExchangeNames[static_cast<int>(meeting->kind)] +
           " at " + to_text(meeting->where));
  }
  if (bytes != 0) std::memcpy(meeting->values[meeting->generation & 1][me->index % 32], value, bytes);
  meeting->arrived |= bit;
  const unsigned members = mask & warp.live;
  if ((meeting->arrived & members) == members) {
    finish_meeting(*meeting, number, members);
  } else {
    me->state = Thread::State::kAtWarp;
    me->where = where;
    me->waits_in = kExchangeNames[static_cast<int>(kind)];
    me->mask = mask;
    leave(false);
  }
  return me->lanes;
}

// In the random order a thread may be overtaken at these places, where order between blocks or
// threads could matter.
static void maybe_wait() {
  if (options.order != 2 || (next_random() & 3) != 0) return;
  make_ready(current->index);
  leave(false);
}

void fence(bool other_blocks, Where where) {
  if (current == nullptr) fail("a fence outside a kernel", where);
  if (other_blocks) order_fence();
  maybe_wait();
}

void before_atomic(void* target, std::size_t bytes, Where where) {
  if (current == nullptr) fail("an atomic outside a kernel", where);
  maybe_wait();
  if (reinterpret_cast<Address>(target) % bytes != 0) fail("misaligned atomic", where);
  order_atomic(reinterpret_cast<Address>(target), bytes,
               reinterpret_cast<Address>(__builtin_return_address(0)));
}

unsigned live_lanes() { return run->warps[current->index / 32].live; }
unsigned lane() { return current->index % 32; }
void* dynamic_shared() { return run->shared; }

}  // namespace cuda_on_cpu
