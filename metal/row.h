// One row of logits: read in place by blocks, reduced, and described by four scalars.
#pragma once

#include "noise.h"
#include "simd.h"
#include "verify_draft_params.h"

namespace exactspec {

struct Row {
  const device uchar* data;
  int64_t step; // in elements
  int size;
  int dtype;
  bool wide; // starts at a multiple of 16 bytes, step 1: can be read 16 bytes at a time
  const device uint* mask; // null: every id is allowed
  int64_t mask_step;

  int num_blocks() const { return (size + DRAW_BLOCK - 1) / DRAW_BLOCK; }

  float element(int64_t at) const {
    if (dtype == DTYPE_FLOAT32) {
      return ((const device float*)data)[at];
    }
    if (dtype == DTYPE_FLOAT16) {
      return float(((const device half*)data)[at]);
    }
    return as_type<float>(uint(((const device ushort*)data)[at]) << 16);
  }

  bool allowed(int id) const {
    return mask == nullptr || ((mask[(id / 32) * mask_step] >> (id % 32)) & 1);
  }

  float logit(int id) const { return allowed(id) ? element(id * step) : -INFINITY; }

  // READS consecutive logits from `id`, which is a multiple of READS; -inf behind the end. Without
  // wide loads the same lane reads the same elements one by one.
  void load(int id, bool masked, thread float* out) const {
    if (id + READS <= size && wide) {
      if (dtype == DTYPE_FLOAT32) {
        const device float4* from = (const device float4*)(data + id * 4l);
        float4 low = from[0];
        float4 high = from[1];
        out[0] = low.x;
        out[1] = low.y;
        out[2] = low.z;
        out[3] = low.w;
        out[4] = high.x;
        out[5] = high.y;
        out[6] = high.z;
        out[7] = high.w;
      } else {
        uint4 words = *(const device uint4*)(data + id * 2l);
        unpack(words.x, out);
        unpack(words.y, out + 2);
        unpack(words.z, out + 4);
        unpack(words.w, out + 6);
      }
    } else {
      UNROLLED(j, READS) {
        out[j] = id + j < size ? element((id + j) * step) : -INFINITY;
      }
    }
    if (masked && mask != nullptr && id < size) {
      uint bits = mask[(id / 32) * mask_step] >> (id % 32);
      UNROLLED(j, READS) {
        out[j] = (bits >> j) & 1 ? out[j] : -INFINITY;
      }
    }
  }

 private:
  void unpack(uint word, thread float* out) const {
    if (dtype == DTYPE_FLOAT16) {
      half2 pair = as_type<half2>(word);
      out[0] = float(pair.x);
      out[1] = float(pair.y);
    } else {
      out[0] = as_type<float>(word << 16);
      out[1] = as_type<float>(word & 0xffff0000u);
    }
  }
};

// The id of element j of a lane's chunk.
inline int held_id(int block, int chunk, ushort lane) {
  return block * DRAW_BLOCK + (chunk * LANES + lane) * READS;
}

// Which element of this lane holds an id of the block; -1 if another lane does.
inline int held_at(int id, ushort lane) {
  int offset = id % DRAW_BLOCK;
  int run = offset / READS;
  return run % LANES == lane ? (run / LANES) * READS + offset % READS : -1;
}

inline void load_block(Row row, int block, bool masked, ushort lane, thread float* x) {
  UNROLLED(c, CHUNKS) {
    row.load(held_id(block, c, lane), masked, x + c * READS);
  }
}

// Sum of a lane's chunk.
inline float run_sum(const thread float* v) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

// Sum of a block held by a simdgroup: pairs, then chunks, then lanes.
inline float block_sum(const thread float* w) {
  float sum = 0;
  UNROLLED(c, CHUNKS) {
    sum += run_sum(w + c * READS);
  }
  return tree_sum(sum);
}

struct RowSampling {
  float temperature;
  int top_k;
  float top_p;
  float min_p;
  int order;

