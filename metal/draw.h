// A token drawn in two levels, by one simdgroup: a block by its mass, then an id of the block.
#pragma once

#include "row.h"

namespace exactspec {

// The first block whose inclusive cumulative mass exceeds u * total; -1 if there is no mass.
inline int draw_block(const device float* mass, int num_blocks, float u, ushort lane) {
  float total = 0;
  for (int first = 0; first < num_blocks; first += LANES) {
    float m = first + lane < num_blocks ? mass[first + lane] : 0.0f;
    total += simd_shuffle(inclusive_scan(m, lane), LANES - 1);
  }
  float threshold = u * total;
  float before = 0;
  int block = -1;
  for (int first = 0; first < num_blocks; first += LANES) {
    float m = first + lane < num_blocks ? mass[first + lane] : 0.0f;
    float to = before + inclusive_scan(m, lane);
    uint chosen = first_lane(m > 0 && to > threshold, lane);
    if (chosen < LANES) {
      return first + int(chosen);
    }
    // Rounding may leave none above the threshold: the last one of positive mass is drawn then.
    uint last = last_lane(m > 0, lane);
    block = last < LANES ? first + int(last) : block;
    before = simd_shuffle(to, LANES - 1);
  }
  return block;
}

// The same for the ids of a block, whose weights come in chunks; -1 if there is no mass.
template <typename Chunks>
inline int draw_id(Chunks chunks, int block, float u, ushort lane) {
  float total = 0;
  ROLLED(c, CHUNKS) {
    float w[READS];
    chunks.take(c, w);
    total += simd_shuffle(inclusive_scan(run_sum(w), lane), LANES - 1);
  }
  float threshold = u * total;
  float before = 0;
  int drawn = -1;
  int last = -1;
  ROLLED(c, CHUNKS) {
    float w[READS];
    chunks.take(c, w);
    float sum = run_sum(w);
    float to = before + inclusive_scan(sum, lane);
    float from = to - sum;
    uint chosen = first_lane(sum > 0 && to > threshold, lane);
    int mine = -1;
    int my_last = -1;
    UNROLLED(j, READS) {
      from += w[j];
      my_last = w[j] > 0 ? j : my_last;
      mine = mine < 0 && w[j] > 0 && from > threshold ? j : mine;
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

} // namespace exactspec
