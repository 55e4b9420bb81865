// Reductions and scans over the 32 lanes of a simdgroup in an explicit order: the result has the same
// bits on every device, whatever order its built-in reductions use.
#pragma once

// A loop over values held in registers: an index that is not a constant would put them into memory.
#define UNROLLED(i, n) _Pragma("clang loop unroll(full)") for (int i = 0; i < (n); ++i)
// A loop that is too long to be unrolled.
#define ROLLED(i, n) _Pragma("clang loop unroll(disable)") for (int i = 0; i < (n); ++i)

namespace exactspec {

inline float tree_sum(float v) {
  for (ushort d = 16; d > 0; d /= 2) {
    v = v + simd_shuffle_xor(v, d);
  }
  return v;
}

inline float tree_max(float v) {
  for (ushort d = 16; d > 0; d /= 2) {
    float other = simd_shuffle_xor(v, d);
    v = other > v ? other : v;
  }
  return v;
}

inline uint tree_min(uint v) {
  for (ushort d = 16; d > 0; d /= 2) {
    v = min(v, simd_shuffle_xor(v, d));
  }
  return v;
}

// Sum of the values of this lane and of those before it.
inline float inclusive_scan(float v, ushort lane) {
  for (ushort d = 1; d < 32; d *= 2) {
    float before = simd_shuffle_up(v, d);
    v = lane >= d ? v + before : v;
  }
  return v;
}

// The lowest lane for which the condition holds; 32 if there is none.
inline uint first_lane(bool condition, ushort lane) {
  return tree_min(condition ? uint(lane) : 32u);
}

// The highest lane for which the condition holds; 32 if there is none.
inline uint last_lane(bool condition, ushort lane) {
  uint from_top = tree_min(condition ? 31u - lane : 32u);
  return from_top == 32 ? 32 : 31 - from_top;
}

} // namespace exactspec
