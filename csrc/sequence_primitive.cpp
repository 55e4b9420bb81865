#include "sequence_primitive.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "mlx/ops.h"

namespace exactspec {

const mx::array& absent() {
  // One for all: arrays are allocated. Never destroyed: MLX's allocator may be gone at exit.
  static const auto* array = new mx::array(0.0f);
  return *array;
}

namespace {

bool runs_shaders(mx::Stream stream) {
#ifdef EXACTSPEC_SIMULATED_GPU
  return true; // by streams of the CPU, since there are no others
#else
  return stream.device == mx::Device::gpu;
#endif
}

} // namespace

std::vector<mx::array> SequencePrimitive::build(
    std::shared_ptr<SequencePrimitive> primitive, const std::vector<mx::array>& inputs) {
  auto shapes = primitive->output_shapes(inputs);
  auto dtypes = primitive->output_dtypes();
  auto outputs = mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
  if (primitive->device() == mx::Device::gpu) {
    primitive->prepare(inputs, outputs);
  }
  return outputs;
}

std::pair<std::vector<mx::array>, std::vector<int>> SequencePrimitive::vmap(
    const std::vector<mx::array>& inputs, const std::vector<int>& axes) {
  auto ranks = core_ranks();
  int count = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (axes[i] >= 0) {
      count = inputs[i].shape(axes[i]);
      if (ranks[i] == kShared) {
        throw std::invalid_argument(
            std::string("[") + name() + "] vmap: expected one draft_vocab for all, got an axis");
      }
    }
  }

  int batch_rank = static_cast<int>(inputs[0].ndim()) - ranks[0] + (axes[0] < 0);
  mx::Shape batch_shape;
  std::vector<mx::array> moved;
  for (size_t i = 0; i < inputs.size(); ++i) {
    auto x = inputs[i];
    if (axes[i] < 0 && (ranks[i] == kShared || x.ndim() == 0)) {
      moved.push_back(x);
      continue;
    }
    x = axes[i] < 0 ? mx::expand_dims(x, 0, stream()) : mx::moveaxis(x, axes[i], 0, stream());
    while (static_cast<int>(x.ndim()) < batch_rank + ranks[i]) {
      x = mx::expand_dims(x, 1, stream());
    }
    auto shape = x.shape();
    shape[0] = count;
    if (i == 0) {
      batch_shape = mx::Shape(shape.begin(), shape.begin() + batch_rank);
    }
    std::copy(batch_shape.begin(), batch_shape.end(), shape.begin());
    x = mx::broadcast_to(x, shape, stream());
    if (batch_rank > 1 && runs_shaders(stream())) {
      x = mx::contiguous(x, false, stream()); // shaders know one stride for all batch axes together
    }
    moved.push_back(x);
  }
  auto outputs = build(clone(), moved);
  return {outputs, std::vector<int>(outputs.size(), 0)};
}

std::vector<mx::array> SequencePrimitive::jvp(
    const std::vector<mx::array>&, const std::vector<mx::array>&, const std::vector<int>&) {
  throw std::invalid_argument(std::string("[") + name() + "] drawn tokens have no derivative");
}

std::vector<mx::array> SequencePrimitive::vjp(
    const std::vector<mx::array>&,
    const std::vector<mx::array>&,
    const std::vector<int>&,
    const std::vector<mx::array>&) {
  throw std::invalid_argument(std::string("[") + name() + "] drawn tokens have no derivative");
}

void SequencePrimitive::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::runtime_error(std::string("[") + name() + "] there is no GPU backend");
}

} // namespace exactspec
