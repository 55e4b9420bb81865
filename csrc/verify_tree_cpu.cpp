#include "verify_tree.h"

#include <limits>
#include <memory>
#include <numeric>
#include <optional>

#include "cpu_task.h"
#include "draft_row_cpu.h"
#include "noise.h"
#include "row_cpu.h"
#include "threads.h"

namespace exactspec {

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int kContext = -1; // the parent of a tree's first nodes

struct Job {
  VerifyTree::Options options;
  int num_nodes;
  int vocab_size;
  View target_logits, draft_tokens, parents;
  DraftViews draft;
  NoiseView noise;
  View bitmask;
  SamplingViews sampling, draft_sampling;
  int32_t* tokens;
  int32_t* path;
  int32_t* num_accepted;
  uint32_t* status;
  float* logprobs;
};

// The target behind one node, and what its rejected children leave of it. Each rejection makes it
// normalise(max(left / mass - draft, 0)): unnormalised, mass * draft is taken from left. So all of
// them together leave max(target - taken * draft, 0), with one number `taken`. Only ids that have
// left the draft, or one-hot children that were rejected, are kept by themselves.
class Branch {
 public:
  Branch(
      const Job& job,
      const RowSampling& sampling,
      const RowSampling& draft_sampling,
      int b,
      int node)
      : job_(job),
        draft_sampling_(draft_sampling),
        b_(b),
        draft_row_(node + 1),
        row_(make_row(job.target_logits, b, node + 1)) {
    if (job.options.has_bitmask) {
      set_mask(row_, job.bitmask, b, node + 1);
    }
    target_ = summarise(row_, sampling);
  }

  const Row& row() const { return row_; }
  const RowSummary& target() const { return target_; }

  // False where the draft's row is bad. One-hot drafts have none.
  bool read_draft() {
    if (is_one_hot()) {
      return true;
    }
    if (!draft_) {
      draft_.emplace(job_.draft, draft_sampling_, b_, draft_row_, PLACEHOLDER_TOKEN);
    }
    return draft_->finite();
  }

  // Whether there is anything left that a further child may have been drawn from.
  bool has_draft() {
    if (draft_mass_ < 0) {
      std::vector<int> ids;
      for (const Fixed& fixed : fixed_) {
        ids.push_back(fixed.id);
      }
      draft_mass_ = draft_->mass_without(ids);
    }
    return draft_mass_ > 0;
  }

  double draft_prob(int id) const {
    if (is_one_hot()) {
      return 1;
    }
    auto is_id = [&](const Fixed& fixed) { return fixed.id == id; };
    bool removed = std::any_of(fixed_.begin(), fixed_.end(), is_id);
    return removed ? 0 : draft_->prob(id) / draft_mass_;
  }

  double target_prob(int id) const { return left(id) / mass_; }

  void reject(int id) {
    auto fixed_before = fixed_.size();
    double taken_before = taken_;
    if (is_one_hot()) {
      fixed_.push_back({id, 0.0f});
    } else {
      taken_ += mass_ / draft_mass_;
    }
    auto block_mass = block_masses(id);
    double mass = std::accumulate(block_mass.begin(), block_mass.end(), 0.0);
    if (mass > 0) {
      mass_ = mass;
      block_mass_ = std::move(block_mass);
    } else {
      // Only rounding leaves no mass: target and draft agree, and the target stays as it is.
      taken_ = taken_before;
      fixed_.resize(fixed_before);
    }
    if (!is_one_hot() && !job_.options.replacement) {
      fixed_.push_back({id, left(id)});
      draft_mass_ = -1;
    }
  }

  int draw() const {
    float u[2];
    job_.noise.pair(b_, u);
    if (block_mass_.empty()) {
      return exactspec::draw(row_, target_, u);
    }
    return exactspec::draw(
        block_mass_, row_.size, u, [&](int first, int n, float* out) { load(first, n, out); });
  }

 private:
  struct Fixed {
    int id;
    float left;
  };

  bool is_one_hot() const { return job_.options.draft == DraftKind::OneHot; }

