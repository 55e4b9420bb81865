// Controls of the simulator. The operations themselves are bound by csrc/bindings.cpp, unmodified.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "host.h"
#include "launch.h"
#include "mlx/backend/metal/device.h"
#include "verify_draft_metal.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace metal_sim;

namespace {

nb::dict to_dict(const Report& r) {
  nb::dict d;
  d["kind"] = r.kind;
  d["kernel"] = r.kernel;
  d["message"] = r.message;
  d["library"] = r.library;
  d["offset"] = r.offset;
  d["other_offset"] = r.other_offset;
  return d;
}

nb::dict to_dict(const DispatchCounters& c) {
  nb::dict d;
  d["kernel"] = c.kernel;
  d["threadgroups"] = nb::make_tuple(c.threadgroups[0], c.threadgroups[1], c.threadgroups[2]);
  auto& t = c.threads_per_threadgroup;
  d["threads_per_threadgroup"] = nb::make_tuple(t[0], t[1], t[2]);
  d["threadgroup_bytes"] = c.threadgroup_bytes;
  d["threadgroup_barriers"] = c.threadgroup_barriers;
  d["simd_operations"] = c.simd_operations;
  d["bytes_read"] = c.bytes_read;
  d["bytes_written"] = c.bytes_written;
  d["waits"] = c.waits;
  return d;
}

nb::dict to_dict(const BufferCounters& c) {
  nb::dict d;
  d["name"] = c.name;
  d["role"] = c.role;
  d["bytes"] = c.bytes;
  d["read"] = c.read;
  d["written"] = c.written;
  d["unique_read"] = c.unique_read;
  d["unique_written"] = c.unique_written;
  return d;
}

template <typename T>
nb::list to_list(const std::vector<T>& items) {
  nb::list list;
  for (auto& item : items) {
    list.append(to_dict(item));
  }
  return list;
}

} // namespace

NB_MODULE(_metal_sim, m) {
  m.def(
      "set_compiler",
      [](nb::callable compiler) {
        // Held for the life of the process: it is called from whichever thread evaluates.
        auto* held = new nb::callable(std::move(compiler));
        set_compiler([held](const std::string& name, const std::string& source) {
          nb::gil_scoped_acquire gil;
          return nb::cast<std::string>((*held)(name, source));
        });
      },
      "compiler"_a);
  m.def(
      "set_options",
      [](int order,
         uint64_t seed,
         bool shadow,
         uint32_t max_threads_per_threadgroup,
         uint32_t thread_execution_width) {
        set_options(
            {static_cast<Order>(order),
             seed,
             shadow,
             max_threads_per_threadgroup,
             thread_execution_width});
      },
      "order"_a,
      "seed"_a,
      "shadow"_a,
      "max_threads_per_threadgroup"_a,
      "thread_execution_width"_a);
  m.def(
      "set_tuning",
      [](int variant, int max_threads) {
        auto& tuning = exactspec::metal_tuning();
        tuning.variant = static_cast<exactspec::MetalVariant>(variant);
        tuning.max_threads = max_threads;
      },
      "variant"_a,
      "max_threads"_a);
  m.def(
      "clear_library",
      [](const std::string& name) {
        mx::metal::device(mx::Device::gpu).clear_library(name);
      },
      "name"_a);
  m.def("take_reports", [] { return to_list(take_reports()); });
  m.def("take_calls", [] {
    nb::list calls;
    for (auto& call : take_calls()) {
      nb::dict d;
      d["name"] = call.name;
      d["dispatches"] = to_list(call.dispatches);
      d["buffers"] = to_list(call.buffers);
      calls.append(d);
    }
    return calls;
  });
  m.def(
      "launch",
      [](const std::string& library,
         const std::string& source,
         const std::string& kernel,
         const std::vector<std::pair<int, mx::array>>& inputs,
         const std::vector<std::tuple<int, std::vector<int>, mx::Dtype>>& outputs,
         const std::vector<std::pair<int, nb::bytes>>& bytes,
         const std::vector<std::tuple<int, std::string, double>>& constants,
         const std::vector<std::pair<int, int>>& threadgroup_memory,
         std::tuple<int, int, int> threadgroups,
         std::tuple<int, int, int> threads) {
        LaunchArguments a{
            library, source, kernel, {}, {}, {}, constants, threadgroup_memory, threadgroups,
            threads};
        std::vector<mx::array> arrays;
        for (auto& [index, array] : inputs) {
          a.input_indices.push_back(index);
          arrays.push_back(array);
        }
        std::vector<mx::Shape> shapes;
        std::vector<mx::Dtype> dtypes;
        for (auto& [index, shape, dtype] : outputs) {
          a.output_indices.push_back(index);
          shapes.emplace_back(shape.begin(), shape.end());
          dtypes.push_back(dtype);
        }
        for (auto& [index, b] : bytes) {
          a.bytes.emplace_back(index, std::string(b.c_str(), b.size()));
        }
        nb::gil_scoped_release release;
        return launch(std::move(a), arrays, shapes, dtypes);
      },
      "library"_a,
      "source"_a,
      "kernel"_a,
      "inputs"_a,
      "outputs"_a,
      "bytes"_a,
      "constants"_a,
      "threadgroup_memory"_a,
      "threadgroups"_a,
      "threads"_a);
}
