#include "runtime.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <numeric>
#include <set>
#include <unordered_set>
#include <utility>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace metal_sim {

constexpr uint32_t kSimdWidth = 32;
constexpr uint32_t kMaxThreads = 1024;
constexpr uint32_t kThreadgroupLimit = 32768;
constexpr uint32_t kNumBuiltins = 12;
constexpr size_t kPage = 4096;

const char* name_of(Scalar s) {
  static const char* names[] = {
      "a struct", "bool", "char", "uchar", "short", "ushort", "int",
      "uint", "long", "ulong", "half", "bfloat", "float"};
  return names[static_cast<uint32_t>(s)];
}

uint32_t size_of(Scalar s) {
  static const uint32_t sizes[] = {0, 1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4};
  return sizes[static_cast<uint32_t>(s)];
}

// ---- Shadow memory: who touched a granule last.

namespace {

enum Space : uint32_t { Device, Threadgroup };

// Atomic updates commute; what a load sees, or a store leaves, depends on their order.
enum Atomicity : uint16_t { Plain, AtomicLoadOrStore, AtomicUpdate };

struct Access {
  uint32_t epoch; // of the space; 0: never
  uint32_t group; // number of the threadgroup within the call
  uint32_t pc; // low half
  uint16_t thread : 14;
  uint16_t atomicity : 2;
  uint16_t simd_epoch;
};

// Two readers are enough: any later writer is unordered with one of them if it is with any.
struct Cell {
  Access write, read, other_read;
};
static_assert(sizeof(Cell) == 48);

uint8_t* reserve(size_t bytes) {
  void* p = mmap(
      nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    throw std::bad_alloc();
  }
  return static_cast<uint8_t*>(p);
}

// Zeros that take up memory where they are touched: a view may have its rows gigabytes apart.
template <typename T>
struct Zeroed {
  explicit Zeroed(size_t n)
      : bytes(n * sizeof(T)), data(reinterpret_cast<T*>(reserve(bytes))) {}
  ~Zeroed() {
    munmap(data, bytes);
  }
  Zeroed(const Zeroed&) = delete;
  size_t bytes;
  T* data;
};

} // namespace

struct Region {
  Region(std::string name, Space space, uint64_t begin, uint64_t bytes, uint32_t granule)
      : name(std::move(name)),
        space(space),
        begin(begin),
        bytes(bytes),
        granule(granule),
        cells(bytes / granule + 1),
        read_bits((bytes / granule + 64) / 64),
        write_bits((bytes / granule + 64) / 64) {}

  bool allows(uint64_t from, uint64_t to) {
    if (last < runs.size() && runs[last].begin <= from && to <= runs[last].end) {
      return true;
    }
    auto after = std::upper_bound(
        runs.begin(), runs.end(), from, [](uint64_t x, const Run& r) { return x < r.begin; });
    if (after == runs.begin() || (after - 1)->end < to) {
      return false;
    }
    last = static_cast<size_t>(after - 1 - runs.begin());
    return true;
  }

  std::string name;
  std::string role;
  Space space;
  uint64_t begin; // address
  uint64_t bytes;
  uint32_t granule;
  std::vector<Run> runs;
  size_t last = 0;
  bool writable = false;
  bool initialised = false;
  bool constant = false; // what the host set as bytes
  Zeroed<Cell> cells;
  Zeroed<uint64_t> read_bits, write_bits;
  BufferCounters counters;
};

// ---- Fibers

namespace {

struct Fiber {
#ifdef __x86_64__
  void* stack_pointer;
#else
  ucontext_t context;
#endif
};

#ifdef __x86_64__
// Saves what a call preserves, and continues where `to` was left.
extern "C" void metal_sim_switch(void** from, void* to);
asm(R"(
.text
.globl metal_sim_switch
.hidden metal_sim_switch
.type metal_sim_switch, @function
metal_sim_switch:
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
.size metal_sim_switch, .-metal_sim_switch
)");

void switch_fiber(Fiber& from, Fiber& to) {
  metal_sim_switch(&from.stack_pointer, to.stack_pointer);
}

void start_fiber(Fiber& fiber, uint8_t* stack, size_t size, void (*entry)()) {
  auto top = reinterpret_cast<void**>(stack + size - 64);
  *--top = nullptr; // the entry's return address, so that its stack is aligned as after a call
  *--top = reinterpret_cast<void*>(entry);
  top -= 6;
  std::fill(top, top + 6, nullptr);
  fiber.stack_pointer = top;
}
#else
void switch_fiber(Fiber& from, Fiber& to) {
  swapcontext(&from.context, &to.context);
}

void start_fiber(Fiber& fiber, uint8_t* stack, size_t size, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = size;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}
#endif

// ---- The machine

enum class State : uint8_t { Ready, AtSimdOperation, AtBarrier, Done };
enum class SimdOperation : uint8_t { Exchange, Shuffle, Barrier };

// metal_sim_exchanged of the shim.
struct Exchanged {
  uint32_t active;
  uint32_t lane;
  uint32_t value[kSimdWidth];
  uint8_t order[kSimdWidth];
};

struct Thread {
  Fiber fiber;
  State state;
  SimdOperation operation;
  uint16_t index;
  uint32_t flags; // of a barrier
  uint64_t pc; // where it waits
  Exchanged* exchanged;
  uint64_t* shuffled;
  uint32_t value; // sent to an exchange
  uint32_t source; // of a shuffle
  bool uniform;
  uint32_t builtins[3 * kNumBuiltins];
};

constexpr size_t kStack = 64 << 10;
constexpr size_t kArena = size_t(1) << 36;
constexpr size_t kThreadgroupArena = 256 << 10;
constexpr size_t kGap = 64; // between threadgroup variables, and what they are aligned to

enum MemFlags : uint32_t { MemDevice = 1, MemThreadgroup = 2 };

class Machine {
 public:
  static Machine& get() {
    return *instance; // every load and store comes by
  }
  static Machine* const instance;

