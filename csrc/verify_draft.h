#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "draft_inputs.h"
#include "law.h"
#include "mlx/utils.h"
#include "sampling_inputs.h"
#include "sequence_primitive.h"

namespace exactspec {

// How drafts are accepted.
struct AcceptanceRule {
  Rule kind = Rule::Token;
  // Typical: epsilon, delta. Cascade: alpha.
  std::array<float, 2> parameters{};
  bool operator==(const AcceptanceRule&) const = default;
};

// Verifies drafts by `rule`.
//   target_logits  [batch..., K + 1, V] f32 / f16 / bf16
//   draft_tokens   [batch..., K] i32
//   draft_lengths  [batch...] i32, optional
//   uniforms       [batch..., K + 2] f32, or keys [batch..., 2] u32: exactly one of them
//   positions      [batch...] i32, with Rule::Coupled: the absolute position of slot 0
//   token_bitmask  [batch..., K + 1, ceil(V / 32)] i32, optional
// Returns tokens [batch..., K + 1] i32, num_accepted [batch...] i32, status [batch...] u32; then,
// if asked for, logprobs [batch..., K + 1] f32; then, if asked for, the four statistics
// [batch..., K] f32 (accept_prob, overlap, target_entropy, draft_entropy).
// The batch shape is [] or [B].
std::vector<mx::array> verify_draft(
    const mx::array& target_logits,
    const mx::array& draft_tokens,
    const std::optional<mx::array>& draft_lengths,
    const Draft& draft,
    const Sampling& sampling,
    const Sampling& draft_sampling,
    const AcceptanceRule& rule,
    const std::optional<mx::array>& uniforms,
    const std::optional<mx::array>& keys,
    const std::optional<mx::array>& positions,
    const std::optional<mx::array>& token_bitmask,
    Logprobs logprobs,
    bool stats,
    mx::StreamOrDevice stream_or_device);

class VerifyDraft : public SequencePrimitive {
 public:
  struct Options {
    DraftKind draft;
    Order order;
    Order draft_order;
    AcceptanceRule rule;
    Logprobs logprobs;
    bool stats;
    bool keyed;
    bool has_lengths;
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
    DraftLengths,
    DraftRows,
    DraftProbs,
    DraftVocab,
    DraftStats,
    Noise,
    Positions,
    Bitmask,
    Parameters,
    DraftParameters = Parameters + kNumParameters,
    NumInputs = DraftParameters + kNumParameters,
  };

  VerifyDraft(mx::Stream stream, Options options)
      : SequencePrimitive(stream), options_(options) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
#ifdef EXACTSPEC_METAL
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
#endif
  const char* name() const override { return "verify_draft"; }
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