  // What is left of ids [first, first + n), unnormalised.
  void load(int first, int n, float* out) const {
    const Distribution& dist = target_.dist;
    if (taken_ > 0) {
      constexpr double max = std::numeric_limits<float>::max();
      auto taken = static_cast<float>(std::min(taken_, max));
      draft_->residual(row_, dist, dist.scale(), taken, first, n, out);
    } else {
      float buffer[DRAW_BLOCK];
      dist.weights(row_.block(first, n, buffer), first, n, out);
      block_ops.scale(out, dist.scale(), n);
    }
    for (const Fixed& fixed : fixed_) {
      if (fixed.id >= first && fixed.id < first + n) {
        out[fixed.id - first] = fixed.left;
      }
    }
  }

  float left(int id) const {
    float value = 0;
    if (id < row_.size) {
      load(id, 1, &value);
    }
    return value;
  }

  std::vector<double> block_masses(int rejected) const {
    std::vector<double> mass(row_.num_blocks(), 0.0);
    // A one-hot rejection changes one block only.
    bool others_known = is_one_hot() && !block_mass_.empty();
    for_each_block(row_.num_blocks(), [&](int block) {
      if (others_known && block != rejected / DRAW_BLOCK) {
        mass[block] = block_mass_[block];
      } else if (target_.may_keep(block)) {
        float w[DRAW_BLOCK];
        int n = row_.block_size(block);
        load(block * DRAW_BLOCK, n, w);
        mass[block] = block_ops.sum(w, n);
      }
    });
    return mass;
  }

  const Job& job_;
  const RowSampling& draft_sampling_;
  int b_;
  int draft_row_;
  Row row_;
  RowSummary target_;
  std::optional<DraftRow> draft_;
  double taken_ = 0;
  std::vector<Fixed> fixed_; // what is left of ids that have left the draft
  double mass_ = 1; // of what is left
  std::vector<double> block_mass_; // the same per block; empty: nothing was taken
  double draft_mass_ = 1; // of the ids still in the draft; negative: to be computed
};

// Decides one sequence. Only rows on the accepted path are read.
class Walk {
 public:
  Walk(const Job& job, int b)
      : job_(job),
        b_(b),
        sampling_(job.sampling, job.options.order, b),
        draft_sampling_(job.draft_sampling, job.options.draft_order, b) {}

  void run() {
    fill_outputs();
    bool reads_draft = job_.options.draft == DraftKind::Dense;
    if (!sampling_.valid() || (reads_draft && !draft_sampling_.valid()) || !job_.noise.valid(b_)) {
      status_ |= BAD_PARAMETER;
    } else {
      find_end();
      int next = accept_path();
      write_tokens(next);
    }
    job_.num_accepted[b_] = static_cast<int32_t>(path_.size());
    job_.status[b_] = status_;
  }

 private:
  void flag_if(bool condition, Status bit) { status_ |= condition ? static_cast<uint32_t>(bit) : 0; }

  int token(int node) const { return *job_.draft_tokens.at<int32_t>(b_, node); }
  int parent(int node) const { return *job_.parents.at<int32_t>(b_, node); }
  bool used(int node) const { return token(node) != PLACEHOLDER_TOKEN; }

  void fill_outputs() {
    int num_rows = job_.num_nodes + 1;
    std::fill_n(job_.tokens + int64_t{b_} * num_rows, num_rows, PLACEHOLDER_TOKEN);
    std::fill_n(job_.path + int64_t{b_} * job_.num_nodes, job_.num_nodes, -1);
    if (job_.logprobs) {
      std::fill_n(job_.logprobs + int64_t{b_} * num_rows, num_rows, kNaN);
    }
  }

  // The tree ends before the first node whose parent does not come before it.
  void find_end() {
    auto good = [&](int node) {
      return !used(node) || (parent(node) >= kContext && parent(node) < node);
    };
    while (end_ < job_.num_nodes && good(end_)) {
      ++end_;
    }
    flag_if(end_ < job_.num_nodes, BAD_PARENT);
  }

  // Goes to a node whose token was accepted. False, with the status set, where its row is bad.
  bool enter(int node) {
    branches_.push_back(std::make_unique<Branch>(job_, sampling_, draft_sampling_, b_, node));
    flag_if(!branches_.back()->target().finite, NON_FINITE_TARGET);
    return branches_.back()->target().finite;
  }

