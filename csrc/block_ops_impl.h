// The loops of block_ops.h for one instruction set, in vectors of 16 floats that the compiler maps to
// what the machine has. Every instruction set does the same operations in the same order; only those
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

constexpr int kLanes = 16;
constexpr int kChunk = 256; // float32 partial sums stay short, so their error stays below 1e-6
constexpr float kInf = __builtin_inff();

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef double Doubles __attribute__((vector_size(8 * kLanes)));

#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define HAS_FMA 1
INLINE Floats fma(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#elif defined(__FMA__)
#define HAS_FMA 1
union Parts {
  Floats whole;
  __m256 part[2];
};
INLINE Floats fma(Floats a, Floats b, Floats c) {
  Parts x{a}, y{b}, z{c};
  for (int i = 0; i < 2; ++i) {
    z.part[i] = _mm256_fmadd_ps(x.part[i], y.part[i], z.part[i]);
  }
  return z.whole;
}
#elif defined(__ARM_FEATURE_FMA)
#define HAS_FMA 1
union Parts {
  Floats whole;
  float32x4_t part[4];
};
INLINE Floats fma(Floats a, Floats b, Floats c) {
  Parts x{a}, y{b}, z{c};
  for (int i = 0; i < 4; ++i) {
    z.part[i] = vfmaq_f32(z.part[i], x.part[i], y.part[i]);
  }
  return z.whole;
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

INLINE void store(Floats v, float* out) {
  __builtin_memcpy(out, &v, sizeof(v));
}

// The first n < 16 values, and -inf behind them.
INLINE Floats load_some(const float* x, int n) {
  Floats v = Floats{} - kInf;
  __builtin_memcpy(&v, x, sizeof(float) * n);
  return v;
}

INLINE void store_some(Floats v, float* out, int n) {
  __builtin_memcpy(out, &v, sizeof(float) * n);
}

INLINE int least(int a, int b) {
  return a < b ? a : b;
}

INLINE Floats positive(Floats v) {
  return v > 0.0f ? v : Floats{};
}

// A sum in a fixed order: 16 float32 lanes over 256 values, the rest in double.
struct Sum {
  INLINE void add(Floats v) {
    lanes += v;
    if (++count == kChunk / kLanes) {
      total += __builtin_convertvector(lanes, Doubles);
      lanes = Floats{};
      count = 0;
    }
  }
  INLINE double value() const {
    Doubles all = total + __builtin_convertvector(lanes, Doubles);
    double sum = 0;
    for (int j = 0; j < kLanes; ++j) {
      sum += all[j];
    }
    return sum;
  }
  Floats lanes{};
  Doubles total{};
  int count = 0;
};

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
    Ints index = Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first;
    Ints keep = (x > cutoff) | ((x == cutoff) & (index <= last));
    return keep ? (*this)(x) : Floats{};
  }

  float max, temperature, cutoff, high, low;
  int last;
};

float block_max(const float* x, int n, bool* bad) {
  Floats lane = Floats{} - kInf;
  Ints odd{};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Floats v = load(x + i);
    lane = v > lane ? v : lane;
    odd |= v != v;
  }
  if (i < n) {
    Floats v = load_some(x + i, n - i);
    lane = v > lane ? v : lane;
    odd |= v != v;
  }
  float max = -kInf;
  for (int j = 0; j < kLanes; ++j) {
    max = lane[j] > max ? lane[j] : max;
    *bad |= odd[j] != 0;
  }
  *bad |= max == kInf;
  return max;
}

void block_weights(const float* x, int n, const Weighting& by, float* w) {
  Weights weights(by);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store(weights.kept(load(x + i), i), w + i);
  }
  if (i < n) {
    store_some(weights.kept(load_some(x + i, n - i), i), w + i, n - i);
  }
}

