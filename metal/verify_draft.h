// verify_draft and sample as named steps. A call is one threadgroup per sequence (`sequence`), or split
// over threadgroups: `partials`, `rows` (with filters), `residual` (dense drafts), `draw`. Both variants
// run the same steps on the same blocks, so they give the same bits. docs/rules.md has the rules.
#pragma once

#include "draw.h"
#include "filter.h"

namespace exactspec {

constant int target_dtype [[function_constant(FC_TARGET_DTYPE)]];
constant int draft_dtype [[function_constant(FC_DRAFT_DTYPE)]];
constant int draft_kind [[function_constant(FC_DRAFT_KIND)]];
constant int target_order [[function_constant(FC_ORDER)]];
constant int draft_order [[function_constant(FC_DRAFT_ORDER)]];
constant int rule [[function_constant(FC_RULE)]];
constant int logprobs_kind [[function_constant(FC_LOGPROBS)]];
constant bool keyed [[function_constant(FC_KEYED)]];
constant bool has_lengths [[function_constant(FC_HAS_LENGTHS)]];
constant bool has_vocab [[function_constant(FC_HAS_VOCAB)]];
constant bool has_draft_stats [[function_constant(FC_HAS_DRAFT_STATS)]];
constant bool has_bitmask [[function_constant(FC_HAS_BITMASK)]];
constant bool target_filtered [[function_constant(FC_TARGET_FILTERED)]];
constant bool draft_filtered [[function_constant(FC_DRAFT_FILTERED)]];
constant bool with_stats [[function_constant(FC_STATS)]];
constant bool is_sample [[function_constant(FC_IS_SAMPLE)]];
constant bool is_tree [[function_constant(FC_IS_TREE)]];

// Everything a kernel is given.
struct Buffers {
  const device uchar* target_logits;
  const device int* draft_tokens;
  const device int* draft_lengths;
  const device uchar* draft_rows; // logits, or ids of a sparse draft
  const device float* draft_probs;
  const device int* draft_vocab;
  const device float* draft_stats;
  const device uint* noise;
  const device int* positions;
  const device uint* bitmask;
  const device float* temperature[2];
  const device int* top_k[2];
  const device float* top_p[2];
  const device float* min_p[2];
  constant VerifyDraftParams* params;
  device float4* partials;
  device float* mass;
  device float* scattered;
  device float2* digests;
  device int* tokens;
  device int* num_accepted;
  device uint* status;
  device float* logprobs;
};

// What the accepted prefix ended with.
enum class Next : int { Target, Residual, Nothing };

// A walk along a sequence's draft.
struct Walk {
  int slot; // slots before it were accepted; with Rule::Block: have been looked at
  float weight; // Rule::Block: that of the prefix before the slot
  bool ended;
  Next next;
  uint bits;
};

// What the next token is drawn from: the target at a slot, or max(factor * target - draft, 0).
struct Source {
  int slot;
  Next next;
  float factor;
  Distribution target;
  Distribution draft;
};

// One sequence of the batch, as seen by one thread of `num_threads`.
struct Sequence {
  Buffers in;
  int b;
  uint tid;
  uint num_threads;
  ushort lane;
  uint simdgroup;
  uint num_simdgroups;
  int K;
  RowSampling target_sampling;
  RowSampling draft_sampling;

  Sequence(Buffers buffers, int b_, uint tid_, uint num_threads_)
      : in(buffers), b(b_), tid(tid_), num_threads(num_threads_), lane(ushort(tid_ % LANES)),
        simdgroup(tid_ / LANES), num_simdgroups(num_threads_ / LANES), K(buffers.params->num_slots) {
    target_sampling = read_sampling(0, target_order);
    draft_sampling = read_sampling(1, draft_order);
  }

  RowSampling read_sampling(int side, int order) const {
    constant int64_t* stride = in.params->parameters + 4 * side;
    RowSampling s;
    s.temperature = in.temperature[side][b * stride[0]];
    s.top_k = in.top_k[side][b * stride[1]];
    s.top_p = in.top_p[side][b * stride[2]];
    s.min_p = in.min_p[side][b * stride[3]];
    s.order = order;
    return s;
  }

  bool valid_parameters() const {
    bool reads_draft = draft_kind == int(DraftKind::Dense);
    return target_sampling.valid() && (!reads_draft || draft_sampling.valid());
  }
  // Whether the sequence gets a token at all. Kernels that only prepare what others decide on need not
  // know of the uniforms.
  bool valid() const { return valid_parameters() && noise().valid(); }

