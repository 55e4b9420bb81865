// The loops of block_ops.h for one instruction set, in vectors of its width that the compiler maps to
// instructions. Every instruction set does the same operations and sums in the same order; only those
// without a fused multiply-add round the exponent otherwise. No templates or inline functions of the
// standard library: the linker may keep one instruction set's copy of such a function for all.

#include "block_ops.h"
#include "random.h"

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_FMA)
#include <arm_neon.h>
#endif

namespace exactspec::EXACTSPEC_ISA {

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#define COUNTING 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#define COUNTING 0, 1, 2, 3, 4, 5, 6, 7
#else
constexpr int kWidth = 4;
#define COUNTING 0, 1, 2, 3
#endif
constexpr int kLanes = 16; // of a sum, whatever the width
constexpr int kParts = kLanes / kWidth;
constexpr int kChunk = 256; // float32 partial sums stay short, so their error stays below 1e-6
constexpr float kInf = __builtin_inff();

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));

#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define HAS_FMA 1
INLINE Floats fma(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#elif defined(__FMA__)
#define HAS_FMA 1
INLINE Floats fma(Floats a, Floats b, Floats c) {
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
#elif defined(__ARM_FEATURE_FMA)
#define HAS_FMA 1
INLINE Floats fma(Floats a, Floats b, Floats c) {
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
#define HAS_FMA 0
INLINE Floats fma(Floats a, Floats b, Floats c) {
  return a * b + c;
}
#endif

INLINE Floats load(const float* x) {
  Floats v;
  __builtin_memcpy(&v, x, sizeof(v));
  return v;
}

INLINE int least(int a, int b) {
  return a < b ? a : b;
}

// The first n values, up to a vector of them; -inf behind them.
INLINE Floats load(const float* x, int n) {
  if (n >= kWidth) {
    return load(x);
  }
  Floats v = Floats{} - kInf;
  if (n > 0) {
    __builtin_memcpy(&v, x, sizeof(float) * n);
  }
  return v;
}

INLINE void store(Floats v, float* out, int n) {
  if (n >= kWidth) {
    __builtin_memcpy(out, &v, sizeof(v));
  } else if (n > 0) {
    __builtin_memcpy(out, &v, sizeof(float) * n);
  }
}

INLINE Floats positive(Floats v) {
  return v > 0.0f ? v : Floats{};
}

// Calls step(i, count) for vectors of values from i on, `count` of them left.
template <typename Step>
INLINE void for_each_vector(int n, Step step) {
  int i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    step(i, kWidth);
  }
  if (i < n) {
    step(i, n - i);
  }
}

// Sum of value(i, count) in a fixed order: 16 float32 lanes over 256 values, the rest in double.
template <typename Value>
INLINE double sum_of(int n, Value value) {
  double total[kLanes] = {};
  for (int start = 0; start < n; start += kChunk) {
    Floats lanes[kParts] = {};
    int end = least(start + kChunk, n);
    int i = start;
    for (; i + kLanes <= end; i += kLanes) {
      for (int part = 0; part < kParts; ++part) {
        lanes[part] += value(i + part * kWidth, kWidth);
      }
    }
    for (int part = 0; part < kParts && i < end; ++part, i += kWidth) {
      lanes[part] += value(i, least(end - i, kWidth));
    }
    for (int j = 0; j < kLanes; ++j) {
      total[j] += static_cast<double>(lanes[j / kWidth][j % kWidth]);
    }
  }
  double sum = 0;
  for (int j = 0; j < kLanes; ++j) {
    sum += total[j];
  }
  return sum;
}

// exp((x - max) / temperature) as 2**t, t = (x - max) * (log2(e) / temperature).
struct Weights {
  INLINE explicit Weights(const Weighting& by)
      : max(by.max), temperature(by.temperature), cutoff(by.cutoff), last(by.last) {
    double exact = 0x1.71547652b82fep0 / static_cast<double>(by.temperature);
    high = static_cast<float>(exact);
    low = static_cast<float>(exact - static_cast<double>(high));
  }

  INLINE Floats operator()(Floats x) const {
    constexpr float magic = 0x1.8p23f; // adding it rounds to an integer in the low mantissa bits
    Floats d = x - max;
#if HAS_FMA
    // t and what its rounding lost.
    Floats t = d * high;
    Floats rest = fma(d, Floats{} + low, fma(d, Floats{} + high, -t));
    Floats shifted = t + magic;
    Floats f = (t - (shifted - magic)) + rest;
#else
    Floats q = d / temperature;
    Floats t = q * 0x1.715476p0f;
    Floats shifted = t + magic;
    Floats k = shifted - magic;
    Floats f = ((q - k * 0x1.62e400p-1f) - k * 0x1.7f7d1cp-20f) * 0x1.715476p0f;
#endif
    // 2**f on [-1/2, 1/2] within 2e-9: a fit of least maximal relative error.
    Floats y = Floats{} + 0x1.41d322p-13f;
    y = fma(y, f, Floats{} + 0x1.5f456ap-10f);
    y = fma(y, f, Floats{} + 0x1.3b2dbcp-7f);
    y = fma(y, f, Floats{} + 0x1.c6aed4p-5f);
    y = fma(y, f, Floats{} + 0x1.ebfbdap-3f);
    y = fma(y, f, Floats{} + 0x1.62e430p-1f);
    y = fma(y, f, Floats{} + 1.0f);
    Ints exponent = ((Ints)shifted - 0x4b400000 + 127) << 23;
    return t >= -126.0f ? y * (Floats)exponent : Floats{};
  }

  // The same where x is kept; `first` is the index of its first lane.
  INLINE Floats kept(Floats x, int first) const {
    Ints index = Ints{COUNTING} + first;
    Ints keep = (x > cutoff) | ((x == cutoff) & (index <= last));
    return keep ? (*this)(x) : Floats{};
  }

  float max, temperature, cutoff, high, low;
  int last;
};

float block_max(const float* x, int n, bool* bad) {
  Floats lane = Floats{} - kInf;
  Ints odd{};
  for_each_vector(n, [&](int i, int count) __attribute__((always_inline)) {
    Floats v = load(x + i, count);
    lane = v > lane ? v : lane;
    odd |= v != v;
  });
  float max = -kInf;
  for (int j = 0; j < kWidth; ++j) {
    max = lane[j] > max ? lane[j] : max;
    *bad |= odd[j] != 0;
  }
  *bad |= max == kInf;
  return max;
}

void block_weights(const float* x, int n, const Weighting& by, float* w) {
  Weights weights(by);
  for_each_vector(n, [&](int i, int count) __attribute__((always_inline)) {
    store(weights.kept(load(x + i, count), i), w + i, count);
  });
}

double block_weight_sum(const float* x, int n, const Weighting& by) {
  Weights weights(by);
  if (by.cutoff == -kInf) { // everything is kept, since the weight of -inf is 0
    return sum_of(n, [&](int i, int count) __attribute__((always_inline)) {
      return weights(load(x + i, count));
    });
  }
  return sum_of(n, [&](int i, int count) __attribute__((always_inline)) {
    return weights.kept(load(x + i, count), i);
  });
}

template <typename Draft>
INLINE double residual(
    const float* x, int n, const Weighting& by, float scale, Draft draft, float* out) {
  Weights weights(by);
  return sum_of(n, [&](int i, int count) __attribute__((always_inline)) {
    Floats target = weights.kept(load(x + i, count), i) * scale;
    Floats left = positive(target - draft(i, count));
    if (out != nullptr) {
      store(left, out + i, count);
    }
    return left;
  });
}

double block_residual(
    const float* x, int n, const Weighting& by, float scale, const float* draft, float* out) {
  return residual(x, n, by, scale, [&](int i, int count) __attribute__((always_inline)) {
    Floats d = load(draft + i, count);
    return d > 0.0f ? d : Floats{}; // -inf behind the end
  }, out);
}

double block_residual_of_logits(
    const float* x,
    const Weighting& by_x,
    float scale_x,
    const float* y,
    const Weighting& by_y,
    float scale_y,
    int n,
    float* out) {
  Weights weights(by_y);
  return residual(x, n, by_x, scale_x, [&](int i, int count) __attribute__((always_inline)) {
    return weights.kept(load(y + i, count), i) * scale_y;
  }, out);
}

void block_scale(float* w, float scale, int n) {
  for (int j = 0; j < n; ++j) {
    w[j] *= scale;
  }
}

double block_sum(const float* w, int n) {
  return sum_of(n, [&](int i, int count) __attribute__((always_inline)) {
    Floats v = load(w + i, count);
    return count < kWidth ? positive(v) : v; // -inf behind the end
  });
}

double block_overlap(const float* a, const float* b, int n) {
  return sum_of(n, [&](int i, int count) __attribute__((always_inline)) {
    Floats v = load(a + i, count), w = load(b + i, count);
    return positive(v < w ? v : w); // -inf behind the end
  });
}

// log(y) for a normal y > 0, within 2 ulp away from 1: 2 artanh(s) of the mantissa in [0.7, 1.4).
INLINE Floats log_positive(Floats y) {
  Ints bits = (Ints)y;
  Ints k = (bits - 0x3f3504f3) >> 23;
  Floats m = (Floats)(bits - (k << 23));
  Floats s = (m - 1.0f) / (m + 1.0f);
  Floats s2 = s * s;
  Floats poly = s2 * (s2 * (s2 * (s2 * (1.0f / 9) + 1.0f / 7) + 1.0f / 5) + 1.0f / 3);
  return __builtin_convertvector(k, Floats) * 0x1.62e430p-1f + (2.0f * s + 2.0f * s * poly);
}

// -log(-log1p(-x)) of the uniform x that a random word stands for.
INLINE Floats gumbel_of(Floats word) {
  constexpr float largest = 0x1.fffffep-1f;
  Floats x = word * 0x1p-32f + 0x1p-33f;
  x = x < largest ? x : Floats{} + largest;
  // Near 0 log(1 - x) would lose the low bits of x: six terms of its series are within 1e-8.
  Floats series =
      x * (1.0f + x * (1.0f / 2 + x * (1.0f / 3 + x * (1.0f / 4 + x * (1.0f / 5 + x * (1.0f / 6))))));
  Floats e = x < 0x1p-4f ? series : -log_positive(1.0f - x);
  return -log_positive(e);
}

void block_gumbel(uint32_t key0, uint32_t key1, uint32_t position, int first, int n, float* g) {
  for (int start = 0; start < n; start += 2 * kWidth) {
    float word[2 * kWidth];
    for (int j = 0; j < kWidth; ++j) {
      uint32_t pair = static_cast<uint32_t>(first + start) / 2 + static_cast<uint32_t>(j);
      RandomWords words = threefry2x32(key0, key1, position, pair);
      word[j] = static_cast<float>(words.first);
      word[kWidth + j] = static_cast<float>(words.second);
    }
    Floats even = gumbel_of(load(word)), odd = gumbel_of(load(word + kWidth));
    float noise[2 * kWidth];
    for (int j = 0; j < kWidth; ++j) {
      noise[2 * j] = even[j];
      noise[2 * j + 1] = odd[j];
    }
    int count = least(2 * kWidth, n - start);
    __builtin_memcpy(g + start, noise, sizeof(float) * count);
  }
}

void widen_float16(const uint16_t* x, int n, float* out) {
  for (int j = 0; j < n; ++j) {
    uint32_t h = x[j];
    uint32_t magnitude = (h & 0x7fff) << 13;
    // Rebiasing by a multiplication is exact for subnormals too; infinities and NaN keep theirs.
    float value = __builtin_bit_cast(float, magnitude) * 0x1p112f;
    uint32_t bits =
        (h & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : __builtin_bit_cast(uint32_t, value);
    out[j] = __builtin_bit_cast(float, bits | (h & 0x8000) << 16);
  }
}

void widen_bfloat16(const uint16_t* x, int n, float* out) {
  for (int j = 0; j < n; ++j) {
    out[j] = __builtin_bit_cast(float, static_cast<uint32_t>(x[j]) << 16);
  }
}

#define STRING(x) #x
#define NAME(x) STRING(x)

} // namespace

extern const BlockOps ops;
const BlockOps ops{
    NAME(EXACTSPEC_ISA),
    block_max,
    block_weights,
    block_weight_sum,
    block_residual,
    block_residual_of_logits,
    block_scale,
    block_sum,
    block_overlap,
    block_gumbel,
    widen_float16,
    widen_bfloat16,
};

} // namespace exactspec::EXACTSPEC_ISA
