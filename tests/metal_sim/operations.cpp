// The operations' primitives, evaluated by their Metal code in the simulator. Their streams are CPU
// streams, so `prepare`, which a GPU stream calls when an operation is built, is called here.
#include <stdexcept>

#include "exp_sum.h"
#include "host.h"
#include "sample.h"
#include "verify_draft.h"
#include "verify_tree.h"

namespace exactspec {

void VerifyDraft::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  prepare(inputs, outputs);
  metal_sim::evaluate(name(), stream(), inputs, outputs, [&] { eval_gpu(inputs, outputs); });
}

void Sample::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  prepare(inputs, outputs);
  metal_sim::evaluate(name(), stream(), inputs, outputs, [&] { eval_gpu(inputs, outputs); });
}

void VerifyTree::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  prepare(inputs, outputs);
  metal_sim::evaluate(name(), stream(), inputs, outputs, [&] { eval_gpu(inputs, outputs); });
}

const char* instruction_set() {
  return "none"; // there are no vector loops in this build
}

double exp_sum_seconds(int64_t, int) {
  throw std::logic_error("exp_sum_seconds: only the CPU has a limit to measure");
}

} // namespace exactspec
