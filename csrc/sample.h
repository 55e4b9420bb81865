#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "law.h"
#include "mlx/utils.h"
#include "sampling_inputs.h"
#include "sequence_primitive.h"

namespace exactspec {

// Draws one token per row of logits. Rule::Token: by noise of its own. Rule::Coupled: by noise that is
// a function of key, position and id, shared with verify_draft.
//   logits         [batch..., V] f32 / f16 / bf16
//   uniforms       [batch..., 2] f32, or keys [batch..., 2] u32: exactly one of them
//   positions      [batch...] i32, with Rule::Coupled: the absolute position of the token
//   token_bitmask  [batch..., ceil(V / 32)] i32, optional
// Returns tokens [batch...] i32, status [batch...] u32, row_stats [batch..., NUM_ROW_STATS] f32
// and, if asked for, logprobs [batch...] f32. The batch shape is [] or [B].
std::vector<mx::array> sample(
    const mx::array& logits,
    const Sampling& sampling,
    Rule rule,
    const std::optional<mx::array>& uniforms,
    const std::optional<mx::array>& keys,
    const std::optional<mx::array>& positions,
    const std::optional<mx::array>& token_bitmask,
    Logprobs logprobs,
    mx::StreamOrDevice stream_or_device);

class Sample : public SequencePrimitive {
 public:
  struct Options {
    Order order;
    Rule rule;
    Logprobs logprobs;
    bool keyed;
    bool has_bitmask;
    bool filtered; // whether a filter may be on
    bool operator==(const Options&) const = default;
  };
  enum Input {
    Logits,
    Noise,
    Positions,
    Bitmask,
    Parameters,
    NumInputs = Parameters + kNumParameters,
  };

  Sample(mx::Stream stream, Options options)
      : SequencePrimitive(stream), options_(options) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
#ifdef EXACTSPEC_METAL
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
#endif
  const char* name() const override { return "sample"; }
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
