// What every kernel is given and sets up.
#pragma once

#include "verify_draft.h"

#define BUFFERS \
  const device uchar* target_logits [[buffer(BUF_TARGET_LOGITS)]], \
  const device int* draft_tokens [[buffer(BUF_DRAFT_TOKENS)]], \
  const device int* draft_lengths [[buffer(BUF_DRAFT_LENGTHS)]], \
  const device uchar* draft_rows [[buffer(BUF_DRAFT_ROWS)]], \
  const device float* draft_probs [[buffer(BUF_DRAFT_PROBS)]], \
  const device int* draft_vocab [[buffer(BUF_DRAFT_VOCAB)]], \
  const device float* draft_stats [[buffer(BUF_DRAFT_STATS)]], \
  const device uint* noise [[buffer(BUF_NOISE)]], \
  const device int* positions [[buffer(BUF_POSITIONS)]], \
  const device uint* bitmask [[buffer(BUF_BITMASK)]], \
  const device float* temperature [[buffer(BUF_PARAMETERS)]], \
  const device int* top_k [[buffer(BUF_PARAMETERS + 1)]], \
  const device float* top_p [[buffer(BUF_PARAMETERS + 2)]], \
  const device float* min_p [[buffer(BUF_PARAMETERS + 3)]], \
  const device float* draft_temperature [[buffer(BUF_PARAMETERS + 4)]], \
  const device int* draft_top_k [[buffer(BUF_PARAMETERS + 5)]], \
  const device float* draft_top_p [[buffer(BUF_PARAMETERS + 6)]], \
  const device float* draft_min_p [[buffer(BUF_PARAMETERS + 7)]], \
  constant VerifyDraftParams& params [[buffer(BUF_PARAMS)]], \
  device float4* partials [[buffer(BUF_PARTIALS)]], \
  device float* mass [[buffer(BUF_MASS)]], \
  device float* scattered [[buffer(BUF_SCATTERED)]], \
  device float2* digests [[buffer(BUF_DIGESTS)]], \
  device int* tokens [[buffer(BUF_TOKENS)]], \
  device int* num_accepted [[buffer(BUF_NUM_ACCEPTED)]], \
  device uint* status [[buffer(BUF_STATUS)]], \
  device float* logprobs [[buffer(BUF_LOGPROBS)]], \
  device float* stats0 [[buffer(BUF_STATS)]], \
  device float* stats1 [[buffer(BUF_STATS + 1)]], \
  device float* stats2 [[buffer(BUF_STATS + 2)]], \
  device float* stats3 [[buffer(BUF_STATS + 3)]], \
  uint3 group [[threadgroup_position_in_grid]], \
  uint tid [[thread_index_in_threadgroup]], \
  uint3 threads [[threads_per_threadgroup]]

#define SEQUENCE(b) \
  Buffers buffers = {target_logits, draft_tokens, draft_lengths, draft_rows, draft_probs, draft_vocab, \
      draft_stats, noise, positions, bitmask, {temperature, draft_temperature}, {top_k, draft_top_k}, \
      {top_p, draft_top_p}, {min_p, draft_min_p}, &params, partials, mass, scattered, digests, tokens, \
      num_accepted, status, logprobs}; \
  Sequence sequence(buffers, int(b), tid, threads.x)

#define FILTER_MEMORY \
  threadgroup atomic_uint bin_count[FILTER_BINS]; \
  threadgroup atomic_uint bin_mass_low[FILTER_BINS]; \
  threadgroup atomic_uint bin_mass_high[FILTER_BINS]; \
  threadgroup ulong candidates[MAX_CANDIDATES]; \
  threadgroup atomic_uint scalars[2]; \
  threadgroup uint found[4]; \
  FilterMemory memory = {bin_count, bin_mass_low, bin_mass_high, candidates, scalars, found}