  int token(int slot) const {
    return in.draft_tokens[b * in.params->tokens_batch + slot * in.params->tokens_step];
  }

  // A row that starts `offset` elements into `data`, which is `misalign` bytes off an aligned address.
  static Row make_row(const device uchar* data, int64_t offset, int64_t step, int size, int dtype,
                      int misalign) {
    int64_t bytes = offset * (dtype == DTYPE_FLOAT32 ? 4 : 2);
    Row row;
    row.data = data + bytes;
    row.step = step;
    row.size = size;
    row.dtype = dtype;
    row.wide = step == 1 && ((bytes + misalign) & 15) == 0;
    row.mask = nullptr;
    row.mask_step = 0;
    return row;
  }

  Row target_row(int i) const {
    constant VerifyDraftParams& p = *in.params;
    Row row = make_row(in.target_logits, b * p.target_batch + i * p.target_row, p.target_step,
                       p.vocab_size, target_dtype, p.target_misalign);
    if (has_bitmask) {
      row.mask = in.bitmask + b * p.mask_batch + i * p.mask_row;
      row.mask_step = p.mask_step;
    }
    return row;
  }

  // Row of a dense draft.
  Row draft_row(int slot) const {
    constant VerifyDraftParams& p = *in.params;
    return make_row(in.draft_rows, b * p.draft_batch + slot * p.draft_row, p.draft_step, p.draft_width,
                    draft_dtype, p.draft_misalign);
  }

  bool dense() const { return draft_kind == int(DraftKind::Dense); }
  // Target rows come first, then the draft's: one a slot, in a tree as many as the target's.
  int num_rows() const { return is_tree ? 2 * K + 2 : 2 * K + 1; }
  bool is_target(int r) const { return r <= K; }
  Row row(int r) const { return is_target(r) ? target_row(r) : draft_row(r - K - 1); }
  RowSampling row_sampling(int r) const {
    // Not `?:`, which would choose an address and so keep the whole object in memory.
    if (is_target(r)) {
      return target_sampling;
    }
    return draft_sampling;
  }
  bool row_filtered(int r) const { return is_target(r) ? target_filtered : draft_filtered; }

  device float4* row_partials(int r) const {
    int64_t at = int64_t(b) * num_rows() + r;
    return in.partials + at * (in.params->row_blocks + 1);
  }
  device float4* row_slot(int r) const { return row_partials(r) + in.params->row_blocks; }
  // A float per block.
  device float* block_floats(int r) const {
    return in.mass + (int64_t(b) * num_rows() + r) * in.params->row_blocks;
  }
  device float2* digests(int i) const {
    return in.digests + (int64_t(b) * (K + 1) + i) * in.params->row_blocks;
  }
  // One region a sequence, or one a slot when every slot's statistics or residual are wanted.
  int64_t scattered_at(int slot) const {
    bool per_slot = with_stats || rule == int(Rule::Block);
    return (per_slot ? int64_t(b) * K + slot : int64_t(b)) * in.params->vocab_size;
  }
  // Rule::Block: the weight of the first `count` > 0 drafts, kept where the filters of a draft's row had
  // their scratch.
  device float& prefix_weight(int count) const { return *block_floats(K + count); }

  // Step 1, per block: maximum and mass, by one simdgroup.
  void reduce(int r, int block) const {
    Row source = row(r);
    RowSampling s = row_sampling(r);
    float x[HELD];
    float4 partial = float4(0);
    bool raw = is_target(r) && logprobs_kind == int(Logprobs::Raw);
    if (raw) {
      load_block(source, block, false, lane, x);
      partial.z = block_max(x);
      partial.w = block_mass(x, block, partial.z, 1.0f, false, lane);
    }
    load_block(source, block, true, lane, x);
    partial.x = block_max(x);
    bool digested = has_digests() && is_target(r) && !s.greedy() && !s.has_filters();
    if (digested) {
      float2 d = digest(r, block, partial.x, unfiltered(s, source.size), HeldBlock{x});
      partial.y = d.y; // the mass, with Rule::Typical
      if (lane == 0) {
        digests(r)[block] = d;
      }
    }
    if (!digested || rule != int(Rule::Typical)) {
      partial.y = block_mass(x, block, partial.x, s.measured(), s.greedy(), lane);
    }
    if (lane == 0) {
      row_partials(r)[block] = partial;
    }
  }

  static bool has_digests() { return !reads_draft(Rule(rule)); }

