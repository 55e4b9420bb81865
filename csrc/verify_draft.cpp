#include "verify_draft.h"

#include <memory>

#include "dtypes.h"
#include "noise.h"

namespace exactspec {

namespace {

constexpr const char* kOp = "verify_draft";

} // namespace

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
    mx::StreamOrDevice stream_or_device) {
  auto stream = resolve_stream(kOp, stream_or_device);

  mx::Shape batch_shape = check_target(kOp, "K", target_logits, token_bitmask);
  int num_draft_tokens = target_logits.shape(-2) - 1;

  check_draft_tokens(kOp, "a row for every draft and the bonus row", target_logits, draft_tokens);
  if (draft_lengths) {
    check_dtype(kOp, "draft_lengths", *draft_lengths, {mx::int32});
    check_shape(kOp, "draft_lengths", *draft_lengths, batch_shape);
  }
  check_draft(kOp, draft, batch_shape, num_draft_tokens);
  check_positions(kOp, positions, rule.kind, batch_shape);

  std::vector<mx::array> inputs{
      target_logits,
      draft_tokens,
      draft_lengths.value_or(absent()),
      draft.rows(),
      draft.probs.value_or(absent()),
      draft.vocab.value_or(absent()),
      draft.stats.value_or(absent()),
      noise_input(kOp, uniforms, keys, rule.kind, batch_shape, num_draft_tokens + 2),
      positions.value_or(absent()),
      token_bitmask.value_or(absent())};
  append_parameters(inputs, kOp, "sampling", sampling, batch_shape, stream);
  append_parameters(inputs, kOp, "draft_sampling", draft_sampling, batch_shape, stream);

  VerifyDraft::Options options{
      draft.kind(),
      sampling.order,
      draft_sampling.order,
      rule,
      logprobs,
      stats,
      keys.has_value(),
      draft_lengths.has_value(),
      draft.vocab.has_value(),
      draft.stats.has_value(),
      token_bitmask.has_value(),
      may_filter(sampling),
      may_filter(draft_sampling)};
  return SequencePrimitive::build(std::make_shared<VerifyDraft>(stream, options), inputs);
}

std::vector<mx::Shape> VerifyDraft::output_shapes(const std::vector<mx::array>& inputs) {
  const auto& logits = inputs[TargetLogits].shape();
  mx::Shape batch(logits.begin(), logits.end() - 2);
  int num_rows = logits[logits.size() - 2];
  std::vector<mx::Shape> shapes{with(batch, {num_rows}), batch, batch};
  if (options_.logprobs != Logprobs::None) {
    shapes.push_back(with(batch, {num_rows}));
  }
  if (options_.stats) {
    shapes.insert(shapes.end(), 4, with(batch, {num_rows - 1}));
  }
  return shapes;
}

std::vector<mx::Dtype> VerifyDraft::output_dtypes() const {
  std::vector<mx::Dtype> dtypes{mx::int32, mx::int32, mx::uint32};
  int floats = (options_.logprobs != Logprobs::None) + (options_.stats ? 4 : 0);
  dtypes.insert(dtypes.end(), floats, mx::float32);
  return dtypes;
}

bool VerifyDraft::is_equivalent(const Primitive& other) const {
  return options_ == static_cast<const VerifyDraft&>(other).options_;
}

std::shared_ptr<SequencePrimitive> VerifyDraft::clone() {
  return std::make_shared<VerifyDraft>(stream(), options_);
}

std::vector<int> VerifyDraft::core_ranks() const {
  std::vector<int> ranks(NumInputs, 0);
  ranks[TargetLogits] = 2;
  ranks[DraftTokens] = 1;
  ranks[DraftLengths] = options_.has_lengths ? 0 : kShared;
  ranks[DraftRows] = options_.draft != DraftKind::OneHot ? 2 : kShared;
  ranks[DraftProbs] = options_.draft == DraftKind::Sparse ? 2 : kShared;
  ranks[DraftVocab] = kShared;
  ranks[DraftStats] = options_.has_draft_stats ? 2 : kShared;
  ranks[Noise] = 1;
  ranks[Positions] = options_.rule.kind == Rule::Coupled ? 0 : kShared;
  ranks[Bitmask] = options_.has_bitmask ? 2 : kShared;
  return ranks;
}

} // namespace exactspec
