#pragma once

#include <cstdint>

#include "law.h"

namespace exactspec {

// Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
// Not shared between files, which are compiled for several instruction sets.
struct RandomWords {
  uint32_t first, second;
};
static inline RandomWords
threefry2x32(uint32_t key0, uint32_t key1, uint32_t x0, uint32_t x1) {
  constexpr int rotation[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  const uint32_t key[3] = {key0, key1, 0x1BD11BDA ^ key0 ^ key1};
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
  float uniform = bits * 0x1p-32f;
  return uniform < 0x1.fffffep-1f ? uniform : 0x1.fffffep-1f;
}

} // namespace exactspec
