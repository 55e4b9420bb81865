#include <limits>
#include <memory>
#include <numeric>
#include <optional>

#include "cpu_task.h"
#include "draft_row_cpu.h"
#include "noise.h"
#include "row_cpu.h"
#include "threads.h"
#include "verify_draft.h"

namespace exactspec {

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Job {
  VerifyDraft::Options options;
  int num_slots;
  int vocab_size;
  View target_logits, draft_tokens, draft_lengths;
  DraftViews draft;
  NoiseView noise;
  View positions, bitmask;
  SamplingViews sampling, draft_sampling;
  int32_t* tokens;
  int32_t* num_accepted;
  uint32_t* status;
  float* logprobs;
  float* stats[4]; // accept_prob, overlap, target_entropy, draft_entropy
};

// Decides one sequence. Rows are read when they are first needed and at most once for their
// normaliser, so the target's rows after a rejection are never touched.
class Sequence {
 public:
  Sequence(const Job& job, int b)
      : job_(job),
        b_(b),
        sampling_(job.sampling, job.options.order, b),
        draft_sampling_(job.draft_sampling, job.options.draft_order, b),
        targets_(job.num_slots + 1),
        drafts_(job.num_slots) {}

  void run() {
    fill_outputs();
    bool reads_draft = job_.options.draft == DraftKind::Dense;
    if (!sampling_.valid() || (reads_draft && !draft_sampling_.valid()) || !job_.noise.valid(b_)) {
      status_ |= BAD_PARAMETER;
    } else {
      read_length();
      int next = rule().kind == Rule::Block && !sampling_.greedy() ? accept_block() : accept_prefix();
      write_tokens(next);
      if (job_.options.stats) {
        write_stats();
      }
    }
    job_.num_accepted[b_] = num_accepted_;
    job_.status[b_] = status_;
  }

 private:
  const AcceptanceRule& rule() const { return job_.options.rule; }

  void flag_if(bool condition, Status bit) { status_ |= condition ? static_cast<uint32_t>(bit) : 0; }

  int token(int slot) const { return *job_.draft_tokens.at<int32_t>(b_, slot); }

  Row target_row(int i) const {
    Row row = make_row(job_.target_logits, b_, i);
    if (job_.options.has_bitmask) {
      set_mask(row, job_.bitmask, b_, i);
    }
    return row;
  }

  const RowSummary& target(int i) {
    if (!targets_[i]) {
      targets_[i] = summarise(target_row(i), sampling_);
    }
    return *targets_[i];
  }

  const DraftRow& draft(int slot) {
    if (!drafts_[slot]) {
      drafts_[slot] = std::make_unique<DraftRow>(job_.draft, draft_sampling_, b_, slot, token(slot));
    }
    return *drafts_[slot];
  }

  // Both rows of a slot, where both are needed, and of the slots after it up to the first rejection:
  // threads are woken once for them.
  void read_rows(int slot) {
    bool reads_draft = job_.options.draft == DraftKind::Dense && !job_.options.has_draft_stats &&
        rule().kind != Rule::Coupled && rule().kind != Rule::Typical && !sampling_.greedy();
    int end = slot;
    while (reads_draft && end < length_ && !targets_[end] && !drafts_[end] && can_produce(end)) {
      ++end;
    }
    auto draft_row = [&](int i) { return make_row(job_.draft.rows, b_, slot + i); };
    auto rows = [&](int i) { return std::pair(target_row(slot + i), draft_row(i)); };
    auto done = [&](int i, RowSummary target, RowSummary draft) {
      int at = slot + i;
      targets_[at] = std::move(target);
      drafts_[at] = std::make_unique<DraftRow>(job_.draft, draft_row(i), std::move(draft));
      bool finite = targets_[at]->finite && drafts_[at]->finite();
      return !finite || (rule().kind != Rule::Block && !accepts(at));
    };
    summarise_pairs(end - slot, rows, sampling_, draft_sampling_, done);
  }