  bool run(const Launch& launch, const Options& options, DispatchCounters& counters);

  // Hooks
  void access(
      uint64_t address, uint32_t size, bool store, Atomicity atomicity, bool aligned, uint64_t pc);
  void simd_operation(SimdOperation operation, uint64_t pc);
  void threadgroup_barrier(uint32_t flags, uint64_t pc);
  void* threadgroup_variable(uint32_t id, uint64_t size, uint64_t align, uint64_t granule);
  uint32_t atomic(uint64_t address, uint32_t op, uint32_t operand, uint32_t expected, uint64_t pc);
  Thread& current() {
    return *current_;
  }

  // Device memory
  uint64_t map(uint64_t bytes, Region* region);
  void reset_memory();

  void add_report(
      const char* kind, const std::string& message, uint64_t pc, uint64_t other_pc = 0);
  std::vector<Report> take_reports();
  void add_host_report(
      const std::string& kind, const std::string& kernel, const std::string& message);

 private:
  Machine();
  static void fiber_entry();
  void resume(Thread& thread);
  void block();
  [[noreturn]] void abandon();
  void run_group(Size position);
  bool run_simdgroups();
  bool step_simdgroup(uint32_t simdgroup);
  void finish_simd_operation(uint32_t simdgroup, uint32_t members);
  Region* region_of(uint64_t address);
  Region* add_threadgroup_region(
      std::string name, uint64_t size, uint64_t align, uint64_t granule);
  void check_races(
      Region& region, uint64_t first, uint64_t last, bool store, Atomicity atomicity, uint64_t pc);
  bool conflicts(const Access& earlier, const Access& mine, Space space) const;
  void remember_reader(Cell& cell, const Access& mine, Space space) const;
  void other_memory(uint64_t address, uint32_t size, bool store, uint64_t pc);
  std::string place(uint64_t address, const Region* region) const;
  std::string who(uint32_t thread, uint32_t group) const;
  uint64_t random();
  void shuffle(std::vector<uint32_t>& order);

  uint8_t* stacks_;
  uint8_t* arena_;
  uint8_t* threadgroup_arena_;
  uint32_t* pages_; // 1 + index into mapped_ of the region that owns a page of the arena
  std::vector<Region*> mapped_;
  uint64_t arena_top_ = kPage;

  std::vector<Thread> threads_;
  Fiber scheduler_;
  Thread* current_ = nullptr;

  const Launch* launch_ = nullptr;
  Options options_;
  DispatchCounters* counters_ = nullptr;
  bool failed_ = false;
  uint32_t num_threads_ = 0;
  uint64_t random_state_ = 1;
  std::vector<uint32_t> simdgroup_order_, lane_order_;

  // Clocks of the shadow memory, per address space.
  uint32_t epoch_[2] = {1, 1};
  uint32_t phase_[2] = {1, 1}; // what is older is ordered before everything now running
  uint16_t simd_epoch_[2][kMaxThreads / kSimdWidth] = {};
  uint32_t group_ = 0;

  // Threadgroup memory of the running dispatch.
  std::vector<std::unique_ptr<Region>> variables_;
  std::map<uint32_t, Region*> variable_of_id_;
  uint8_t variable_at_[kThreadgroupArena / kGap]; // 1 + index into variables_
  uint64_t threadgroup_top_ = kGap;
  uint64_t threadgroup_used_ = 0;
  uint64_t dynamic_threadgroup_[31];

  std::unordered_set<uint64_t> image_pages_; // of loaded libraries: constant tables
  std::vector<Report> reports_;
  std::set<std::tuple<std::string, std::string, uint64_t, uint64_t>> reported_;
  std::mutex reports_mutex_;
};

} // namespace
} // namespace metal_sim

extern "C" __attribute__((visibility("default"))) uint64_t
    metal_sim_function_constants[metal_sim::kNumFunctionConstants];
uint64_t metal_sim_function_constants[metal_sim::kNumFunctionConstants] = {};

