// Where the filters cut a row. All filters keep a prefix of the order "logit descending, then id
// ascending", so the cut is one (logit, id). It is found by a radix search over 64-bit keys whose bins
// hold integer counts and integer masses: atomics on them give the same bits in any order.
#pragma once

#include "row.h"

namespace exactspec {

// Threadgroup memory of the search.
struct FilterMemory {
  threadgroup atomic_uint* count; // [DIGIT_BINS]
  threadgroup atomic_uint* mass_low; // [DIGIT_BINS]
  threadgroup atomic_uint* mass_high; // [DIGIT_BINS]
  threadgroup uint2* candidates; // [MAX_CANDIDATES]
  threadgroup atomic_uint* scalar; // [4]
  threadgroup uint* found; // [8]
};

enum FilterScalar : int { NUM_CANDIDATES, FLOOR_KEY };
enum FilterFound : int { FOUND_DIGIT, FOUND_COUNT, BEFORE_COUNT, BEFORE_LOW, BEFORE_HIGH, MASS_LOW, MASS_HIGH };

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

class RankSearch {
 public:
  // `tid` of `num_threads` threads; every thread of the group makes the same calls.
  RankSearch(Row row_, const device float4* partials_, float max_, float temperature_,
             FilterMemory memory_, uint tid_, uint num_threads_)
      : row(row_), partials(partials_), max(max_), temperature(temperature_), memory(memory_),
        tid(tid_), num_threads(num_threads_), lane(ushort(tid_ % LANES)) {}

