#include "block_ops.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

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
