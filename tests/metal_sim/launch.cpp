#include "launch.h"

#include <stdexcept>

#include "host.h"
#include "mlx/allocator.h"
#include "mlx/backend/metal/device.h"

namespace metal_sim {

namespace {

namespace metal = mlx::core::metal;

struct ConstantValue {
  bool b;
  int i;
  unsigned u;
  float f;
};

class LaunchPrimitive : public mx::Primitive {
 public:
  LaunchPrimitive(mx::Stream stream, LaunchArguments arguments)
      : mx::Primitive(stream), a_(std::move(arguments)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    evaluate(a_.kernel, stream(), inputs, outputs, [&] { eval_gpu(inputs, outputs); });
  }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (auto& out : outputs) {
      out.set_data(mx::allocator::malloc(out.nbytes()));
    }
    auto& device = metal::device(stream().device);
    auto* library = device.get_library(a_.library, [this] { return a_.source; });
    std::vector<ConstantValue> values(a_.constants.size());
    metal::MTLFCList list;
    std::string hash = a_.kernel;
    for (size_t i = 0; i < values.size(); ++i) {
      auto& [index, type, value] = a_.constants[i];
      values[i] = {
          value != 0,
          static_cast<int>(value),
          static_cast<unsigned>(value),
          static_cast<float>(value)};
      if (type == "bool") {
        list.emplace_back(&values[i].b, MTL::DataTypeBool, index);
      } else if (type == "int") {
        list.emplace_back(&values[i].i, MTL::DataTypeInt, index);
      } else if (type == "uint") {
        list.emplace_back(&values[i].u, MTL::DataTypeUInt, index);
      } else {
        list.emplace_back(&values[i].f, MTL::DataTypeFloat, index);
      }
      hash += "_" + std::to_string(index) + type + std::to_string(value);
    }
    auto* kernel = device.get_kernel(a_.kernel, library, hash, list);
    auto& encoder = metal::get_command_encoder(stream());
    encoder.set_compute_pipeline_state(kernel);
    for (size_t i = 0; i < inputs.size(); ++i) {
      encoder.set_input_array(inputs[i], a_.input_indices[i]);
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      encoder.set_output_array(outputs[i], a_.output_indices[i]);
    }
    for (auto& [index, bytes] : a_.bytes) {
      encoder.set_bytes(bytes.data(), static_cast<int>(bytes.size()), index);
    }
    for (auto& [index, length] : a_.threadgroup_memory) {
      encoder.set_threadgroup_memory_length(length, index);
    }
    auto size = [](const std::tuple<int, int, int>& t) {
      return MTL::Size(std::get<0>(t), std::get<1>(t), std::get<2>(t));
    };
    encoder.dispatch_threadgroups(size(a_.threadgroups), size(a_.threads));
  }

  const char* name() const override {
    return "metal_sim_launch";
  }

 private:
  LaunchArguments a_;
};

} // namespace

std::vector<mx::array> launch(
    LaunchArguments arguments,
    const std::vector<mx::array>& inputs,
    const std::vector<mx::Shape>& output_shapes,
    const std::vector<mx::Dtype>& output_dtypes) {
  auto primitive = std::make_shared<LaunchPrimitive>(
      mx::default_stream(mx::Device::cpu), std::move(arguments));
  return mx::array::make_arrays(
      std::vector<mx::Shape>(output_shapes), output_dtypes, primitive, inputs);
}

} // namespace metal_sim
