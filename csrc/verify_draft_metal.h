// The Metal evaluation that all operations share: `sample` is a call without draft slots, verify_tree one
// with a node per slot.
#pragma once

#include <string>
#include <vector>

#include "verify_draft.h"

namespace exactspec {

// How a call is spread over threadgroups. `Auto` decides from the batch, the vocabulary and the GPU.
enum class MetalVariant : int { Auto, Sequence, Split };

struct MetalTuning {
  MetalVariant variant = MetalVariant::Auto;
  int max_threads = 0; // 0: each kernel's own choice
};

// Process-wide, for tests and self-tests; results have the same bits whatever it says.
MetalTuning& metal_tuning();

enum class MetalOperation : int { VerifyDraft, Sample, VerifyTree };

struct MetalCall {
  VerifyDraft::Options options;
  MetalOperation operation;
  bool replacement; // of verify_tree
  bool target_filtered; // whether a filter may be on
  bool draft_filtered;
  int num_slots;
  // By VerifyDraft::Input, the parents of a tree as DraftLengths; what a call does not have is a dummy.
  std::vector<mx::array> inputs;
  mx::array* tokens;
  mx::array* num_accepted; // null for `sample`
  mx::array* status;
  mx::array* logprobs; // null unless asked for
  std::vector<mx::array*> stats; // four with statistics, row_stats alone for `sample`, the path of a tree
};

// Compiles what the call needs. Throws std::runtime_error when the GPU cannot run the kernels.
void prepare_metal(mx::Stream stream, const MetalCall& call);
void encode_metal(mx::Stream stream, MetalCall& call);

} // namespace exactspec
