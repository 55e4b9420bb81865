// Where a sequence's uniforms come from: given, or generated from its key.
#pragma once

#include "law.h"
#include "simd.h"

namespace exactspec {

// Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
inline uint2 threefry2x32(uint2 key, uint2 x) {
  const int rotation[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  const uint keys[3] = {key.x, key.y, 0x1BD11BDA ^ key.x ^ key.y};
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
  return min(bits * 2.3283064365386963e-10f, 0.99999994f);
}

struct Noise {
  const device uint* data;
  int64_t step;
  bool keyed;
  int num_coins;

  float word(int i) const {
    return keyed ? keyed_uniform(uint2(data[0], data[step]), i)
                 : as_type<float>(data[i * step]);
  }
  float coin(int slot) const { return word(slot); }
  // The pair that draws a token, whatever the length of the sequence's draft.
  float pair(int i) const { return word((keyed ? int(MAX_KEYED_DRAFTS) : num_coins) + i); }
};

} // namespace exactspec