namespace metal_sim {
namespace {

Machine* const Machine::instance = new Machine;

Machine::Machine() : threads_(kMaxThreads), lane_order_(kSimdWidth) {
  stacks_ = reserve(kStack * kMaxThreads);
  for (uint32_t i = 0; i < kMaxThreads; ++i) {
    mprotect(stacks_ + i * kStack, kPage, PROT_NONE); // an overflow faults instead of spreading
  }
  arena_ = reserve(kArena);
  threadgroup_arena_ = reserve(kThreadgroupArena);
  pages_ = reinterpret_cast<uint32_t*>(reserve(kArena / kPage * sizeof(uint32_t)));
}

// ---- Threads

uint64_t Machine::random() {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_;
}

void Machine::shuffle(std::vector<uint32_t>& order) {
  for (size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[random() % i]);
  }
}

void Machine::resume(Thread& thread) {
  current_ = &thread;
  switch_fiber(scheduler_, thread.fiber);
}

void Machine::block() {
  switch_fiber(current_->fiber, scheduler_);
}

void Machine::abandon() {
  failed_ = true;
  block();
  std::abort(); // nothing resumes a thread of an abandoned dispatch
}

void Machine::fiber_entry() {
  Machine& m = get();
  // On the thread's own stack, which it may read.
  uint64_t buffers[31], threadgroup[31];
  uint32_t builtins[3 * kNumBuiltins];
  for (int i = 0; i < 31; ++i) {
    auto& b = m.launch_->buffers[i];
    buffers[i] = b.region ? b.region->begin + b.offset : 0;
  }
  std::copy(std::begin(m.dynamic_threadgroup_), std::end(m.dynamic_threadgroup_), threadgroup);
  std::copy(std::begin(m.current_->builtins), std::end(m.current_->builtins), builtins);
  m.launch_->kernel->entry(buffers, threadgroup, builtins);
  m.current_->state = State::Done;
  m.block();
  std::abort();
}

bool Machine::run(const Launch& launch, const Options& options, DispatchCounters& counters) {
  launch_ = &launch;
  options_ = options;
  counters_ = &counters;
  failed_ = false;
  random_state_ = (options.seed + 1) * 0x9E3779B97F4A7C15ull;
  auto g = launch.group, t = launch.threads;
  Size groups = {(t.x + g.x - 1) / g.x, (t.y + g.y - 1) / g.y, (t.z + g.z - 1) / g.z};
  counters.kernel = launch.kernel->name;
  uint32_t* to[] = {counters.threadgroups, counters.threads_per_threadgroup};
  int k = 0;
  for (auto& s : {groups, g}) {
    to[k][0] = s.x;
    to[k][1] = s.y;
    to[k++][2] = s.z;
  }
  counters.waits = launch.waits;

  std::memset(metal_sim_function_constants, 0xa5, sizeof metal_sim_function_constants);
  for (auto& c : launch.constants) {
    std::memcpy(&metal_sim_function_constants[c.index], &c.value, c.size);
  }
  for (auto* region : mapped_) {
    region->writable = false;
  }
  for (auto& b : launch.buffers) {
    if (b.region && b.writable) {
      b.region->writable = true;
    }
  }
  variables_.clear();
  variable_of_id_.clear();
  std::memset(variable_at_, 0, sizeof variable_at_);
  threadgroup_top_ = kGap;
  threadgroup_used_ = 0;
  for (uint32_t i = 0; i < launch.kernel->num_parameters; ++i) {
    auto& p = launch.kernel->parameters[i];
    if (p.binding == Binding::threadgroup) {
      auto* layout = launch.kernel->layout[i];
      auto granule = std::max(1u, size_of(static_cast<Scalar>(layout[Kernel::ScalarCode])));
      auto index = layout[Kernel::Index];
      auto* region = add_threadgroup_region(p.name, launch.threadgroup_bytes[index], 16, granule);
      dynamic_threadgroup_[index] = region->begin;
    }
  }

  epoch_[Device]++;
  if (launch.waits) {
    phase_[Device] = epoch_[Device];
  }
  std::vector<uint32_t> order(groups.x * groups.y * groups.z);
  std::iota(order.begin(), order.end(), 0);
  if (options.order == Order::Reverse) {
    std::reverse(order.begin(), order.end());
  } else if (options.order == Order::Random) {
    shuffle(order);
  }
  for (auto i : order) {
    if (failed_) {
      break;
    }
    run_group({i % groups.x, i / groups.x % groups.y, i / groups.x / groups.y});
  }
  counters.threadgroup_bytes = threadgroup_used_;
  counters_ = nullptr;
  return !failed_;
}

void Machine::run_group(Size position) {
  auto t = launch_->threads, g = launch_->group;
  // Threadgroups at the edge of a grid that is no multiple of them are smaller.
  Size size = {
      std::min(g.x, t.x - position.x * g.x),
      std::min(g.y, t.y - position.y * g.y),
      std::min(g.z, t.z - position.z * g.z)};
  num_threads_ = size.x * size.y * size.z;
  uint32_t num_simdgroups = (num_threads_ + kSimdWidth - 1) / kSimdWidth;
  group_++;
  epoch_[Device]++;
  phase_[Threadgroup] = ++epoch_[Threadgroup];
  std::memset(threadgroup_arena_, 0xff, threadgroup_top_ + kGap); // NaN, or -1

  for (uint32_t i = 0; i < num_threads_; ++i) {
    Thread& thread = threads_[i];
    thread.state = State::Ready;
    thread.index = i;
    uint32_t x = i % size.x, y = i / size.x % size.y, z = i / size.x / size.y;
    uint32_t groups[] = {(t.x + g.x - 1) / g.x, (t.y + g.y - 1) / g.y, (t.z + g.z - 1) / g.z};
    const uint32_t values[kNumBuiltins][3] = {
        {position.x * g.x + x, position.y * g.y + y, position.z * g.z + z},
        {position.x, position.y, position.z},
        {x, y, z},
        {i},
        {i % kSimdWidth},
        {i / kSimdWidth},
        {size.x, size.y, size.z},
        {g.x, g.y, g.z},
        {groups[0], groups[1], groups[2]},
        {t.x, t.y, t.z},
        {num_simdgroups},
        {kSimdWidth}};
    std::memcpy(thread.builtins, values, sizeof values);
    start_fiber(thread.fiber, stacks_ + i * kStack, kStack, fiber_entry);
  }

  simdgroup_order_.resize(num_simdgroups);
  std::iota(simdgroup_order_.begin(), simdgroup_order_.end(), 0);
  std::iota(lane_order_.begin(), lane_order_.end(), 0);
  if (options_.order == Order::Reverse) {
    std::reverse(simdgroup_order_.begin(), simdgroup_order_.end());
    std::reverse(lane_order_.begin(), lane_order_.end());
  }
  while (run_simdgroups()) {
  }
}

// Runs all threads up to a threadgroup barrier; false if there is none.
bool Machine::run_simdgroups() {
  if (options_.order == Order::Random) {
    shuffle(simdgroup_order_);
    shuffle(lane_order_);
  }
  for (auto s : simdgroup_order_) {
    while (!failed_ && step_simdgroup(s)) {
    }
    if (failed_) {
      return false;
    }
  }
  Thread* waiting = nullptr;
  uint32_t count = 0;
  bool same = true;
  for (uint32_t i = 0; i < num_threads_; ++i) {
    if (threads_[i].state == State::AtBarrier) {
      same &= !waiting || waiting->pc == threads_[i].pc;
      waiting = &threads_[i];
      count++;
    }
  }
  if (!waiting) {
    return false;
  }
  current_ = waiting;
  if (count < num_threads_ || !same) {
    add_report(
        "barrier divergence",
        same ? "threadgroup_barrier reached by " + std::to_string(count) + " of " +
                std::to_string(num_threads_) + " threads"
             : "threads wait at different calls of threadgroup_barrier",
        waiting->pc);
    failed_ = true;
    return false;
  }
  counters_->threadgroup_barriers++;
  if (waiting->flags & MemThreadgroup) {
    epoch_[Threadgroup]++;
  }
  if (waiting->flags & MemDevice) {
    epoch_[Device]++;
  }
  for (uint32_t i = 0; i < num_threads_; ++i) {
    threads_[i].state = State::Ready;
  }
  return true;
}

// Runs a simdgroup up to a SIMD-group operation and performs it; false if there is none.
bool Machine::step_simdgroup(uint32_t simdgroup) {
  Thread* lanes = &threads_[simdgroup * kSimdWidth];
  uint32_t width = std::min(kSimdWidth, num_threads_ - simdgroup * kSimdWidth);
  for (auto i : lane_order_) {
    if (i < width && lanes[i].state == State::Ready) {
      resume(lanes[i]);
      if (failed_) {
        return false;
      }
    }
  }
  uint64_t pc = 0;
  for (uint32_t i = 0; i < width; ++i) {
    if (lanes[i].state == State::AtSimdOperation && (!pc || lanes[i].pc < pc)) {
      pc = lanes[i].pc;
      current_ = &lanes[i];
    }
  }
  if (!pc) {
    return false;
  }
  uint32_t members = 0, count = 0;
  for (uint32_t i = 0; i < width; ++i) {
    if (lanes[i].state == State::AtSimdOperation && lanes[i].pc == pc) {
      members |= 1u << i;
      count++;
    }
  }
  if (count < width) {
    add_report(
        "simd divergence",
        "a SIMD-group operation is reached by " + std::to_string(count) + " of " +
            std::to_string(width) + " threads",
        pc);
  }
  finish_simd_operation(simdgroup, members);
  return true;
}

void Machine::finish_simd_operation(uint32_t simdgroup, uint32_t members) {
  Thread* lanes = &threads_[simdgroup * kSimdWidth];
  counters_->simd_operations++;
  auto operation = current_->operation;
  auto pc = current_->pc;
  if (operation == SimdOperation::Exchange) {
    Exchanged result = {members, 0, {}, {}};
    std::vector<uint32_t> order(kSimdWidth);
    std::iota(order.begin(), order.end(), 0);
    if (options_.order == Order::Reverse) {
      std::reverse(order.begin(), order.end());
    } else if (options_.order == Order::Random) {
      shuffle(order);
    }
    std::copy(order.begin(), order.end(), result.order);
    for (uint32_t i = 0; i < kSimdWidth; ++i) {
      if (members >> i & 1) {
        result.value[i] = lanes[i].value;
      }
    }
    for (uint32_t i = 0; i < kSimdWidth; ++i) {
      if (members >> i & 1) {
        result.lane = i;
        *lanes[i].exchanged = result;
      }
    }
  } else if (operation == SimdOperation::Shuffle) {
    uint64_t values[kSimdWidth][2];
    for (uint32_t i = 0; i < kSimdWidth; ++i) {
      if (members >> i & 1) {
        std::memcpy(values[i], lanes[i].shuffled, sizeof values[i]);
      }
    }
    bool uniform = true, inactive = false;
    uint32_t bad = 0;
    for (uint32_t i = 0; i < kSimdWidth; ++i) {
      if (!(members >> i & 1)) {
        continue;
      }
      uint32_t source = lanes[i].source;
      uniform &= !lanes[i].uniform || source == current_->source;
      if (source < kSimdWidth && (members >> source & 1)) {
        std::memcpy(lanes[i].shuffled, values[source], sizeof values[source]);
      } else {
        inactive = true;
        bad = source;
        std::memset(lanes[i].shuffled, 0xa5, sizeof values[i]);
      }
    }
    if (inactive) {
      add_report(
          "inactive lane",
          "a SIMD-group function reads lane " + std::to_string(bad) + ", which takes no part",
          pc);
    }
    if (!uniform) {
      add_report(
          "non-uniform broadcast", "the lane of simd_broadcast differs between threads", pc);
    }
  } else {
    if (current_->flags & MemThreadgroup) {
      simd_epoch_[Threadgroup][simdgroup]++;
    }
    if (current_->flags & MemDevice) {
      simd_epoch_[Device][simdgroup]++;
    }
  }
  for (uint32_t i = 0; i < kSimdWidth; ++i) {
    if (members >> i & 1) {
      lanes[i].state = State::Ready;
    }
  }
}

void Machine::simd_operation(SimdOperation operation, uint64_t pc) {
  current_->operation = operation;
  current_->pc = pc;
  current_->state = State::AtSimdOperation;
  block();
}

void Machine::threadgroup_barrier(uint32_t flags, uint64_t pc) {
  current_->flags = flags;
  current_->pc = pc;
  current_->state = State::AtBarrier;
  block();
}

// ---- Memory

Region* Machine::region_of(uint64_t address) {
  uint64_t device = address - reinterpret_cast<uint64_t>(arena_);
  if (device < kArena) {
    uint32_t i = pages_[device / kPage];
    return i ? mapped_[i - 1] : nullptr;
  }
  uint64_t local = address - reinterpret_cast<uint64_t>(threadgroup_arena_);
  uint32_t i = variable_at_[local / kGap];
  return i ? variables_[i - 1].get() : nullptr;
}

void* Machine::threadgroup_variable(
    uint32_t id, uint64_t size, uint64_t align, uint64_t granule) {
  Region*& region = variable_of_id_[id];
  if (!region) {
    region = add_threadgroup_region(launch_->library->variables[id], size, align, granule);
  }
  return reinterpret_cast<void*>(region->begin);
}

Region* Machine::add_threadgroup_region(
    std::string name, uint64_t size, uint64_t align, uint64_t granule) {
  threadgroup_used_ = (threadgroup_used_ + align - 1) / align * align + size;
  if (threadgroup_used_ > kThreadgroupLimit) {
    add_report(
        "threadgroup memory",
        std::to_string(threadgroup_used_) + " bytes of threadgroup memory, limit " +
            std::to_string(kThreadgroupLimit),
        0);
  }
  if (threadgroup_top_ + size + 2 * kGap > kThreadgroupArena) {
    throw std::bad_alloc();
  }
  uint64_t begin = reinterpret_cast<uint64_t>(threadgroup_arena_) + threadgroup_top_;
  variables_.push_back(std::make_unique<Region>(
      std::move(name), Threadgroup, begin, size, static_cast<uint32_t>(granule)));
  auto* region = variables_.back().get();
  region->runs = {{0, size}};
  region->writable = true;
  uint64_t slots = (size + kGap - 1) / kGap;
  std::memset(variable_at_ + threadgroup_top_ / kGap, static_cast<int>(variables_.size()), slots);
  std::memset(reinterpret_cast<void*>(begin), 0xff, size);
  threadgroup_top_ += (slots + 1) * kGap;
  return region;
}

void Machine::access(
    uint64_t address, uint32_t size, bool store, Atomicity atomicity, bool aligned, uint64_t pc) {
  bool device = address - reinterpret_cast<uint64_t>(arena_) < kArena;
  if (!device && address - reinterpret_cast<uint64_t>(threadgroup_arena_) >= kThreadgroupArena) {
    return other_memory(address, size, store, pc);
  }
  Region* region = region_of(address);
  uint64_t offset = region ? address - region->begin : 0;
  if (!region || !region->allows(offset, offset + size)) {
    add_report(
        store ? "out-of-bounds write" : "out-of-bounds read",
        std::to_string(size) + " bytes " + place(address, region),
        pc);
    abandon();
  }
  if (aligned && address % size != 0) {
    add_report(
        "misaligned access",
        std::to_string(size) + " bytes " + place(address, region) + " need an alignment of " +
            std::to_string(size),
        pc);
  }
  if (store && !region->writable) {
    add_report(
        "write to an input",
        std::to_string(size) + " bytes " + place(address, region) +
            ", which the host did not bind as an output",
        pc);
  }
  uint64_t first = offset / region->granule, last = (offset + size - 1) / region->granule;
  if (device) {
    auto& c = region->counters;
    (store ? c.written : c.read) += size;
    if (!region->constant) {
      (store ? counters_->bytes_written : counters_->bytes_read) += size;
    }
    auto* bits = (store ? region->write_bits : region->read_bits).data;
    auto& unique = store ? c.unique_written : c.unique_read;
    for (uint64_t i = first; i <= last; ++i) {
      uint64_t bit = uint64_t(1) << (i & 63);
      if (!(bits[i >> 6] & bit)) {
        bits[i >> 6] |= bit;
        unique += region->granule;
      }
    }
  }
  if (options_.shadow) {
    check_races(*region, first, last, store, atomicity, pc);
  }
}

// What to remember of two accesses by one thread: an atomic one does not hide a plain one.
Access weaker(const Access& earlier, Access mine) {
  if (earlier.thread == mine.thread && earlier.group == mine.group &&
      earlier.epoch == mine.epoch && earlier.simd_epoch == mine.simd_epoch) {
    mine.atomicity = std::min<uint16_t>(earlier.atomicity, mine.atomicity);
  }
  return mine;
}

bool Machine::conflicts(const Access& earlier, const Access& mine, Space space) const {
  bool commute = earlier.atomicity == AtomicUpdate && mine.atomicity == AtomicUpdate;
  if (earlier.epoch < phase_[space] || commute) {
    return false;
  }
  if (earlier.group != mine.group) {
    return true;
  }
  if (earlier.epoch != mine.epoch || earlier.thread == mine.thread) {
    return false;
  }
  // simdgroup_barrier orders the threads of one simdgroup.
  return earlier.thread / kSimdWidth != mine.thread / kSimdWidth ||
      earlier.simd_epoch == mine.simd_epoch;
}

void Machine::remember_reader(Cell& cell, const Access& mine, Space space) const {
  if (cell.read.thread == mine.thread && cell.read.group == mine.group) {
    cell.read = weaker(cell.read, mine);
    return;
  }
  auto superseded = [&](const Access& a) {
    return a.epoch < phase_[space] ||
        (a.group == mine.group &&
         (a.epoch != mine.epoch || a.thread == mine.thread ||
          (a.thread / kSimdWidth == mine.thread / kSimdWidth &&
           a.simd_epoch != mine.simd_epoch)));
  };
  if (superseded(cell.read)) {
    cell.read = mine;
  } else if (superseded(cell.other_read)) {
    cell.other_read = mine;
  } else if (cell.read.group == cell.other_read.group) {
    bool other_group = mine.group != cell.read.group;
    bool other_simdgroup =
        cell.read.thread / kSimdWidth == cell.other_read.thread / kSimdWidth &&
        mine.thread / kSimdWidth != cell.read.thread / kSimdWidth;
    if (other_group || other_simdgroup) {
      cell.other_read = mine;
    }
  }
}

void Machine::check_races(
    Region& region, uint64_t first, uint64_t last, bool store, Atomicity atomicity, uint64_t pc) {
  auto space = region.space;
  uint32_t simdgroup = current_->index / kSimdWidth;
  Access mine = {epoch_[space], group_, static_cast<uint32_t>(pc), 0, 0, 0};
  mine.thread = current_->index;
  mine.atomicity = atomicity;
  mine.simd_epoch = simd_epoch_[space][simdgroup];
  const Access* racing = nullptr;
  const char* earlier = "";
  Access copy;
  bool unwritten = false;
  for (uint64_t i = first; i <= last; ++i) {
    Cell& cell = region.cells.data[i];
    if (!store && !region.initialised &&
        (space == Device ? cell.write.epoch == 0 : cell.write.epoch < phase_[space])) {
      unwritten = true;
    }
    auto look = [&](const Access& a, const char* what) {
      if (!racing && conflicts(a, mine, space)) {
        copy = a;
        racing = &copy;
        earlier = what;
      }
    };
    look(cell.write, "write");
    if (store) {
      look(cell.read, "read");
      look(cell.other_read, "read");
      cell.write = weaker(cell.write, mine);
    } else {
      remember_reader(cell, mine, space);
    }
  }
  uint64_t address = region.begin + first * region.granule;
  if (racing) {
    // The other access is in the same library, so both addresses share their high half.
    uint64_t other_pc = (pc & ~uint64_t(0xffffffff)) | racing->pc;
    add_report(
        space == Device ? "device race" : "threadgroup race",
        std::string(store ? "write" : "read") + " " + place(address, &region) + " by " +
            who(mine.thread, mine.group) + ", unordered with a " + earlier + " by " +
            who(racing->thread, racing->group),
        pc,
        other_pc);
  }
  if (unwritten) {
    add_report("unwritten memory", "read " + place(address, &region) + ", never written", pc);
  }
}

// Private memory, function constants, constant tables; anything else is a wild pointer.
void Machine::other_memory(uint64_t address, uint32_t size, bool store, uint64_t pc) {
  if (address - reinterpret_cast<uint64_t>(stacks_) < kStack * kMaxThreads) {
    return;
  }
  auto slots = reinterpret_cast<uint64_t>(metal_sim_function_constants);
  uint64_t slot = (address - slots) / sizeof(uint64_t);
  if (address >= slots && slot < kNumFunctionConstants) {
    bool set = std::any_of(
        launch_->constants.begin(), launch_->constants.end(), [&](const Launch::Constant& c) {
          return c.index == slot;
        });
    if (!set) {
      add_report(
          "function constant",
          "function constant " + std::to_string(slot) + " is read but the host did not set it",
          pc);
    }
    return;
  }
  if (image_pages_.count(address / kPage)) {
    return;
  }
  Dl_info info;
  if (!store && dladdr(reinterpret_cast<void*>(address), &info)) {
    image_pages_.insert(address / kPage);
    return;
  }
  add_report(
      store ? "out-of-bounds write" : "out-of-bounds read",
      std::to_string(size) + " bytes outside all memory",
      pc);
  abandon();
}

uint32_t Machine::atomic(
    uint64_t address, uint32_t op, uint32_t operand, uint32_t expected, uint64_t pc) {
  enum { Add, Sub, Min, Max, And, Or, Xor, Swap, Load, Store, CompareSwap };
  bool is_signed = op & 32;
  op &= 31;
  auto atomicity = op == Load || op == Store ? AtomicLoadOrStore : AtomicUpdate;
  if (op != Store) {
    access(address, 4, false, atomicity, true, pc);
  }
  if (op != Load) {
    access(address, 4, true, atomicity, true, pc);
  }
  auto* p = reinterpret_cast<uint32_t*>(address);
  uint32_t old = *p;
  auto less = [&](uint32_t a, uint32_t b) {
    return is_signed ? static_cast<int32_t>(a) < static_cast<int32_t>(b) : a < b;
  };
  switch (op) {
    case Add: *p = old + operand; break;
    case Sub: *p = old - operand; break;
    case Min: *p = less(operand, old) ? operand : old; break;
    case Max: *p = less(old, operand) ? operand : old; break;
    case And: *p = old & operand; break;
    case Or: *p = old | operand; break;
    case Xor: *p = old ^ operand; break;
    case Swap:
    case Store: *p = operand; break;
    case CompareSwap: *p = old == expected ? operand : old; break;
  }
  return old;
}

uint64_t Machine::map(uint64_t bytes, Region* region) {
  uint64_t pages = (bytes + kPage - 1) / kPage;
  if (arena_top_ + (pages + 1) * kPage > kArena) {
    throw std::bad_alloc();
  }
  uint64_t first = arena_top_ / kPage;
  mapped_.push_back(region);
  std::fill(pages_ + first, pages_ + first + pages, static_cast<uint32_t>(mapped_.size()));
  arena_top_ += (pages + 1) * kPage; // one page between buffers belongs to none
  return reinterpret_cast<uint64_t>(arena_) + first * kPage;
}

void Machine::reset_memory() {
  madvise(arena_, arena_top_, MADV_DONTNEED);
  std::memset(pages_, 0, arena_top_ / kPage * sizeof(uint32_t));
  mapped_.clear();
  arena_top_ = kPage;
  group_ = 0;
  for (auto s : {Device, Threadgroup}) {
    epoch_[s] = phase_[s] = 1;
  }
}

// ---- Reports

std::string Machine::place(uint64_t address, const Region* region) const {
  if (!region) {
    // The nearest buffer in front of the address, or behind it.
    for (auto* r : mapped_) {
      if (address + kPage > r->begin && address < r->begin + r->bytes + kPage) {
        region = r;
      }
    }
    for (auto& r : variables_) {
      if (address + kGap > r->begin && address < r->begin + r->bytes + kGap) {
        region = r.get();
      }
    }
  }
  if (!region) {
    return "outside all buffers";
  }
  auto offset = static_cast<int64_t>(address - region->begin);
  return std::string("at byte ") + std::to_string(offset) + " of " +
      (region->space == Device ? "" : "threadgroup ") + region->name + " (" +
      std::to_string(region->bytes) + " bytes)";
}

std::string Machine::who(uint32_t thread, uint32_t group) const {
  return "thread " + std::to_string(thread) + " of threadgroup " + std::to_string(group);
}

void Machine::add_report(
    const char* kind, const std::string& message, uint64_t pc, uint64_t other_pc) {
  std::lock_guard lock(reports_mutex_);
  if (!reported_.insert({kind, launch_->kernel->name, pc, other_pc}).second) {
    return;
  }
  Report r = {kind, launch_->kernel->name, message, "", 0, 0};
  Dl_info info;
  if (pc && dladdr(reinterpret_cast<void*>(pc), &info)) {
    auto base = reinterpret_cast<uint64_t>(info.dli_fbase);
    r.library = info.dli_fname;
    r.offset = pc - base - 1; // the call itself, not the instruction behind it
    r.other_offset = other_pc ? other_pc - base - 1 : 0;
  }
  reports_.push_back(std::move(r));
}

void Machine::add_host_report(
    const std::string& kind, const std::string& kernel, const std::string& message) {
  std::lock_guard lock(reports_mutex_);
  reports_.push_back({kind, kernel, message, "", 0, 0});
}

std::vector<Report> Machine::take_reports() {
  std::lock_guard lock(reports_mutex_);
  reported_.clear();
  return std::exchange(reports_, {});
}

} // namespace

