// Constants of the sampling law, shared by every backend. Plain C++ and Metal: no includes.
#pragma once

namespace exactspec {

// A token is drawn in two levels: a block of this many ids, then an id inside it.
enum : int { DRAW_BLOCK = 2048 };

enum : int { PLACEHOLDER_TOKEN = -1 };

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

enum class Order : int { TemperatureFirst, TemperatureLast, Sequential };
enum class DraftKind : int { OneHot, Sparse, Dense };
enum class Logprobs : int { None, Raw, Filtered };

// How a draft is accepted; docs/rules.md. `sample` knows Token (independent noise) and Coupled.
enum class Rule : int { Token, Block, Coupled, Typical, Cascade };

} // namespace exactspec