  bool valid() const {
    // All comparisons are false for NaN.
    return temperature >= 0 && temperature < INFINITY && top_p >= 0 && top_p <= 1 && min_p >= 0 &&
        min_p <= 1;
  }
  bool greedy() const { return temperature < LEAST_TEMPERATURE; }
  bool has_filters() const { return !greedy() && (top_k > 0 || top_p < 1 || min_p > 0); }
  // The temperature at which filters are measured.
  float measured() const {
    bool untempered = greedy() || (has_filters() && measures_untempered(Order(order)));
    return untempered ? 1.0f : temperature;
  }
  // The smallest logit that min_p keeps in a row of this largest one.
  float min_p_logit(float max) const { return min(max + measured() * log(min_p), max); }
};

// A filtered distribution over a row: with the row, these scalars give every probability.
struct Distribution {
  float max;
  float temperature; // 1 for a greedy row, which keeps a single id
  float log_norm;
  float cutoff; // kept: logit > cutoff, or logit == cutoff and id <= cutoff_id
  int cutoff_id;
  bool greedy;
  bool finite;

  bool keeps(float logit, int id) const {
    return logit > cutoff || (logit == cutoff && id <= cutoff_id);
  }
  float weight(float logit, int id) const {
    return keeps(logit, id) ? exp((logit - max) / temperature) : 0.0f;
  }
  float scale() const { return exp(-log_norm); }
  float prob(float logit, int id) const { return weight(logit, id) * scale(); }
  float logprob(float logit) const { return (logit - max) / temperature - log_norm; }

  void weights(int block, ushort lane, thread float* x) const {
    UNROLLED(c, CHUNKS) {
      UNROLLED(j, READS) {
        x[c * READS + j] = weight(x[c * READS + j], held_id(block, c, lane) + j);
      }
    }
  }
};

// Chunks of a block one after the other, c not being a constant: of a block held in registers.
struct HeldBlock {
  const thread float* x;

  void take(int c, thread float* out) const {
    UNROLLED(i, HELD) {
      out[i % READS] = i < READS || i / READS == c ? x[i] : out[i % READS];
    }
  }
};

// The same of one that is read as it is needed, where holding it would cost too many registers.
struct ReadBlock {
  Row row;
  int block;
  ushort lane;