  // Returns the token after the accepted path, or a placeholder where a bad row ends it. Children
  // come after their parents, so one pass over the nodes finds them all.
  int accept_path() {
    int at = kContext;
    if (!enter(at)) {
      return PLACEHOLDER_TOKEN;
    }
    for (int node = 0; node < end_; ++node) {
      if (!used(node) || parent(node) != at || !branches_.back()->has_draft()) {
        continue;
      }
      // Not drawn from the draft, such a child says nothing about its siblings nor the target.
      if (!job_.draft.can_produce(b_, at + 1, token(node), job_.vocab_size)) {
        status_ |= OUT_OF_RANGE;
        continue;
      }
      flag_if(token(node) >= job_.vocab_size, OUT_OF_RANGE);
      bool greedy = branches_.back()->target().dist.greedy;
      if (!greedy && !branches_.back()->read_draft()) {
        status_ |= BAD_DRAFT;
        return PLACEHOLDER_TOKEN;
      }
      if (greedy ? is_argmax(node) : passes_coin(node)) {
        path_.push_back(node);
        at = node;
        if (!enter(at)) {
          return PLACEHOLDER_TOKEN;
        }
      } else if (!greedy) {
        branches_.back()->reject(token(node));
      }
    }
    return branches_.back()->draw();
  }

  bool is_argmax(int node) const {
    return token(node) == branches_.back()->target().dist.cutoff_id;
  }

  bool passes_coin(int node) {
    double draft_prob = branches_.back()->draft_prob(token(node));
    flag_if(draft_prob == 0, ZERO_DRAFT_PROB);
    // Strictly less: a token the target cannot produce stays out also when the coin is 0.
    return job_.noise.coin(b_, node) * draft_prob < branches_.back()->target_prob(token(node));
  }

  void write_tokens(int next) {
    int64_t row = int64_t{b_} * (job_.num_nodes + 1);
    for (size_t i = 0; i <= path_.size(); ++i) {
      int id = i < path_.size() ? token(path_[i]) : next;
      job_.tokens[row + i] = id;
      if (job_.logprobs && id >= 0) {
        const Branch& branch = *branches_[i];
        job_.logprobs[row + i] =
            token_logprob(branch.row(), branch.target(), sampling_, id, job_.options.logprobs);
      }
    }
    std::copy(path_.begin(), path_.end(), job_.path + int64_t{b_} * job_.num_nodes);
  }

  const Job& job_;
  int b_;
  RowSampling sampling_;
  RowSampling draft_sampling_;
  int end_ = 0;
  std::vector<int> path_;
  std::vector<std::unique_ptr<Branch>> branches_; // the context's, then those of the path
  uint32_t status_ = 0;
};

} // namespace

void VerifyTree::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  allocate(outputs);
  int batch = static_cast<int>(outputs[2].size());
  auto view = [&](Input input, bool given, int core_rank) {
    return View(inputs[input], given ? core_rank : 0);
  };
  auto job = std::make_shared<Job>(Job{
      options_,
      inputs[DraftTokens].shape(-1),
      inputs[TargetLogits].shape(-1),
      view(TargetLogits, true, 2),
      view(DraftTokens, true, 1),
      view(Parents, true, 1),
      {options_.draft,
       options_.has_vocab,
       options_.has_draft_stats,
       view(DraftRows, options_.draft != DraftKind::OneHot, 2),
       view(DraftProbs, options_.draft == DraftKind::Sparse, 2),
       view(DraftVocab, options_.has_vocab, 1),
       view(DraftStats, options_.has_draft_stats, 2),
       {}},
      NoiseView(inputs[Noise], options_.keyed, inputs[DraftTokens].shape(-1)),
      view(Bitmask, options_.has_bitmask, 2),
      SamplingViews(inputs, Parameters),
      SamplingViews(inputs, DraftParameters),
      outputs[0].data<int32_t>(),
      outputs[1].data<int32_t>(),
      outputs[2].data<int32_t>(),
      outputs[3].data<uint32_t>(),
      options_.logprobs != Logprobs::None ? outputs[4].data<float>() : nullptr});
  dispatch(stream(), outputs, [job, batch] {
    job->draft.sort_columns();
    parallel_for(batch, [&](int b) { Walk(*job, b).run(); });
  });
}

} // namespace exactspec
