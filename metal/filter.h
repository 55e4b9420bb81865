// Where the filters cut a row. All filters keep a prefix of the order "logit descending, then id
// ascending", so the cut is one position in that order. It is searched for by bins of positions that
// hold integer counts and integer masses: atomics on them give the same bits in any order.
#pragma once

#include "row.h"

namespace exactspec {

// Threadgroup memory of the search.
struct FilterMemory {
  threadgroup atomic_uint* count; // [FILTER_BINS]
  threadgroup atomic_uint* mass_low; // [FILTER_BINS]
  threadgroup atomic_uint* mass_high; // [FILTER_BINS]
  threadgroup ulong* candidates; // [MAX_CANDIDATES], positions
  threadgroup atomic_uint* scalar; // [2]
  threadgroup uint* found; // [4]
};

enum FilterScalar : int { NUM_CANDIDATES, FLOOR_KEY };
enum FilterFound : int { FOUND_BIN, BEFORE_COUNT, BEFORE_LOW, BEFORE_HIGH };

// Keys compare like logits; -0 equals +0.
inline uint logit_key(float logit) {
  uint bits = as_type<uint>(logit + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline float key_logit(uint key) {
  return as_type<float>(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

inline ulong join(uint low, uint high) {
  return (ulong(high) << 32) | low;
}

inline ulong at_least_one(ulong mass) {
  return mass > 0 ? mass : 1;
}

struct Cut {
  float logit;
  int id;
  float mass; // of the kept ids, at the temperature of the search
};

// Narrows an interval of positions until one is left. A position is (key of the logit, id from the
// end) as one integer, so that larger ones come first; a 16-bit logit's key has 16 bits or a few more.
class RankSearch {
 public:
  // `tid` of `num_threads` threads; every thread of the group makes the same calls.
  RankSearch(Row row_, const device float4* partials_, float max_, float temperature_, float total_,
             FilterMemory memory_, uint tid_, uint num_threads_)
      : row(row_), partials(partials_), max_logit(max_), temperature(temperature_), total(total_),
        memory(memory_), tid(tid_), num_threads(num_threads_), lane(ushort(tid_ % LANES)),
        dropped(row_.dtype == DTYPE_FLOAT32 ? 0 : row_.dtype == DTYPE_FLOAT16 ? 13 : 16), id_bits(0) {
    while ((row.size - 1) >> id_bits > 0) {
      ++id_bits;
    }
  }

  // The last id of the shortest prefix that holds `limit` ids or a mass of `mass` (a fraction of
  // 2**-MASS_BITS each), among ids whose logit is at least `floor`. `again`: as in the run before.
  Cut run(uint limit, ulong mass, float floor, bool again = false) {
    low = position(max(floor, -FLT_MAX), row.size - 1);
    high = position(max_logit, 0);
    // First bins of equal width in the logit: float keys would spend most of them near 0. Without a
    // useful floor, a multiple of the distance to the logit of average weight covers most of a row.
    float spread = 4 * temperature * log(row.size / total);
    linear = FILTER_BINS / clamp(min(max_logit - floor, spread), 1e-30f, 1e30f);
    ulong kept = 0;
    bool on_chip = again && all_on_chip;
    bool first = true;
    do {
      count(on_chip);
      on_chip = atomic_load_explicit(&memory.scalar[NUM_CANDIDATES], memory_order_relaxed) <= MAX_CANDIDATES;
      all_on_chip = first ? on_chip : all_on_chip;
      first = false;
      find_bin(limit, mass);
      ulong before = join(memory.found[BEFORE_LOW], memory.found[BEFORE_HIGH]);
      limit -= memory.found[BEFORE_COUNT];
      mass -= before;
      kept += before;
      narrow(memory.found[FOUND_BIN]);
    } while (low < high);
    Cut cut;
    cut.logit = logit(high);
    cut.id = row.size - 1 - int(high & ((1ul << id_bits) - 1));
    cut.mass = float(kept + weight(high)) * exp2(-float(MASS_BITS));
    return cut;
  }

  // The smallest logit at or above this one that the row's type can hold: positions have no other bits.
  float representable(float floor) const {
    ulong at = position(max(floor, -FLT_MAX), 0);
    return logit(at) < floor ? logit(at + (1ul << id_bits)) : logit(at);
  }

  // The limit-th largest block maximum: that many ids are at or above it. -inf with fewer blocks.
  float block_floor(uint limit) {
    int num_blocks = row.num_blocks();
    if (tid == 0) {
      atomic_store_explicit(&memory.scalar[FLOOR_KEY], logit_key(-INFINITY), memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = tid; i < num_blocks; i += num_threads) {
      float m = partials[i].x;
      uint above = 0;
      for (int j = 0; j < num_blocks; ++j) {
        above += partials[j].x >= m;
      }
      if (above >= limit) {
        atomic_fetch_max_explicit(&memory.scalar[FLOOR_KEY], logit_key(m), memory_order_relaxed);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return key_logit(atomic_load_explicit(&memory.scalar[FLOOR_KEY], memory_order_relaxed));
  }

 private:
  ulong position(float logit, int id) const {
    return (ulong(logit_key(logit) >> dropped) << id_bits) | uint(row.size - 1 - id);
  }

  float logit(ulong position) const {
    uint key = uint(position >> id_bits) << dropped;
    return key_logit(key & 0x80000000u ? key : key | ((1u << dropped) - 1));
  }

  // As a fraction of 2**-MASS_BITS.
  ulong weight(ulong position) const {
    return ulong(exp((logit(position) - max_logit) / temperature) * exp2(float(MASS_BITS)));
  }

  // Rises as positions fall.
  uint bin(ulong position) const {
    if (linear > 0) {
      return uint(min((max_logit - logit(position)) * linear, FILTER_BINS - 1.0f));
    }
    return uint((high - position) >> shift);
  }

  // The lowest position of the interval whose bin is at most `last`.
  ulong lowest(uint last) const {
    ulong from = low;
    ulong to = high;
    while (from < to) {
      ulong middle = from + (to - from) / 2;
      if (bin(middle) <= last) {
        to = middle;
      } else {
        from = middle + 1;
      }
    }
    return from;
  }

  // The interval becomes one bin; its bins are then of equal width in the position.
  void narrow(uint chosen) {
    ulong new_low = lowest(chosen);
    high = chosen > 0 ? lowest(chosen - 1) - 1 : high;
    low = new_low;
    linear = 0;
    shift = 0;
    while ((high - low) >> shift >= FILTER_BINS) {
      ++shift;
    }
  }

  // Whether a block may hold positions of the interval.
  bool may_match(int block) const {
    int first = block * DRAW_BLOCK;
    bool one_logit = low >> id_bits == high >> id_bits;
    int last = min(first + DRAW_BLOCK, row.size) - 1;
    float block_max = partials[block].x;
    return position(block_max, first) >= low && !(one_logit && position(logit(high), last) > high);
  }

  // Counts and masses of the bins, over the candidates on chip or over the row, whose candidates go on
  // chip if they fit.
  void count(bool on_chip) {
    collects = !on_chip;
    for (uint i = tid; i < FILTER_BINS; i += num_threads) {
      atomic_store_explicit(&memory.count[i], 0u, memory_order_relaxed);
      atomic_store_explicit(&memory.mass_low[i], 0u, memory_order_relaxed);
      atomic_store_explicit(&memory.mass_high[i], 0u, memory_order_relaxed);
    }
    if (tid == 0 && !on_chip) {
      atomic_store_explicit(&memory.scalar[NUM_CANDIDATES], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (on_chip) {
      uint num = atomic_load_explicit(&memory.scalar[NUM_CANDIDATES], memory_order_relaxed);
      for (uint i = tid; i < num; i += num_threads) {
        add(memory.candidates[i]);
      }
    } else {
      for (int block = tid / LANES; block < row.num_blocks(); block += num_threads / LANES) {
        if (may_match(block)) {
          count_block(block);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  void count_block(int block) {
    const float smallest = logit(low);
    for (int c = 0; c < CHUNKS; ++c) {
      float x[READS];
      int first = held_id(block, c, lane);
      row.load(first, true, x);
      UNROLLED(j, READS) {
        if (x[j] >= smallest) {
          add(position(x[j], first + j));
        }
      }
    }
  }

  void add(ulong position) {
    if (position < low || position > high) {
      return;
    }
    uint i = bin(position);
    ulong mass = weight(position);
    uint mass_low = uint(mass);
    atomic_fetch_add_explicit(&memory.count[i], 1u, memory_order_relaxed);
    uint old = atomic_fetch_add_explicit(&memory.mass_low[i], mass_low, memory_order_relaxed);
    uint carry = old + mass_low < mass_low ? 1 : 0;
    atomic_fetch_add_explicit(&memory.mass_high[i], uint(mass >> 32) + carry, memory_order_relaxed);
    if (collects) {
      uint at = atomic_fetch_add_explicit(&memory.scalar[NUM_CANDIDATES], 1u, memory_order_relaxed);
      collects = at < MAX_CANDIDATES;
      if (collects) {
        memory.candidates[at] = position;
      }
    }
  }

  ulong bin_mass(uint i) const {
    return join(atomic_load_explicit(&memory.mass_low[i], memory_order_relaxed),
                atomic_load_explicit(&memory.mass_high[i], memory_order_relaxed));
  }

  // The first bin that reaches the count or the mass, else the last that holds any; the first
  // simdgroup walks.
  void find_bin(uint limit, ulong mass) {
    if (tid < LANES) {
      const uint per_lane = FILTER_BINS / LANES;
      const uint first = lane * per_lane;
      uint own_count = 0;
      ulong own_mass = 0;
      for (uint i = 0; i < per_lane; ++i) {
        own_count += atomic_load_explicit(&memory.count[first + i], memory_order_relaxed);
        own_mass += bin_mass(first + i);
      }
      uint count_to = own_count;
      ulong mass_to = own_mass;
      for (ushort d = 1; d < LANES; d *= 2) {
        uint c = simd_shuffle_up(count_to, d);
        uint low_word = simd_shuffle_up(uint(mass_to), d);
        uint high_word = simd_shuffle_up(uint(mass_to >> 32), d);
        count_to += lane >= d ? c : 0;
        mass_to += lane >= d ? join(low_word, high_word) : 0ul;
      }
      limit = min(limit, simd_shuffle(count_to, LANES - 1));
      uint chosen = first_lane(count_to >= limit || mass_to >= mass, lane);
      if (lane == chosen) {
        uint before_count = count_to - own_count;
        ulong before_mass = mass_to - own_mass;
        for (uint i = first; i < first + per_lane; ++i) {
          uint c = atomic_load_explicit(&memory.count[i], memory_order_relaxed);
          ulong m = bin_mass(i);
          if (before_count + c >= limit || before_mass + m >= mass) {
            memory.found[FOUND_BIN] = i;
            memory.found[BEFORE_COUNT] = before_count;
            memory.found[BEFORE_LOW] = uint(before_mass);
            memory.found[BEFORE_HIGH] = uint(before_mass >> 32);
            break;
          }
          before_count += c;
          before_mass += m;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  Row row;
  const device float4* partials;
  float max_logit;
  float temperature;
  float total; // mass of the row
  FilterMemory memory;
  uint tid;
  uint num_threads;
  ushort lane;
  int dropped; // bits of a key that are the same for all logits of one sign
  int id_bits;
  ulong low; // the interval
  ulong high;
  float linear; // bins per unit of the logit; 0: bins of 2**shift positions
  int shift;
  bool collects; // until there is no room
  bool all_on_chip; // the candidates are all ids of the first interval
};

// Sum of the kept weights, by the whole threadgroup; blocks below the cutoff are not read. `scratch`
// holds a float per block.
inline float kept_mass(Row row, const device float4* partials, Distribution dist, device float* scratch,
                       uint tid, uint num_threads) {
  ushort lane = ushort(tid % LANES);
  int num_blocks = row.num_blocks();
  for (int block = tid / LANES; block < num_blocks; block += num_threads / LANES) {
    float mass = 0;
    if (partials[block].x >= dist.cutoff && partials[block].x > -INFINITY) {
      float x[HELD];
      load_block(row, block, true, lane, x);
      dist.weights(block, lane, x);
      mass = block_sum(x);
    }
    if (lane == 0) {
      scratch[block] = mass;
    }
  }
  threadgroup_barrier(mem_flags::mem_device);
  float sum = 0;
  for (int block = lane; block < num_blocks; block += LANES) {
    sum += scratch[block];
  }
  return tree_sum(sum);
}

// The distribution of a row with filters, by the whole threadgroup.
inline Distribution filter_row(Row row, RowSampling sampling, const device float4* partials,
                               device float* scratch, FilterMemory memory, uint tid, uint num_threads) {
  ushort lane = ushort(tid % LANES);
  int num_blocks = row.num_blocks();
  Distribution dist = combine(partials, row.size, num_blocks, sampling, lane);
  if (!dist.finite || !sampling.has_filters()) {
    return dist;
  }
  const float max = dist.max;
  const float temperature = sampling.measured();
  const Order order = Order(sampling.order);
  const bool use_top_k = sampling.top_k > 0 && sampling.top_k < row.size;
  const bool use_top_p = sampling.top_p > 0 && sampling.top_p < 1;
  float total = combine_sum(partials, num_blocks, max, temperature, false, lane);
  bool known_mass = false;

  if (use_top_k || use_top_p) {
    RankSearch search(row, partials, max, temperature, total, memory, tid, num_threads);
    uint limit = use_top_k ? uint(sampling.top_k) : uint(row.size);
    float floor = limit <= uint(num_blocks) ? search.block_floor(limit) : -INFINITY;
    const bool min_p_first = order == Order::MinPFirst && sampling.min_p > 0;
    if (min_p_first) {
      float lowest = search.representable(sampling.min_p_logit(max));
      floor = lowest > floor ? lowest : floor;
    }
    const float unit = exp2(float(MASS_BITS));
    Cut cut;
    if (use_top_p && (use_top_k || min_p_first) && filters_in_turn(order)) {
      cut = search.run(limit, ~0ul, floor);
      ulong mass = at_least_one(ulong(sampling.top_p * cut.mass * unit));
      cut = search.run(limit, mass, floor, true);
    } else {
      ulong mass = ~0ul;
      if (use_top_p) {
        // Ids this light cannot add up to the mass that the nucleus leaves out (half, for rounding).
        float tail = 0.5f * (1 - sampling.top_p) * total / row.size;
        float nucleus_floor = max + temperature * log(tail);
        floor = nucleus_floor > floor ? nucleus_floor : floor;
        mass = at_least_one(ulong(sampling.top_p * total * unit));
      }
      cut = search.run(limit, mass, floor);
    }
    dist.cutoff = cut.logit;
    dist.cutoff_id = cut.id;
    total = cut.mass;
    known_mass = temperature == sampling.temperature;
  }
  if (sampling.min_p > 0) {
    float logit = sampling.min_p_logit(max);
    if (logit > dist.cutoff) {
      dist.cutoff = logit;
      dist.cutoff_id = row.size - 1;
      known_mass = false;
    }
  }
  if (!known_mass) {
    total = kept_mass(row, partials, dist, scratch, tid, num_threads);
  }
  dist.log_norm = log(total);
  return dist;
}

} // namespace exactspec