  // What the rule needs of a block of a target row, relative to the block's own maximum: of the kept ids,
  // the best score and its id, or the sums for the entropy.
  template <typename Chunks>
  float2 digest(int i, int block, float max, Distribution dist, Chunks chunks) const {
    dist.max = max;
    if (rule == int(Rule::Typical)) {
      return max > -INFINITY ? entropy_sums(chunks, dist, block, lane) : float2(0);
    }
    if (!(max > -INFINITY)) {
      return float2(-INFINITY, 0);
    }
    return coupled_best(chunks, dist, noise().key(), position(i), block, lane);
  }

  uint position(int i) const { return uint(in.positions[b * in.params->positions_batch] + i); }

  // Steps 1 and 2 by the whole threadgroup.
  void read_row(int r, FilterMemory memory) const {
    int num_blocks = row(r).num_blocks();
    for (int block = simdgroup; block < num_blocks; block += num_simdgroups) {
      reduce(r, block);
    }
    threadgroup_barrier(mem_flags::mem_device);
    if (row_filtered(r)) {
      filter(r, memory);
      threadgroup_barrier(mem_flags::mem_device);
    }
  }

  // Step 2, with filters: the cut and the normaliser of a row, by the whole threadgroup.
  void filter(int r, FilterMemory memory) const {
    Distribution dist = filter_row(
        row(r), row_sampling(r), row_partials(r), block_floats(r), memory, tid, num_threads);
    if (tid == 0) {
      float id = as_type<float>(dist.cutoff_id);
      *row_slot(r) = float4(dist.finite ? dist.max : NAN, dist.log_norm, dist.cutoff, id);
    }
    if (!has_digests() || !is_target(r) || !dist.finite || !row_sampling(r).has_filters()) {
      return;
    }
    for (int block = simdgroup; block < row(r).num_blocks(); block += num_simdgroups) {
      float max = row_partials(r)[block].x;
      max = max >= dist.cutoff ? max : -INFINITY; // nothing is kept: nothing is read
      float2 d = digest(r, block, max, dist, ReadBlock{row(r), block, lane});
      if (lane == 0) {
        digests(r)[block] = d;
      }
    }
  }

  // The distribution of a row whose blocks (and cut) are known; every lane of a simdgroup calls it.
  Distribution distribution(int r) const {
    RowSampling s = row_sampling(r);
    if (!is_target(r) && has_draft_stats) {
      return handed_over(r - K - 1);
    }
    if (row_filtered(r)) {
      float4 stored = *row_slot(r);
      Distribution dist;
      dist.max = stored.x;
      dist.log_norm = stored.y;
      dist.cutoff = stored.z;
      dist.cutoff_id = as_type<int>(stored.w);
      dist.greedy = s.greedy();
      dist.temperature = dist.greedy ? 1.0f : s.temperature;
      dist.finite = !isnan(stored.x);
      return dist;
    }
    Row source = row(r);
    return combine(row_partials(r), source.size, source.num_blocks(), s, lane);
  }

  // A draft row's distribution as `sample` described it.
  Distribution handed_over(int slot) const {
    constant VerifyDraftParams& p = *in.params;
    const device float* stat = in.draft_stats + b * p.stats_batch + slot * p.stats_row;
    Distribution dist;
    dist.max = stat[STAT_MAX * p.stats_step];
    dist.log_norm = stat[STAT_LOG_NORM * p.stats_step];
    dist.cutoff = stat[STAT_CUTOFF * p.stats_step];
    float id = stat[STAT_CUTOFF_ID * p.stats_step];
    dist.finite = !(isnan(dist.max) || isnan(dist.log_norm) || isnan(dist.cutoff) || isnan(id));
    dist.cutoff_id = dist.finite ? int(clamp(id, 0.0f, MAX_CUTOFF_ID)) : 0;
    dist.greedy = draft_sampling.greedy();
    dist.temperature = dist.greedy ? 1.0f : draft_sampling.temperature;
    return dist;
  }

  int sparse_id(int slot, int entry) const {
    constant VerifyDraftParams& p = *in.params;
    const device int* ids = (const device int*)in.draft_rows;
    return ids[b * p.draft_batch + slot * p.draft_row + entry * p.draft_step];
  }
  float sparse_prob(int slot, int entry) const {
    constant VerifyDraftParams& p = *in.params;
    return in.draft_probs[b * p.probs_batch + slot * p.probs_row + entry * p.probs_step];
  }
  int column_id(int column) const { return in.draft_vocab[column * in.params->vocab_step]; }

