#include "host.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/backend/metal/device.h"

namespace mx = mlx::core;
using mlx::core::metal::CommandEncoder;

namespace metal_sim {

namespace {

constexpr size_t kMaxBytes = 4096; // of set_bytes
constexpr size_t kThreadgroupMemory = 32768;

struct State {
  std::mutex mutex;
  Options options;
  std::function<std::string(const std::string&, const std::string&)> compiler;
  std::vector<Call> calls;
  std::mutex running; // one machine
};

State& state() {
  static State s;
  return s;
}

std::string indexed(const char* what, int idx) {
  return std::string(what) + "(" + std::to_string(idx) + ")";
}

// Byte ranges of the elements of `a`, from the start of its allocation.
std::vector<Run> runs_of(const mx::array& a) {
  auto itemsize = static_cast<int64_t>(a.itemsize());
  std::vector<std::pair<int64_t, int64_t>> dims; // extent, stride in bytes; outermost first
  for (int i = 0; i < static_cast<int>(a.ndim()); ++i) {
    if (a.shape(i) == 0) {
      return {};
    }
    if (a.shape(i) > 1 && a.strides(i) != 0) {
      dims.emplace_back(a.shape(i), a.strides(i) * itemsize);
    }
  }
  int64_t length = itemsize;
  while (!dims.empty() && dims.back().second == length) {
    length *= dims.back().first;
    dims.pop_back();
  }
  std::vector<int64_t> starts{a.offset()};
  for (auto [extent, stride] : dims) {
    std::vector<int64_t> more;
    for (auto start : starts) {
      for (int64_t i = 0; i < extent; ++i) {
        more.push_back(start + i * stride);
      }
    }
    starts = std::move(more);
  }
  std::vector<Run> runs;
  for (auto start : starts) {
    runs.push_back({static_cast<uint64_t>(start), static_cast<uint64_t>(start + length)});
  }
  return runs;
}

// Host and shader must agree on what is bound; what is found wrong is reported.
bool check_arguments(const CommandEncoder::Command& command) {
  const auto& kernel = *command.pipeline->kernel;
  bool complete = true;
  auto complain = [&](const std::string& kind, const std::string& message) {
    report(kind, kernel.name, message);
  };
  std::unordered_set<int> used;
  for (uint32_t i = 0; i < kernel.num_parameters; ++i) {
    const auto& p = kernel.parameters[i];
    const auto* layout = kernel.layout[i];
    int idx = static_cast<int>(layout[Kernel::Index]);
    if (p.binding == Binding::threadgroup) {
      auto length = command.threadgroup_lengths.find(idx);
      if (length == command.threadgroup_lengths.end()) {
        complain("unbound argument", indexed("threadgroup", idx) + " " + p.name + " has no length");
        complete = false;
      } else if (length->second % 16 != 0) {
        complain(
            "threadgroup memory", indexed("threadgroup", idx) + " is no multiple of 16 bytes long");
      }
    }
    if (p.binding != Binding::buffer) {
      continue;
    }
    used.insert(idx);
    auto found = command.arguments.find(idx);
    std::string name = indexed("buffer", idx) + " " + p.name;
    if (found == command.arguments.end()) {
      complain("unbound argument", name + " is not bound");
      complete = false;
      continue;
    }
    const auto& argument = found->second;
    auto size = layout[Kernel::Size];
    auto scalar = static_cast<Scalar>(layout[Kernel::ScalarCode]);
    if (!argument.data) {
      bool fits = layout[Kernel::Reference] ? argument.raw.size() == size
                                            : argument.raw.size() % size == 0;
      if (!fits) {
        complain(
            "argument size",
            name + ": the host sets " + std::to_string(argument.raw.size()) +
                " bytes, the kernel reads " + std::to_string(size));
      }
      if (layout[Kernel::Writable]) {
        complain("argument type", name + ": the kernel can write what the host sets as bytes");
      }
    } else {
      // A pointer to bytes takes any array.
      bool opaque = scalar == Scalar::None || scalar == Scalar::UChar || scalar == Scalar::Char;
      if (!opaque && size_of(scalar) != argument.itemsize) {
        complain(
            "argument type",
            name + ": the array has elements of " + std::to_string(argument.itemsize) +
                " bytes, the kernel takes " + name_of(scalar));
      }
      if (argument.output && !layout[Kernel::Writable]) {
        complain("argument type", name + ": bound as an output, but the kernel cannot write it");
      }
    }
  }
  for (auto& [idx, argument] : command.arguments) {
    if (!used.count(idx)) {
      complain("argument type", indexed("buffer", idx) + " is bound, but the kernel has none");
    }
  }
  return complete;
}

// The buffers of a call, by their allocation in the host's memory.
struct Buffers {
  Memory& memory;
  std::map<const uint8_t*, Region*> regions;
  std::map<const uint8_t*, std::string> names;
  std::set<std::tuple<const uint8_t*, uint64_t, uint64_t>> filled = {};
  int temporaries = 0;

