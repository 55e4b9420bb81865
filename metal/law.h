// Constants of the sampling law, shared by every backend. Plain C++ and Metal: no includes.
#pragma once

namespace exactspec {

// A token is drawn in two levels: a block of this many ids, then an id inside it.
enum : int { DRAW_BLOCK = 2048 };

enum : int { PLACEHOLDER_TOKEN = -1 };

// Numbers of the law that no enum can hold. Decimal: Metal has no hexadecimal floats.
// A temperature below 2**-126, the smallest normal float, counts as 0.
#define LEAST_TEMPERATURE 1.17549435082228750797e-38f
// A sparse draft's probabilities are final: more mass than this in a row is a defect upstream.
#define MAX_SPARSE_MASS 1.001f
// Cutoff ids handed over in `row_stats` are clamped to 0 and this: 2**30.
#define MAX_CUTOFF_ID 1073741824.0f
// A random word stands for the uniform word * 2**-32, and for Gumbel noise for the middle of its cell; at
// most 1 - 2**-24, the largest float below 1.
#define WORD_SPACING 2.3283064365386962890625e-10f
#define LARGEST_UNIFORM 0.999999940395355224609375f
// Gumbel noise takes -log1p(-x) below this as a series, since log(1 - x) would lose the low bits of x.
#define GUMBEL_SERIES_END 0.0625f

// Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
#define THREEFRY_PARITY 0x1BD11BDAu
#define THREEFRY_ROTATIONS {13, 15, 26, 6, 17, 29, 16, 24}

// A keyed sequence owns this many uniforms, whatever K is: coin i is word i, and the draw's pair
// is the last two. Padding a batch therefore never changes a row.
enum : int { NOISE_WORDS = 256, MAX_KEYED_DRAFTS = NOISE_WORDS - 2 };

// `row_stats`: what describes a filtered distribution over a row of logits.
enum : int { STAT_MAX, STAT_LOG_NORM, STAT_CUTOFF, STAT_CUTOFF_ID, NUM_ROW_STATS };

enum Status : unsigned {
  NON_FINITE_TARGET = 1,
  BAD_DRAFT = 2,
  OUT_OF_RANGE = 4,
  ZERO_DRAFT_PROB = 8,
  BAD_PARENT = 16,
  BAD_PARAMETER = 32,
};

// On which masses filters are measured; docs/algorithm.md.
enum class Order : int {
  TemperatureFirst,
  TemperatureLast,
  Sequential,
  SequentialUntempered,
  MinPFirst,
};
inline bool measures_untempered(Order order) {
  return order == Order::TemperatureLast || order == Order::SequentialUntempered;
}
// Whether top_p is measured on what the filters before it leave.
inline bool filters_in_turn(Order order) {
  return order == Order::Sequential || order == Order::SequentialUntempered || order == Order::MinPFirst;
}

enum class DraftKind : int { OneHot, Sparse, Dense };
enum class Logprobs : int { None, Raw, Filtered };

// How a draft is accepted; docs/rules.md. `sample` knows Token (independent noise) and Coupled.
enum class Rule : int { Token, Block, Coupled, Typical, Cascade };

} // namespace exactspec
