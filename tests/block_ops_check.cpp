// Checks every function of one instruction set's BlockOps against plain loops in double, on random
// blocks. Prints the failures, then "HASH" of all results: it is the same for all instruction sets with a
// fused multiply-add. Compiled once per instruction set: EXACTSPEC_ISA is its namespace. Inputs come from
// integer arithmetic, so that they are the same with every C library.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "block_ops.h"
#include "random.h"

namespace exactspec::EXACTSPEC_ISA {
extern const BlockOps ops;
}

using exactspec::Weighting;

namespace {

const exactspec::BlockOps& ops = exactspec::EXACTSPEC_ISA::ops;
constexpr int kMax = 2048;
constexpr float kInf = INFINITY;
int failures = 0;
uint64_t hash = 0xcbf29ce484222325;
uint64_t state = 1;

#define CHECK(condition, ...) \
  if (!(condition) && ++failures <= 20) { \
    printf("line %d: %s: ", __LINE__, #condition); \
    printf(__VA_ARGS__); \
    printf("\n"); \
  }

void add_to_hash(const void* data, size_t size) {
  for (size_t i = 0; i < size; ++i) {
    hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3;
  }
}

uint32_t next() {
  state = state * 6364136223846793005 + 1442695040888963407;
  return static_cast<uint32_t>(state >> 32);
}

int below(int n) {
  return static_cast<int>(next() % static_cast<uint32_t>(n));
}

float uniform() {
  return static_cast<float>(next() >> 8) * 0x1p-24f;
}

// About normal.
float normal() {
  return (uniform() + uniform() + uniform() + uniform() - 2) * 1.7f;
}

struct Block {
  int n;
  // Values end where the array does, so that reading on is noticed by tools.
  float x[kMax];
  Weighting by;
};

void fill(Block& b, int n, float temperature) {
  b.n = n;
  bool coarse = below(3) == 0; // many ties
  float max = -kInf;
  for (int i = 0; i < n; ++i) {
    float v = normal() * 4;
    b.x[i] = below(40) == 0 ? -kInf : coarse ? static_cast<float>(static_cast<int>(v)) : v;
    max = b.x[i] > max ? b.x[i] : max;
  }
  max = max == -kInf ? 1 : max;
  float above = below(2) == 0 ? 0 : uniform() * 3; // of another block
  float cutoffs[] = {-kInf, n > 0 ? b.x[below(n)] : 0, max, max + 9, -1};
  b.by = {max + above, temperature, cutoffs[below(5)], below(n + 3) - 1};
}

bool keeps(const Weighting& by, float x, int i) {
  return x > by.cutoff || (x == by.cutoff && i <= by.last);
}

double distance(const Weighting& by, float x) {
  return static_cast<double>(x - by.max) / static_cast<double>(by.temperature);
}

bool close(double got, double wanted, double tolerance) {
  return fabs(got - wanted) <= tolerance * fabs(wanted) + 1e-36;
}

void check_weights(Block& b) {
  float w[kMax + 1];
  w[b.n] = -7;
  ops.weights(b.x, b.n, b.by, w);
  CHECK(w[b.n] == -7, "written behind the end");
  add_to_hash(w, sizeof(float) * b.n);
  double sum = 0;
  for (int i = 0; i < b.n; ++i) {
    double d = distance(b.by, b.x[i]);
    double wanted = keeps(b.by, b.x[i], i) ? exp(d) : 0;
    // Without a fused multiply-add the exponent is rounded.
    double tolerance = HAS_FMA ? 2.5e-7 : 2.5e-7 + 1.2e-7 * fabs(d);
    if (wanted < 0x1p-126 * (1 - 1e-4)) {
      CHECK(w[i] == 0, "%g for %g", w[i], wanted);
    } else if (wanted > 0x1p-126 * (1 + 1e-4)) {
      CHECK(fabs(w[i] / wanted - 1) <= tolerance, "%.9g for %.9g", w[i], wanted);
    }
    sum += w[i];
  }
  double got = ops.weight_sum(b.x, b.n, b.by);
  CHECK(close(got, sum, 1e-6), "%.9g for %.9g", got, sum);
  add_to_hash(&got, sizeof(got));
}

void check_max(Block& b) {
  bool bad = false;
  float wanted = -kInf;
  double sum = 0;
  for (int i = 0; i < b.n; ++i) {
    wanted = b.x[i] > wanted ? b.x[i] : wanted;
  }
  CHECK(ops.max(b.x, b.n, &bad) == wanted && !bad, "%g", wanted);
  Weighting by = {b.by.max, b.by.temperature, -kInf, b.n};
  if (b.n > 0 && below(2) == 0) { // any value may be the reference
    float reference = b.x[below(b.n)];
    by.max = reference > -kInf && (wanted - reference) / by.temperature < 40 ? reference : by.max;
  }
  float w[kMax];
  ops.weights(b.x, b.n, by, w);
  for (int i = 0; i < b.n; ++i) {
    sum += w[i];
  }
  float max = 0;
  double got = ops.max_weight_sum(b.x, b.n, by, &max);
  CHECK(max == wanted, "%g for %g", max, wanted);
  CHECK(close(got, sum, 1e-6), "%.9g for %.9g", got, sum);
  add_to_hash(&got, sizeof(got));
  if (b.n > 0) {
    int at = below(b.n);
    float old = b.x[at];
    b.x[at] = NAN;
    CHECK(isnan(ops.max_weight_sum(b.x, b.n, by, &max)), "NaN at %d of %d", at, b.n);
    ops.max(b.x, b.n, &bad);
    CHECK(bad, "NaN at %d of %d", at, b.n);
    b.x[at] = kInf;
    bad = false;
    ops.max(b.x, b.n, &bad);
    ops.max_weight_sum(b.x, b.n, by, &max);
    CHECK(bad && max == kInf, "inf at %d of %d", at, b.n);
    b.x[at] = old;
  }
}

void check_residual(Block& b, const Block& draft) {
  float w[kMax], d[kMax], out[kMax + 1], again[kMax + 1];
  float scale = 0.05f + uniform(), draft_scale = 0.05f + uniform();
  ops.weights(b.x, b.n, b.by, w);
  ops.weights(draft.x, b.n, draft.by, d);
  ops.scale(d, draft_scale, b.n);
  out[b.n] = again[b.n] = -7;
  double sum = ops.residual(b.x, b.n, b.by, scale, d, out);
  double same =
      ops.residual_of_logits(b.x, b.by, scale, draft.x, draft.by, draft_scale, b.n, again);
  CHECK(out[b.n] == -7 && again[b.n] == -7, "written behind the end");
  double wanted = 0, overlap = 0;
  for (int i = 0; i < b.n; ++i) {
    float t = w[i] * scale;
    float left = t > d[i] ? t - d[i] : 0;
    CHECK(out[i] == left && again[i] == left, "%g and %g for %g", out[i], again[i], left);
    wanted += left;
    overlap += t < d[i] ? t : d[i];
  }
  CHECK(close(sum, wanted, 1e-6), "%.9g for %.9g", sum, wanted);
  CHECK(same == sum, "%.9g for %.9g", same, sum);
  CHECK(ops.residual(b.x, b.n, b.by, scale, d, nullptr) == sum, "without an output");
  CHECK(
      ops.residual_of_logits(b.x, b.by, scale, draft.x, draft.by, draft_scale, b.n, nullptr) == sum,
      "without an output");
  CHECK(close(ops.sum(out, b.n), wanted, 1e-6), "%.9g", wanted);
  ops.scale(w, scale, b.n);
  double got = ops.overlap(w, d, b.n);
  CHECK(close(got, overlap, 1e-6), "%.9g for %.9g", got, overlap);
  add_to_hash(&sum, sizeof(sum));
  add_to_hash(&got, sizeof(got));
}

void check_find(const Block& b) {
  int index[kMax + 1], found = 0;
  float ends[] = {b.by.max - 6 * uniform(), b.by.max, b.n > 0 ? b.x[below(b.n)] : 0, -9.0f};
  float from = ends[below(4)], to = ends[below(4)];
  from = from > -kInf ? from : -3e38f;
  index[b.n] = -7;
  int got = ops.find(b.x, b.n, from, to, index);
  CHECK(index[b.n] == -7, "written behind the end");
  for (int i = 0; i < b.n; ++i) {
    if (b.x[i] >= from && b.x[i] <= to) {
      CHECK(found < got && index[found] == i, "%d is %d", found, index[found]);
      ++found;
    }
  }
  CHECK(got == found, "%d for %d", got, found);
}

double gumbel(uint32_t key0, uint32_t key1, uint32_t position, uint32_t id) {
  auto words = exactspec::threefry2x32(key0, key1, position, id / 2);
  double u = (id % 2 == 0 ? words.first : words.second) * 0x1p-32 + 0x1p-33;
  return -log(-log1p(-u));
}

void check_noisy_argmax(const Block& b) {
  uint32_t key0 = next(), key1 = next(), position = next();
  int first = 2 * below(1000);
  double score[kMax];
  int best = -1;
  float largest = -kInf;
  for (int i = 0; i < b.n; ++i) {
    score[i] = distance(b.by, b.x[i]) + gumbel(key0, key1, position, first + i);
    largest = b.x[i] > largest ? b.x[i] : largest;
    if (keeps(b.by, b.x[i], i) && static_cast<float>(score[i]) > -kInf && (best < 0 || score[i] > score[best])) {
      best = i;
    }
  }
  auto call = [&](float* from) {
    return ops.noisy_argmax(b.x, b.n, b.by, largest, key0, key1, position, first, from);
  };
  float reached = -kInf;
  int got = call(&reached);
  CHECK((got >= 0) == (best >= 0), "%d for %d", got, best);
  if (got < 0 || best < 0) {
    return;
  }
  double error = 2e-6 + 2e-7 * fabs(score[best]);
  CHECK(keeps(b.by, b.x[got], got), "%d is not kept", got);
  CHECK(score[got] >= score[best] - 2 * error, "%.9g for %.9g", score[got], score[best]);
  CHECK(fabs(reached - score[got]) <= error, "%.9g for %.9g", reached, score[got]);
  float lower = nextafterf(reached, -kInf);
  CHECK(call(&lower) == got && lower == reached, "from the next lower score: %.9g", lower);
  CHECK(call(&reached) == -1, "no score is larger than the largest");
}

void check_widening() {
  uint16_t bits[kMax];
  float half[kMax], brain[kMax];
  for (int start = 0; start < 0x10000; start += kMax) {
    for (int i = 0; i < kMax; ++i) {
      bits[i] = static_cast<uint16_t>(start + i);
    }
    ops.widen_float16(bits, kMax, half);
    ops.widen_bfloat16(bits, kMax, brain);
    for (int i = 0; i < kMax; ++i) {
      int exponent = bits[i] >> 10 & 31, mantissa = bits[i] & 1023;
      double wanted = exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, exponent - 25);
      wanted = exponent < 31 ? wanted : mantissa == 0 ? static_cast<double>(kInf) : NAN;
      wanted = bits[i] & 0x8000 ? -wanted : wanted;
      CHECK(isnan(wanted) ? isnan(half[i]) : half[i] == wanted, "%g for %g", half[i], wanted);
      uint32_t word;
      memcpy(&word, &brain[i], sizeof(word));
      CHECK(word == static_cast<uint32_t>(bits[i]) << 16, "%x for %x", word, bits[i]);
    }
  }
}

} // namespace

int main() {
  const int sizes[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 255, 256, 257, 300, 2047, 2048};
  const float temperatures[] = {1e-37f, 0.02f, 0.6f, 1, 1.7f, 1e30f};
  static Block target, draft;
  for (int round = 0; round < ROUNDS; ++round) {
    int n = sizes[round % 20];
    fill(draft, n, temperatures[below(6)]);
    fill(target, n, temperatures[below(6)]);
    check_weights(target);
    check_max(target);
    check_residual(target, draft);
    check_find(target);
    check_noisy_argmax(target);
  }
  check_widening();
  printf("%d failures\nhash %016llx\n", failures, static_cast<unsigned long long>(hash));
  return failures > 0;
}