bool run(const Launch& launch, const Options& options, DispatchCounters& counters) {
  return Machine::get().run(launch, options, counters);
}

void report(const std::string& kind, const std::string& kernel, const std::string& message) {
  Machine::get().add_host_report(kind, kernel, message);
}

std::vector<Report> take_reports() {
  return Machine::get().take_reports();
}

Memory::Memory() = default;

Memory::~Memory() {
  Machine::get().reset_memory();
}

Region* Memory::allocate(std::string name, uint64_t bytes, uint32_t granule) {
  regions_.push_back(
      std::make_unique<Region>(std::move(name), Device, 0, std::max<uint64_t>(bytes, 1), granule));
  auto* region = regions_.back().get();
  region->begin = Machine::get().map(region->bytes, region);
  return region;
}

void Memory::allow(Region* region, const std::vector<Run>& more) {
  auto& runs = region->runs;
  runs.insert(runs.end(), more.begin(), more.end());
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.begin < b.begin; });
  size_t n = 0;
  for (auto& r : runs) {
    if (n && r.begin <= runs[n - 1].end) {
      runs[n - 1].end = std::max(runs[n - 1].end, r.end);
    } else {
      runs[n++] = r;
    }
  }
  runs.resize(n);
}

uint8_t* Memory::data(Region* region) {
  return reinterpret_cast<uint8_t*>(region->begin);
}

