#include <limits>

#include "cpu_task.h"
#include "noise.h"
#include "row_cpu.h"
#include "sample.h"
#include "threads.h"

namespace exactspec {

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Job {
  Sample::Options options;
  View logits;
  NoiseView noise;
  View positions, bitmask;
  SamplingViews sampling;
  int32_t* tokens;
  uint32_t* status;
  float* row_stats;
  float* logprobs;
};

void write_row_stats(const RowSummary& summary, float* out) {
  const Distribution& dist = summary.dist;
  out[STAT_MAX] = summary.finite ? dist.max : kNaN;
  out[STAT_LOG_NORM] = summary.finite ? dist.log_norm : kNaN;
  out[STAT_CUTOFF] = summary.finite ? dist.cutoff : kNaN;
  out[STAT_CUTOFF_ID] = summary.finite ? static_cast<float>(dist.cutoff_id) : kNaN;
}

void sample_row(const Job& job, int b) {
  Row row = make_row(job.logits, b);
  if (job.options.has_bitmask) {
    set_mask(row, job.bitmask, b);
  }
  RowSampling sampling(job.sampling, job.options.order, b);
  RowSummary summary;
  uint32_t status = 0;
  int32_t token = PLACEHOLDER_TOKEN;
  if (!sampling.valid() || !job.noise.valid(b)) {
    status = BAD_PARAMETER;
  } else {
    summary = summarise(row, sampling);
    if (!summary.finite) {
      status = NON_FINITE_TARGET;
    }
  }
  if (status == 0) {
    if (job.options.rule == Rule::Coupled) {
      token = coupled_choice(row, summary, job.noise.key(b), *job.positions.at<int32_t>(b));
    } else {
      float u[2];
      job.noise.pair(b, u);
      token = draw(row, summary, u);
    }
  }
  job.tokens[b] = token;
  job.status[b] = status;
  write_row_stats(summary, job.row_stats + static_cast<int64_t>(b) * NUM_ROW_STATS);
  if (job.options.logprobs != Logprobs::None) {
    job.logprobs[b] =
        token < 0 ? kNaN : token_logprob(row, summary, sampling, token, job.options.logprobs);
  }
}

} // namespace

void Sample::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  allocate(outputs);
  int batch = static_cast<int>(outputs[0].size());
  bool has_logprobs = options_.logprobs != Logprobs::None;
  Job job{
      options_,
      View(inputs[Logits], 1),
      NoiseView(inputs[Noise], options_.keyed, 0),
      View(inputs[Positions], 0),
      View(inputs[Bitmask], options_.has_bitmask ? 1 : 0),
      SamplingViews(inputs, Parameters),
      outputs[0].data<int32_t>(),
      outputs[1].data<uint32_t>(),
      outputs[2].data<float>(),
      has_logprobs ? outputs[3].data<float>() : nullptr};
  dispatch(stream(), outputs, [job, batch] {
    parallel_for(batch, [&](int b) { sample_row(job, b); });
  });
}

} // namespace exactspec
