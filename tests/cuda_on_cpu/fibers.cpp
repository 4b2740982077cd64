// Stacks, and the switch between the scheduler and a thread of the kernel.
#include <sys/mman.h>

#include <cstdlib>

#include "internal.h"

#if !defined(__x86_64__) && !defined(FASTACCUM_FIBERS_UCONTEXT)
#define FASTACCUM_FIBERS_UCONTEXT
#endif
#if defined(FASTACCUM_FIBERS_UCONTEXT)
#include <ucontext.h>
#endif

// An error leaves the kernel's threads where they are: what they own is never freed.
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }

namespace cuda_on_cpu {
namespace {

//----------------------------------------------------------------------------------------- contexts

#if defined(FASTACCUM_FIBERS_UCONTEXT)

void switch_context(void** save, void* load) {
  ucontext_t here;  // stays on the stack that is being left
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(load));
}

void* make_context(char* stack, std::size_t bytes, void (*entry)()) {
  auto* context = new (stack) ucontext_t;
  constexpr std::size_t kUsed = (sizeof(ucontext_t) + 63) / 64 * 64;
  getcontext(context);
  context->uc_stack.ss_sp = stack + kUsed;
  context->uc_stack.ss_size = bytes - kUsed;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}

#else

// swapcontext saves the signal mask, a system call each time: ten times as slow.
extern "C" void cuda_on_cpu_switch(void** save, void* load);
asm(R"(
.text
.globl cuda_on_cpu_switch
.hidden cuda_on_cpu_switch
.type cuda_on_cpu_switch,@function
cuda_on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_cpu_switch,.-cuda_on_cpu_switch
)");

void switch_context(void** save, void* load) { cuda_on_cpu_switch(save, load); }

void* make_context(char* stack, std::size_t bytes, void (*entry)()) {
  auto* top = reinterpret_cast<Address*>(reinterpret_cast<Address>(stack + bytes) & ~Address{15});
  *--top = 0;  // where entry would return to; it never does. This also aligns its frame.
  *--top = reinterpret_cast<Address>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
  return top;
}

#endif

//------------------------------------------------------------------------------------------- stacks

// One range of addresses for all, each stack with an unmapped page below it.
constexpr std::size_t kMaxStacks = 1024;
char* arena = nullptr;
std::size_t arena_bytes = 0, stack_bytes = 0;
int stacks_made = 0;
std::vector<int> free_stacks;

char* stack_begin(int stack) {
  return arena + static_cast<std::size_t>(stack) * (stack_bytes + kPage) + kPage;
}

int take_stack() {
  if (free_stacks.empty()) {
    if (mprotect(stack_begin(stacks_made), stack_bytes, PROT_READ | PROT_WRITE) != 0) std::abort();
    return stacks_made++;
  }
  const int stack = free_stacks.back();
  free_stacks.pop_back();
  return stack;
}

void* scheduler_context = nullptr;
void* scheduler_sanitizer_stack = nullptr;
const void* scheduler_stack = nullptr;
std::size_t scheduler_stack_bytes = 0;

void entry() {
  if (__sanitizer_finish_switch_fiber)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
  run->launch->call(run->launch->arguments);
  current->state = Thread::State::kReturned;
  leave(true);
  std::abort();
}

}  // namespace

Address own_stack = 0;
std::size_t own_stack_bytes = 0;

void prepare_stacks(std::size_t by_value_bytes) {
  const long plain = __sanitizer_start_switch_fiber ? 256 << 10 : 64 << 10;
  std::size_t wanted = static_cast<std::size_t>(options.stack_bytes > 0 ? options.stack_bytes : plain);
  wanted = (wanted + 4 * by_value_bytes + kPage - 1) / kPage * kPage;
  if (arena != nullptr && wanted <= stack_bytes) return;
  if (arena != nullptr) {
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(arena, arena_bytes);
    munmap(arena, arena_bytes);
  }
  arena_bytes = kMaxStacks * (wanted + kPage);
  void* mapped = mmap(nullptr, arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  arena = mapped == MAP_FAILED ? nullptr : static_cast<char*>(mapped);
  stack_bytes = wanted;
  stacks_made = 0;
  free_stacks.clear();
  if (arena == nullptr) throw_error("no memory for the threads' stacks");
}

bool on_a_stack(Address a) { return a - reinterpret_cast<Address>(arena) < arena_bytes; }

void resume(Thread& thread) {
  if (thread.stack < 0) {
    thread.stack = take_stack();
    thread.context = make_context(stack_begin(thread.stack), stack_bytes, entry);
  }
  current = &thread;
  own_stack = reinterpret_cast<Address>(stack_begin(thread.stack));
  own_stack_bytes = stack_bytes;
  builtins.thread = thread.position;
  ++counts.switches;
  if (__sanitizer_start_switch_fiber)
    __sanitizer_start_switch_fiber(&scheduler_sanitizer_stack, stack_begin(thread.stack), stack_bytes);
  switch_context(&scheduler_context, thread.context);
  if (__sanitizer_finish_switch_fiber)
    __sanitizer_finish_switch_fiber(scheduler_sanitizer_stack, nullptr, nullptr);
  current = nullptr;
}

void leave(bool for_good) {
  Thread* me = current;
  if (__sanitizer_start_switch_fiber)
    __sanitizer_start_switch_fiber(for_good ? nullptr : &me->sanitizer_stack, scheduler_stack,
                                   scheduler_stack_bytes);
  switch_context(&me->context, scheduler_context);
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(me->sanitizer_stack, nullptr, nullptr);
}

void release_stack(Thread& thread) {
  if (thread.stack < 0) return;
  if (thread.state != Thread::State::kReturned && __asan_unpoison_memory_region)
    __asan_unpoison_memory_region(stack_begin(thread.stack), stack_bytes);
  free_stacks.push_back(thread.stack);
  thread.stack = -1;
}

}  // namespace cuda_on_cpu
