// What the host passes to the verify_draft kernels: one struct, the buffer indices and the function
// constants, in plain C++ and Metal.
#pragma once

#include "law.h"

namespace exactspec {

// Strides are in elements. Rows 0..K of a sequence are the target's, row K + 1 + i is slot i's draft, in a
// tree of K nodes the draft's row i.
struct VerifyDraftParams {
  int num_slots; // K
  int vocab_size; // V
  int draft_width; // columns of a dense draft, support of a sparse one, 0 for one-hot
  int target_misalign, draft_misalign; // bytes from a multiple of 16 to the first element
  int row_blocks; // scratch blocks per row: the larger of the target's and the draft's
  int64_t target_batch, target_row, target_step;
  int64_t draft_batch, draft_row, draft_step;
  int64_t probs_batch, probs_row, probs_step;
  int64_t stats_batch, stats_row, stats_step;
  int64_t mask_batch, mask_row, mask_step;
  int64_t tokens_batch, tokens_step;
  int64_t noise_batch, noise_step;
  int64_t lengths_batch;
  int64_t parents_batch, parents_step;
  int64_t vocab_step;
  int64_t positions_batch;
  int64_t parameters[8]; // target's temperature, top_k, top_p, min_p; then the draft's
  float rule_parameters[2]; // Rule::Typical: epsilon, delta; Rule::Cascade: alpha
};
static_assert(sizeof(VerifyDraftParams) == 24 + 8 * 32 + 8, "host and shader must agree");

// Buffer indices. Optional buffers are bound to a dummy.
enum VerifyDraftBuffer : int {
  BUF_TARGET_LOGITS,
  BUF_DRAFT_TOKENS,
  BUF_DRAFT_LENGTHS,
  BUF_PARENTS = BUF_DRAFT_LENGTHS, // a tree has no lengths
  BUF_DRAFT_ROWS,
  BUF_DRAFT_PROBS,
  BUF_DRAFT_VOCAB,
  BUF_DRAFT_STATS,
  BUF_NOISE,
  BUF_POSITIONS,
  BUF_BITMASK,
  BUF_PARAMETERS, // eight buffers, in the order of VerifyDraftParams::parameters
  BUF_PARAMS = BUF_PARAMETERS + 8,
  // float4 [B, 2K + 1, row_blocks + 1]: max, sum, raw max, raw sum of a block; then max, log norm, cutoff
  // and cutoff id (bits) of a filtered row.
  BUF_PARTIALS,
  BUF_MASS, // float [B, 2K + 1, row_blocks]: a sum per block
  BUF_SCATTERED, // float [B, V], with statistics [B, K, V]: a mapped draft by target id
  BUF_TOKENS,
  BUF_NUM_ACCEPTED,
  BUF_STATUS,
  BUF_LOGPROBS,
  // float2 [B, K + 1, row_blocks]. Rule::Coupled: the best score in a block and its id (bits);
  // Rule::Typical: sums of w * -log(w) and of w.
  BUF_DIGESTS,
  BUF_STATS, // four buffers: accept_prob, overlap, target_entropy, draft_entropy
  BUF_ROW_STATS = BUF_STATS, // `sample` has no draft, so no statistics of one
  BUF_PATH = BUF_STATS, // a tree has none either
  BUF_REMOVED, // float2 [B, N]: an id (bits) that left a node's draft, and what is left of its target
};

enum VerifyDraftConstant : int {
  FC_TARGET_DTYPE,
  FC_DRAFT_DTYPE,
  FC_DRAFT_KIND,
  FC_ORDER,
  FC_DRAFT_ORDER,
  FC_RULE,
  FC_LOGPROBS,
  FC_KEYED,
  FC_HAS_LENGTHS,
  FC_HAS_VOCAB,
  FC_HAS_DRAFT_STATS,
  FC_HAS_BITMASK,
  FC_TARGET_FILTERED,
  FC_DRAFT_FILTERED,
  FC_STATS,
  FC_IS_SAMPLE,
  FC_IS_TREE,
  FC_REPLACEMENT,
};

// Coupled and typical acceptance look at the target alone.
inline bool reads_draft(Rule rule) {
  return rule != Rule::Coupled && rule != Rule::Typical;
}

enum LogitsDtype : int { DTYPE_FLOAT32, DTYPE_FLOAT16, DTYPE_BFLOAT16 };

// A simdgroup owns one DRAW_BLOCK: lane l holds READS consecutive ids of each chunk.
enum : int { LANES = 32, READS = 8, CHUNKS = DRAW_BLOCK / (LANES * READS), HELD = CHUNKS * READS };

// Threads of a threadgroup, at most; also the fewest that a kernel accepts are one simdgroup.
enum : int { MAX_THREADS = 512, MAX_SIMDGROUPS = MAX_THREADS / LANES };

// Filter search: bins, and candidates kept on chip.
enum : int { FILTER_BINS = 2048, MAX_CANDIDATES = 512, MASS_BITS = 40 };

} // namespace exactspec