  Region* get(const CommandEncoder::Argument& a) {
    auto [found, inserted] = regions.try_emplace(a.base, nullptr);
    Region*& region = found->second;
    if (inserted) {
      auto name = names.find(a.base);
      std::string label = name != names.end()
          ? name->second
          : "temporary " + std::to_string(temporaries++);
      region = memory.allocate(label, a.bytes, a.itemsize);
      memory.set_role(
          region, label.substr(0, label.find(' '))); // input, output or temporary
      if (a.initialised) {
        memory.set_initialised(region);
      }
    }
    std::vector<Run> fresh;
    for (auto& r : a.runs) {
      if (filled.insert({a.base, r.begin, r.end}).second) {
        fresh.push_back(r);
        auto* to = memory.data(region) + r.begin;
        if (a.initialised) {
          std::memcpy(to, a.base + r.begin, r.end - r.begin);
        } else {
          std::memset(to, 0xff, r.end - r.begin); // NaN, or -1
        }
      }
    }
    memory.allow(region, fresh);
    return region;
  }
};

struct Job {
  std::string name;
  Options options;
  std::vector<CommandEncoder::Command> commands;
  struct Array {
    std::shared_ptr<mx::array::Data> data;
    uint8_t* base;
    std::string name;
    bool output;
    std::vector<Run> runs;
  };
  std::vector<Array> arrays;
};

void execute(Job& job) {
  std::lock_guard lock(state().running);
  Call call{job.name, {}, {}};
  Memory memory;
  Buffers buffers{memory, {}, {}};
  for (auto& a : job.arrays) {
    buffers.names.try_emplace(a.base, a.name);
  }
  for (auto& command : job.commands) {
    if (!check_arguments(command)) {
      break;
    }
    Launch launch;
    launch.library = command.pipeline->library;
    launch.kernel = command.pipeline->kernel;
    launch.constants = command.pipeline->constants;
    launch.threads = command.threads;
    launch.group = command.group;
    launch.waits = command.waits;
    for (auto& [idx, length] : command.threadgroup_lengths) {
      launch.threadgroup_bytes[idx] = length;
    }
    for (auto& [idx, a] : command.arguments) {
      auto& bound = launch.buffers[idx];
      if (a.data) {
        bound = {buffers.get(a), static_cast<uint64_t>(a.offset), a.output};
      } else {
        auto* region = memory.allocate(indexed("bytes", idx), a.raw.size(), 1);
        memory.set_role(region, "bytes");
        memory.allow(region, {{0, a.raw.size()}});
        memory.set_initialised(region);
        std::memcpy(memory.data(region), a.raw.data(), a.raw.size());
        bound = {region, 0, false};
      }
    }
    call.dispatches.emplace_back();
    if (!run(launch, job.options, call.dispatches.back())) {
      break;
    }
  }
  for (auto& a : job.arrays) {
    auto region = buffers.regions.find(a.base);
    if (!a.output || region == buffers.regions.end()) {
      continue;
    }
    for (auto& r : a.runs) {
      std::memcpy(a.base + r.begin, memory.data(region->second) + r.begin, r.end - r.begin);
    }
    if (auto missing = memory.unwritten(region->second, a.runs)) {
      report(
          "unwritten output",
          job.commands.back().pipeline->kernel->name,
          a.name + " of " + job.name + ": " + std::to_string(missing) + " bytes are never written");
    }
  }
  call.buffers = memory.counters();
  std::lock_guard state_lock(state().mutex);
  state().calls.push_back(std::move(call));
}

} // namespace

void evaluate(
    const std::string& name,
    mx::Stream stream,
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs,
    const std::function<void()>& encode) {
  auto& encoder = mx::metal::get_command_encoder(stream);
  encode();
  auto job = std::make_shared<Job>();
  job->name = name;
  job->options = options();
  job->commands = encoder.take_commands();
  auto add = [&](const mx::array& a, const char* kind, size_t i) {
    if (a.size() > 0) {
      job->arrays.push_back(
          {a.data_shared_ptr(),
           static_cast<uint8_t*>(const_cast<mx::array&>(a).buffer().raw_ptr()),
           std::string(kind) + " " + std::to_string(i),
           std::string(kind) == "output",
           runs_of(a)});
    }
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    add(inputs[i], "input", i);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    add(outputs[i], "output", i);
  }
  // The inputs are computed by tasks in front of this one.
  mx::cpu::get_command_encoder(stream).dispatch([job] { execute(*job); });
}

void set_compiler(std::function<std::string(const std::string&, const std::string&)> compiler) {
  std::lock_guard lock(state().mutex);
  state().compiler = std::move(compiler);
}

void set_options(const Options& o) {
  std::lock_guard lock(state().mutex);
  state().options = o;
}

Options options() {
  std::lock_guard lock(state().mutex);
  return state().options;
}

std::vector<Call> take_calls() {
  std::lock_guard lock(state().mutex);
  return std::exchange(state().calls, {});
}

} // namespace metal_sim

