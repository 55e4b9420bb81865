#include "block_ops.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "random.h"

// The compiler vectorises these loops once per instruction set and picks one at load time. Every
// version does the same operations in the same order (no contraction), so the bits agree.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define EXACTSPEC_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EXACTSPEC_CLONES
#endif

namespace exactspec {

namespace {

constexpr int kLanes = 16;
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
constexpr int kChunk = 256; // float32 partial sums stay short, so their error stays below 1e-6

// exp(x) for x <= 0, within 2 ulp; 0 below 2**-126. Cephes-style: 2**k * polynomial(r).
inline __attribute__((always_inline)) float exp_nonpositive(float x) {
  constexpr float magic = 0x1.8p23f; // adding it rounds to an integer in the low mantissa bits
  float clamped = x < -87.3f ? -87.3f : x;
  float shifted = clamped * 0x1.715476p0f + magic;
  float k = shifted - magic;
  float r = clamped - k * 0x1.62e400p-1f;
  r = r - k * 0x1.7f7d1cp-20f;
  // Taylor coefficients; |r| <= ln(2) / 2 leaves a remainder below 1e-8.
  float poly = 1.0f / 5040;
  poly = poly * r + 1.0f / 720;
  poly = poly * r + 1.0f / 120;
  poly = poly * r + 1.0f / 24;
  poly = poly * r + 1.0f / 6;
  poly = poly * r + 0.5f;
  poly = poly * r + 1.0f;
  poly = poly * r + 1.0f;
  auto exponent = (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(magic) + 127) << 23;
  float y = poly * std::bit_cast<float>(exponent);
  return x < -87.3f ? 0.0f : y;
}

// log(y) for a normal y > 0, within 2 ulp away from 1: 2 artanh(s) of the mantissa in [0.7, 1.4).
inline __attribute__((always_inline)) float log_positive(float y) {
  auto bits = std::bit_cast<int32_t>(y);
  int32_t k = (bits - 0x3f3504f3) >> 23;
  float m = std::bit_cast<float>(bits - (k << 23));
  float s = (m - 1.0f) / (m + 1.0f);
  float s2 = s * s;
  float poly = s2 * (s2 * (s2 * (s2 / 9 + 1.0f / 7) + 1.0f / 5) + 1.0f / 3);
  return static_cast<float>(k) * 0x1.62e430p-1f + (2.0f * s + 2.0f * s * poly);
}

// -log(-log1p(-x)) of the uniform x that a random word stands for.
inline __attribute__((always_inline)) float gumbel(uint32_t word) {
  float x = static_cast<float>(word) * 0x1p-32f + 0x1p-33f;
  x = x < 0x1.fffffep-1f ? x : 0x1.fffffep-1f;
  // Near 0 log(1 - x) would lose the low bits of x: six terms of its series are within 1e-8.
  float series = x * (1 + x * (1.0f / 2 + x * (1.0f / 3 + x * (1.0f / 4 + x * (1.0f / 5 + x / 6)))));
  float e = x < 0x1p-4f ? series : -log_positive(1.0f - x);
  return -log_positive(e);
}

} // namespace

EXACTSPEC_CLONES
float block_max(const float* x, int n, bool* bad) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  Floats lane = Floats{} - inf;
  Ints odd{};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Floats v;
    std::memcpy(&v, x + i, sizeof(v));
    lane = v > lane ? v : lane;
    odd |= v != v;
  }
  float max = -inf;
  for (; i < n; ++i) {
    max = x[i] > max ? x[i] : max;
    *bad |= x[i] != x[i];
  }
  for (int j = 0; j < kLanes; ++j) {
    max = lane[j] > max ? lane[j] : max;
    *bad |= odd[j] != 0;
  }
  *bad |= max == inf;
  return max;
}

EXACTSPEC_CLONES
void block_weights(
    const float* x, int n, float max, float temperature, float cutoff, int last, float* w) {
  for (int j = 0; j < n; ++j) {
    float y = exp_nonpositive((x[j] - max) / temperature);
    bool kept = (x[j] > cutoff) | ((x[j] == cutoff) & (j <= last));
    w[j] = kept ? y : 0.0f;
  }
}

EXACTSPEC_CLONES
void block_residual(float* w, float scale, const float* draft, int n) {
  for (int j = 0; j < n; ++j) {
    float r = w[j] * scale - draft[j];
    w[j] = r > 0.0f ? r : 0.0f;
  }
}

EXACTSPEC_CLONES
void block_scale(float* w, float scale, int n) {
  for (int j = 0; j < n; ++j) {
    w[j] *= scale;
  }
}

EXACTSPEC_CLONES
void block_gumbel(uint32_t key0, uint32_t key1, uint32_t position, int first, int n, float* g) {
  for (int start = 0; start < n; start += kChunk) {
    uint32_t words[2][kChunk / 2];
    for (int j = 0; j < kChunk / 2; ++j) {
      auto id = static_cast<uint32_t>(first + start) / 2 + static_cast<uint32_t>(j);
      auto pair = threefry2x32(key0, key1, position, id);
      words[0][j] = pair.first;
      words[1][j] = pair.second;
    }
    float noise[kChunk];
    for (int j = 0; j < kChunk / 2; ++j) {
      noise[2 * j] = gumbel(words[0][j]);
      noise[2 * j + 1] = gumbel(words[1][j]);
    }
    std::copy_n(noise, std::min(kChunk, n - start), g + start);
  }
}

EXACTSPEC_CLONES
double block_sum(const float* w, int n) {
  double total = 0;
  for (int start = 0; start < n; start += kChunk) {
    int end = std::min(start + kChunk, n);
    float lane[kLanes] = {};
    int i = start;
    for (; i + kLanes <= end; i += kLanes) {
      for (int j = 0; j < kLanes; ++j) {
        lane[j] += w[i + j];
      }
    }
    for (; i < end; ++i) {
      lane[0] += w[i];
    }
    for (int j = 0; j < kLanes; ++j) {
      total += lane[j];
    }
  }
  return total;
}

EXACTSPEC_CLONES
double block_overlap(const float* a, const float* b, int n) {
  double total = 0;
  for (int j = 0; j < n; ++j) {
    total += a[j] < b[j] ? a[j] : b[j];
  }
  return total;
}

EXACTSPEC_CLONES
void widen_float16(const uint16_t* x, int n, float* out) {
  for (int j = 0; j < n; ++j) {
    uint32_t h = x[j];
    uint32_t magnitude = (h & 0x7fff) << 13;
    // Rebiasing by a multiplication is exact for subnormals too; infinities and NaN keep theirs.
    float value = std::bit_cast<float>(magnitude) * 0x1p112f;
    uint32_t bits = (h & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : std::bit_cast<uint32_t>(value);
    out[j] = std::bit_cast<float>(bits | (h & 0x8000) << 16);
  }
}

EXACTSPEC_CLONES
void widen_bfloat16(const uint16_t* x, int n, float* out) {
  for (int j = 0; j < n; ++j) {
    out[j] = std::bit_cast<float>(static_cast<uint32_t>(x[j]) << 16);
  }
}

} // namespace exactspec