void Memory::set_role(Region* region, std::string role) {
  region->role = std::move(role);
  region->constant = region->role == "bytes";
}

void Memory::set_initialised(Region* region) {
  region->initialised = true;
}

uint64_t Memory::unwritten(Region* region, const std::vector<Run>& runs) const {
  uint64_t missing = 0;
  for (auto& r : runs) {
    for (uint64_t i = r.begin / region->granule; i < r.end / region->granule; ++i) {
      if (!(region->write_bits.data[i >> 6] >> (i & 63) & 1)) {
        missing += region->granule;
      }
    }
  }
  return missing;
}

std::vector<BufferCounters> Memory::counters() const {
  std::vector<BufferCounters> result;
  for (auto& r : regions_) {
    auto c = r->counters;
    c.name = r->name;
    c.role = r->role;
    for (auto& run : r->runs) {
      c.bytes += run.end - run.begin;
    }
    result.push_back(std::move(c));
  }
  return result;
}

} // namespace metal_sim

// ---- What translated code calls

using metal_sim::Machine;
using metal_sim::Plain;
using metal_sim::SimdOperation;
#define CALLER reinterpret_cast<uint64_t>(__builtin_return_address(0))
#define EXPORT extern "C" __attribute__((visibility("default")))

#define HOOKS(size)                                                                  \
  EXPORT void __tsan_read##size(void* p) {                                           \
    Machine::get().access(reinterpret_cast<uint64_t>(p), size, false, Plain, true, CALLER);  \
  }                                                                                  \
  EXPORT void __tsan_write##size(void* p) {                                          \
    Machine::get().access(reinterpret_cast<uint64_t>(p), size, true, Plain, true, CALLER);   \
  }                                                                                  \
  EXPORT void __tsan_unaligned_read##size(void* p) {                                 \
    Machine::get().access(reinterpret_cast<uint64_t>(p), size, false, Plain, false, CALLER); \
  }                                                                                  \
  EXPORT void __tsan_unaligned_write##size(void* p) {                                \
    Machine::get().access(reinterpret_cast<uint64_t>(p), size, true, Plain, false, CALLER);  \
  }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

