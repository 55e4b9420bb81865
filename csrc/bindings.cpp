#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "exp_sum.h"
#include "sample.h"
#include "verify_draft.h"
#include "verify_tree.h"
#ifdef EXACTSPEC_METAL
#include "verify_draft_metal.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;
using namespace exactspec;

namespace {

// temperature, top_k, top_p, min_p, order
using SamplingTuple = std::tuple<Parameter, Parameter, Parameter, Parameter, int>;

Sampling to_sampling(const SamplingTuple& t) {
  return {
      std::get<0>(t),
      std::get<1>(t),
      std::get<2>(t),
      std::get<3>(t),
      static_cast<Order>(std::get<4>(t))};
}

// kind, first and second parameter
using RuleTuple = std::tuple<int, float, float>;

AcceptanceRule to_rule(const RuleTuple& t) {
  return {static_cast<Rule>(std::get<0>(t)), {std::get<1>(t), std::get<2>(t)}};
}

using OptionalArray = std::optional<mx::array>;

} // namespace

NB_MODULE(_ext, m) {
  m.doc() = "The compiled operations of exactspec; use them through the package.";
  m.attr("MLX_VERSION") = EXACTSPEC_MLX_VERSION;
  m.attr("NANOBIND_VERSION") = EXACTSPEC_NANOBIND_VERSION;
  m.attr("DRAW_BLOCK") = static_cast<int>(DRAW_BLOCK);
  m.attr("PLACEHOLDER_TOKEN") = static_cast<int>(PLACEHOLDER_TOKEN);
  m.attr("NOISE_WORDS") = static_cast<int>(NOISE_WORDS);
  m.attr("MAX_KEYED_DRAFTS") = static_cast<int>(MAX_KEYED_DRAFTS);
  m.attr("LEAST_TEMPERATURE") = LEAST_TEMPERATURE;
  m.attr("MAX_SPARSE_MASS") = MAX_SPARSE_MASS;
  m.attr("WORD_SPACING") = WORD_SPACING;
  m.attr("LARGEST_UNIFORM") = LARGEST_UNIFORM;

  m.attr("NON_FINITE_TARGET") = static_cast<int>(NON_FINITE_TARGET);
  m.attr("BAD_DRAFT") = static_cast<int>(BAD_DRAFT);
  m.attr("OUT_OF_RANGE") = static_cast<int>(OUT_OF_RANGE);
  m.attr("ZERO_DRAFT_PROB") = static_cast<int>(ZERO_DRAFT_PROB);
  m.attr("BAD_PARENT") = static_cast<int>(BAD_PARENT);
  m.attr("BAD_PARAMETER") = static_cast<int>(BAD_PARAMETER);

  // The graph is built without the GIL: nothing below touches a Python object.
  m.def(
      "verify_draft",
      [](const mx::array& target_logits,
         const mx::array& draft_tokens,
         const OptionalArray& draft_lengths,
         const OptionalArray& draft_logits,
         const OptionalArray& draft_ids,
         const OptionalArray& draft_probs,
         const OptionalArray& draft_vocab,
         const OptionalArray& draft_stats,
         const SamplingTuple& sampling,
         const SamplingTuple& draft_sampling,
         const RuleTuple& rule,
         const OptionalArray& uniforms,
         const OptionalArray& keys,
         const OptionalArray& positions,
         const OptionalArray& token_bitmask,
         int logprobs,
         bool stats,
         mx::StreamOrDevice stream) {
        return verify_draft(
            target_logits,
            draft_tokens,
            draft_lengths,
            {draft_logits, draft_ids, draft_probs, draft_vocab, draft_stats},
            to_sampling(sampling),
            to_sampling(draft_sampling),
            to_rule(rule),
            uniforms,
            keys,
            positions,
            token_bitmask,
            static_cast<Logprobs>(logprobs),
            stats,
            stream);
      },
      "target_logits"_a,
      "draft_tokens"_a,
      "draft_lengths"_a.none(),
      "draft_logits"_a.none(),
      "draft_ids"_a.none(),
      "draft_probs"_a.none(),
      "draft_vocab"_a.none(),
      "draft_stats"_a.none(),
      "sampling"_a,
      "draft_sampling"_a,
      "rule"_a,
      "uniforms"_a.none(),
      "keys"_a.none(),
      "positions"_a.none(),
      "token_bitmask"_a.none(),
      "logprobs"_a,
      "stats"_a,
      "stream"_a.none(),
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "verify_tree",
      [](const mx::array& target_logits,
         const mx::array& draft_tokens,
         const mx::array& parents,
         const OptionalArray& draft_logits,
         const OptionalArray& draft_ids,
         const OptionalArray& draft_probs,
         const OptionalArray& draft_vocab,
         const OptionalArray& draft_stats,
         const SamplingTuple& sampling,
         const SamplingTuple& draft_sampling,
         bool replacement,
         const OptionalArray& uniforms,
         const OptionalArray& keys,
         const OptionalArray& token_bitmask,
         int logprobs,
         mx::StreamOrDevice stream) {
        return verify_tree(
            target_logits,
            draft_tokens,
            parents,
            {draft_logits, draft_ids, draft_probs, draft_vocab, draft_stats},
            to_sampling(sampling),
            to_sampling(draft_sampling),
            replacement,
            uniforms,
            keys,
            token_bitmask,
            static_cast<Logprobs>(logprobs),
            stream);
      },
      "target_logits"_a,
      "draft_tokens"_a,
      "parents"_a,
      "draft_logits"_a.none(),
      "draft_ids"_a.none(),
      "draft_probs"_a.none(),
      "draft_vocab"_a.none(),
      "draft_stats"_a.none(),
      "sampling"_a,
      "draft_sampling"_a,
      "replacement"_a,
      "uniforms"_a.none(),
      "keys"_a.none(),
      "token_bitmask"_a.none(),
      "logprobs"_a,
      "stream"_a.none(),
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "sample",
      [](const mx::array& logits,
         const SamplingTuple& sampling,
         int rule,
         const OptionalArray& uniforms,
         const OptionalArray& keys,
         const OptionalArray& positions,
         const OptionalArray& token_bitmask,
         int logprobs,
         mx::StreamOrDevice stream) {
        return sample(
            logits,
            to_sampling(sampling),
            static_cast<Rule>(rule),
            uniforms,
            keys,
            positions,
            token_bitmask,
            static_cast<Logprobs>(logprobs),
            stream);
      },
      "logits"_a,
      "sampling"_a,
      "rule"_a,
      "uniforms"_a.none(),
      "keys"_a.none(),
      "positions"_a.none(),
      "token_bitmask"_a.none(),
      "logprobs"_a,
      "stream"_a.none(),
      nb::call_guard<nb::gil_scoped_release>());

  m.def("instruction_set", &instruction_set, "Of the vector loops: EXACTSPEC_ISA may ask for less.");
  m.def(
      "exp_sum_seconds",
      &exp_sum_seconds,
      "n"_a,
      "repeats"_a,
      nb::call_guard<nb::gil_scoped_release>(),
      "Seconds for the weights of n float32 logits and their sum: the least of `repeats` runs.\n\n"
      "The logits stay in the first-level cache, and as many threads take part as in an operation:\n"
      "the limit of this machine for operations that must take n exponentials.");

#ifdef EXACTSPEC_METAL
  m.def(
      "set_metal_tuning",
      [](int variant, int max_threads) {
        metal_tuning() = {static_cast<MetalVariant>(variant), max_threads};
      },
      "variant"_a,
      "max_threads"_a);
#endif
}
