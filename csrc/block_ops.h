// Loops over one DRAW_BLOCK of float32 values: all arithmetic of a row happens here. They are compiled
// once per instruction set, and the best one that the machine has is chosen when the library is loaded.
#pragma once

#include <cstdint>

namespace exactspec {

// How logits become weights: exp((x - max) / temperature) where x is kept, else 0. Kept: x > cutoff, or
// x == cutoff at an index up to `last`. A weight below 2**-126 is 0.
struct Weighting {
  float max;
  float temperature;
  float cutoff;
  int last;
};

struct BlockOps {
  const char* name; // of the instruction set

  // Largest value, or -inf for an empty block; `bad` is set when a value is NaN or +inf.
  float (*max)(const float* x, int n, bool* bad);

  // Sum of the weights and the largest value, where by.max may be another value of the row and nothing
  // is cut. The sum is NaN where a value is, and good while (largest - max) / temperature <= 40.
  double (*max_weight_sum)(const float* x, int n, const Weighting& by, float* max);

  void (*weights)(const float* x, int n, const Weighting& by, float* w);

  // Sum of the weights, which have the same bits as those of `weights`.
  double (*weight_sum)(const float* x, int n, const Weighting& by);

  // out[j] = max(scale * weight(x[j]) - draft[j], 0), the unnormalised residual of a scaled target.
  // Returns the sum; `out` may be null.
  double (*residual)(
      const float* x, int n, const Weighting& by, float scale, const float* draft, float* out);

  // The same where the draft is scale_y * weight(y[j]).
  double (*residual_of_logits)(
      const float* x,
      const Weighting& by_x,
      float scale_x,
      const float* y,
      const Weighting& by_y,
      float scale_y,
      int n,
      float* out);

  // w[j] *= scale
  void (*scale)(float* w, float scale, int n);

  // Sums in a fixed order: 16 float32 lanes over 256 values, the rest in double.
  double (*sum)(const float* w, int n);

  // sum of min(a[j], b[j])
  double (*overlap)(const float* a, const float* b, int n);

  // Indices of values in [from, to], in order; returns how many there are.
  int (*find)(const float* x, int n, float from, float to, int* index);

  // The kept j of the largest score (x[j] - max) / temperature + G(first + j), the lowest of equal ones,
  // if it is larger than *best, which then becomes that score; else -1. No value of x is larger than
  // `largest`. `first` is even, and G is standard Gumbel noise: r is word `id & 1` of
  // threefry2x32(key, (position, id >> 1)), u = r * 2**-32 + 2**-33 and G = -log(-log1p(-u)). So a tail
  // has the full 32 bits, and no rounding of u to 1 lets an id win by an infinite score.
  int (*noisy_argmax)(
      const float* x,
      int n,
      const Weighting& by,
      float largest,
      uint32_t key0,
      uint32_t key1,
      uint32_t position,
      int first,
      float* best);

  void (*widen_float16)(const uint16_t* x, int n, float* out);
  void (*widen_bfloat16)(const uint16_t* x, int n, float* out);
};

// Of this machine. EXACTSPEC_ISA=portable (or avx2) in the environment asks for less, for tests.
extern const BlockOps& block_ops;

} // namespace exactspec
