// verify_tree as named steps, over those of verify_draft. A call is one threadgroup per sequence
// (`sequence`, which reads rows when they are reached), or split over threadgroups: `partials`, `rows`
// (with filters), then one group per sequence, `walk`. Both go the same way over the same blocks, so they
// give the same bits.
#pragma once

#include "verify_draft.h"

namespace exactspec {

constant bool replacement [[function_constant(FC_REPLACEMENT)]];

enum class Verdict : int { PassedOver, Accepted, Rejected, Stopped };

// The target behind the node reached, and what its rejected children leave of it. Taking the draft from
// left / mass is taking mass * draft from left, so all rejections together leave
// max(target - taken * draft, 0), unnormalised; only ids that can no longer be drafted stay as they were.
struct Branch {
  int row; // the node's, or 0: the context's
  Distribution target;
  Distribution draft;
  bool has_draft; // its distribution is known
  bool scattered; // it has been spread over the target's ids
  float taken;
  float mass; // of what is left
  bool has_masses; // per block: else nothing was taken yet
  float draft_mass; // of the ids still in the draft; negative: to be measured
  bool has_draft_masses; // per block, as they were before the last id left
  int num_removed; // ids that have left the draft
};

// What is left of a block, chunk by chunk.
template <typename Tree>
struct LeftBlock {
  Tree tree;
  Branch branch;
  int block;

  void take(int c, thread float* w) const { tree.left_chunk(branch, block, c, w); }
};

struct Tree {
  Sequence sequence;
  const device int* parents;
  device int* path;
  device float2* removed;

  Tree(Sequence sequence_, const device int* parents_, device int* path_, device float2* removed_)
      : sequence(sequence_), parents(parents_), path(path_ + int64_t(sequence_.b) * sequence_.K),
        removed(removed_ + int64_t(sequence_.b) * sequence_.K) {}

  int parent(int node) const {
    constant VerifyDraftParams& p = *sequence.in.params;
    return parents[sequence.b * p.parents_batch + node * p.parents_step];
  }
  bool used(int node) const { return sequence.token(node) != PLACEHOLDER_TOKEN; }
  bool one_hot() const { return draft_kind == int(DraftKind::OneHot); }
  bool reduces_draft() const {
    // A greedy target decides without the draft's row.
    return sequence.dense() && !has_draft_stats && !sequence.target_sampling.greedy();
  }

  // The tree ends before the first node whose parent does not come before it.
  int end() const {
    for (int first = 0; first < sequence.K; first += LANES) {
      int node = first + sequence.lane;
      bool bad = node < sequence.K && used(node) && !(parent(node) >= -1 && parent(node) < node);
      uint lane = first_lane(bad, sequence.lane);
      if (lane < LANES) {
        return first + int(lane);
      }
    }
    return sequence.K;
  }

  // Whether a row may be reached at all, so that it is worth reading; by one simdgroup.
  bool needed(int r) const {
    int n = end();
    bool is_target = sequence.is_target(r);
    int row = is_target ? r : r - sequence.K - 1;
    if (row > 0 && !(row - 1 < n && used(row - 1))) {
      return false;
    }
    if (is_target) {
      return true;
    }
    bool has_child = false;
    for (int node = sequence.lane; node < n && reduces_draft(); node += LANES) {
      has_child = has_child || (used(node) && parent(node) == row - 1);
    }
    return simd_any(has_child);
  }

  // Goes to a node whose token was accepted.
  Branch enter(int row, bool reads_rows, FilterMemory memory) const {
    Branch branch;
    if (reads_rows) {
      sequence.read_row(row, memory);
    }
    branch.row = row;
    branch.target = sequence.distribution(row);
    branch.draft = branch.target;
    branch.has_draft = false;
    branch.scattered = false;
    branch.taken = 0;
    branch.mass = 1;
    branch.has_masses = false;
    branch.draft_mass = 1;
    branch.has_draft_masses = false;
    branch.num_removed = 0;
    return branch;
  }

