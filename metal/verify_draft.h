// verify_draft and sample as named steps. A call is one threadgroup per sequence (`sequence`), or split
// over threadgroups: `partials`, `rows` (with filters), `residual` (dense drafts), `draw`. Both variants
// run the same steps on the same blocks, so they give the same bits.
#pragma once

#include "filter.h"
#include "noise.h"

namespace exactspec {

constant int target_dtype [[function_constant(FC_TARGET_DTYPE)]];
constant int draft_dtype [[function_constant(FC_DRAFT_DTYPE)]];
constant int draft_kind [[function_constant(FC_DRAFT_KIND)]];
constant int target_order [[function_constant(FC_ORDER)]];
constant int draft_order [[function_constant(FC_DRAFT_ORDER)]];
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
  const device uint* bitmask;
  const device float* temperature[2];
  const device int* top_k[2];
  const device float* top_p[2];
  const device float* min_p[2];
  constant VerifyDraftParams* params;
  device float4* partials;
  device float4* rows;
  device float* mass;
  device float* scattered;
  device int* tokens;
  device int* num_accepted;
  device uint* status;
  device float* logprobs;
};

// What the accepted prefix ended with.
enum class Next : int { Target, Residual, Nothing };

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
    if (s.min_p > 1) {
      s.top_k = 1; // no weight is that large, and one token always stays
    }
    return s;
  }

  bool valid() const {
    bool reads_draft = draft_kind == int(DraftKind::Dense);
    return target_sampling.valid() && (!reads_draft || draft_sampling.valid());
  }

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
  // Target rows come first, then the draft's.
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
    int64_t at = int64_t(b) * (2 * K + 1) + r;
    return in.partials + at * in.params->row_blocks;
  }
  device float4* row_slot(int r) const { return in.rows + int64_t(b) * (2 * K + 1) + r; }
  // A float per block: the row that is drawn from uses the region of row 0.
  device float* block_floats(int r) const {
    return in.mass + (int64_t(b) * (2 * K + 1) + r) * in.params->row_blocks;
  }
  device float* block_mass() const { return block_floats(0); }
  // One region a sequence, or one a slot when every slot's statistics are wanted.
  int64_t scattered_at(int slot) const {
    return (with_stats ? int64_t(b) * K + slot : int64_t(b)) * in.params->vocab_size;
  }

  // Step 1, per block: maximum and mass, by one simdgroup.
  void reduce(int r, int block) const {
    Row source = row(r);
    RowSampling s = row_sampling(r);
    float x[HELD];
    float4 partial = float4(0);
    bool raw = is_target(r) && logprobs_kind == int(Logprobs::Raw);
    if (raw) {
      load_block(source, block, false, lane, x);
      partial.zw = reduce_block(x, block, 1.0f, false, lane);
    }
    load_block(source, block, true, lane, x);
    partial.xy = reduce_block(x, block, s.measured(), s.greedy(), lane);
    if (lane == 0) {
      row_partials(r)[block] = partial;
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
    dist.cutoff_id = dist.finite ? int(clamp(id, 0.0f, 1073741824.0f)) : 0;
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

  // Whether the draft has a place for the token at all, whatever its probability there.
  bool can_produce(int slot) const {
    int id = token(slot);
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
    return simd_any(bad) || !(tree_sum(mass) <= 1.001f);
  }

  float draft_prob(int slot, Distribution dist) const {
    int id = token(slot);
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

  float target_prob(int slot, Distribution dist) const {
    int id = token(slot);
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
    // A greedy target decides without the draft's row.
    return dense() && !has_draft_stats && r - K - 1 < n && (with_stats || !target_sampling.greedy());
  }

  // Step 3: decides one slot; true while the draft goes on. Every lane of a simdgroup calls it.
  bool accept_slot(int i, int n, thread Next& next, thread uint& bits) const {
    Distribution target = distribution(i);
    if (!target.finite) {
      bits |= NON_FINITE_TARGET;
      next = Next::Nothing;
      return false;
    }
    next = Next::Target;
    if (i == n) {
      return false;
    }
    if (!can_produce(i)) {
      bits |= OUT_OF_RANGE;
      return false;
    }
    bits |= token(i) >= in.params->vocab_size ? OUT_OF_RANGE : 0;
    if (target.greedy) {
      // The residual of a one-hot target is its token, as is the target itself.
      return token(i) == target.cutoff_id;
    }
    Distribution draft = target;
    bool bad = false;
    if (dense()) {
      draft = distribution(K + 1 + i);
      bad = !draft.finite;
    } else if (draft_kind == int(DraftKind::Sparse)) {
      bad = sparse_is_bad(i);
    }
    if (bad) {
      bits |= BAD_DRAFT;
      next = Next::Nothing;
      return false;
    }
    float prob = draft_prob(i, draft);
    bits |= prob == 0 ? ZERO_DRAFT_PROB : 0;
    // Strictly less: a token the target cannot produce stays out also when the coin is 0.
    bool accepted = noise().coin(i) * prob < target_prob(i, target);
    next = Next::Residual;
    return accepted;
  }

  // Step 3 for all slots, when all rows are known.
  int accept_prefix(int n, thread Next& next, thread uint& bits) const {
    int i = 0;
    while (accept_slot(i, n, next, bits)) {
      ++i;
    }
    return i;
  }

  // Step 4, dense drafts with a vocabulary map: probabilities of ids [first, last) by target id. A word
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
    threadgroup_barrier(mem_flags::mem_device);
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
        int size = in.params->vocab_size;
        Row source = make_row((const device uchar*)in.scattered, scattered_at(slot), 1, size,
                              DTYPE_FLOAT32, 0);
        load_block(source, block, false, lane, y);
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
      int offset = id % DRAW_BLOCK;
      int run = offset / READS;
      int held = (run / LANES) * READS + offset % READS;
      bool mine = run % LANES == lane;
      float prob = entry_prob(slot, e);
      UNROLLED(i, HELD) {
        w[i] -= mine && i == held ? prob : 0.0f;
      }
    }
  }

  // Weights that the next token is drawn from, at one block's ids.
  void draw_weights(int i, Next next, Distribution target, Distribution draft, int block, thread float* w) const {
    load_block(target_row(i), block, true, lane, w);
    target.weights(block, lane, w);
    if (next == Next::Residual) {
      float scale = target.scale();
      UNROLLED(j, HELD) {
        w[j] *= scale;
      }
      subtract_draft(i, draft, block, w);
      UNROLLED(j, HELD) {
        w[j] = w[j] > 0 ? w[j] : 0.0f;
      }
    }
  }

  // Step 5: mass of one block of the row that is drawn from, by one simdgroup. A block is read only if
  // its mass is not known from step 1.
  float draw_mass(int i, Next next, Distribution target, Distribution draft, int block) const {
    float2 partial = row_partials(i)[block].xy;
    if (target.greedy) {
      return target.cutoff_id / DRAW_BLOCK == block ? 1.0f : 0.0f;
    }
    if (partial.x == -INFINITY || partial.x < target.cutoff) {
      return 0;
    }
    bool residual = next == Next::Residual;
    bool known = !target_sampling.has_filters() && !(residual && (dense() || touches(i, block)));
    if (known) {
      float mass = rescaled(partial, target.max, target.temperature);
      return residual ? mass * target.scale() : mass;
    }
    float w[HELD];
    draw_weights(i, next, target, draft, block, w);
    return block_sum(w);
  }

  // Step 6: two-level draw by one simdgroup. -1 if there is no mass.
  int draw_token(int i, Next next, Distribution target, Distribution draft) const {
    if (target.greedy) {
      return target.cutoff_id;
    }
    const device float* mass = block_mass();
    int num_blocks = target_row(i).num_blocks();
    float total = 0;
    for (int first = 0; first < num_blocks; first += LANES) {
      float m = first + lane < num_blocks ? mass[first + lane] : 0.0f;
      total += simd_shuffle(inclusive_scan(m, lane), LANES - 1);
    }
    float threshold = noise().pair(0) * total;
    float before = 0;
    int block = -1;
    for (int first = 0; first < num_blocks; first += LANES) {
      float m = first + lane < num_blocks ? mass[first + lane] : 0.0f;
      float to = before + inclusive_scan(m, lane);
      uint chosen = first_lane(m > 0 && to > threshold, lane);
      if (chosen < LANES) {
        block = first + int(chosen);
        break;
      }
      // Rounding may leave none above the threshold: the last one of positive mass is drawn then.
      uint last = last_lane(m > 0, lane);
      block = last < LANES ? first + int(last) : block;
      before = simd_shuffle(to, LANES - 1);
    }
    if (block < 0) {
      return -1;
    }

    float w[HELD];
    draw_weights(i, next, target, draft, block, w);
    total = 0;
    UNROLLED(c, CHUNKS) {
      total += simd_shuffle(inclusive_scan(run_sum(w + c * READS), lane), LANES - 1);
    }
    threshold = noise().pair(1) * total;
    before = 0;
    int drawn = -1;
    int last = -1;
    UNROLLED(c, CHUNKS) {
      float sum = run_sum(w + c * READS);
      float to = before + inclusive_scan(sum, lane);
      float from = to - sum;
      uint chosen = first_lane(sum > 0 && to > threshold, lane);
      int mine = -1;
      int my_last = -1;
      UNROLLED(j, READS) {
        float v = w[c * READS + j];
        from += v;
        my_last = v > 0 ? j : my_last;
        mine = mine < 0 && v > 0 && from > threshold ? j : mine;
      }
      mine = mine < 0 ? my_last : mine;
      if (chosen < LANES) {
        drawn = held_id(block, c, ushort(chosen)) + simd_shuffle(mine, ushort(chosen));
        break;
      }
      uint owner = last_lane(my_last >= 0, lane);
      if (owner < LANES) {
        last = held_id(block, c, ushort(owner)) + simd_shuffle(my_last, ushort(owner));
      }
      before = simd_shuffle(to, LANES - 1);
    }
    return drawn < 0 ? last : drawn;
  }

  static float run_sum(const thread float* v) {
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
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

  // Steps 5 to 7 by the whole threadgroup. `masses_known`: another dispatch did step 5 for a residual.
  void finish(int accepted, Next next, uint bits, bool masses_known, threadgroup int* shared,
              threadgroup atomic_uint* repeats) const {
    int next_token = PLACEHOLDER_TOKEN;
    if (next != Next::Nothing) {
      Distribution target = distribution(accepted);
      Distribution draft = target;
      if (next == Next::Residual && dense()) {
        draft = distribution(K + 1 + accepted);
        if (has_vocab && !masses_known) {
          scatter(accepted, draft, 0, in.params->vocab_size, repeats);
        }
      }
      next_token = draw(accepted, next, target, draft, masses_known && next == Next::Residual, shared);
      if (next_token < 0) {
        // Only rounding leaves no residual: target and draft agree, so the target itself is the law.
        next_token = draw(accepted, Next::Target, target, draft, false, shared);
      }
    }
    if (simdgroup == 0) {
      write_tokens(accepted, next_token, bits);
    }
  }

  int draw(int i, Next next, Distribution target, Distribution draft, bool masses_known,
           threadgroup int* shared) const {
    if (!masses_known) {
      int num_blocks = target_row(i).num_blocks();
      for (int block = simdgroup; block < num_blocks; block += num_simdgroups) {
        store_mass(i, next, target, draft, block);
      }
      threadgroup_barrier(mem_flags::mem_device);
    }
    if (simdgroup == 0) {
      int id = draw_token(i, next, target, draft);
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

  void store_mass(int i, Next next, Distribution target, Distribution draft, int block) const {
    float mass = draw_mass(i, next, target, draft, block);
    if (lane == 0) {
      block_mass()[block] = mass;
    }
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
      float w[HELD];
      load_block(source, block, true, lane, x);
      load_block(source, block, true, lane, w);
      dist.weights(block, lane, w);
      UNROLLED(j, HELD) {
        // -log of a weight is (max - l) / T; a weight of 0 adds nothing, also where that is inf.
        w[j] = w[j] > 0 ? w[j] * ((dist.max - x[j]) / dist.temperature) : 0.0f;
      }
      float sum = block_sum(w);
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
