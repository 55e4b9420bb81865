#include <metal_stdlib>

using namespace metal;

#include "kernel.h"

using namespace exactspec;

// Grid (ceil(row_blocks / simdgroups), rows, B): a simdgroup reduces a block.
[[kernel]] void verify_draft_partials(BUFFERS) {
  SEQUENCE(group.z);
  uint bits = 0;
  int r = int(group.y);
  int block = int(group.x * sequence.num_simdgroups + sequence.simdgroup);
  if (sequence.valid_parameters() && sequence.needed(r, sequence.length(bits)) &&
      block < sequence.row(r).num_blocks()) {
    sequence.reduce(r, block);
  }
}

// Grid (1, rows, B): a threadgroup finds a row's cut and normaliser.
[[kernel]] void verify_draft_rows(BUFFERS) {
  FILTER_MEMORY;
  SEQUENCE(group.z);
  uint bits = 0;
  int r = int(group.y);
  if (sequence.valid_parameters() && sequence.row_filtered(r) &&
      sequence.needed(r, sequence.length(bits))) {
    sequence.filter(r, memory);
  }
}

// Grid (ceil(blocks / simdgroups), slots, B), dense drafts: masses of the residual at the rejection, or of
// those that Rule::Block may ask for.
[[kernel]] void verify_draft_residual(BUFFERS) {
  threadgroup int shared[4];
  threadgroup atomic_uint repeats;
  SEQUENCE(group.z);
  if (!sequence.valid_parameters()) {
    return;
  }
  if (sequence.simdgroup == 0) {
    Walk walk = Sequence::begin();
    int n = sequence.length(walk.bits);
    float factor = 1;
    bool certain = false; // whether a longer prefix passes whatever its coin
    while (!walk.ended) {
      factor = walk.slot == int(group.y) ? walk.weight : factor;
      sequence.accept_slot(n, walk);
      certain = certain || (walk.slot > int(group.y) && walk.weight == 1);
    }
    int slot = walk.slot;
    // A greedy target's residual is its token: there is nothing to sum.
    bool wanted = walk.next == Next::Residual;
    if (sequence.by_block()) {
      slot = int(group.y);
      wanted = walk.next != Next::Nothing && walk.slot > slot && !certain &&
          !sequence.accepts_all(walk.slot, walk.weight);
    }
    if (sequence.lane == 0) {
      shared[0] = slot;
      shared[1] = wanted;
      shared[2] = as_type<int>(factor);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (!shared[1]) {
    return;
  }
  Source from = sequence.source(shared[0], Next::Residual, as_type<float>(shared[2]));
  int num_blocks = sequence.target_row(from.slot).num_blocks();
  int first = int(group.x * sequence.num_simdgroups);
  if (has_vocab) {
    int last_id = min(params.vocab_size, (first + int(sequence.num_simdgroups)) * DRAW_BLOCK);
    sequence.scatter(from.slot, from.draft, first * DRAW_BLOCK, last_id, &repeats);
  }
  int block = first + int(sequence.simdgroup);
  if (block < num_blocks) {
    sequence.store_mass(from, block);
  }
}

// Grid (1, 1, B): decides, draws and writes.
[[kernel]] void verify_draft_draw(BUFFERS) {
  threadgroup int shared[4];
  threadgroup atomic_uint repeats;
  SEQUENCE(group.z);
  Walk walk = Sequence::begin();
  if (sequence.valid()) {
    if (sequence.simdgroup == 0) {
      int n = sequence.length(walk.bits);
      while (!walk.ended) {
        sequence.accept_slot(n, walk);
        sequence.keep_weight(walk);
      }
    }
    sequence.share(shared, walk);
  } else {
    walk.bits = BAD_PARAMETER;
  }
  sequence.finish(walk, sequence.dense(), shared, &repeats);
  if (is_sample && sequence.simdgroup == 0) {
    sequence.write_row_stats(stats0);
  }
}

// Grid (1, 1, B): the whole call by one threadgroup per sequence. Rows are read when they are reached.
[[kernel]] void verify_draft_sequence(BUFFERS) {
  FILTER_MEMORY;
  threadgroup int shared[4];
  threadgroup atomic_uint repeats;
  SEQUENCE(group.z);
  Walk walk = Sequence::begin();
  if (sequence.valid()) {
    int n = sequence.length(walk.bits);
    while (!walk.ended) {
      for (int side = 0; side < 2; ++side) {
        int r = side == 0 ? walk.slot : sequence.K + 1 + walk.slot;
        if (side == 1 && walk.slot == n) {
          continue;
        }
        if (sequence.needed(r, n)) {
          sequence.read_row(r, memory);
        }
      }
      if (sequence.simdgroup == 0) {
        sequence.accept_slot(n, walk);
        sequence.keep_weight(walk);
      }
      sequence.share(shared, walk);
    }
  } else {
    walk.bits = BAD_PARAMETER;
  }
  sequence.finish(walk, false, shared, &repeats);
  if (is_sample && sequence.simdgroup == 0) {
    sequence.write_row_stats(stats0);
  }
}

// Grid (K, 1, B), after partials and rows: statistics of a slot.
[[kernel]] void verify_draft_stats(BUFFERS) {
  threadgroup atomic_uint repeats;
  SEQUENCE(group.z);
  int slot = int(group.x);
  int K = sequence.K;
  float value[4] = {NAN, NAN, NAN, NAN};
  uint bits = 0;
  bool used = sequence.valid() && slot < sequence.length(bits);
  for (int i = 0; i <= slot && used; ++i) {
    used = sequence.can_produce(i, sequence.token(i));
  }
  if (used) {
    int r = K + 1 + slot;
    Distribution target = sequence.distribution(slot);
    Distribution draft = target;
    bool good_draft = true;
    if (sequence.dense()) {
      draft = sequence.distribution(r);
      good_draft = draft.finite;
    } else if (draft_kind == int(DraftKind::Sparse)) {
      good_draft = !sequence.sparse_is_bad(slot);
    }
    if (target.finite) {
      value[2] = sequence.entropy(slot, target, r);
    }
    if (good_draft) {
      value[3] = sequence.dense() && !has_vocab ? sequence.entropy(r, draft, r)
                                                : sequence.listed_entropy(slot, draft);
    }
    if (target.finite && good_draft) {
      float prob = sequence.target_prob(slot, sequence.token(slot), target);
      float draft_prob = sequence.draft_prob(slot, sequence.token(slot), draft);
      value[0] = draft_prob > 0 ? min(1.0f, prob / draft_prob) : float(prob > 0);
      if (has_vocab) {
        sequence.scatter(slot, draft, 0, params.vocab_size, &repeats);
      }
      value[1] = sequence.overlap(slot, target, draft, r);
    }
  }
  if (tid == 0) {
    int64_t at = int64_t(group.z) * K + slot;
    stats0[at] = value[0];
    stats1[at] = value[1];
    stats2[at] = value[2];
    stats3[at] = value[3];
  }
}