namespace MTL {

NS::UInteger Device::maxThreadgroupMemoryLength() const {
  return metal_sim::kThreadgroupMemory;
}

NS::UInteger ComputePipelineState::maxTotalThreadsPerThreadgroup() const {
  return metal_sim::options().max_threads_per_threadgroup;
}

NS::UInteger ComputePipelineState::threadExecutionWidth() const {
  return metal_sim::options().thread_execution_width;
}

} // namespace MTL

namespace mlx::core::metal {

namespace {

struct ConstantType {
  MTL::DataType type;
  const char* name;
  uint32_t size;
};
constexpr ConstantType kConstantTypes[] = {
    {MTL::DataTypeBool, "bool", 1},
    {MTL::DataTypeChar, "char", 1},
    {MTL::DataTypeUChar, "uchar", 1},
    {MTL::DataTypeShort, "short", 2},
    {MTL::DataTypeUShort, "ushort", 2},
    {MTL::DataTypeInt, "int", 4},
    {MTL::DataTypeUInt, "uint", 4},
    {MTL::DataTypeLong, "long", 8},
    {MTL::DataTypeULong, "ulong", 8},
    {MTL::DataTypeHalf, "half", 2},
    {MTL::DataTypeFloat, "float", 4},
};

} // namespace

MTL::Library* Device::get_library(
    const std::string& name,
    const CompileOptions&,
    const std::function<std::string(void)>& builder) {
  std::lock_guard lock(mutex_);
  auto& library = libraries_[name];
  if (!library) {
    auto path = metal_sim::state().compiler(name, builder());
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
      libraries_.erase(name);
      throw std::runtime_error(std::string("[metal_sim] ") + dlerror());
    }
    library = std::make_unique<MTL::Library>();
    library->table = static_cast<const metal_sim::Library*>(dlsym(handle, "metal_sim_library"));
  }
  return library.get();
}

void Device::clear_library(const std::string& name) {
  std::lock_guard lock(mutex_);
  auto found = libraries_.find(name);
  if (found != libraries_.end()) {
    std::erase_if(
        pipelines_, [&](const auto& p) { return p.first.first == found->second.get(); });
    libraries_.erase(found);
  }
}

