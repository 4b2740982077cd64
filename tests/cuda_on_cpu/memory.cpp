// Buffers and their guard pages, the shared variables of the kernels, reports of invalid accesses.
#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "internal.h"

namespace cuda_on_cpu {

std::map<Address, Buffer> buffers;
static Buffer* last_found = nullptr;

//------------------------------------------------------------------------------------------ buffers

Buffer* find_buffer(Address a) {
  if (last_found != nullptr && a >= last_found->begin && a < last_found->end) return last_found;
  auto next = buffers.upper_bound(a);
  if (next == buffers.begin()) return nullptr;
  Buffer& found = std::prev(next)->second;
  if (a >= found.end) return nullptr;
  return last_found = &found;
}

static void erase_if(auto predicate) {
  std::erase_if(buffers, [&](const auto& entry) { return predicate(entry.second); });
  last_found = nullptr;
}

void add_buffer(Address begin, std::size_t bytes, const std::string& name, Buffer::Kind kind, bool written) {
  erase_if([&](const Buffer& b) { return b.begin < begin + bytes && begin < b.end; });
  Buffer& buffer = buffers[begin];
  buffer.begin = begin;
  buffer.end = begin + bytes;
  buffer.name = name;
  buffer.kind = kind;
  if (!instrumented) return;
  Cell fresh;
  if (written) fresh.flags = kWritten;
  buffer.cells.assign(bytes, fresh);
}

void mark_written(Address begin, std::size_t bytes) {
  for (auto& [key, buffer] : buffers)
    for (Address a = std::max(begin, buffer.begin); a < std::min(begin + bytes, buffer.end); ++a)
      if (!buffer.cells.empty()) buffer.cells[a - buffer.begin].flags |= kWritten;
}

//------------------------------------------------------------------------------------------- module

static std::string demangled(const char* symbol) {
  int status = 0;
  char* text = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
  std::string result = text != nullptr && status == 0 ? text : symbol;
  std::free(text);
  return result;
}

// Variables at function scope: those of __shared__ are, those of libraries mostly are not.
static bool is_shared_variable(const char* symbol) {
  return std::strncmp(symbol, "_ZZ", 3) == 0 && std::strstr(symbol, "touch_thread_locals") == nullptr;
}

static void read_symbols(Module& m) {
  const int file = open(m.path.c_str(), O_RDONLY);
  if (file < 0) throw_error("cannot read " + m.path);
  const std::size_t bytes = static_cast<std::size_t>(lseek(file, 0, SEEK_END));
  void* mapped = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  if (mapped == MAP_FAILED) throw_error("cannot map " + m.path);
  const auto* start = static_cast<const char*>(mapped);
  const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(start);
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(start + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(start + sections[i].sh_offset);
    const char* names = start + sections[sections[i].sh_link].sh_offset;
    for (std::size_t k = 0; k < sections[i].sh_size / sizeof *symbols; ++k) {
      const ElfW(Sym) & symbol = symbols[k];
      const char* name = names + symbol.st_name;
      if (symbol.st_shndx == SHN_UNDEF || symbol.st_size == 0) continue;
      if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC) m.functions[m.base + symbol.st_value] = name;
      if (ELF64_ST_TYPE(symbol.st_info) != STT_TLS || !is_shared_variable(name)) continue;
      const std::string full = demangled(name);
      const std::size_t scope = full.rfind("::");
      m.shared.push_back(
          {symbol.st_value, symbol.st_size, scope == std::string::npos ? full : full.substr(scope + 2)});
    }
  }
  munmap(mapped, bytes);
}

// Calls `see` with the program or library that this function is in.
static void with_own_module(auto see) {
  using See = decltype(see);
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* raw) {
        const Address here = reinterpret_cast<Address>(&find_buffer);
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& part = info->dlpi_phdr[i];
          if (part.p_type != PT_LOAD || here - (info->dlpi_addr + part.p_vaddr) >= part.p_memsz) continue;
          (*static_cast<See*>(raw))(*info);
          return 1;
        }
        return 0;
      },
      &see);
}