  float target_prob(int slot) {
    int id = token(slot);
    return id < job_.vocab_size ? target(slot).dist.prob(target_row(slot).logit(id), id) : 0.0f;
  }

  void fill_outputs() {
    int num_rows = job_.num_slots + 1;
    std::fill_n(job_.tokens + int64_t{b_} * num_rows, num_rows, PLACEHOLDER_TOKEN);
    if (job_.logprobs) {
      std::fill_n(job_.logprobs + int64_t{b_} * num_rows, num_rows, kNaN);
    }
    if (job_.options.stats) {
      for (float* stat : job_.stats) {
        std::fill_n(stat + int64_t{b_} * job_.num_slots, job_.num_slots, kNaN);
      }
    }
  }

  void read_length() {
    if (job_.options.has_lengths) {
      int given = *job_.draft_lengths.at<int32_t>(b_);
      length_ = std::clamp(given, 0, job_.num_slots);
      flag_if(length_ != given, OUT_OF_RANGE);
      return;
    }
    while (length_ < job_.num_slots && token(length_) != PLACEHOLDER_TOKEN) {
      ++length_;
    }
  }

  bool can_produce(int slot) const {
    return job_.draft.can_produce(b_, slot, token(slot), job_.vocab_size);
  }

  // Returns the token after the accepted prefix, or a placeholder where a bad row ends it.
  int accept_prefix() {
    for (int i = 0; i < length_; ++i) {
      read_rows(i);
      if (!target(i).finite) {
        status_ |= NON_FINITE_TARGET;
        return PLACEHOLDER_TOKEN;
      }
      if (!can_produce(i)) {
        status_ |= OUT_OF_RANGE;
        return draw_target(i);
      }
      int id = token(i);
      flag_if(id >= job_.vocab_size, OUT_OF_RANGE);
      if (target(i).dist.greedy || rule().kind == Rule::Coupled) {
        int choice = draw_target(i);
        if (id != choice) {
          return choice;
        }
      } else if (rule().kind == Rule::Typical) {
        if (!is_typical(i)) {
          return draw_target(i);
        }
      } else {
        if (!read_draft(i)) {
          return PLACEHOLDER_TOKEN;
        }
        if (!accepts(i)) {
          return draw_residual(i, 1.0);
        }
      }
      ++num_accepted_;
    }
    if (!target(length_).finite) {
      status_ |= NON_FINITE_TARGET;
      return PLACEHOLDER_TOKEN;
    }
    return draw_target(length_);
  }

  // The ratio test of a slot whose rows are good.
  bool accepts(int i) {
    bool defers = rule().kind != Rule::Cascade || defers_to_target(i);
    // Strictly less: a token the target cannot produce stays out also when the coin is 0.
    double threshold = defers ? job_.noise.coin(b_, i) * double{draft(i).prob(token(i))} : 0.0;
    return threshold < target_prob(i);
  }

  // False, with the status set, where the slot's draft row is bad.
  bool read_draft(int i) {
    if (!draft(i).finite()) {
      status_ |= BAD_DRAFT;
      return false;
    }
    flag_if(draft(i).prob(token(i)) == 0, ZERO_DRAFT_PROB);
    return true;
  }

  // Typical acceptance (Cai et al. 2401.10774, section 2.3.1).
  bool is_typical(int i) {
    auto [epsilon, delta] = rule().parameters;
    float entropy = exactspec::entropy(target_row(i), target(i).dist);
    return target_prob(i) > std::min(epsilon, delta * std::exp(-entropy));
  }

  // The deferral rule "Diff" of speculative cascades (Narasimhan et al. 2405.19261).
  bool defers_to_target(int i) {
    return draft(i).largest() < target(i).dist.scale() - rule().parameters[0];
  }