EXPORT void __tsan_init() {}

EXPORT void* __tsan_memcpy(void* to, const void* from, size_t n) {
  if (n) {
    Machine::get().access(reinterpret_cast<uint64_t>(from), n, false, Plain, false, CALLER);
    Machine::get().access(reinterpret_cast<uint64_t>(to), n, true, Plain, false, CALLER);
  }
  return std::memmove(to, from, n);
}

EXPORT void* __tsan_memmove(void* to, const void* from, size_t n) {
  return __tsan_memcpy(to, from, n);
}

EXPORT void* __tsan_memset(void* to, int value, size_t n) {
  if (n) {
    Machine::get().access(reinterpret_cast<uint64_t>(to), n, true, Plain, false, CALLER);
  }
  return std::memset(to, value, n);
}

EXPORT void metal_sim_exchange(metal_sim::Exchanged* result, uint32_t value) {
  auto& machine = Machine::get();
  machine.current().exchanged = result;
  machine.current().value = value;
  machine.simd_operation(SimdOperation::Exchange, CALLER);
}

EXPORT void metal_sim_shuffle(uint64_t* value, uint32_t source, uint32_t uniform) {
  auto& machine = Machine::get();
  machine.current().shuffled = value;
  machine.current().source = source;
  machine.current().uniform = uniform;
  machine.simd_operation(SimdOperation::Shuffle, CALLER);
}

