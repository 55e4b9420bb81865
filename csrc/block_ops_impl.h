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
constexpr int kAhead = 2048; // values: rows are read once, and mostly from memory
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

INLINE bool any(Ints v) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)v) != 0;
#else
  uint64_t words[kWidth / 2];
  __builtin_memcpy(words, &v, sizeof(v));
  uint64_t all = 0;
  for (int j = 0; j < kWidth / 2; ++j) {
    all |= words[j];
  }
  return all != 0;
#endif
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

typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef double DoubleLanes __attribute__((vector_size(8 * kLanes)));

// Sum of value(i, count) in a fixed order: 16 float32 lanes over 256 values, the rest in double.
template <typename Value>
INLINE double sum_of(int n, Value value) {
  DoubleLanes total{};
  for (int start = 0; start < n; start += kChunk) {
    Floats parts[kParts] = {};
    int end = least(start + kChunk, n);
    int i = start;
    for (; i + kLanes <= end; i += kLanes) {
      for (int part = 0; part < kParts; ++part) {
        parts[part] += value(i + part * kWidth, kWidth);
      }
    }
    for (int part = 0; part < kParts && i < end; ++part, i += kWidth) {
      parts[part] += value(i, least(end - i, kWidth));
    }
    Lanes lanes;
    __builtin_memcpy(&lanes, parts, sizeof(lanes));
    total += __builtin_convertvector(lanes, DoubleLanes);
  }
  double sum = 0;
  for (int j = 0; j < kLanes; ++j) {
    sum += total[j];
  }
  return sum;
}

float next_up(float x) {
  int32_t bits = __builtin_bit_cast(int32_t, x);
  return x == 0 ? 0x1p-149f : __builtin_bit_cast(float, bits + (x > 0 ? 1 : -1));
}

// exp((x - max) / temperature) as 2**t, t = (x - max) * (log2(e) / temperature).
struct Weights {
  // For blocks of n values.
  INLINE Weights(const Weighting& by, int n)
      : max(by.max), temperature(by.temperature), cutoff(by.cutoff), last(by.last) {
    double exact = 0x1.71547652b82fep0 / static_cast<double>(by.temperature);
    high = static_cast<float>(exact);
    low = static_cast<float>(exact - static_cast<double>(high));
    by_index = last >= 0 && last < n - 1;
    // The least x of a weight that is not 0: t >= -126, and kept.
    constexpr float largest = 0x1.fffffep127f;
    double distance = -126 / exact;
    float least_d = distance < -largest ? -largest : static_cast<float>(distance);
    lowest = static_cast<float>(static_cast<double>(max) + static_cast<double>(least_d));
    while (lowest - max < least_d) {
      lowest = next_up(lowest);
    }
    float first_kept = last < 0 ? next_up(cutoff) : cutoff;
    lowest = first_kept > lowest ? first_kept : lowest;
  }

  // 2**t, whatever is kept.
  INLINE Floats exp(Floats x) const {
    // Adding it rounds to an integer, which the low mantissa bits hold with an exponent's bias.
    constexpr float magic = 0x1.8p23f + 127;
    Floats d = x - max;
#if HAS_FMA
    Floats shifted = fma(d, Floats{} + high, Floats{} + magic);
    Floats k = shifted - magic;
    Floats f = fma(d, Floats{} + low, fma(d, Floats{} + high, -k));
#else
    Floats q = d / temperature;
    Floats shifted = q * 0x1.715476p0f + magic;
    Floats k = shifted - magic;
    Floats f = ((q - k * 0x1.62e400p-1f) - k * 0x1.7f7d1cp-20f) * 0x1.715476p0f;
#endif
    // 2**f on [-1/2, 1/2] within 1.1e-7, and 1 at 0: a fit of least maximal relative error.
    Floats y = Floats{} + 0x1.5bb988p-10f;
    y = fma(y, f, Floats{} + 0x1.3ceb10p-7f);
    y = fma(y, f, Floats{} + 0x1.c6b758p-5f);
    y = fma(y, f, Floats{} + 0x1.ebf9bap-3f);
    y = fma(y, f, Floats{} + 0x1.62e42ap-1f);
    y = fma(y, f, Floats{} + 1.0f);
#if defined(__AVX512F__)
    return (Floats)_mm512_maskz_scalef_ps(0xffff, (__m512)y, (__m512)k);
#else
    return y * (Floats)((Ints)shifted << 23);
#endif
  }

  // The weights; `first` is the index of the first lane.
  template <bool ByIndex>
  INLINE Floats at(Floats x, int first) const {
    Ints keep = x >= lowest;
    if constexpr (ByIndex) {
      keep &= (x != cutoff) | (Ints{COUNTING} + first <= last);
    }
    return keep ? exp(x) : Floats{};
  }

