#include "verify_tree.h"

#include <memory>

#include "dtypes.h"
#include "noise.h"

namespace exactspec {

namespace {

constexpr const char* kOp = "verify_tree";

} // namespace

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
    mx::StreamOrDevice stream_or_device) {
  auto stream = resolve_stream(kOp, stream_or_device);

  mx::Shape batch_shape = check_target(kOp, "N", target_logits, token_bitmask);
  int num_nodes = target_logits.shape(-2) - 1;

  check_draft_tokens(kOp, "the context's row and one for every node", target_logits, draft_tokens);
  check_dtype(kOp, "parents", parents, {mx::int32});
  check_shape(kOp, "parents", parents, with(batch_shape, {num_nodes}));
  check_draft(kOp, draft, batch_shape, num_nodes + 1);

  std::vector<mx::array> inputs{
      target_logits,
      draft_tokens,
      parents,
      draft.rows(),
      draft.probs.value_or(absent()),
      draft.vocab.value_or(absent()),
      draft.stats.value_or(absent()),
      noise_input(kOp, uniforms, keys, Rule::Token, batch_shape, num_nodes + 2),
      token_bitmask.value_or(absent())};
  append_parameters(inputs, kOp, "sampling", sampling, batch_shape, stream);
  append_parameters(inputs, kOp, "draft_sampling", draft_sampling, batch_shape, stream);

  VerifyTree::Options options{
      draft.kind(),
      sampling.order,
      draft_sampling.order,
      replacement,
      logprobs,
      keys.has_value(),
      draft.vocab.has_value(),
      draft.stats.has_value(),
      token_bitmask.has_value(),
      may_filter(sampling),
      may_filter(draft_sampling)};
  return SequencePrimitive::build(std::make_shared<VerifyTree>(stream, options), inputs);
}

std::vector<mx::Shape> VerifyTree::output_shapes(const std::vector<mx::array>& inputs) {
  const auto& logits = inputs[TargetLogits].shape();
  mx::Shape batch(logits.begin(), logits.end() - 2);
  int num_rows = logits[logits.size() - 2];
  std::vector<mx::Shape> shapes{with(batch, {num_rows}), with(batch, {num_rows - 1}), batch, batch};
  if (options_.logprobs != Logprobs::None) {
    shapes.push_back(with(batch, {num_rows}));
  }
  return shapes;
}

std::vector<mx::Dtype> VerifyTree::output_dtypes() const {
  std::vector<mx::Dtype> dtypes{mx::int32, mx::int32, mx::int32, mx::uint32};
  if (options_.logprobs != Logprobs::None) {
    dtypes.push_back(mx::float32);
  }
  return dtypes;
}

bool VerifyTree::is_equivalent(const Primitive& other) const {
  return options_ == static_cast<const VerifyTree&>(other).options_;
}

std::shared_ptr<SequencePrimitive> VerifyTree::clone() {
  return std::make_shared<VerifyTree>(stream(), options_);
}

std::vector<int> VerifyTree::core_ranks() const {
  std::vector<int> ranks(NumInputs, 0);
  ranks[TargetLogits] = 2;
  ranks[DraftTokens] = 1;
  ranks[Parents] = 1;
  ranks[DraftRows] = options_.draft != DraftKind::OneHot ? 2 : kShared;
  ranks[DraftProbs] = options_.draft == DraftKind::Sparse ? 2 : kShared;
  ranks[DraftVocab] = kShared;
  ranks[DraftStats] = options_.has_draft_stats ? 2 : kShared;
  ranks[Noise] = 1;
  ranks[Bitmask] = options_.has_bitmask ? 2 : kShared;
  return ranks;
}

} // namespace exactspec
