#include "draft_inputs.h"

#include "dtypes.h"
#include "sequence_primitive.h"

namespace exactspec {

DraftKind Draft::kind() const {
  return logits ? DraftKind::Dense : ids ? DraftKind::Sparse : DraftKind::OneHot;
}

mx::array Draft::rows() const {
  return logits ? *logits : ids.value_or(absent());
}

mx::Shape check_target(
    const char* op,
    const char* n,
    const mx::array& target_logits,
    const std::optional<mx::array>& token_bitmask) {
  check_logits_dtype(op, "target_logits", target_logits);
  const auto& shape = target_logits.shape();
  if (shape.size() < 2 || shape.size() > 3 || shape[shape.size() - 2] < 1 || shape.back() < 1) {
    auto rows = std::string(n) + " + 1, V]";
    bad_argument(
        op, "target_logits", "shape [B, " + rows + " or [" + rows + " with V >= 1", describe(shape));
  }
  mx::Shape batch_shape(shape.begin(), shape.end() - 2);
  if (token_bitmask) {
    check_ids_dtype(op, "token_bitmask", *token_bitmask);
    int words = (shape.back() + 31) / 32;
    check_shape(
        op, "token_bitmask", *token_bitmask, with(batch_shape, {shape[shape.size() - 2], words}));
  }
  return batch_shape;
}

void check_draft_tokens(
    const char* op, const char* rows, const mx::array& target_logits, const mx::array& draft_tokens) {
  check_ids_dtype(op, "draft_tokens", draft_tokens);
  auto expected = target_logits.shape();
  expected.pop_back();
  if (draft_tokens.shape() == expected) {
    // As many rows as draft tokens: the usual mistake, whose cause is the target.
    expected = target_logits.shape();
    ++expected[expected.size() - 2];
    bad_argument(
        op,
        "target_logits",
        "shape " + describe(expected) + " with draft_tokens " + describe(draft_tokens.shape()) + " (" +
            rows + ")",
        describe(target_logits.shape()) + ", a row too few");
  }
  --expected.back();
  check_shape(op, "draft_tokens", draft_tokens, expected);
}

void check_draft(const char* op, const Draft& draft, const mx::Shape& batch_shape, int num_rows) {
  if (draft.ids.has_value() != draft.probs.has_value()) {
    bad_argument(
        op,
        draft.ids ? "draft_probs" : "draft_ids",
        "draft_ids and draft_probs together",
        "only one of them");
  }
  if (draft.logits && draft.ids) {
    bad_argument(
        op, "draft_logits", "either draft_logits or draft_ids and draft_probs", "all of them");
  }
  if (!draft.logits && draft.vocab) {
    bad_argument(op, "draft_vocab", "None without draft_logits", describe(draft.vocab->shape()));
  }
  if (!draft.logits && draft.stats) {
    bad_argument(op, "draft_stats", "None without draft_logits", describe(draft.stats->shape()));
  }
  auto rows_shape = [&](int width) { return with(batch_shape, {num_rows, width}); };
  if (draft.logits) {
    check_logits_dtype(op, "draft_logits", *draft.logits);
    int width = draft.logits->ndim() > 0 ? draft.logits->shape(-1) : 0;
    if (width < 1 || draft.logits->shape() != rows_shape(width)) {
      auto expected = describe(with(batch_shape, {num_rows}));
      expected.back() = ',';
      bad_argument(
          op, "draft_logits", "shape " + expected + " Vd]", describe(draft.logits->shape()));
    }
    if (draft.vocab) {
      check_ids_dtype(op, "draft_vocab", *draft.vocab);
      check_shape(op, "draft_vocab", *draft.vocab, {width});
    }
    if (draft.stats) {
      check_dtype(op, "draft_stats", *draft.stats, {mx::float32});
      check_shape(op, "draft_stats", *draft.stats, rows_shape(NUM_ROW_STATS));
    }
  }
  if (draft.ids) {
    check_ids_dtype(op, "draft_ids", *draft.ids);
    int support = draft.ids->ndim() > 0 ? draft.ids->shape(-1) : 0;
    if (draft.ids->ndim() == 0 || draft.ids->shape() != rows_shape(support)) {
      auto expected = describe(with(batch_shape, {num_rows}));
      expected.back() = ',';
      bad_argument(op, "draft_ids", "shape " + expected + " S]", describe(draft.ids->shape()));
    }
    check_dtype(op, "draft_probs", *draft.probs, {mx::float32});
    check_shape(op, "draft_probs", *draft.probs, draft.ids->shape());
  }
}

} // namespace exactspec
