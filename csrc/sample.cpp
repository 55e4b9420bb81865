#include "sample.h"

#include <memory>

#include "dtypes.h"
#include "noise.h"

namespace exactspec {

namespace {

constexpr const char* kOp = "sample";

} // namespace

std::vector<mx::array> sample(
    const mx::array& logits,
    const Sampling& sampling,
    Rule rule,
    const std::optional<mx::array>& uniforms,
    const std::optional<mx::array>& keys,
    const std::optional<mx::array>& positions,
    const std::optional<mx::array>& token_bitmask,
    Logprobs logprobs,
    mx::StreamOrDevice stream_or_device) {
  auto stream = resolve_stream(kOp, stream_or_device);
  check_logits_dtype(kOp, "logits", logits);
  if (logits.ndim() < 1 || logits.ndim() > 2 || logits.shape(-1) < 1) {
    bad_argument(kOp, "logits", "shape [B, V] or [V] with V >= 1", describe(logits.shape()));
  }
  mx::Shape batch_shape(logits.shape().begin(), logits.shape().end() - 1);

  check_positions(kOp, positions, rule, batch_shape);
  std::vector<mx::array> inputs{
      logits,
      noise_input(kOp, uniforms, keys, rule, batch_shape, 2),
      positions.value_or(absent()),
      token_bitmask.value_or(absent())};
  if (token_bitmask) {
    check_ids_dtype(kOp, "token_bitmask", *token_bitmask);
    auto shape = batch_shape;
    shape.push_back((logits.shape(-1) + 31) / 32);
    check_shape(kOp, "token_bitmask", *token_bitmask, shape);
  }
  append_parameters(inputs, kOp, "sampling", sampling, batch_shape, stream);

  Sample::Options options{
      sampling.order,
      rule,
      logprobs,
      keys.has_value(),
      token_bitmask.has_value(),
      may_filter(sampling)};
  return SequencePrimitive::build(std::make_shared<Sample>(stream, options), inputs);
}

std::vector<mx::Shape> Sample::output_shapes(const std::vector<mx::array>& inputs) {
  mx::Shape batch(inputs[Logits].shape().begin(), inputs[Logits].shape().end() - 1);
  auto stats = batch;
  stats.push_back(NUM_ROW_STATS);
  std::vector<mx::Shape> shapes{batch, batch, stats};
  if (options_.logprobs != Logprobs::None) {
    shapes.push_back(batch);
  }
  return shapes;
}

std::vector<mx::Dtype> Sample::output_dtypes() const {
  std::vector<mx::Dtype> dtypes{mx::int32, mx::uint32, mx::float32};
  if (options_.logprobs != Logprobs::None) {
    dtypes.push_back(mx::float32);
  }
  return dtypes;
}

bool Sample::is_equivalent(const Primitive& other) const {
  return options_ == static_cast<const Sample&>(other).options_;
}

std::shared_ptr<SequencePrimitive> Sample::clone() {
  return std::make_shared<Sample>(stream(), options_);
}

std::vector<int> Sample::core_ranks() const {
  int positions = options_.rule == Rule::Coupled ? 0 : kShared;
  return {1, 1, positions, options_.has_bitmask ? 1 : kShared, 0, 0, 0, 0};
}

} // namespace exactspec
