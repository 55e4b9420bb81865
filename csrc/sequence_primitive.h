// What every primitive here has in common: inputs of shape [batch..., core...], one batch shape.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "mlx/primitives.h"

namespace exactspec {

namespace mx = mlx::core;

// Core rank of an input without batch axes: a vocabulary map, or one that was not given.
constexpr int kShared = -1;

// Stands for an optional input that was not given.
const mx::array& absent();

class SequencePrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  // Outputs of `primitive` for checked inputs.
  static std::vector<mx::array> build(
      std::shared_ptr<SequencePrimitive> primitive, const std::vector<mx::array>& inputs);

  // The vectorised axis becomes the first batch axis. Inputs without it are broadcast, which
  // copies nothing; scalars and shared inputs stay as they are.
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(
      const std::vector<mx::array>& inputs, const std::vector<int>& axes) override;

  // Drawn tokens have no derivative: both throw.
  std::vector<mx::array> jvp(
      const std::vector<mx::array>& primals,
      const std::vector<mx::array>& tangents,
      const std::vector<int>& argnums) override;
  std::vector<mx::array> vjp(
      const std::vector<mx::array>& primals,
      const std::vector<mx::array>& cotangents,
      const std::vector<int>& argnums,
      const std::vector<mx::array>& outputs) override;

  // Without a GPU backend operations refuse GPU streams when they are built: never reached then.
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

 protected:
  // Compiles what evaluation on a GPU needs: it may throw, evaluation may not.
  virtual void prepare(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {}
  virtual std::shared_ptr<SequencePrimitive> clone() = 0;
  virtual std::vector<mx::Dtype> output_dtypes() const = 0;
  // Per input; the first input has all batch axes.
  virtual std::vector<int> core_ranks() const = 0;
};

} // namespace exactspec