  // Block verification (Sun et al. 2403.10444, algorithm 2): the longest prefix whose coin passes.
  int accept_block() {
    std::vector<double> weight{1.0};
    int n = 0;
    for (; n < length_; ++n) {
      read_rows(n);
      if (!target(n).finite) {
        status_ |= NON_FINITE_TARGET;
        return PLACEHOLDER_TOKEN;
      }
      if (!can_produce(n)) {
        status_ |= OUT_OF_RANGE;
        break;
      }
      flag_if(token(n) >= job_.vocab_size, OUT_OF_RANGE);
      if (!read_draft(n)) {
        return PLACEHOLDER_TOKEN;
      }
      double target_p = target_prob(n), draft_p = draft(n).prob(token(n));
      double before = weight.back();
      weight.push_back(
          target_p == 0      ? 0.0
              : draft_p == 0 ? static_cast<double>(before > 0)
                             : std::min(before * target_p / draft_p, 1.0));
    }
    if (!target(n).finite) {
      status_ |= NON_FINITE_TARGET;
      return PLACEHOLDER_TOKEN;
    }
    if (n > 0 && job_.noise.coin(b_, n - 1) < weight[n]) {
      num_accepted_ = n;
      return draw_target(n);
    }
    for (int i = n - 1; i > 0; --i) {
      auto mass = residual_mass(i, weight[i]);
      double sum = std::accumulate(mass.begin(), mass.end(), 0.0);
      double all = sum + (1 - weight[i]); // in this order, or a small sum is lost
      if (all == 0 || job_.noise.coin(b_, i - 1) < sum / all) {
        num_accepted_ = i;
        return draw_residual(i, weight[i], mass);
      }
    }
    return n > 0 ? draw_residual(0, 1.0) : draw_target(0);
  }

  // The target's own choice at row i, by the draw's pair or by the noise of its position.
  int draw_target(int i) {
    if (rule().kind == Rule::Coupled) {
      auto position = static_cast<uint32_t>(*job_.positions.at<int32_t>(b_)) + i;
      return coupled_choice(target_row(i), target(i), job_.noise.key(b_), position);
    }
    float u[2];
    job_.noise.pair(b_, u);
    return draw(target_row(i), target(i), u);
  }

  // max(factor * target - draft, 0) of ids [first, first + n), and its sum; `out` may be null.
  double load_residual(int slot, double factor, int first, int n, float* out) {
    const Distribution& dist = target(slot).dist;
    auto scale = static_cast<float>(factor * dist.scale());
    return draft(slot).residual(target_row(slot), dist, scale, 1, first, n, out);
  }

  std::vector<double> residual_mass(int slot, double factor) {
    Row row = target_row(slot);
    const RowSummary& summary = target(slot);
    std::vector<double> mass(row.num_blocks(), 0.0);
    draft(slot); // made here, then only read by the threads below
    for_each_block(row.num_blocks(), [&](int block) {
      if (summary.may_keep(block)) {
        int first = block * DRAW_BLOCK;
        mass[block] = load_residual(slot, factor, first, row.block_size(block), nullptr);
      }
    });
    return mass;
  }

  int draw_residual(int slot, double factor) {
    return draw_residual(slot, factor, residual_mass(slot, factor));
  }

  int draw_residual(int slot, double factor, const std::vector<double>& mass) {
    float u[2];
    job_.noise.pair(b_, u);
    int id = draw(mass, job_.vocab_size, u, [&](int first, int n, float* out) {
      load_residual(slot, factor, first, n, out);
    });
    // Only rounding leaves no mass: target and draft agree, so the target itself is the law.
    return id < 0 ? draw_target(slot) : id;
  }

  void write_tokens(int next) {
    int64_t row = int64_t{b_} * (job_.num_slots + 1);
    for (int i = 0; i <= num_accepted_; ++i) {
      int id = i < num_accepted_ ? token(i) : next;
      job_.tokens[row + i] = id;
      if (job_.logprobs && id >= 0) {
        job_.logprobs[row + i] =
            token_logprob(target_row(i), target(i), sampling_, id, job_.options.logprobs);
      }
    }
  }

