#include "verify_draft_metal.h"
#include "verify_tree.h"

namespace exactspec {

namespace {

// A call of verify_draft whose slots are the nodes.
MetalCall tree_call(
    const VerifyTree::Options& options,
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  using V = VerifyDraft;
  using T = VerifyTree;
  V::Options as_verify{};
  as_verify.draft = options.draft;
  as_verify.order = options.order;
  as_verify.draft_order = options.draft_order;
  as_verify.logprobs = options.logprobs;
  as_verify.keyed = options.keyed;
  as_verify.has_vocab = options.has_vocab;
  as_verify.has_draft_stats = options.has_draft_stats;
  as_verify.has_bitmask = options.has_bitmask;
  std::vector<mx::array> all(V::NumInputs, absent());
  all[V::TargetLogits] = inputs[T::TargetLogits];
  all[V::DraftTokens] = inputs[T::DraftTokens];
  all[V::DraftLengths] = inputs[T::Parents];
  all[V::DraftRows] = inputs[T::DraftRows];
  all[V::DraftProbs] = inputs[T::DraftProbs];
  all[V::DraftVocab] = inputs[T::DraftVocab];
  all[V::DraftStats] = inputs[T::DraftStats];
  all[V::Noise] = inputs[T::Noise];
  all[V::Bitmask] = inputs[T::Bitmask];
  for (int i = 0; i < 2 * kNumParameters; ++i) {
    all[V::Parameters + i] = inputs[T::Parameters + i];
  }
  return {
      as_verify,
      MetalOperation::VerifyTree,
      options.replacement,
      options.target_filtered,
      options.draft == DraftKind::Dense && !options.has_draft_stats && options.draft_filtered,
      inputs[T::DraftTokens].shape(-1),
      std::move(all),
      &outputs[0],
      &outputs[2],
      &outputs[3],
      options.logprobs != Logprobs::None ? &outputs[4] : nullptr,
      {&outputs[1]}};
}

} // namespace

void VerifyTree::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto call = tree_call(options_, inputs, outputs);
  encode_metal(stream(), call);
}

void VerifyTree::prepare(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  prepare_metal(stream(), tree_call(options_, inputs, outputs));
}

} // namespace exactspec