double block_weight_sum(const float* x, int n, const Weighting& by) {
  Weights weights(by);
  Sum sum;
  int i = 0;
  if (by.cutoff == -kInf) { // everything is kept, since the weight of -inf is 0
    for (; i + kLanes <= n; i += kLanes) {
      sum.add(weights(load(x + i)));
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    sum.add(weights.kept(load(x + i), i));
  }
  if (i < n) {
    sum.add(weights.kept(load_some(x + i, n - i), i));
  }
  return sum.value();
}

double block_residual(
    const float* x, int n, const Weighting& by, float scale, const float* draft, float* out) {
  Weights weights(by);
  Sum sum;
  for (int i = 0; i < n; i += kLanes) {
    int some = least(kLanes, n - i);
    bool all = some == kLanes;
    Floats target = weights.kept(all ? load(x + i) : load_some(x + i, some), i) * scale;
    Floats left = positive(target - (all ? load(draft + i) : load_some(draft + i, some)));
    left = all ? left : target > 0.0f ? left : Floats{}; // behind the end the draft is -inf
    sum.add(left);
    if (out != nullptr) {
      store_some(left, out + i, some);
    }
  }
  return sum.value();
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
  Weights target(by_x), draft(by_y);
  Sum sum;
  for (int i = 0; i < n; i += kLanes) {
    int some = least(kLanes, n - i);
    bool all = some == kLanes;
    Floats t = target.kept(all ? load(x + i) : load_some(x + i, some), i) * scale_x;
    Floats d = draft.kept(all ? load(y + i) : load_some(y + i, some), i) * scale_y;
    Floats left = positive(t - d);
    sum.add(left);
    if (out != nullptr) {
      store_some(left, out + i, some);
    }
  }
  return sum.value();
}

void block_scale(float* w, float scale, int n) {
  for (int j = 0; j < n; ++j) {
    w[j] *= scale;
  }
}

double block_sum(const float* w, int n) {
  Sum sum;
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    sum.add(load(w + i));
  }
  for (Floats rest{}; i < n;) {
    __builtin_memcpy(&rest, w + i, sizeof(float) * (n - i));
    sum.add(rest);
    i = n;
  }
  return sum.value();
}

double block_overlap(const float* a, const float* b, int n) {
  Sum sum;
  for (int i = 0; i < n; i += kLanes) {
    Floats v{}, w{};
    int some = least(kLanes, n - i);
    __builtin_memcpy(&v, a + i, sizeof(float) * some);
    __builtin_memcpy(&w, b + i, sizeof(float) * some);
    sum.add(v < w ? v : w);
  }
  return sum.value();
}

// log(y) for a normal y > 0, within 2 ulp away from 1: 2 artanh(s) of the mantissa in [0.7, 1.4).
INLINE Floats log_positive(Floats y) {
  Ints bits = (Ints)y;
  Ints k = (bits - 0x3f3504f3) >> 23;
  Floats m = (Floats)(bits - (k << 23));
  Floats s = (m - 1.0f) / (m + 1.0f);
  Floats s2 = s * s;
  Floats poly = s2 * (s2 * (s2 * (s2 / 9.0f + 1.0f / 7) + 1.0f / 5) + 1.0f / 3);
  return __builtin_convertvector(k, Floats) * 0x1.62e430p-1f + (2.0f * s + 2.0f * s * poly);
}

// -log(-log1p(-x)) of the uniform x that a random word stands for.
INLINE Floats gumbel_of(Floats word) {
  constexpr float largest = 0x1.fffffep-1f;
  Floats x = word * 0x1p-32f + 0x1p-33f;
  x = x < largest ? x : Floats{} + largest;
  // Near 0 log(1 - x) would lose the low bits of x: six terms of its series are within 1e-8.
  Floats series = x / 6.0f;
  for (float term : {5.0f, 4.0f, 3.0f, 2.0f}) {
    series = x * (1.0f / term + series);
  }
  series = x * (1.0f + series);
  Floats e = x < 0x1p-4f ? series : -log_positive(1.0f - x);
  return -log_positive(e);
}

void block_gumbel(uint32_t key0, uint32_t key1, uint32_t position, int first, int n, float* g) {
  for (int start = 0; start < n; start += 2 * kLanes) {
    uint32_t words[2][kLanes];
    for (int j = 0; j < kLanes; ++j) {
      threefry2x32(key0, key1, position, uint32_t(first + start) / 2 + uint32_t(j), &words[0][j],
                   &words[1][j]);
    }
    float noise[2 * kLanes];
    for (int half = 0; half < 2; ++half) {
      Floats word;
      for (int j = 0; j < kLanes; ++j) {
        word[j] = static_cast<float>(words[half][j]);
      }
      Floats value = gumbel_of(word);
      for (int j = 0; j < kLanes; ++j) {
        noise[2 * j + half] = value[j];
      }
    }
    __builtin_memcpy(g + start, noise, sizeof(float) * least(2 * kLanes, n - start));
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
