// What the operations that verify a draft have in common: its distributions, and the target's rows.
#pragma once

#include <optional>

#include "law.h"
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

  DraftKind kind() const;
  mx::array rows() const; // logits or ids
};

// Checks the logits, [batch..., n + 1, V] where the operation calls its drafts n, and a bitmask of their
// rows. Returns the shape of the batch.
mx::Shape check_target(
    const char* op,
    const char* n,
    const mx::array& target_logits,
    const std::optional<mx::array>& token_bitmask);

// Checks that there is one row more than draft tokens; `rows` says which.
void check_draft_tokens(
    const char* op, const char* rows, const mx::array& target_logits, const mx::array& draft_tokens);

void check_draft(const char* op, const Draft& draft, const mx::Shape& batch_shape, int num_rows);

} // namespace exactspec