const Module& module() {
  static const Module found = [] {
    Module m;
    with_own_module([&m](const dl_phdr_info& info) {
      m.base = info.dlpi_addr;
      char program[kPage] = "";
      if (info.dlpi_name[0] == 0 && readlink("/proc/self/exe", program, sizeof program - 1) < 0) std::abort();
      m.path = info.dlpi_name[0] != 0 ? info.dlpi_name : program;
      for (int i = 0; i < info.dlpi_phnum; ++i) {
        const auto& part = info.dlpi_phdr[i];
        if (part.p_type != PT_LOAD) continue;
        auto& list = part.p_flags & PF_W ? m.variable : m.constant;
        list.emplace_back(m.base + part.p_vaddr, m.base + part.p_vaddr + part.p_memsz);
      }
    });
    read_symbols(m);
    return m;
  }();
  return found;
}

// Of the calling host thread.
static Address thread_local_block() {
  Address block = 0;
  with_own_module(
      [&block](const dl_phdr_info& info) { block = reinterpret_cast<Address>(info.dlpi_tls_data); });
  return block;
}

// "void space::(anonymous namespace)::kernel<float, 4>(float*)" -> "space::kernel<float, 4>".
std::string kernel_name(const Launch& l) {
  const auto& functions = module().functions;
  const auto found = functions.find(reinterpret_cast<Address>(l.kernel));
  if (found == functions.end()) return l.expression;
  std::string name = demangled(found->second.c_str());
  for (std::size_t at; (at = name.find("(anonymous namespace)::")) != std::string::npos;) name.erase(at, 23);
  if (name.starts_with("void ")) name.erase(0, 5);
  int depth = 0;
  for (std::size_t i = 0; i < name.size(); ++i) {
    depth += (name[i] == '<') - (name[i] == '>');
    if (depth == 0 && name[i] == '(') return name.substr(0, i);
  }
  return name;
}

//------------------------------------------------------------------------------------ shared memory

static std::vector<std::pair<Address, Address>> shared_ranges;

void prepare_memory() {
  const Address block = thread_local_block();
  shared_ranges.clear();
  erase_if([](const Buffer& b) { return b.kind == Buffer::Kind::kShared; });
  const auto add = [](Address begin, std::size_t bytes, const std::string& name) {
    shared_ranges.emplace_back(begin, begin + bytes);
    if (checking) add_buffer(begin, bytes, name, Buffer::Kind::kShared, false);
  };
  if (block != 0)
    for (const auto& s : module().shared) add(block + s.offset, s.bytes, s.name);
  if (run->shared != nullptr)
    add(reinterpret_cast<Address>(run->shared), run->launch->shared, "dynamic shared memory");
  if (!checking) return;
  for (const auto& [begin, end] : module().variable)
    if (buffers.count(begin) == 0)
      add_buffer(begin, end - begin, "the module", Buffer::Kind::kModule, true);  // __device__ variables
}

void refill_shared() {
  if (options.poison_shared)
    for (const auto& [begin, end] : shared_ranges)
      std::memset(reinterpret_cast<void*>(begin), 0xff, end - begin);
  if (!checking) return;
  for (const auto& [begin, end] : shared_ranges) {
    Buffer& buffer = buffers.at(begin);
    std::fill(buffer.cells.begin(), buffer.cells.end(), Cell{});
    buffer.reads.clear();
  }
}

//---------------------------------------------------------------------------------- invalid accesses

static struct sigaction earlier_action;
static stack_t earlier_stack;