MTL::ComputePipelineState* Device::get_kernel(
    const std::string& base_name,
    MTL::Library* mtl_lib,
    const std::string& hash_name,
    const MTLFCList& func_consts,
    const std::vector<MTL::Function*>&) {
  std::lock_guard lock(mutex_);
  const auto& table = *mtl_lib->table;
  auto* kernels_end = table.kernels + table.num_kernels;
  auto* kernel = std::find_if(table.kernels, kernels_end, [&](const metal_sim::Kernel& k) {
    return base_name == k.name;
  });
  if (kernel == kernels_end) {
    throw std::runtime_error(
        "[metal_sim] there is no kernel " + base_name + " in library " + table.name);
  }
  std::vector<metal_sim::Launch::Constant> constants;
  for (auto& [data, type, index] : func_consts) {
    auto known = std::find_if(
        std::begin(kConstantTypes), std::end(kConstantTypes), [type = type](auto& t) {
          return t.type == type;
        });
    if (known == std::end(kConstantTypes) || index >= metal_sim::kNumFunctionConstants) {
      throw std::runtime_error("[metal_sim] function constant of an unsupported type or index");
    }
    auto* end = table.constants + table.num_constants;
    auto* declared = std::find_if(
        table.constants, end, [index = index](auto& c) { return *c.index == index; });
    if (declared == end) {
      metal_sim::report(
          "function constant",
          base_name,
          "the host sets " + std::to_string(index) + ", which the library does not declare");
    } else if (declared->type != std::string(known->name)) {
      metal_sim::report(
          "function constant",
          base_name,
          std::string(declared->name) + " is " + declared->type + " but the host sets " +
              known->name);
    }
    metal_sim::Launch::Constant constant{static_cast<uint32_t>(index), 0, known->size};
    std::memcpy(&constant.value, data, known->size);
    constants.push_back(constant);
  }
  // MLX looks pipelines up by this name alone: one name for two settings is a defect of the host.
  auto& pipeline = pipelines_[{mtl_lib, hash_name.empty() ? base_name : hash_name}];
  if (!pipeline) {
    pipeline = std::make_unique<MTL::ComputePipelineState>();
    pipeline->library = &table;
    pipeline->kernel = kernel;
    pipeline->constants = constants;
  }
  auto same = [](const auto& a, const auto& b) {
    return a.index == b.index && a.value == b.value && a.size == b.size;
  };
  if (pipeline->kernel != kernel ||
      !std::equal(
          constants.begin(),
          constants.end(),
          pipeline->constants.begin(),
          pipeline->constants.end(),
          same)) {
    metal_sim::report(
        "pipeline name",
        base_name,
        "the pipeline " + hash_name + " was built for another kernel or other function constants");
  }
  return pipeline.get();
}

CommandEncoder::ConcurrentContext::~ConcurrentContext() {
  enc.concurrent_ = false;
  enc.prev_outputs_.insert(enc.concurrent_outputs_.begin(), enc.concurrent_outputs_.end());
  enc.concurrent_outputs_.clear();
}

void CommandEncoder::set_input_array(const array& a, int idx, int64_t offset) {
  if (a.size() == 0) {
    metal_sim::report(
        "empty buffer",
        pipeline_->kernel->name,
        "buffer " + std::to_string(idx) + " is an array without elements: on a GPU it is null");
  }
  auto* buffer = a.buffer().ptr();
  next_inputs_.insert(buffer);
  needs_barrier_ = needs_barrier_ || prev_outputs_.count(buffer);
  Argument argument;
  argument.data = a.data_shared_ptr();
  argument.base = static_cast<uint8_t*>(const_cast<array&>(a).buffer().raw_ptr());
  argument.bytes = a.buffer_size();
  argument.offset = a.offset() + offset;
  argument.runs = metal_sim::runs_of(a);
  argument.itemsize = static_cast<uint32_t>(a.itemsize());
  // Arrays made inside an evaluation have no status yet; all others have been computed.
  argument.initialised = a.status() != array::Status::unscheduled;
  arguments_[idx] = std::move(argument);
}

void CommandEncoder::set_output_array(array& a, int idx, int64_t offset) {
  set_input_array(a, idx, offset);
  register_output_array(a);
  arguments_[idx].output = true;
}

