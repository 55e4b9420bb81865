#include "sample.h"
#include "sequence_primitive.h"
#include "verify_draft_metal.h"

namespace exactspec {

namespace {

// A draw from one row is verify_draft without draft slots: the bonus token.
MetalCall sample_call(
    const Sample::Options& options,
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  bool has_logprobs = options.logprobs != Logprobs::None;
  VerifyDraft::Options as_verify{};
  as_verify.draft = DraftKind::OneHot;
  as_verify.order = options.order;
  as_verify.rule.kind = options.rule;
  as_verify.logprobs = options.logprobs;
  as_verify.keyed = options.keyed;
  as_verify.has_bitmask = options.has_bitmask;
  std::vector<mx::array> all(VerifyDraft::NumInputs, absent());
  all[VerifyDraft::TargetLogits] = inputs[Sample::Logits];
  all[VerifyDraft::Noise] = inputs[Sample::Noise];
  all[VerifyDraft::Positions] = inputs[Sample::Positions];
  all[VerifyDraft::Bitmask] = inputs[Sample::Bitmask];
  for (int i = 0; i < kNumParameters; ++i) {
    all[VerifyDraft::Parameters + i] = inputs[Sample::Parameters + i];
    all[VerifyDraft::DraftParameters + i] = inputs[Sample::Parameters + i];
  }
  return {
      as_verify,
      MetalOperation::Sample,
      true,
      options.filtered,
      false,
      0,
      std::move(all),
      &outputs[0],
      nullptr,
      &outputs[1],
      has_logprobs ? &outputs[3] : nullptr,
      {&outputs[2]}};
}

} // namespace

void Sample::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto call = sample_call(options_, inputs, outputs);
  encode_metal(stream(), call);
}

void Sample::prepare(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  prepare_metal(stream(), sample_call(options_, inputs, outputs));
}

} // namespace exactspec
