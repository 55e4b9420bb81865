// Stands in for MLX's header of the same name: the calls that host code makes to encode kernels,
// with MLX 0.32.4's signatures. Kernels run in the simulator instead.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_set>
#include <vector>

#include "mlx/array.h"
#include "mlx/backend/common/metal_kernel.h"
#include "mlx/device.h"
#include "mlx/utils.h"
#include "runtime.h"

namespace NS {
using UInteger = unsigned long;
enum StringEncoding : UInteger { UTF8StringEncoding = 4 };
class String {
 public:
  static String* string(const char*, StringEncoding) {
    return nullptr;
  }
};
} // namespace NS

namespace MTL {

enum DataType : NS::UInteger {
  DataTypeNone = 0,
  DataTypeFloat = 3,
  DataTypeHalf = 16,
  DataTypeInt = 29,
  DataTypeUInt = 33,
  DataTypeShort = 37,
  DataTypeUShort = 41,
  DataTypeChar = 45,
  DataTypeUChar = 49,
  DataTypeBool = 53,
  DataTypeLong = 81,
  DataTypeULong = 85,
  DataTypeBFloat = 121,
};

class Size {
 public:
  Size() = default;
  Size(NS::UInteger width, NS::UInteger height, NS::UInteger depth)
      : width(width), height(height), depth(depth) {}
  static Size Make(NS::UInteger width, NS::UInteger height, NS::UInteger depth) {
    return Size(width, height, depth);
  }
  NS::UInteger width = 0;
  NS::UInteger height = 0;
  NS::UInteger depth = 0;
};

class Function;
class Buffer;
class CommandBuffer;
class CommandQueue;

class Device {
 public:
  NS::UInteger maxThreadgroupMemoryLength() const;
};

// A compiled library: a shared object of translated kernels.
class Library {
 public:
  const metal_sim::Library* table = nullptr;
};

class ComputePipelineState {
 public:
  NS::UInteger maxTotalThreadsPerThreadgroup() const;
  NS::UInteger threadExecutionWidth() const;

  const metal_sim::Library* library = nullptr;
  const metal_sim::Kernel* kernel = nullptr;
  std::vector<metal_sim::Launch::Constant> constants;
};

} // namespace MTL

namespace mlx::core::metal {

using MTLFCList = std::vector<std::tuple<const void*, MTL::DataType, NS::UInteger>>;

class Device;

// Records what is to run; metal_sim::evaluate runs it when the inputs have been computed.
class CommandEncoder {
 public:
  CommandEncoder() = default;
  CommandEncoder(const CommandEncoder&) = delete;
  CommandEncoder& operator=(const CommandEncoder&) = delete;

  struct ConcurrentContext {
    explicit ConcurrentContext(CommandEncoder& enc) : enc(enc) {
      enc.concurrent_ = true;
    }
    ~ConcurrentContext();

   private:
    CommandEncoder& enc;
  };

  void set_input_array(const array& a, int idx, int64_t offset = 0);
  void set_output_array(array& a, int idx, int64_t offset = 0);
  void register_output_array(const array& a);

  void add_temporary(array arr);
  void add_temporaries(std::vector<array> arrays);

  void dispatch_threadgroups(MTL::Size grid_dims, MTL::Size group_dims);
  void dispatch_threads(MTL::Size grid_dims, MTL::Size group_dims);
  void maybeInsertBarrier();

  void set_compute_pipeline_state(MTL::ComputePipelineState* kernel);

  template <typename Vec, typename = std::enable_if_t<is_vector_v<Vec>>>
  void set_vector_bytes(const Vec& vec, size_t nelems, int idx) {
    using T = typename Vec::value_type;
    if (nelems > 0) {
      set_raw_bytes(vec.data(), nelems * sizeof(T), idx);
    } else {
      T value{};
      set_raw_bytes(&value, sizeof(T), idx);
    }
  }
  template <typename Vec, typename = std::enable_if_t<is_vector_v<Vec>>>
  void set_vector_bytes(const Vec& vec, int idx) {
    set_vector_bytes(vec, vec.size(), idx);
  }
  template <typename T>
  void set_bytes(const T* v, int n, int idx) {
    set_raw_bytes(v, n * sizeof(T), idx);
  }
  template <typename T>
  void set_bytes(const T& v, int idx) {
    set_raw_bytes(&v, sizeof(T), idx);
  }
  void set_threadgroup_memory_length(size_t length, int idx);

  ConcurrentContext start_concurrent() {
    return ConcurrentContext(*this);
  }
  void barrier();

  // What an index is bound to.
  struct Argument {
    std::shared_ptr<array::Data> data; // keeps the array's memory; null for bytes
    uint8_t* base = nullptr; // of the allocation
    size_t bytes = 0; // of the allocation
    int64_t offset = 0; // from `base`
    std::vector<metal_sim::Run> runs; // what belongs to the array
    uint32_t itemsize = 1;
    bool initialised = false;
    bool output = false;
    std::vector<uint8_t> raw;
  };
  struct Command {
    MTL::ComputePipelineState* pipeline;
    std::map<int, Argument> arguments;
    std::map<int, size_t> threadgroup_lengths;
    metal_sim::Size threads;
    metal_sim::Size group;
    bool waits;
  };
  std::vector<Command> take_commands();

 private:
  void set_raw_bytes(const void* data, size_t n, int idx);
  void dispatch(metal_sim::Size threads, metal_sim::Size group);

  MTL::ComputePipelineState* pipeline_ = nullptr;
  std::map<int, Argument> arguments_;
  std::map<int, size_t> threadgroup_lengths_;
  std::vector<Command> commands_;

  // MLX's rule for barriers between dispatches, which otherwise run concurrently.
  bool needs_barrier_ = true; // in front of the first
  bool concurrent_ = false;
  std::unordered_set<const void*> prev_inputs_, prev_outputs_;
  std::unordered_set<const void*> next_inputs_, next_outputs_;
  std::unordered_set<const void*> concurrent_outputs_;
};

class Device {
 public:
  MTL::Device* mtl_device() {
    return &device_;
  }
  const std::string& get_architecture() const {
    return arch_;
  }
  int get_architecture_gen() const {
    return 14;
  }

  // Compiles what `builder` returns, once per name.
  MTL::Library* get_library(
      const std::string& name,
      const CompileOptions& compile_options,
      const std::function<std::string(void)>& builder);
  MTL::Library* get_library(
      const std::string& name, const std::function<std::string(void)>& builder) {
    return get_library(name, {}, builder);
  }
  void clear_library(const std::string& name);

  MTL::ComputePipelineState* get_kernel(
      const std::string& base_name,
      MTL::Library* mtl_lib,
      const std::string& hash_name = "",
      const MTLFCList& func_consts = {},
      const std::vector<MTL::Function*>& linked_functions = {});

 private:
  std::mutex mutex_;
  MTL::Device device_;
  std::string arch_ = "applegpu_g14s";
  std::map<std::string, std::unique_ptr<MTL::Library>> libraries_;
  std::map<std::pair<MTL::Library*, std::string>, std::unique_ptr<MTL::ComputePipelineState>>
      pipelines_;
};

Device& device(mlx::core::Device);
CommandEncoder& get_command_encoder(Stream s);

} // namespace mlx::core::metal
