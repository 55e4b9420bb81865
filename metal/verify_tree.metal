#include <metal_stdlib>

using namespace metal;

#include "kernel.h"
#include "verify_tree.h"

using namespace exactspec;

#define TREE(b) \
  SEQUENCE(b); \
  Tree tree(sequence, draft_lengths, (device int*)stats0, (device float2*)stats1)

// Grid (ceil(row_blocks / simdgroups), rows, B): a simdgroup reduces a block.
[[kernel]] void verify_tree_partials(BUFFERS) {
  TREE(group.z);
  int r = int(group.y);
  int block = int(group.x * sequence.num_simdgroups + sequence.simdgroup);
  if (sequence.valid_parameters() && tree.needed(r) && block < sequence.row(r).num_blocks()) {
    sequence.reduce(r, block);
  }
}

// Grid (1, rows, B): a threadgroup finds a row's cut and normaliser.
[[kernel]] void verify_tree_rows(BUFFERS) {
  FILTER_MEMORY;
  TREE(group.z);
  int r = int(group.y);
  if (sequence.valid_parameters() && sequence.row_filtered(r) && tree.needed(r)) {
    sequence.filter(r, memory);
  }
}

// Grid (1, 1, B), after partials and rows: decides, draws and writes.
[[kernel]] void verify_tree_walk(BUFFERS) {
  threadgroup int shared[1];
  threadgroup atomic_uint repeats;
  TREE(group.z);
  FilterMemory none = {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  tree.walk(false, none, shared, &repeats);
}

// Grid (1, 1, B): the whole call by one threadgroup per sequence. Rows are read when they are reached.
[[kernel]] void verify_tree_sequence(BUFFERS) {
  FILTER_MEMORY;
  threadgroup int shared[1];
  threadgroup atomic_uint repeats;
  TREE(group.z);
  tree.walk(true, memory, shared, &repeats);
}