  // A draft of listed ids: the support of a sparse one, or the token of a one-hot one.
  int num_entries() const {
    return draft_kind == int(DraftKind::Sparse) ? in.params->draft_width : 1;
  }
  int entry_id(int slot, int entry) const {
    return draft_kind == int(DraftKind::Sparse) ? sparse_id(slot, entry) : token(slot);
  }
  float entry_prob(int slot, int entry) const {
    return draft_kind == int(DraftKind::Sparse) ? sparse_prob(slot, entry) : 1.0f;
  }

  int length(thread uint& bits) const {
    if (has_lengths) {
      int given = in.draft_lengths[b * in.params->lengths_batch];
      int n = clamp(given, 0, K);
      bits |= n != given ? OUT_OF_RANGE : 0;
      return n;
    }
    int n = 0;
    while (n < K && token(n) != PLACEHOLDER_TOKEN) {
      ++n;
    }
    return n;
  }

  // Whether a row of the draft has a place for the token at all, whatever its probability there.
  bool can_produce(int slot, int id) const {
    if (id < 0) {
      return false;
    }
    if (dense() && !has_vocab) {
      return id < in.params->draft_width;
    }
    if (draft_kind == int(DraftKind::OneHot) || (!dense() && id < in.params->vocab_size)) {
      return id < in.params->vocab_size;
    }
    bool found = false;
    for (int i = lane; i < in.params->draft_width; i += LANES) {
      found = found || (dense() ? column_id(i) : sparse_id(slot, i)) == id;
    }
    return simd_any(found);
  }

  // NaN, negative or infinite entries, or too much mass.
  bool sparse_is_bad(int slot) const {
    bool bad = false;
    float mass = 0;
    for (int i = lane; i < in.params->draft_width; i += LANES) {
      float prob = sparse_prob(slot, i);
      bool used = sparse_id(slot, i) >= 0;
      bad = bad || (used && !(prob >= 0 && prob < INFINITY));
      mass += used ? prob : 0.0f;
    }
    return simd_any(bad) || !(tree_sum(mass) <= MAX_SPARSE_MASS);
  }

  float draft_prob(int slot, int id, Distribution dist) const {
    if (draft_kind == int(DraftKind::OneHot)) {
      return 1;
    }
    if (dense() && !has_vocab) {
      return dist.prob(draft_row(slot).logit(id), id);
    }
    float sum = 0;
    Row source = draft_row(slot);
    for (int i = lane; i < in.params->draft_width; i += LANES) {
      if (dense()) {
        sum += column_id(i) == id ? dist.prob(source.logit(i), i) : 0.0f;
      } else {
        sum += sparse_id(slot, i) == id ? sparse_prob(slot, i) : 0.0f;
      }
    }
    return tree_sum(sum);
  }

  float target_prob(int slot, int id, Distribution dist) const {
    return id < in.params->vocab_size ? dist.prob(target_row(slot).logit(id), id) : 0.0f;
  }

  Noise noise() const {
    constant VerifyDraftParams& p = *in.params;
    Noise n;
    n.data = in.noise + b * p.noise_batch;
    n.step = p.noise_step;
    n.keyed = keyed;
    n.num_coins = K;
    return n;
  }

  // Whether a row can be reached at all, so that it is worth reading.
  bool needed(int r, int n) const {
    if (is_target(r)) {
      return r <= n;
    }
    bool decides = reads_draft(Rule(rule)) && !target_sampling.greedy();
    return dense() && !has_draft_stats && r - K - 1 < n && (with_stats || decides);
  }

  // The probability of the draft's likeliest column or entry.
  float largest_draft_prob(int slot, Distribution dist) const {
    if (draft_kind != int(DraftKind::Sparse)) {
      return dense() ? dist.scale() : 1.0f;
    }
    float largest = 0;
    for (int i = lane; i < in.params->draft_width; i += LANES) {
      largest = max(largest, sparse_id(slot, i) >= 0 ? sparse_prob(slot, i) : 0.0f);
    }
    return tree_max(largest);
  }

  static Walk begin() {
    Walk walk;
    walk.slot = 0;
    walk.weight = 1;
    walk.ended = false;
    walk.next = Next::Nothing;
    walk.bits = 0;
    return walk;
  }

  // Greedy targets decide alike under every rule.
  bool by_block() const { return rule == int(Rule::Block) && !target_sampling.greedy(); }