  void write_stats() {
    for (int i = 0; i < length_ && can_produce(i); ++i) {
      int64_t at = int64_t{b_} * job_.num_slots + i;
      if (target(i).finite) {
        job_.stats[2][at] = entropy(target_row(i), target(i).dist);
      }
      if (draft(i).finite()) {
        job_.stats[3][at] = draft(i).entropy();
      }
      if (target(i).finite && draft(i).finite()) {
        float draft_prob = draft(i).prob(token(i));
        float prob = target_prob(i);
        job_.stats[0][at] =
            draft_prob > 0 ? std::min(1.0f, prob / draft_prob) : static_cast<float>(prob > 0);
        job_.stats[1][at] = overlap(i);
      }
    }
  }

  float overlap(int slot) {
    Row row = target_row(slot);
    const RowSummary& summary = target(slot);
    const DraftRow& draft_row = draft(slot);
    std::vector<double> partial(row.num_blocks(), 0.0);
    for_each_block(row.num_blocks(), [&](int block) {
      int first = block * DRAW_BLOCK;
      int n = row.block_size(block);
      float x[DRAW_BLOCK], w[DRAW_BLOCK];
      row.load(first, n, x);
      summary.dist.weights(x, first, n, w);
      block_ops.scale(w, summary.dist.scale(), n);
      draft_row.load(first, n, x);
      partial[block] = block_ops.overlap(w, x, n);
    });
    return static_cast<float>(std::accumulate(partial.begin(), partial.end(), 0.0));
  }

  const Job& job_;
  int b_;
  RowSampling sampling_;
  RowSampling draft_sampling_;
  std::vector<std::optional<RowSummary>> targets_;
  std::vector<std::unique_ptr<DraftRow>> drafts_;
  int length_ = 0;
  int num_accepted_ = 0;
  uint32_t status_ = 0;
};

} // namespace

void VerifyDraft::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  allocate(outputs);
  int batch = static_cast<int>(outputs[1].size());
  bool has_logprobs = options_.logprobs != Logprobs::None;
  bool has_rows = options_.draft != DraftKind::OneHot;
  auto view = [&](Input input, bool given, int core_rank) {
    return View(inputs[input], given ? core_rank : 0);
  };
  auto job = std::make_shared<Job>(Job{
      options_,
      inputs[DraftTokens].shape(-1),
      inputs[TargetLogits].shape(-1),
      view(TargetLogits, true, 2),
      view(DraftTokens, true, 1),
      view(DraftLengths, true, 0),
      {options_.draft,
       options_.has_vocab,
       options_.has_draft_stats,
       view(DraftRows, has_rows, 2),
       view(DraftProbs, options_.draft == DraftKind::Sparse, 2),
       view(DraftVocab, options_.has_vocab, 1),
       view(DraftStats, options_.has_draft_stats, 2),
       {}},
      NoiseView(inputs[Noise], options_.keyed, inputs[DraftTokens].shape(-1)),
      view(Positions, options_.rule.kind == Rule::Coupled, 0),
      view(Bitmask, options_.has_bitmask, 2),
      SamplingViews(inputs, Parameters),
      SamplingViews(inputs, DraftParameters),
      outputs[0].data<int32_t>(),
      outputs[1].data<int32_t>(),
      outputs[2].data<uint32_t>(),
      has_logprobs ? outputs[3].data<float>() : nullptr,
      {}});
  for (int i = 0; options_.stats && i < 4; ++i) {
    job->stats[i] = outputs[3 + has_logprobs + i].data<float>();
  }
  dispatch(stream(), outputs, [job, batch] {
    job->draft.sort_columns();
    parallel_for(batch, [&](int b) { Sequence(*job, b).run(); });
  });
}

} // namespace exactspec