  void take(int c, thread float* out) const { row.load(held_id(block, c, lane), true, out); }
};

// What the entropy needs of a block: sums of w * -log(w), and of the weights w.
template <typename Chunks>
inline float2 entropy_sums(Chunks chunks, Distribution dist, int block, ushort lane) {
  float2 sums = float2(0);
  ROLLED(c, CHUNKS) {
    float y[READS];
    float w[READS];
    float v[READS];
    chunks.take(c, y);
    UNROLLED(j, READS) {
      float below = (dist.max - y[j]) / dist.temperature; // -log of a weight
      w[j] = dist.keeps(y[j], held_id(block, c, lane) + j) ? exp(-below) : 0.0f;
      v[j] = w[j] > 0 ? w[j] * below : 0.0f; // nothing also where that is inf
    }
    sums += float2(run_sum(v), run_sum(w));
  }
  return float2(tree_sum(sums.x), tree_sum(sums.y));
}

// The largest (logit - max) / temperature + noise among the kept ids of a block, and the id's bits.
template <typename Chunks>
inline float2 coupled_best(Chunks chunks, Distribution dist, uint2 key, uint position, int block,
                           ushort lane) {
  float best = -INFINITY;
  uint id = ~0u;
  ROLLED(c, CHUNKS) {
    float y[READS];
    chunks.take(c, y);
    UNROLLED(pair, READS / 2) {
      uint even = uint(held_id(block, c, lane)) + 2 * pair;
      uint2 words = threefry2x32(key, uint2(position, even / 2));
      UNROLLED(odd, 2) {
        float logit = y[2 * pair + odd];
        float score = (logit - dist.max) / dist.temperature + gumbel(odd ? words.y : words.x);
        if (dist.keeps(logit, int(even) + odd) && score > best) {
          best = score;
          id = even + odd;
        }
      }
    }
  }
  float winner = tree_max(best);
  return float2(winner, as_type<float>(tree_min(best == winner ? id : ~0u)));
}

// Maximum of a block; NaN marks a bad one.
inline float block_max(const thread float* x) {
  float max = -INFINITY;
  bool bad = false;
  UNROLLED(i, HELD) {
    max = x[i] > max ? x[i] : max;
    bad = bad || isnan(x[i]);
  }
  max = tree_max(max);
  return simd_any(bad) || max == INFINITY ? NAN : max;
}

// Mass of a block relative to its own maximum. A greedy row has the id of the maximum in its place.
inline float
block_mass(const thread float* x, int block, float max, float temperature, bool greedy, ushort lane) {
  if (!(max > -INFINITY)) {
    return 0;
  }
  if (greedy) {
    uint id = ~0u;
    UNROLLED(i, HELD) {
      id = x[i] == max ? min(id, uint(held_id(block, i / READS, lane) + i % READS)) : id;
    }
    return as_type<float>(tree_min(id));
  }
  float sum = 0;
  UNROLLED(c, CHUNKS) {
    float w[READS];
    UNROLLED(j, READS) {
      w[j] = exp((x[c * READS + j] - max) / temperature);
    }
    sum += run_sum(w);
  }
  return tree_sum(sum);
}

// Largest maximum of all blocks, by one simdgroup; NaN if a block is bad or none is finite.
inline float combine_max(const device float4* partials, int num_blocks, bool raw, ushort lane) {
  float max = -INFINITY;
  bool bad = false;
  for (int block = lane; block < num_blocks; block += LANES) {
    float m = raw ? partials[block].z : partials[block].x;
    max = m > max ? m : max;
    bad = bad || isnan(m);
  }
  max = tree_max(max);
  return simd_any(bad) || max == -INFINITY ? NAN : max;
}

// Mass of one block relative to the row's maximum.
inline float rescaled(float2 partial, float max, float temperature) {
  return partial.x == -INFINITY ? 0.0f : partial.y * exp((partial.x - max) / temperature);
}

// Mass of all blocks in block order: lanes first, then the tree.
inline float combine_sum(
    const device float4* partials, int num_blocks, float max, float temperature, bool raw, ushort lane) {
  float sum = 0;
  for (int block = lane; block < num_blocks; block += LANES) {
    float4 p = partials[block];
    sum += rescaled(raw ? p.zw : p.xy, max, temperature);
  }
  return tree_sum(sum);
}

// What is known of a row without filters before it is read.
inline Distribution unfiltered(RowSampling sampling, int size) {
  Distribution dist;
  dist.max = NAN;
  dist.finite = false;
  dist.greedy = sampling.greedy();
  dist.temperature = dist.greedy ? 1.0f : sampling.temperature;
  dist.cutoff = -INFINITY;
  dist.cutoff_id = size - 1;
  dist.log_norm = 0;
  return dist;
}

// The distribution of a row without filters, from its blocks.
inline Distribution
combine(const device float4* partials, int size, int num_blocks, RowSampling sampling, ushort lane) {
  Distribution dist = unfiltered(sampling, size);
  float max = combine_max(partials, num_blocks, false, lane);
  dist.max = max;
  dist.finite = !isnan(max);
  if (dist.finite && dist.greedy) {
    uint id = ~0u;
    for (int block = lane; block < num_blocks; block += LANES) {
      id = partials[block].x == max ? min(id, as_type<uint>(partials[block].y)) : id;
    }
    dist.cutoff = max;
    dist.cutoff_id = int(tree_min(id));
  } else if (dist.finite) {
    dist.log_norm = log(combine_sum(partials, num_blocks, max, sampling.temperature, false, lane));
  }
  return dist;
}

} // namespace exactspec