  // Step 3: decides one slot, by one simdgroup.
  void accept_slot(int n, thread Walk& walk) const {
    const int i = walk.slot;
    Distribution target = distribution(i);
    walk.ended = true;
    if (!target.finite) {
      walk.bits |= NON_FINITE_TARGET;
      walk.next = Next::Nothing;
      return;
    }
    walk.next = Next::Target;
    if (i == n) {
      return;
    }
    if (!can_produce(i, token(i))) {
      walk.bits |= OUT_OF_RANGE;
      return;
    }
    walk.bits |= token(i) >= in.params->vocab_size ? OUT_OF_RANGE : 0;
    bool accepted;
    if (target.greedy || rule == int(Rule::Coupled)) {
      // The residual of a one-hot target is its token, as is the target itself.
      accepted = token(i) == choice(i, target);
    } else if (rule == int(Rule::Typical)) {
      constant float* p = in.params->rule_parameters;
      accepted = target_prob(i, token(i), target) > min(p[0], p[1] * exp(-digested_entropy(i, target)));
    } else {
      Distribution draft = target;
      bool bad = false;
      if (dense()) {
        draft = distribution(K + 1 + i);
        bad = !draft.finite;
      } else if (draft_kind == int(DraftKind::Sparse)) {
        bad = sparse_is_bad(i);
      }
      if (bad) {
        walk.bits |= BAD_DRAFT;
        walk.next = Next::Nothing;
        return;
      }
      walk.next = Next::Residual;
      float drafted = draft_prob(i, token(i), draft);
      float prob = target_prob(i, token(i), target);
      walk.bits |= drafted == 0 ? ZERO_DRAFT_PROB : 0;
      if (rule == int(Rule::Block)) {
        float without_draft = walk.weight > 0 ? 1.0f : 0.0f;
        float with_draft = drafted == 0 ? without_draft : min(walk.weight * prob / drafted, 1.0f);
        walk.weight = prob == 0 ? 0.0f : with_draft;
        accepted = true;
      } else {
        bool defers = rule != int(Rule::Cascade) ||
            largest_draft_prob(i, draft) < target.scale() - in.params->rule_parameters[0];
        // Strictly less: a token the target cannot produce stays out also when the coin is 0.
        accepted = (defers ? noise().coin(i) * drafted : 0.0f) < prob;
      }
    }
    walk.ended = !accepted;
    walk.slot += accepted;
  }

  // The id that a greedy target or one coupled to its noise chooses.
  int choice(int i, Distribution target) const {
    if (target.greedy) {
      return target.cutoff_id;
    }
    const device float4* partials = row_partials(i);
    float best = -INFINITY;
    uint id = ~0u;
    for (int block = lane; block < target_row(i).num_blocks(); block += LANES) {
      float2 d = digests(i)[block];
      float score = d.x + (partials[block].x - target.max) / target.temperature;
      id = score > best ? as_type<uint>(d.y) : id;
      best = score > best ? score : best;
    }
    float winner = tree_max(best);
    return int(tree_min(best == winner ? id : ~0u));
  }

  // Entropy in nats of a target row, by one simdgroup.
  float digested_entropy(int i, Distribution target) const {
    const device float4* partials = row_partials(i);
    float sum = 0;
    for (int block = lane; block < target_row(i).num_blocks(); block += LANES) {
      float2 d = digests(i)[block];
      float below = (target.max - partials[block].x) / target.temperature;
      float factor = exp(-below);
      sum += factor > 0 ? factor * (d.x + below * d.y) : 0.0f;
    }
    return target.log_norm + tree_sum(sum) * target.scale();
  }

  // After a slot that was accepted: what accept_block needs of it.
  void keep_weight(Walk walk) const {
    if (rule == int(Rule::Block) && !walk.ended && lane == 0) {
      prefix_weight(walk.slot) = walk.weight;
    }
  }

