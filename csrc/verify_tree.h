#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "draft_inputs.h"
#include "law.h"
#include "mlx/utils.h"
#include "sampling_inputs.h"
#include "sequence_primitive.h"

namespace exactspec {

// Verifies a tree of drafts by recursive rejection (Miao et al. 2305.09781; without replacement:
// Jeon et al. 2402.14160).
//   target_logits  [batch..., N + 1, V] f32 / f16 / bf16: row 0 follows the context, row j + 1 node j
//   draft_tokens   [batch..., N] i32
//   parents        [batch..., N] i32: an earlier node, or -1 for the context
//   draft          of N + 1 rows: node j was drawn from row parents[j] + 1
//   uniforms       [batch..., N + 2] f32, or keys [batch..., 2] u32: exactly one of them
//   token_bitmask  [batch..., N + 1, ceil(V / 32)] i32, optional
// Returns tokens [batch..., N + 1] i32, path [batch..., N] i32, num_accepted [batch...] i32, status
// [batch...] u32 and, if asked for, logprobs [batch..., N + 1] f32. The batch shape is [] or [B].
std::vector<mx::array> verify_tree(
    const mx::array& target_logits,
    const mx::array& draft_tokens,
    const mx::array& parents,
    const Draft& draft,
    const Sampling& sampling,
    const Sampling& draft_sampling,
    bool replacement,
    const std::optional<mx::array>& uniforms,
    const std::optional<mx::array>& keys,
    const std::optional<mx::array>& token_bitmask,
    Logprobs logprobs,
    mx::StreamOrDevice stream_or_device);

class VerifyTree : public SequencePrimitive {
 public:
  struct Options {
    DraftKind draft;
    Order order;
    Order draft_order;
    bool replacement; // whether siblings were drawn with replacement
    Logprobs logprobs;
    bool keyed;
    bool has_vocab;
    bool has_draft_stats;
    bool has_bitmask;
    bool target_filtered; // whether a filter may be on
    bool draft_filtered;
    bool operator==(const Options&) const = default;
  };
  // DraftRows: draft logits or ids. Inputs that were not given hold a dummy.
  enum Input {
    TargetLogits,
    DraftTokens,
    Parents,
    DraftRows,
    DraftProbs,
    DraftVocab,
    DraftStats,
    Noise,
    Bitmask,
    Parameters,
    DraftParameters = Parameters + kNumParameters,
    NumInputs = DraftParameters + kNumParameters,
  };

  VerifyTree(mx::Stream stream, Options options)
      : SequencePrimitive(stream), options_(options) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
#ifdef EXACTSPEC_METAL
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
#endif
  const char* name() const override { return "verify_tree"; }
  bool is_equivalent(const Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;

 protected:
#ifdef EXACTSPEC_METAL
  void prepare(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
#endif
  std::shared_ptr<SequencePrimitive> clone() override;
  std::vector<mx::Dtype> output_dtypes() const override;
  std::vector<int> core_ranks() const override;

 private:
  Options options_;
};

} // namespace exactspec
