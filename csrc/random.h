#pragma once

#include <cstdint>

#include "law.h"

namespace exactspec {

// Not shared between files, which are compiled for several instruction sets.
struct RandomWords {
  uint32_t first, second;
};
static inline RandomWords
threefry2x32(uint32_t key0, uint32_t key1, uint32_t x0, uint32_t x1) {
  constexpr int rotation[8] = THREEFRY_ROTATIONS;
  const uint32_t key[3] = {key0, key1, THREEFRY_PARITY ^ key0 ^ key1};
  x0 += key[0];
  x1 += key[1];
#pragma GCC unroll 20 // so that a loop over calls is vectorised
  for (uint32_t round = 0; round < 20; ++round) {
    x0 += x1;
    int r = rotation[round % 8];
    x1 = (x1 << r | x1 >> (32 - r)) ^ x0;
    if (round % 4 == 3) {
      uint32_t s = round / 4 + 1;
      x0 += key[s % 3];
      x1 += key[(s + 1) % 3] + s;
    }
  }
  return {x0, x1};
}

// Word i of mx.random.uniform(shape=(NOISE_WORDS,), key=key), bit for bit.
static inline float keyed_uniform(uint32_t key0, uint32_t key1, int i) {
  constexpr int half = NOISE_WORDS / 2;
  auto words = threefry2x32(key0, key1, i % half, i % half + half);
  auto bits = static_cast<float>(i < half ? words.first : words.second);
  float uniform = bits * WORD_SPACING;
  return uniform < LARGEST_UNIFORM ? uniform : LARGEST_UNIFORM;
}

} // namespace exactspec