  // The last id of the shortest prefix that holds `limit` ids or a mass of `mass` (a fraction of
  // 2**-MASS_BITS each), among ids whose logit is at least `floor`.
  Cut run(uint limit, ulong mass, float floor) {
    uint prefix = 0;
    uint logit_prefix = 0;
    uint left = limit;
    ulong mass_left = mass;
    ulong kept = 0;
    Cut cut;
    // 16-bit logits are told apart by the first two digits of their key.
    const int last_logit_level = row.dtype == DTYPE_FLOAT32 ? 2 : 1;
    bool compact = false;
    for (int level = 0; level < 6; ++level) {
      if (level > last_logit_level && level < 3) {
        continue;
      }
      if (level == 3 && row.size <= (1 << (32 - DIGIT_BITS))) {
        prefix = (1u << DIGIT_BITS) - 1; // the same for all ids of such a vocabulary
        continue;
      }
      count_digits(level, prefix, logit_prefix, floor, compact);
      if (level == 0) {
        uint total = atomic_load_explicit(&memory.scalar[NUM_CANDIDATES], memory_order_relaxed);
        compact = total <= MAX_CANDIDATES;
        left = min(left, total);
      }
      find_digit(left, mass_left);
      uint digit = memory.found[FOUND_DIGIT];
      ulong before = join(memory.found[BEFORE_LOW], memory.found[BEFORE_HIGH]);
      left -= memory.found[BEFORE_COUNT];
      mass_left -= mass_left == ~0ul ? 0 : before;
      kept += level < 3 ? before : 0;
      prefix = (prefix << digit_bits(level)) | digit;
      uint ties = memory.found[FOUND_COUNT];
      ulong tied_mass = join(memory.found[MASS_LOW], memory.found[MASS_HIGH]);
      if (level == last_logit_level) {
        logit_prefix = level == 2 ? prefix : complete(prefix);
        ulong each = tied_mass / ties;
        ulong wanted = mass_left == ~0ul || each == 0 ? left : (mass_left + each - 1) / each;
        left = uint(min(ulong(left), wanted));
        kept += each * left;
        cut.logit = key_logit(logit_prefix);
        cut.id = row.size - 1;
        if (left == ties) {
          break;
        }
        mass_left = ~0ul;
        prefix = 0;
      } else if (level == 5) {
        cut.id = int(~prefix);
      }
    }
    cut.mass = float(kept) * exp2(-float(MASS_BITS));
    return cut;
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
  static int digit_bits(int level) { return level % 3 == 2 ? 32 - 2 * DIGIT_BITS : DIGIT_BITS; }
  static int digit_shift(int level) { return level % 3 == 2 ? 0 : 32 - (level % 3 + 1) * DIGIT_BITS; }

  // The low bits of a 16-bit logit's key, which its first digits leave out.
  static uint complete(uint prefix) {
    const int missing = 32 - 2 * DIGIT_BITS;
    uint key = prefix << missing;
    return key & 0x80000000u ? key : key | ((1u << missing) - 1);
  }

  // The last digit of an id is looked for in a single block.
  static bool may_match(int block, int level, uint prefix) {
    const int ids_per_prefix = 1 << (32 - 2 * DIGIT_BITS);
    int first = int(~prefix & ((1u << (2 * DIGIT_BITS)) - 1)) * ids_per_prefix;
    return level < 5 || first / DRAW_BLOCK == block;
  }

  void add(uint2 key, int level, uint prefix, uint logit_prefix) {
    uint word = level < 3 ? key.x : key.y;
    int shift = digit_shift(level);
    int bits = digit_bits(level);
    bool tied = level < 3 || key.x == logit_prefix;
    bool matches = level % 3 == 0 || (word >> (shift + bits)) == prefix;
    if (!tied || !matches) {
      return;
    }
    uint bin = (word >> shift) & ((1u << bits) - 1);
    atomic_fetch_add_explicit(&memory.count[bin], 1u, memory_order_relaxed);
    if (level < 3) {
      float weight = exp((key_logit(key.x) - max) / temperature);
      ulong fixed = ulong(weight * exp2(float(MASS_BITS)));
      uint low = uint(fixed);
      uint old = atomic_fetch_add_explicit(&memory.mass_low[bin], low, memory_order_relaxed);
      uint carry = old + low < low ? 1 : 0;
      atomic_fetch_add_explicit(&memory.mass_high[bin], uint(fixed >> 32) + carry, memory_order_relaxed);
    }
  }

  // Counts and masses of one digit, over the candidates on chip or over the row.
  void count_digits(int level, uint prefix, uint logit_prefix, float floor, bool compact) {
    for (uint bin = tid; bin < DIGIT_BINS; bin += num_threads) {
      atomic_store_explicit(&memory.count[bin], 0u, memory_order_relaxed);
      atomic_store_explicit(&memory.mass_low[bin], 0u, memory_order_relaxed);
      atomic_store_explicit(&memory.mass_high[bin], 0u, memory_order_relaxed);
    }
    if (level == 0 && tid == 0) {
      atomic_store_explicit(&memory.scalar[NUM_CANDIDATES], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (compact) {
      uint total = atomic_load_explicit(&memory.scalar[NUM_CANDIDATES], memory_order_relaxed);
      for (uint i = tid; i < total; i += num_threads) {
        add(memory.candidates[i], level, prefix, logit_prefix);
      }
    } else {
      for (int block = tid / LANES; block < row.num_blocks(); block += num_threads / LANES) {
        if (partials[block].x >= floor && may_match(block, level, prefix)) {
          count_block(block, level, prefix, logit_prefix, floor);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  void count_block(int block, int level, uint prefix, uint logit_prefix, float floor) {
    UNROLLED(c, CHUNKS) {
      float x[READS];
      int first = held_id(block, c, lane);
      row.load(first, true, x);
      UNROLLED(j, READS) {
        if (!(x[j] >= floor) || x[j] == -INFINITY) {
          continue;
        }
        uint2 key = uint2(logit_key(x[j]), ~uint(first + j));
        add(key, level, prefix, logit_prefix);
        if (level == 0) {
          uint at = atomic_fetch_add_explicit(&memory.scalar[NUM_CANDIDATES], 1u, memory_order_relaxed);
          if (at < MAX_CANDIDATES) {
            memory.candidates[at] = key;
          }
        }
      }
    }
  }

  ulong bin_mass(uint bin) {
    return join(atomic_load_explicit(&memory.mass_low[bin], memory_order_relaxed),
                atomic_load_explicit(&memory.mass_high[bin], memory_order_relaxed));
  }

  // The first bin, from the top, that reaches the count or the mass; the first simdgroup walks.
  void find_digit(uint left, ulong mass_left) {
    if (tid < LANES) {
      const uint per_lane = DIGIT_BINS / LANES;
      uint top = DIGIT_BINS - 1 - lane * per_lane;
      uint count = 0;
      ulong mass = 0;
      for (uint i = 0; i < per_lane; ++i) {
        count += atomic_load_explicit(&memory.count[top - i], memory_order_relaxed);
        mass += bin_mass(top - i);
      }
      uint count_to = count;
      ulong mass_to = mass;
      for (ushort d = 1; d < LANES; d *= 2) {
        uint c = simd_shuffle_up(count_to, d);
        uint low = simd_shuffle_up(uint(mass_to), d);
        uint high = simd_shuffle_up(uint(mass_to >> 32), d);
        count_to += lane >= d ? c : 0;
        mass_to += lane >= d ? join(low, high) : 0ul;
      }
      uint chosen = first_lane(count_to >= left || mass_to >= mass_left, lane);
      if (lane == chosen) {
        uint before_count = count_to - count;
        ulong before_mass = mass_to - mass;
        for (uint i = 0; i < per_lane; ++i) {
          uint c = atomic_load_explicit(&memory.count[top - i], memory_order_relaxed);
          ulong m = bin_mass(top - i);
          if (c > 0 && (before_count + c >= left || before_mass + m >= mass_left)) {
            memory.found[FOUND_DIGIT] = top - i;
            memory.found[FOUND_COUNT] = c;
            memory.found[BEFORE_COUNT] = before_count;
            memory.found[BEFORE_LOW] = uint(before_mass);
            memory.found[BEFORE_HIGH] = uint(before_mass >> 32);
            memory.found[MASS_LOW] = uint(m);
            memory.found[MASS_HIGH] = uint(m >> 32);
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
  float max;
  float temperature;
  FilterMemory memory;
  uint tid;
  uint num_threads;
  ushort lane;
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
  const bool sequential = sampling.order == int(Order::Sequential);
  const bool use_top_k = sampling.top_k > 0 && sampling.top_k < row.size;
  const bool use_top_p = sampling.top_p > 0 && sampling.top_p < 1;
  float total = combine_sum(partials, num_blocks, max, temperature, false, lane);
  bool known_mass = false;

  if (use_top_k || use_top_p) {
    RankSearch search(row, partials, max, temperature, memory, tid, num_threads);
    uint limit = use_top_k ? uint(sampling.top_k) : uint(row.size);
    float floor = limit <= uint(num_blocks) ? search.block_floor(limit) : -INFINITY;
    const float unit = exp2(float(MASS_BITS));
    Cut cut;
    if (use_top_p && use_top_k && sequential) {
      cut = search.run(limit, ~0ul, floor);
      ulong mass = at_least_one(ulong(sampling.top_p * cut.mass * unit));
      cut = search.run(limit, mass, floor);
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
    float logit = min(max + temperature * log(sampling.min_p), max);
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