  // To be called before a child is judged.
  void read_draft(bool reads_rows, FilterMemory memory, thread Branch& branch) const {
    if (branch.has_draft || !sequence.dense() || branch.target.greedy) {
      return;
    }
    int r = sequence.K + 1 + branch.row;
    if (reads_rows && reduces_draft()) {
      sequence.read_row(r, memory);
    }
    branch.draft = sequence.distribution(r);
    branch.has_draft = true;
  }

  int removed_id(int i) const { return as_type<int>(removed[i].x); }

  // What is left of an id, unnormalised; by one simdgroup.
  float left(Branch branch, int id) const {
    if (id >= sequence.in.params->vocab_size) {
      return 0;
    }
    float value = sequence.target_prob(branch.row, id, branch.target);
    if (branch.taken > 0) {
      value -= sequence.draft_prob(branch.row, id, branch.draft) * branch.taken;
      value = value > 0 ? value : 0.0f;
    }
    for (int i = 0; i < branch.num_removed; ++i) {
      value = removed_id(i) == id ? removed[i].y : value;
    }
    return value;
  }

  // Probabilities of a dense draft at the ids of a lane's chunk.
  void draft_probs(Branch branch, int block, int chunk, thread float* y) const {
    int first = held_id(block, chunk, sequence.lane);
    Row source = has_vocab ? sequence.scattered_row(branch.row) : sequence.draft_row(branch.row);
    source.load(first, false, y);
    float scale = branch.draft.scale();
    UNROLLED(j, READS) {
      float prob = has_vocab ? y[j] : branch.draft.weight(y[j], first + j) * scale;
      y[j] = prob > 0 ? prob : 0.0f; // a load behind the end gives -inf
    }
  }

  // The same of a sparse draft, taken off w.
  void take_entries(Branch branch, int block, int chunk, thread float* w) const {
    for (int e = 0; e < sequence.num_entries(); ++e) {
      int id = sequence.entry_id(branch.row, e);
      int held = id >= 0 && id / DRAW_BLOCK == block ? held_at(id, sequence.lane) : -1;
      float prob = sequence.entry_prob(branch.row, e) * branch.taken;
      UNROLLED(j, READS) {
        w[j] -= chunk * READS + j == held ? prob : 0.0f;
      }
    }
  }

  // What is left at the ids of a lane's chunk, unnormalised. By chunks, since a whole block of weights
  // does not fit into registers beside the walk.
  void left_chunk(Branch branch, int block, int chunk, thread float* w) const {
    int first = held_id(block, chunk, sequence.lane);
    sequence.target_row(branch.row).load(first, true, w);
    float scale = branch.target.scale();
    UNROLLED(j, READS) {
      w[j] = branch.target.weight(w[j], first + j) * scale;
    }
    if (branch.taken > 0) {
      if (sequence.dense()) {
        float y[READS];
        draft_probs(branch, block, chunk, y);
        UNROLLED(j, READS) {
          w[j] -= y[j] * branch.taken;
        }
      } else {
        take_entries(branch, block, chunk, w);
      }
      UNROLLED(j, READS) {
        w[j] = w[j] > 0 ? w[j] : 0.0f;
      }
    }
    for (int i = 0; i < branch.num_removed; ++i) {
      int place = removed_id(i) - first;
      float value = removed[i].y;
      UNROLLED(j, READS) {
        w[j] = j == place ? value : w[j];
      }
    }
  }

  // Whether the rejection of a token changes what is left of a block; by one simdgroup.
  bool changes(Branch branch, int token, int block) const {
    if (one_hot()) {
      return token / DRAW_BLOCK == block;
    }
    return sequence.dense() || sequence.touches(branch.row, block);
  }

