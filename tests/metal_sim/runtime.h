// The machine that runs translated kernels: threads, memory, checks and counters.
//
// A thread of a threadgroup is a fiber; threadgroups run one after the other. The compiler puts a
// call in front of every load and store (clang's thread sanitizer, without its library), so that
// each access is checked and counted here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace metal_sim {

// ---- What translate.py registers for a library.

enum class Binding : uint32_t { buffer, threadgroup, builtin };

// Codes of metal_sim::scalar_code in the shim; 0 stands for a struct.
enum class Scalar : uint32_t {
  None, Bool, Char, UChar, Short, UShort, Int, UInt, Long, ULong, Half, BFloat, Float
};
const char* name_of(Scalar);
uint32_t size_of(Scalar);

struct Parameter {
  const char* name;
  Binding binding;
};

struct Kernel {
  const char* name;
  void (*entry)(const uint64_t* buffers, const uint64_t* threadgroup, const uint32_t* builtins);
  const Parameter* parameters;
  // Per parameter; of what it points at from Size on. A builtin has no row.
  enum Layout { Index, Size, Align, ScalarCode, Writable, Reference, NumLayout };
  const uint32_t (*layout)[NumLayout];
  uint32_t num_parameters;
};

constexpr uint32_t kNumFunctionConstants = 64;

struct FunctionConstant {
  const uint32_t* index;
  const char* type;
  const char* name;
};

struct Library {
  const char* name;
  const Kernel* kernels;
  uint32_t num_kernels;
  const FunctionConstant* constants;
  uint32_t num_constants;
  const char* const* variables;
};

// ---- How to run, and what came of it.

enum class Order { Forward, Reverse, Random };

struct Options {
  // In which threads of a simdgroup, simdgroups and threadgroups run; also the order of reductions.
  Order order = Order::Forward;
  uint64_t seed = 0;
  // Shadow memory: races and reads of unwritten memory. Bounds are checked always.
  bool shadow = true;
  uint32_t max_threads_per_threadgroup = 1024;
  uint32_t thread_execution_width = 32; // what pipelines report; kernels run in simdgroups of 32
};

struct Report {
  std::string kind;
  std::string kernel;
  std::string message;
  // Where it happened and, for a race, where the other access was: offsets in `library`.
  std::string library;
  uint64_t offset = 0;
  uint64_t other_offset = 0;
};

struct BufferCounters {
  std::string name;
  std::string role;
  uint64_t bytes = 0;
  uint64_t read = 0;
  uint64_t written = 0;
  uint64_t unique_read = 0;
  uint64_t unique_written = 0;
};

struct DispatchCounters {
  std::string kernel;
  uint32_t threadgroups[3];
  uint32_t threads_per_threadgroup[3];
  uint64_t threadgroup_bytes = 0; // threadgroup memory in use
  uint64_t threadgroup_barriers = 0; // met by a threadgroup, summed over them
  uint64_t simd_operations = 0; // of a simdgroup
  uint64_t bytes_read = 0; // device memory, as issued by threads; without set_bytes' arguments
  uint64_t bytes_written = 0;
  bool waits = false; // for the dispatches before it
};

struct Call {
  std::string name;
  std::vector<DispatchCounters> dispatches;
  std::vector<BufferCounters> buffers;
};

// ---- Memory

struct Region;

// One element-wise contiguous piece of a buffer that a kernel may touch.
struct Run {
  uint64_t begin; // bytes from the start of the allocation
  uint64_t end;
};

// Device memory of one call: a copy of each buffer between red zones.
class Memory {
 public:
  Memory();
  ~Memory();
  // An allocation of `bytes`; nothing of it may be touched before `allow`. `granule` is the size of
  // the pieces that are written independently: that of an element.
  Region* allocate(std::string name, uint64_t bytes, uint32_t granule);
  void allow(Region*, const std::vector<Run>&);
  uint8_t* data(Region*);
  void set_role(Region*, std::string role);
  void set_initialised(Region*);
  // How many bytes of `runs` no kernel has written.
  uint64_t unwritten(Region*, const std::vector<Run>& runs) const;
  std::vector<BufferCounters> counters() const;

 private:
  std::vector<std::unique_ptr<Region>> regions_;
};

struct Size {
  uint32_t x, y, z;
};

struct Launch {
  const Library* library = nullptr;
  const Kernel* kernel = nullptr;
  struct Bound {
    Region* region = nullptr;
    uint64_t offset = 0;
    bool writable = false;
  };
  Bound buffers[31];
  uint64_t threadgroup_bytes[31] = {};
  struct Constant {
    uint32_t index;
    uint64_t value;
    uint32_t size;
  };
  std::vector<Constant> constants;
  Size threads; // of the grid
  Size group; // threads of a threadgroup
  bool waits = true; // a barrier orders it after what ran before
};

// Runs a launch; false if a report ended it early. One caller at a time, and one Memory.
bool run(const Launch&, const Options&, DispatchCounters&);

void report(const std::string& kind, const std::string& kernel, const std::string& message);
// What was reported since the last call; each place in the code once.
std::vector<Report> take_reports();

} // namespace metal_sim

#pragma GCC visibility pop
