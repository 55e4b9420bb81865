// Loops over one DRAW_BLOCK of float32 values: all arithmetic of a row happens here.
#pragma once

#include <cstdint>

namespace exactspec {

// Largest value, or -inf for an empty block; `bad` is set when a value is NaN or +inf.
float block_max(const float* x, int n, bool* bad);

// w[j] = exp((x[j] - max) / temperature) where x[j] is kept, else 0. Kept: x[j] > cutoff, or
// x[j] == cutoff and j <= last. Below 2**-126 a weight is 0.
void block_weights(
    const float* x, int n, float max, float temperature, float cutoff, int last, float* w);

// w[j] = max(w[j] * scale - draft[j], 0): the unnormalised residual of a scaled target.
void block_residual(float* w, float scale, const float* draft, int n);

// w[j] *= scale
void block_scale(float* w, float scale, int n);

// Standard Gumbel noise G = -log(e) of ids [first, first + n), first even: r is word `id & 1` of
// threefry2x32(key, (position, id >> 1)), x = r * 2**-32 + 2**-33 and e = -log1p(-x) is exponential.
// So a tail has the full 32 bits, and no rounding of x to 1 lets an id win by an infinite score.
void block_gumbel(uint32_t key0, uint32_t key1, uint32_t position, int first, int n, float* g);

// Sums in a fixed order: 16 float32 lanes over 256 values, the rest in double.
double block_sum(const float* w, int n);

// sum of min(a[j], b[j])
double block_overlap(const float* a, const float* b, int n);

void widen_float16(const uint16_t* x, int n, float* out);
void widen_bfloat16(const uint16_t* x, int n, float* out);

} // namespace exactspec