  // Mass of what is left of a block. It is read only if its mass is not known from step 1.
  float left_mass(Branch branch, int token, int block) const {
    float2 partial = sequence.row_partials(branch.row)[block].xy;
    if (partial.x == -INFINITY || partial.x < branch.target.cutoff) {
      return 0;
    }
    if (!sequence.target_sampling.has_filters() && !changes(branch, token, block)) {
      const Distribution target = branch.target;
      // A block must not be drawn from if its weights are too small to be told from 0.
      bool has_weight = exp((partial.x - target.max) / target.temperature) * target.scale() > 0;
      return has_weight ? rescaled(partial, target.max, target.temperature) * target.scale() : 0.0f;
    }
    float sum = 0;
    ROLLED(c, CHUNKS) {
      float w[READS];
      left_chunk(branch, block, c, w);
      sum += run_sum(w);
    }
    return tree_sum(sum);
  }

  // Masses of what is left after a token was rejected, and their sum; by the whole threadgroup.
  float measure_left(Branch branch, int token) const {
    int num_blocks = sequence.target_row(branch.row).num_blocks();
    device float* mass = sequence.block_floats(branch.row);
    for (int block = sequence.simdgroup; block < num_blocks; block += sequence.num_simdgroups) {
      if (!branch.has_masses || changes(branch, token, block)) {
        float m = left_mass(branch, token, block);
        if (sequence.lane == 0) {
          mass[block] = m;
        }
      }
    }
    return sequence.sum_floats(branch.row, num_blocks);
  }

  void remove(int token, float value, thread Branch& branch) const {
    if (sequence.tid == 0) {
      removed[branch.num_removed] = float2(as_type<float>(token), value);
    }
    ++branch.num_removed;
    threadgroup_barrier(mem_flags::mem_device);
  }

  // Takes the draft of a rejected token from what is left; by the whole threadgroup.
  void reject(int token, threadgroup atomic_uint* repeats, thread Branch& branch) const {
    const float taken = branch.taken;
    if (one_hot()) {
      remove(token, 0, branch);
    } else {
      branch.taken = min(taken + branch.mass / branch.draft_mass, FLT_MAX);
    }
    if (has_vocab && !branch.scattered) {
      sequence.scatter(branch.row, branch.draft, 0, sequence.in.params->vocab_size, repeats);
      branch.scattered = true;
    }
    float mass = measure_left(branch, token);
    if (mass > 0) {
      branch.mass = mass;
      branch.has_masses = true;
    } else {
      // Only rounding leaves no mass: target and draft agree, and the target stays as it is.
      branch.taken = taken;
      branch.num_removed -= one_hot();
      if (branch.has_masses) {
        measure_left(branch, token);
      }
    }
    if (!one_hot() && !replacement) {
      float value = sequence.simdgroup == 0 ? left(branch, token) : 0.0f;
      remove(token, value, branch);
      branch.draft_mass = -1;
    }
  }

  // Mass of the ids still in the draft: exactly 0 where nothing else is likely; by the whole threadgroup.
  void measure_draft(thread Branch& branch) const {
    branch.draft_mass = sequence.dense() ? measure_columns(branch) : measure_entries(branch);
    branch.has_draft_masses = true;
  }

  float measure_entries(Branch branch) const {
    float sum = 0;
    for (int e = sequence.lane; e < sequence.num_entries(); e += LANES) {
      int id = sequence.entry_id(branch.row, e);
      bool there = id >= 0;
      for (int i = 0; i < branch.num_removed; ++i) {
        there = there && removed_id(i) != id;
      }
      sum += there ? sequence.entry_prob(branch.row, e) : 0.0f;
    }
    return tree_sum(sum);
  }

