// Where a sequence's uniforms come from: given, or generated from its key.
#pragma once

#include "law.h"
#include "simd.h"
#include "verify_draft_params.h"

namespace exactspec {

inline uint2 threefry2x32(uint2 key, uint2 x) {
  const int rotation[8] = THREEFRY_ROTATIONS;
  const uint keys[3] = {key.x, key.y, THREEFRY_PARITY ^ key.x ^ key.y};
  x.x += keys[0];
  x.y += keys[1];
  UNROLLED(round, 20) {
    int r = rotation[round % 8];
    x.x += x.y;
    x.y = ((x.y << r) | (x.y >> (32 - r))) ^ x.x;
    if (round % 4 == 3) {
      uint s = uint(round) / 4 + 1;
      x.x += keys[s % 3];
      x.y += keys[(s + 1) % 3] + s;
    }
  }
  return x;
}

// Word i of mx.random.uniform(shape=(NOISE_WORDS,), key=key), bit for bit.
inline float keyed_uniform(uint2 key, int i) {
  const int half_words = NOISE_WORDS / 2;
  uint2 words = threefry2x32(key, uint2(i % half_words, i % half_words + half_words));
  float bits = float(i < half_words ? words.x : words.y);
  return min(bits * WORD_SPACING, LARGEST_UNIFORM);
}

// Standard Gumbel noise -log(e) of a random word: x = word * 2**-32 + 2**-33 and e = -log1p(-x). So a
// tail has all 32 bits, and no rounding of x to 1 lets an id win by an infinite score.
inline float gumbel(uint word) {
  float x = float(word) * WORD_SPACING + 0.5f * WORD_SPACING;
  x = min(x, LARGEST_UNIFORM);
  // Six terms of the series are within 1e-8.
  float tail = 1.0f / 3 + x * (1.0f / 4 + x * (1.0f / 5 + x * (1.0f / 6)));
  float series = x * (1 + x * (1.0f / 2 + x * tail));
  float e = x < GUMBEL_SERIES_END ? series : -precise::log(1 - x);
  return -precise::log(e);
}

struct Noise {
  const device uint* data;
  int64_t step;
  bool keyed;
  int num_coins;

  uint2 key() const { return uint2(data[0], data[step]); }
  float word(int i) const {
    return keyed ? keyed_uniform(key(), i) : as_type<float>(data[i * step]);
  }
  // Whether all given uniforms are in [0, 1), used or not. As bits: negative numbers and NaN are above those
  // of 1; the sum makes -0 a 0.
  bool valid() const {
    bool good = true;
    ROLLED(i, keyed ? 0 : num_coins + 2) {
      good = good && as_type<uint>(as_type<float>(data[i * step]) + 0.0f) < as_type<uint>(1.0f);
    }
    return good;
  }
  float coin(int slot) const { return word(slot); }
  // The pair that draws a token, whatever the length of the sequence's draft.
  float pair(int i) const { return word((keyed ? int(MAX_KEYED_DRAFTS) : num_coins) + i); }
};

} // namespace exactspec