EXPORT void metal_sim_simdgroup_barrier(uint32_t flags) {
  auto& machine = Machine::get();
  machine.current().flags = flags;
  machine.simd_operation(SimdOperation::Barrier, CALLER);
}

EXPORT void metal_sim_threadgroup_barrier(uint32_t flags) {
  Machine::get().threadgroup_barrier(flags, CALLER);
}

EXPORT uint32_t metal_sim_lane() {
  return Machine::get().current().index % metal_sim::kSimdWidth;
}

EXPORT void* metal_sim_threadgroup_variable(
    uint32_t id, uint64_t size, uint64_t align, uint64_t granule) {
  return Machine::get().threadgroup_variable(id, size, align, granule);
}

EXPORT uint32_t metal_sim_atomic(
    uint64_t address, uint32_t operation, uint32_t operand, uint32_t expected) {
  return Machine::get().atomic(address, operation, operand, expected, CALLER);
}

// ---- Conversions that the compiler leaves to its own library. The 16-bit result is returned in
// the low half of a vector register, as a float's low half would be.

namespace {

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

} // namespace

EXPORT float __truncsfbf2(float x) {
  uint32_t bits = bits_of(x);
  if (x != x) {
    return from_bits((bits >> 16) | 0x40); // stay a NaN
  }
  return from_bits((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

EXPORT float __truncsfhf2(float x) {
  uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    return from_bits(sign | 0x7e00);
  }
  if (magnitude >= 0x477ff000) { // rounds to 65520 or more
    return from_bits(sign | 0x7c00);
  }
  if (magnitude < 0x38800000) { // a subnormal: adding 0.5 rounds at its last bit
    return from_bits(sign | (bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000));
  }
  magnitude -= 0x38000000; // the exponent's bias
  return from_bits(sign | (magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

EXPORT float __extendhfsf2(float low) {
  uint32_t h = bits_of(low) & 0xffff, sign = (h & 0x8000) << 16, magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) {
    return from_bits(sign | 0x7f800000 | magnitude << 13);
  }
  if (magnitude < 0x400) {
    return from_bits(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
  }
  return from_bits(sign | ((magnitude << 13) + 0x38000000));
}