  float measure_columns(Branch branch) const {
    const int r = sequence.K + 1 + branch.row;
    Row source = sequence.draft_row(branch.row);
    int num_blocks = source.num_blocks();
    int last_removed = removed_id(branch.num_removed - 1);
    bool reduced = !has_draft_stats && !sequence.draft_sampling.has_filters();
    for (int block = sequence.simdgroup; block < num_blocks; block += sequence.num_simdgroups) {
      bool loses = has_column(block, last_removed);
      if (branch.has_draft_masses && !loses) {
        continue;
      }
      float mass;
      if (reduced && !loses && !branch.draft.greedy) {
        float2 partial = sequence.row_partials(r)[block].xy;
        mass = rescaled(partial, branch.draft.max, branch.draft.temperature);
      } else {
        float sum = 0;
        ROLLED(c, CHUNKS) {
          float w[READS];
          kept_columns(branch, source, block, c, w);
          sum += run_sum(w);
        }
        mass = tree_sum(sum);
      }
      if (sequence.lane == 0) {
        sequence.block_floats(r)[block] = mass;
      }
    }
    return sequence.sum_floats(r, num_blocks) * branch.draft.scale();
  }

  // Whether an id is one of the columns of a block; by one simdgroup.
  bool has_column(int block, int id) const {
    if (!has_vocab) {
      return id / DRAW_BLOCK == block;
    }
    int last = min((block + 1) * DRAW_BLOCK, sequence.in.params->draft_width);
    bool found = false;
    for (int column = block * DRAW_BLOCK + sequence.lane; column < last; column += LANES) {
      found = found || sequence.column_id(column) == id;
    }
    return simd_any(found);
  }

  // Weights of a chunk of the draft's columns; 0 where the id has left the draft.
  void kept_columns(Branch branch, Row source, int block, int chunk, thread float* w) const {
    int first = held_id(block, chunk, sequence.lane);
    source.load(first, false, w);
    UNROLLED(j, READS) {
      w[j] = branch.draft.weight(w[j], first + j);
    }
    UNROLLED(j, READS) {
      int column = first + j;
      bool inside = column < sequence.in.params->draft_width;
      int id = has_vocab && inside ? sequence.column_id(column) : column;
      for (int i = 0; i < branch.num_removed; ++i) {
        w[j] = inside && removed_id(i) == id ? 0.0f : w[j];
      }
    }
  }

  // Decides a child of the node reached; by one simdgroup.
  Verdict judge(Branch branch, int node, thread uint& bits) const {
    int token = sequence.token(node);
    if (!sequence.can_produce(branch.row, token)) {
      // Not drawn from the draft, it says nothing about its siblings nor the target.
      bits |= OUT_OF_RANGE;
      return Verdict::PassedOver;
    }
    bits |= token >= sequence.in.params->vocab_size ? OUT_OF_RANGE : 0;
    if (branch.target.greedy) {
      return token == branch.target.cutoff_id ? Verdict::Accepted : Verdict::PassedOver;
    }
    bool sparse = draft_kind == int(DraftKind::Sparse);
    if (sequence.dense() ? !branch.draft.finite : sparse && sequence.sparse_is_bad(branch.row)) {
      bits |= BAD_DRAFT;
      return Verdict::Stopped;
    }
    float drafted = sequence.draft_prob(branch.row, token, branch.draft) / branch.draft_mass;
    for (int i = 0; i < branch.num_removed && !one_hot(); ++i) {
      drafted = removed_id(i) == token ? 0.0f : drafted;
    }
    bits |= drafted == 0 ? ZERO_DRAFT_PROB : 0;
    // Strictly less: a token the target cannot produce stays out also when the coin is 0.
    bool accepted = sequence.noise().coin(node) * drafted < left(branch, token) / branch.mass;
    return accepted ? Verdict::Accepted : Verdict::Rejected;
  }

  // A token of what is left, known to simdgroup 0; by the whole threadgroup.
  int draw(Branch branch, threadgroup int* shared, threadgroup atomic_uint* repeats) const {
    if (!branch.has_masses) {
      return sequence.draw(sequence.source(branch.row, Next::Target, 1), true, shared, repeats);
    }
    int id = -1;
    if (sequence.simdgroup == 0) {
      Noise noise = sequence.noise();
      int num_blocks = sequence.target_row(branch.row).num_blocks();
      const device float* mass = sequence.block_floats(branch.row);
      int block = draw_block(mass, num_blocks, noise.pair(0), sequence.lane);
      id = draw_id(LeftBlock<Tree>{*this, branch, block}, block, noise.pair(1), sequence.lane);
    }
    return id;
  }