  float max, temperature, cutoff, high, low, lowest;
  int last;
  bool by_index; // whether an index decides about equal values
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

double block_max_weight_sum(const float* x, int n, const Weighting& by, float* max) {
  Weights weights(by, n);
  Floats lane = Floats{} - kInf;
  double sum = sum_of(n, [&](int i, int count) __attribute__((always_inline)) {
    __builtin_prefetch(x + i + kAhead);
    Floats v = load(x + i, count);
    lane = v > lane ? v : lane;
    return v < weights.lowest ? Floats{} : weights.exp(v); // NaN stays
  });
  *max = -kInf;
  for (int j = 0; j < kWidth; ++j) {
    *max = lane[j] > *max ? lane[j] : *max;
  }
  return sum;
}

template <bool ByIndex>
INLINE void store_weights(const float* x, int n, const Weights& weights, float* w) {
  for_each_vector(n, [&](int i, int count) __attribute__((always_inline)) {
    store(weights.at<ByIndex>(load(x + i, count), i), w + i, count);
  });
}

void block_weights(const float* x, int n, const Weighting& by, float* w) {
  Weights weights(by, n);
  return weights.by_index ? store_weights<true>(x, n, weights, w)
                          : store_weights<false>(x, n, weights, w);
}

template <bool ByIndex>
INLINE double sum_weights(const float* x, int n, const Weights& weights) {
  return sum_of(n, [&](int i, int count) __attribute__((always_inline)) {
    return weights.at<ByIndex>(load(x + i, count), i);
  });
}

double block_weight_sum(const float* x, int n, const Weighting& by) {
  Weights weights(by, n);
  return weights.by_index ? sum_weights<true>(x, n, weights) : sum_weights<false>(x, n, weights);
}

template <bool ByIndex, typename Draft>
INLINE double residual(
    const float* x, int n, const Weights& weights, float scale, Draft draft, float* out) {
  return sum_of(n, [&](int i, int count) __attribute__((always_inline)) {
    Floats target = weights.at<ByIndex>(load(x + i, count), i) * scale;
    Floats left = positive(target - draft(i, count));
    if (out != nullptr) {
      store(left, out + i, count);
    }
    return left;
  });
}

double block_residual(
    const float* x, int n, const Weighting& by, float scale, const float* draft, float* out) {
  Weights weights(by, n);
  auto load_draft = [&](int i, int count) __attribute__((always_inline)) {
    return positive(load(draft + i, count)); // -inf behind the end
  };
  return weights.by_index ? residual<true>(x, n, weights, scale, load_draft, out)
                          : residual<false>(x, n, weights, scale, load_draft, out);
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
  Weights target(by_x, n), draft(by_y, n);
  if (!target.by_index && !draft.by_index) {
    return residual<false>(x, n, target, scale_x, [&](int i, int count) __attribute__((always_inline)) {
      __builtin_prefetch(x + i + kAhead);
      __builtin_prefetch(y + i + kAhead);
      return draft.at<false>(load(y + i, count), i) * scale_y;
    }, out);
  }
  return residual<true>(x, n, target, scale_x, [&](int i, int count) __attribute__((always_inline)) {
    return draft.at<true>(load(y + i, count), i) * scale_y;
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
  Floats x = word * WORD_SPACING + 0.5f * WORD_SPACING;
  x = x < LARGEST_UNIFORM ? x : Floats{} + LARGEST_UNIFORM;
  // Six terms of the series are within 1e-8.
  Floats series =
      x * (1.0f + x * (1.0f / 2 + x * (1.0f / 3 + x * (1.0f / 4 + x * (1.0f / 5 + x * (1.0f / 6))))));
  Floats e = x < GUMBEL_SERIES_END ? series : -log_positive(1.0f - x);
  return -log_positive(e);
}

// Twice a vector's width of random words: those of even ids, then those of odd ones.
INLINE void random_words(
    uint32_t key0, uint32_t key1, uint32_t position, int first, float* word) {
  for (int j = 0; j < kWidth; ++j) {
    uint32_t pair = static_cast<uint32_t>(first) / 2 + static_cast<uint32_t>(j);
    RandomWords words = threefry2x32(key0, key1, position, pair);
    word[j] = static_cast<float>(words.first);
    word[kWidth + j] = static_cast<float>(words.second);
  }
}

// No word above this gives a score of at least `best` where (x - max) / temperature <= `distance`:
// G <= -log(u), as -log1p(-u) >= u.
float largest_word(float distance, float best) {
  double u = __builtin_exp(static_cast<double>(distance) - static_cast<double>(best) + 1e-4);
  return u < 1 ? static_cast<float>(u * 0x1p32) : kInf;
}

// At most log2(w), for a normal w or 0: the exponent and mantissa as they are.
INLINE float log2_below(float w) {
  return static_cast<float>(__builtin_bit_cast(int32_t, w)) * 0x1p-23f - 127 - 1e-4f;
}

int block_noisy_argmax(
    const float* x,
    int n,
    const Weighting& by,
    float largest,
    uint32_t key0,
    uint32_t key1,
    uint32_t position,
    int first,
    float* best) {
  float distance = (largest - by.max) / by.temperature;
  float bound = largest_word(distance, *best);
  int argmax = -1;
  for (int start = 0; start < n; start += 2 * kWidth) {
    float word[2 * kWidth];
    random_words(key0, key1, position, first + start, word);
    Floats even = load(word), odd = load(word + kWidth);
    if (!any((even <= bound) | (odd <= bound))) {
      continue; // most vectors
    }
    int count = least(2 * kWidth, n - start);
    bool needed = false;
    for (int j = 0; j < count; ++j) {
      float w = word[j / 2 + j % 2 * kWidth];
      if (w <= bound) {
        float most = (x[start + j] - by.max) / by.temperature + 0x1.62e430p-1f * (32 - log2_below(w));
        needed |= most + 1e-3f >= *best;
      }
    }
    if (!needed) {
      continue;
    }
    float noise[2 * kWidth];
    store(gumbel_of(even), noise, kWidth);
    store(gumbel_of(odd), noise + kWidth, kWidth);
    for (int j = 0; j < count; ++j) {
      int i = start + j, at = j / 2 + j % 2 * kWidth;
      if (word[at] > bound) {
        continue;
      }
      bool kept = x[i] > by.cutoff || (x[i] == by.cutoff && i <= by.last);
      float score = (x[i] - by.max) / by.temperature + noise[at];
      if (kept && score > *best) {
        *best = score;
        argmax = i;
        bound = largest_word(distance, score);
      }
    }
  }
  return argmax;
}

// Appends the indices from `first` on where a lane is set, of `count` lanes; returns how many.
INLINE int append(Ints lanes, int first, int count, int* index) {
#if defined(__AVX512F__)
  auto mask = _mm512_movepi32_mask((__m512i)lanes) & static_cast<__mmask16>((1u << count) - 1);
  auto all = (__m512i)(Ints{COUNTING} + first);
  int found = __builtin_popcount(mask);
  _mm512_mask_storeu_epi32(
      index, static_cast<__mmask16>((1u << found) - 1), _mm512_maskz_compress_epi32(mask, all));
  return found;
#else
  int found = 0;
  for (int j = 0; j < count; ++j) {
    if (lanes[j]) {
      index[found++] = first + j;
    }
  }
  return found;
#endif
}

int block_find(const float* x, int n, float from, float to, int* index) {
  constexpr int stretch = 4 * kWidth; // as much as is passed over at once
  int found = 0;
  for (int start = 0; start < n; start += stretch) {
    int end = least(start + stretch, n);
    Ints inside[4], all{};
    for (int part = 0; part < 4; ++part) {
      Floats v = load(x + start + part * kWidth, end - start - part * kWidth); // -inf behind the end
      inside[part] = (v >= from) & (v <= to);
      all |= inside[part];
    }
    if (!any(all)) {
      continue;
    }
    for (int part = 0; part < 4; ++part) {
      if (any(inside[part])) {
        int first = start + part * kWidth;
        found += append(inside[part], first, least(kWidth, n - first), index + found);
      }
    }
  }
  return found;
}

// Calls widen(j) for all j, in stretches of one cache line of 16-bit values.
template <typename Widen>
INLINE void for_each_half(const uint16_t* x, int n, Widen widen) {
  constexpr int line = 32;
  int start = 0;
  for (; start + line <= n; start += line) {
    __builtin_prefetch(x + start + kAhead);
    for (int j = start; j < start + line; ++j) {
      widen(j);
    }
  }
  for (; start < n; ++start) {
    widen(start);
  }
}

void widen_float16(const uint16_t* x, int n, float* out) {
  for_each_half(x, n, [&](int j) __attribute__((always_inline)) {
    uint32_t h = x[j];
    uint32_t magnitude = (h & 0x7fff) << 13;
    // Rebiasing by a multiplication is exact for subnormals too; infinities and NaN keep theirs.
    float value = __builtin_bit_cast(float, magnitude) * 0x1p112f;
    uint32_t bits =
        (h & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : __builtin_bit_cast(uint32_t, value);
    out[j] = __builtin_bit_cast(float, bits | (h & 0x8000) << 16);
  });
}

void widen_bfloat16(const uint16_t* x, int n, float* out) {
  for_each_half(x, n, [&](int j) __attribute__((always_inline)) {
    out[j] = __builtin_bit_cast(float, static_cast<uint32_t>(x[j]) << 16);
  });
}

#define STRING(x) #x
#define NAME(x) STRING(x)

} // namespace

extern const BlockOps ops;
const BlockOps ops{
    NAME(EXACTSPEC_ISA),
    block_max,
    block_max_weight_sum,
    block_weights,
    block_weight_sum,
    block_residual,
    block_residual_of_logits,
    block_scale,
    block_sum,
    block_overlap,
    block_find,
    block_noisy_argmax,
    widen_float16,
    widen_bfloat16,
};

} // namespace exactspec::EXACTSPEC_ISA