  // What simdgroup 0 knows of its walk, for the whole threadgroup.
  void share(threadgroup int* shared, thread Walk& walk) const {
    if (tid == 0) {
      shared[0] = walk.slot;
      shared[1] = int(walk.next);
      shared[2] = walk.ended;
    }
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
    walk.slot = shared[0];
    walk.next = Next(shared[1]);
    walk.ended = shared[2];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // Rule::Block: whether the coin of all drafts that were looked at passes.
  bool accepts_all(int n, float weight) const { return noise().coin(n - 1) < weight; }

  // Step 4, Rule::Block, by the whole threadgroup: the longest of the prefixes of `n` drafts whose coin
  // passes. The masses of its residual are known afterwards, unless nothing is accepted.
  int accept_block(int n, bool masses_known, threadgroup atomic_uint* repeats, thread Next& next,
                   thread float& factor) const {
    next = Next::Target;
    if (n == 0 || accepts_all(n, prefix_weight(n))) {
      return n;
    }
    next = Next::Residual;
    for (int i = n - 1; i > 0; --i) {
      factor = prefix_weight(i);
      if (!masses_known) {
        store_masses(source(i, next, factor), repeats);
      }
      float sum = sum_floats(i, target_row(i).num_blocks());
      float rest = sum + (1 - factor);
      if (rest == 0 || noise().coin(i - 1) < sum / rest) {
        return i;
      }
    }
    factor = 1;
    return 0;
  }

  // Step 5, dense drafts with a vocabulary map: probabilities of ids [first, last) by target id. A word
  // holds the lowest column of its id before it holds the probability.
  void scatter(int slot, Distribution draft, int first, int last, threadgroup atomic_uint* repeats) const {
    Row source = draft_row(slot);
    int width = in.params->draft_width;
    device atomic_uint* words = (device atomic_uint*)(in.scattered + scattered_at(slot));
    for (int id = first + int(tid); id < last; id += num_threads) {
      atomic_store_explicit(&words[id], ~0u, memory_order_relaxed);
    }
    if (tid == 0) {
      atomic_store_explicit(repeats, 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
    for (int c = tid; c < width; c += num_threads) {
      int id = column_id(c);
      if (id >= first && id < last) {
        atomic_fetch_min_explicit(&words[id], uint(c), memory_order_relaxed);
      }
    }
    threadgroup_barrier(mem_flags::mem_device);
    for (int c = tid; c < width; c += num_threads) {
      int id = column_id(c);
      if (id >= first && id < last && atomic_load_explicit(&words[id], memory_order_relaxed) != uint(c)) {
        atomic_fetch_max_explicit(repeats, 1u, memory_order_relaxed);
      }
    }
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
    bool repeated = atomic_load_explicit(repeats, memory_order_relaxed) != 0;
    for (int id = first + int(tid); id < last; id += num_threads) {
      int c = int(atomic_load_explicit(&words[id], memory_order_relaxed));
      float prob = repeated || c < 0 ? 0.0f : draft.prob(source.logit(c), c);
      atomic_store_explicit(&words[id], as_type<uint>(prob), memory_order_relaxed);
    }
    // Columns that repeat an id add up in column order, by the thread that owns the id.
    for (int c = 0; repeated && c < width; ++c) {
      int id = column_id(c);
      if (id >= first && id < last && uint(id - first) % num_threads == tid) {
        float sum = as_type<float>(atomic_load_explicit(&words[id], memory_order_relaxed));
        sum += draft.prob(source.logit(c), c);
        atomic_store_explicit(&words[id], as_type<uint>(sum), memory_order_relaxed);
      }
    }
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  }

  // A mapped draft's probabilities by target id.
  Row scattered_row(int slot) const {
    return make_row((const device uchar*)in.scattered, scattered_at(slot), 1, in.params->vocab_size,
                    DTYPE_FLOAT32, 0);
  }

  // Whether a listed id falls into the block: only then does the draft change its mass.
  bool touches(int slot, int block) const {
    bool touched = false;
    for (int i = lane; i < num_entries(); i += LANES) {
      int id = entry_id(slot, i);
      touched = touched || (id >= 0 && id / DRAW_BLOCK == block);
    }
    return simd_any(touched);
  }

  // The probabilities of the draft at a block's ids, subtracted from w.
  void subtract_draft(int slot, Distribution draft, int block, thread float* w) const {
    if (dense()) {
      float y[HELD];
      if (has_vocab) {
        load_block(scattered_row(slot), block, false, lane, y);
      } else {
        load_block(draft_row(slot), block, false, lane, y);
        draft.weights(block, lane, y);
      }
      float scale = has_vocab ? 1.0f : draft.scale();
      UNROLLED(i, HELD) {
        // Behind the end of the draft's row a load gives -inf, whose weight is 0.
        w[i] -= y[i] > 0 ? y[i] * scale : 0.0f;
      }
      return;
    }
    for (int e = 0; e < num_entries(); ++e) {
      int id = entry_id(slot, e);
      if (id < 0 || id / DRAW_BLOCK != block) {
        continue;
      }
      int held = held_at(id, lane);
      float prob = entry_prob(slot, e);
      UNROLLED(i, HELD) {
        w[i] -= i == held ? prob : 0.0f;
      }
    }
  }

  Source source(int slot, Next next, float factor) const {
    Source from;
    from.slot = slot;
    from.next = next;
    from.factor = factor;
    from.target = distribution(slot);
    from.draft = from.target;
    if (next == Next::Residual && dense()) {
      from.draft = distribution(K + 1 + slot);
    }
    return from;
  }

  // Weights that the next token is drawn from, at one block's ids.
  void draw_weights(Source from, int block, thread float* w) const {
    load_block(target_row(from.slot), block, true, lane, w);
    from.target.weights(block, lane, w);
    if (from.next == Next::Residual) {
      float scale = from.factor * from.target.scale();
      UNROLLED(j, HELD) {
        w[j] *= scale;
      }
      subtract_draft(from.slot, from.draft, block, w);
      UNROLLED(j, HELD) {
        w[j] = w[j] > 0 ? w[j] : 0.0f;
      }
    }
  }

  // Step 5: mass of one block of what is drawn from, by one simdgroup. A block is read only if its mass is
  // not known from step 1.
  float draw_mass(Source from, int block) const {
    const Distribution target = from.target;
    float2 partial = row_partials(from.slot)[block].xy;
    if (target.greedy) {
      return target.cutoff_id / DRAW_BLOCK == block ? 1.0f : 0.0f;
    }
    if (partial.x == -INFINITY || partial.x < target.cutoff) {
      return 0;
    }
    bool residual = from.next == Next::Residual;
    bool known = !target_sampling.has_filters() && !(residual && (dense() || touches(from.slot, block)));
    if (known) {
      float mass = rescaled(partial, target.max, target.temperature);
      return residual ? mass * (from.factor * target.scale()) : mass;
    }
    float w[HELD];
    draw_weights(from, block, w);
    return block_sum(w);
  }

  void store_mass(Source from, int block) const {
    float mass = draw_mass(from, block);
    if (lane == 0) {
      block_floats(from.slot)[block] = mass;
    }
  }

  // Step 5 for all blocks, by the whole threadgroup; known after a barrier.
  void store_masses(Source from, threadgroup atomic_uint* repeats) const {
    if (has_vocab && from.next == Next::Residual) {
      scatter(from.slot, from.draft, 0, in.params->vocab_size, repeats);
    }
    int num_blocks = target_row(from.slot).num_blocks();
    for (int block = simdgroup; block < num_blocks; block += num_simdgroups) {
      store_mass(from, block);
    }
  }

  // Step 6: two-level draw by one simdgroup. -1 if there is no mass.
  int draw_token(Source from) const {
    if (from.target.greedy || rule == int(Rule::Coupled)) {
      return choice(from.slot, from.target);
    }
    int block = draw_block(block_floats(from.slot), target_row(from.slot).num_blocks(), noise().pair(0), lane);
    if (block < 0) {
      return -1;
    }
    float w[HELD];
    draw_weights(from, block, w);
    return draw_id(HeldBlock{w}, block, noise().pair(1), lane);
  }

  float token_logprob(int i, int id, Distribution target) const {
    Row source = target_row(i);
    if (logprobs_kind == int(Logprobs::Filtered)) {
      return target.logprob(source.logit(id));
    }
    const device float4* partials = row_partials(i);
    float max = combine_max(partials, source.num_blocks(), true, lane);
    float sum = combine_sum(partials, source.num_blocks(), max, 1.0f, true, lane);
    return source.element(id * source.step) - max - log(sum);
  }

  // Steps 4 to 7 by the whole threadgroup. `masses_known`: another dispatch did step 5 for residuals.
  void finish(Walk walk, bool masses_known, threadgroup int* shared, threadgroup atomic_uint* repeats) const {
    int accepted = walk.slot;
    Next next = walk.next;
    float factor = 1;
    if (by_block()) {
      if (next == Next::Nothing) {
        accepted = 0;
      } else {
        accepted = accept_block(accepted, masses_known, repeats, next, factor);
        masses_known = masses_known || accepted > 0;
      }
    }
    int next_token = PLACEHOLDER_TOKEN;
    if (next != Next::Nothing) {
      Source from = source(accepted, next, factor);
      bool needs_masses = rule != int(Rule::Coupled) && !(masses_known && next == Next::Residual);
      next_token = draw(from, needs_masses, shared, repeats);
      if (next_token < 0) {
        // Only rounding leaves no residual: target and draft agree, so the target itself is the law.
        from.next = Next::Target;
        next_token = draw(from, true, shared, repeats);
      }
    }
    if (simdgroup == 0) {
      write_tokens(accepted, next_token, walk.bits);
    }
  }

  int draw(Source from, bool needs_masses, threadgroup int* shared, threadgroup atomic_uint* repeats) const {
    if (needs_masses) {
      store_masses(from, repeats);
      threadgroup_barrier(mem_flags::mem_device);
    }
    if (simdgroup == 0) {
      int id = draw_token(from);
      if (lane == 0) {
        shared[0] = id;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    int id = shared[0];
    // Both the masses and the shared id may be written again.
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
    return id;
  }

  // Sum over a row's region of block_floats, after a barrier.
  float sum_floats(int r, int num_blocks) const {
    threadgroup_barrier(mem_flags::mem_device);
    float sum = 0;
    for (int block = lane; block < num_blocks; block += LANES) {
      sum += block_floats(r)[block];
    }
    sum = tree_sum(sum);
    threadgroup_barrier(mem_flags::mem_device);
    return sum;
  }

  // Entropy in nats of row r, by the whole threadgroup; `scratch_row` names a free region.
  float entropy(int r, Distribution dist, int scratch_row) const {
    Row source = row(r);
    for (int block = simdgroup; block < source.num_blocks(); block += num_simdgroups) {
      float x[HELD];
      load_block(source, block, true, lane, x);
      float sum = entropy_sums(HeldBlock{x}, dist, block, lane).x;
      if (lane == 0) {
        block_floats(scratch_row)[block] = sum;
      }
    }
    return dist.log_norm + sum_floats(scratch_row, source.num_blocks()) * dist.scale();
  }

  // Entropy of a draft of listed ids or columns, repeated ids merged; by one simdgroup.
  float listed_entropy(int slot, Distribution draft) const {
    if (draft_kind == int(DraftKind::OneHot)) {
      return 0;
    }
    Row source = draft_row(slot);
    int count = in.params->draft_width;
    float sum = 0;
    for (int e = lane; e < count; e += LANES) {
      int id = dense() ? column_id(e) : sparse_id(slot, e);
      float prob = 0;
      bool first = dense() || id >= 0;
      for (int other = 0; other < count && first; ++other) {
        if ((dense() ? column_id(other) : sparse_id(slot, other)) == id) {
          first = other >= e;
          prob += dense() ? draft.prob(source.logit(other), other) : sparse_prob(slot, other);
        }
      }
      sum -= first && prob > 0 ? prob * log(prob) : 0.0f;
    }
    return tree_sum(sum);
  }

  // sum_v min(target(v), draft(v)), by the whole threadgroup.
  float overlap(int slot, Distribution target, Distribution draft, int scratch_row) const {
    Row source = target_row(slot);
    float scale = target.scale();
    for (int block = simdgroup; block < source.num_blocks(); block += num_simdgroups) {
      float w[HELD];
      float d[HELD];
      load_block(source, block, true, lane, w);
      target.weights(block, lane, w);
      UNROLLED(j, HELD) {
        d[j] = 0;
      }
      subtract_draft(slot, draft, block, d);
      UNROLLED(j, HELD) {
        w[j] = min(w[j] * scale, -d[j]);
      }
      float sum = block_sum(w);
      if (lane == 0) {
        block_floats(scratch_row)[block] = sum;
      }
    }
    return sum_floats(scratch_row, source.num_blocks());
  }

  // Step 7: the outputs, by one simdgroup.
  void write_tokens(int accepted, int next_token, uint bits) const {
    device int* out = in.tokens + int64_t(b) * (K + 1);
    for (int i = lane; i <= K; i += LANES) {
      out[i] = i < accepted ? token(i) : i == accepted ? next_token : int(PLACEHOLDER_TOKEN);
    }
    if (lane == 0) {
      if (!is_sample) {
        in.num_accepted[b] = accepted;
      }
      in.status[b] = bits;
    }
    if (logprobs_kind == int(Logprobs::None)) {
      return;
    }
    for (int i = 0; i <= K; ++i) {
      int id = i < accepted ? token(i) : i == accepted ? next_token : -1;
      float value = NAN;
      if (id >= 0) {
        value = token_logprob(i, id, distribution(i));
      }
      if (lane == 0) {
        in.logprobs[int64_t(b) * (K + 1) + i] = value;
      }
    }
  }

  // `sample`: the scalars that describe its row, by one simdgroup.
  void write_row_stats(device float* out) const {
    Distribution dist;
    dist.finite = false;
    if (valid()) {
      dist = distribution(0);
    }
    if (lane == 0) {
      device float* stat = out + int64_t(b) * NUM_ROW_STATS;
      stat[STAT_MAX] = dist.finite ? dist.max : NAN;
      stat[STAT_LOG_NORM] = dist.finite ? dist.log_norm : NAN;
      stat[STAT_CUTOFF] = dist.finite ? dist.cutoff : NAN;
      stat[STAT_CUTOFF_ID] = dist.finite ? float(dist.cutoff_id) : NAN;
    }
  }
};

} // namespace exactspec