static void on_fault(int signal, siginfo_t* info, void*) {
  if (current != nullptr) {
    char text[600];
    const Address a = reinterpret_cast<Address>(info->si_addr);
    const uint3 b = builtins.block, t = current->position;
    int n = std::snprintf(text, sizeof text,
                          "cuda_on_cpu: kernel %s, block (%u,%u,%u), thread (%u,%u,%u): invalid access to ",
                          run->name.c_str(), b.x, b.y, b.z, t.x, t.y, t.z);
    if (a == 0)  // the CPU does not say
      n += std::snprintf(text + n, sizeof text - n, "a null, misaligned or wild pointer\n");
    else
      n += std::snprintf(text + n, sizeof text - n, "%p\n", info->si_addr);
    for (const auto& [begin, buffer] : buffers)
      if (a - buffer.end < kGuard || begin - a < kGuard)
        n += std::snprintf(text + n, sizeof text - n, "  byte %ld of buffer '%s' (%zu bytes)\n",
                           static_cast<long>(a - begin), buffer.name.c_str(),
                           static_cast<std::size_t>(buffer.end - begin));
    if (write(2, text, static_cast<std::size_t>(n)) < 0) std::abort();
  }
  sigaction(signal, &earlier_action, nullptr);  // and the access happens again
}

FaultReports::FaultReports() {
  static char stack[64 << 10];
  stack_t own{};
  own.ss_sp = stack;
  own.ss_size = sizeof stack;
  sigaltstack(&own, &earlier_stack);
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &earlier_action);
}

FaultReports::~FaultReports() {
  sigaction(SIGSEGV, &earlier_action, nullptr);
  sigaltstack(&earlier_stack, nullptr);
}

}  // namespace cuda_on_cpu

//---------------------------------------------------------------------------------------- interface

using namespace cuda_on_cpu;

static std::string free_error;

void* cuda_on_cpu_allocate(std::size_t bytes, const char* name, int written) {
  const auto alignment = static_cast<std::size_t>(options.alignment);
  const std::size_t room = (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
  const std::size_t pages = (room + kPage - 1) / kPage * kPage;
  void* mapped =
      mmap(nullptr, pages + 2 * kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* first = static_cast<char*>(mapped) + kGuard;
  mprotect(first, pages, PROT_READ | PROT_WRITE);
  std::memset(first, 0xff, pages);
  char* begin = first + pages - room;
  if (__asan_poison_memory_region) {
    __asan_poison_memory_region(first, static_cast<std::size_t>(begin - first));
    __asan_poison_memory_region(begin + bytes, room - bytes);
  }
  const Address key = reinterpret_cast<Address>(begin);
  add_buffer(key, bytes, name, Buffer::Kind::kGlobal, written != 0);
  buffers[key].pages = static_cast<char*>(mapped);
  buffers[key].page_bytes = pages + 2 * kGuard;
  return begin;
}

const char* cuda_on_cpu_free(void* pointer) {
  const Address key = reinterpret_cast<Address>(pointer);
  const auto found = buffers.find(key);
  if (found == buffers.end() || found->second.pages == nullptr)
    return "cuda_on_cpu: free of a pointer that is no buffer of its own";
  const Buffer& buffer = found->second;
  const char* first = buffer.pages + kGuard;
  const char* past = buffer.pages + buffer.page_bytes - kGuard;
  const auto* end = reinterpret_cast<const char*>(buffer.end);
  const auto untouched = [](char c) { return c == '\xff'; };
  const bool good =
      std::all_of(first, static_cast<const char*>(pointer), untouched) && std::all_of(end, past, untouched);
  if (!good) free_error = "cuda_on_cpu: bytes next to buffer '" + buffer.name + "' were overwritten";
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(buffer.pages, buffer.page_bytes);
  munmap(buffer.pages, buffer.page_bytes);
  buffers.erase(found);
  last_found = nullptr;
  return good ? nullptr : free_error.c_str();
}

void cuda_on_cpu_add_buffer(const void* buffer, std::size_t bytes, const char* name, int written) {
  if (bytes != 0)
    add_buffer(reinterpret_cast<Address>(buffer), bytes, name, Buffer::Kind::kGlobal, written != 0);
}

void cuda_on_cpu_drop_buffer(const void* buffer) {
  buffers.erase(reinterpret_cast<Address>(buffer));
  last_found = nullptr;
}

void cuda_on_cpu_mark_written(const void* from, std::size_t bytes) {
  mark_written(reinterpret_cast<Address>(from), bytes);
}
