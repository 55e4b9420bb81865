// The draft's distributions as inputs of an operation.
#pragma once

#include <optional>

#include "mlx/array.h"

namespace exactspec {

namespace mx = mlx::core;

// Dense: logits (and optionally vocab, stats). Sparse: ids and probs. One-hot: nothing.
struct Draft {
  std::optional<mx::array> logits; // [batch..., rows, Vd] f32 / f16 / bf16
  std::optional<mx::array> ids; // [batch..., rows, S] i32
  std::optional<mx::array> probs; // [batch..., rows, S] f32
  std::optional<mx::array> vocab; // [Vd] i32
  std::optional<mx::array> stats; // [batch..., rows, NUM_ROW_STATS] f32
};

void check_draft(const char* op, const Draft& draft, const mx::Shape& batch_shape, int num_rows);

} // namespace exactspec