  // An emitted token, of the row behind the node reached; by one simdgroup.
  void write_token(int at, int token, Branch branch) const {
    int64_t i = int64_t(sequence.b) * (sequence.K + 1) + at;
    float logprob = NAN;
    if (logprobs_kind != int(Logprobs::None) && token >= 0) {
      logprob = sequence.token_logprob(branch.row, token, branch.target);
    }
    if (sequence.lane == 0) {
      sequence.in.tokens[i] = token;
      if (logprobs_kind != int(Logprobs::None)) {
        sequence.in.logprobs[i] = logprob;
      }
    }
  }

  // The whole walk, by the threadgroup. `reads_rows`: no other dispatch has read them.
  void walk(bool reads_rows, FilterMemory memory, threadgroup int* shared,
            threadgroup atomic_uint* repeats) const {
    uint bits = 0;
    int count = 0;
    int next_token = PLACEHOLDER_TOKEN;
    Branch branch;
    if (sequence.valid()) {
      const int n = end();
      bits |= n < sequence.K ? BAD_PARENT : 0;
      branch = enter(0, reads_rows, memory);
      bool stopped = !branch.target.finite;
      bits |= stopped ? NON_FINITE_TARGET : 0;
      // Children come after their parents, so one pass over the nodes finds them all.
      for (int node = 0; node < n && !stopped; ++node) {
        if (!used(node) || parent(node) != branch.row - 1) {
          continue;
        }
        read_draft(reads_rows, memory, branch);
        if (branch.draft_mass < 0) {
          measure_draft(branch);
        }
        if (branch.draft_mass == 0) {
          continue; // nothing is left that it may have been drawn from
        }
        switch (shared_verdict(branch, node, shared, bits)) {
        case Verdict::PassedOver:
          break;
        case Verdict::Stopped:
          stopped = true;
          break;
        case Verdict::Rejected:
          reject(sequence.token(node), repeats, branch);
          break;
        case Verdict::Accepted:
          if (sequence.simdgroup == 0) {
            write_token(count, sequence.token(node), branch);
          }
          if (sequence.tid == 0) {
            path[count] = node;
          }
          ++count;
          branch = enter(node + 1, reads_rows, memory);
          stopped = !branch.target.finite;
          bits |= stopped ? NON_FINITE_TARGET : 0;
          break;
        }
      }
      if (!stopped) {
        next_token = draw(branch, shared, repeats);
      }
    } else {
      bits = BAD_PARAMETER;
    }
    if (sequence.simdgroup == 0) {
      write_token(count, next_token, branch);
      for (int i = count + 1; i <= sequence.K; ++i) {
        write_token(i, PLACEHOLDER_TOKEN, branch);
      }
    }
    for (int i = count + int(sequence.tid); i < sequence.K; i += sequence.num_threads) {
      path[i] = -1;
    }
    if (sequence.tid == 0) {
      sequence.in.num_accepted[sequence.b] = count;
      sequence.in.status[sequence.b] = bits;
    }
  }

  // Simdgroup 0's verdict, for the whole threadgroup.
  Verdict shared_verdict(Branch branch, int node, threadgroup int* shared, thread uint& bits) const {
    if (sequence.simdgroup == 0) {
      Verdict verdict = judge(branch, node, bits);
      if (sequence.lane == 0) {
        shared[0] = int(verdict);
      }
    }
    // Of the device, too: the ids that left the draft were read, and another node's may be written.
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
    Verdict verdict = Verdict(shared[0]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return verdict;
  }
};

} // namespace exactspec