void CommandEncoder::register_output_array(const array& a) {
  auto* buffer = a.buffer().ptr();
  if (concurrent_) {
    concurrent_outputs_.insert(buffer);
  } else {
    next_outputs_.insert(buffer);
    needs_barrier_ = needs_barrier_ || prev_inputs_.count(buffer);
  }
}

// Arguments hold on to their memory until they have run.
void CommandEncoder::add_temporary(array) {}
void CommandEncoder::add_temporaries(std::vector<array>) {}

void CommandEncoder::set_compute_pipeline_state(MTL::ComputePipelineState* kernel) {
  pipeline_ = kernel;
  arguments_.clear(); // an encoder may end at any time, so nothing may be left over from before
  threadgroup_lengths_.clear();
}

void CommandEncoder::set_raw_bytes(const void* data, size_t n, int idx) {
  if (n > metal_sim::kMaxBytes) {
    throw std::runtime_error("[metal_sim] set_bytes takes at most 4096 bytes");
  }
  Argument argument;
  auto* bytes = static_cast<const uint8_t*>(data);
  argument.raw.assign(bytes, bytes + n);
  arguments_[idx] = std::move(argument);
}

void CommandEncoder::set_threadgroup_memory_length(size_t length, int idx) {
  threadgroup_lengths_[idx] = length;
}

void CommandEncoder::maybeInsertBarrier() {
  if (needs_barrier_) {
    prev_inputs_ = std::exchange(next_inputs_, {});
    prev_outputs_ = std::exchange(next_outputs_, {});
  } else {
    prev_inputs_.merge(next_inputs_);
    prev_outputs_.merge(next_outputs_);
    next_inputs_.clear();
    next_outputs_.clear();
  }
}

void CommandEncoder::barrier() {
  needs_barrier_ = true;
}

void CommandEncoder::dispatch_threadgroups(MTL::Size grid, MTL::Size group) {
  dispatch_threads(
      {grid.width * group.width, grid.height * group.height, grid.depth * group.depth}, group);
}

void CommandEncoder::dispatch_threads(MTL::Size grid, MTL::Size group) {
  auto narrow = [](MTL::Size s) {
    return metal_sim::Size{
        static_cast<uint32_t>(s.width),
        static_cast<uint32_t>(s.height),
        static_cast<uint32_t>(s.depth)};
  };
  if (!pipeline_) {
    throw std::runtime_error("[metal_sim] dispatch without a kernel");
  }
  auto threads = group.width * group.height * group.depth;
  if (grid.width * grid.height * grid.depth == 0 || threads == 0) {
    metal_sim::report("dispatch size", pipeline_->kernel->name, "a grid or group without threads");
    return;
  }
  if (threads > pipeline_->maxTotalThreadsPerThreadgroup()) {
    metal_sim::report(
        "dispatch size",
        pipeline_->kernel->name,
        std::to_string(threads) + " threads per threadgroup, the pipeline allows " +
            std::to_string(pipeline_->maxTotalThreadsPerThreadgroup()));
    return;
  }
  bool waits = needs_barrier_;
  maybeInsertBarrier();
  needs_barrier_ = false;
  commands_.push_back(
      {pipeline_, arguments_, threadgroup_lengths_, narrow(grid), narrow(group), waits});
}

std::vector<CommandEncoder::Command> CommandEncoder::take_commands() {
  pipeline_ = nullptr;
  arguments_.clear();
  threadgroup_lengths_.clear();
  needs_barrier_ = true;
  concurrent_ = false;
  for (auto* set : {&prev_inputs_, &prev_outputs_, &next_inputs_, &next_outputs_}) {
    set->clear();
  }
  concurrent_outputs_.clear();
  return std::exchange(commands_, {});
}

Device& device(mlx::core::Device) {
  static Device d;
  return d;
}

CommandEncoder& get_command_encoder(Stream s) {
  static std::mutex mutex;
  static std::map<int, CommandEncoder> encoders;
  std::lock_guard lock(mutex);
  return encoders[s.index];
}

} // namespace mlx::core::metal
