// One row of logits on the CPU: its filtered distribution, and a token drawn from it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "block_ops.h"
#include "law.h"
#include "mlx/dtype.h"
#include "sampling_inputs.h"
#include "view.h"

namespace exactspec {

// Logits of one row, read in place.
struct Row {
  const char* data;
  mx::Dtype dtype;
  int64_t stride; // in elements
  int size;
  const int32_t* mask = nullptr; // bit 1 = allowed; null: everything is
  int64_t mask_stride = 0;

  int num_blocks() const { return (size + DRAW_BLOCK - 1) / DRAW_BLOCK; }
  int block_size(int block) const { return std::min<int>(DRAW_BLOCK, size - block * DRAW_BLOCK); }

  // Widens ids [first, first + n) to float32; masked ids become -inf.
  void load(int first, int n, float* out) const;
  // The same in place where the row is float32 already; else in `buffer`.
  const float* block(int first, int n, float* buffer) const {
    if (dtype == mx::float32 && stride == 1 && mask == nullptr) {
      return reinterpret_cast<const float*>(data) + first;
    }
    load(first, n, buffer);
    return buffer;
  }
  float logit(int id) const;
};

// Row `index...` of a [batch..., rows..., V] view, and a [batch..., rows..., ceil(V / 32)] mask.
template <typename... Index>
Row make_row(const View& logits, int b, Index... index) {
  return {
      logits.at<char>(b, index...),
      logits.dtype,
      logits.core_strides.back(),
      static_cast<int>(logits.core_shape.back())};
}
template <typename... Index>
void set_mask(Row& row, const View& bitmask, int b, Index... index) {
  row.mask = bitmask.at<int32_t>(b, index...);
  row.mask_stride = bitmask.core_strides.back();
}

// The parameters of one sequence.
struct RowSampling {
  RowSampling(const SamplingViews& views, Order order, int b);
  // Temperature 1 and no filters: the softmax of the logits as given.
  RowSampling() = default;

  float temperature = 1;
  int top_k = 0;
  float top_p = 1;
  float min_p = 0;
  Order order = Order::TemperatureFirst;

  bool valid() const;
  bool greedy() const { return temperature < LEAST_TEMPERATURE; }
  bool has_filters() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

// A filtered distribution over a row: four scalars and the row give every probability.
struct Distribution {
  float max;
  float temperature; // 1 for a greedy row, which keeps a single id
  float log_norm;
  float cutoff; // kept: logit > cutoff, or logit == cutoff and id <= cutoff_id
  int cutoff_id;
  bool greedy;

  bool keeps(float logit, int id) const {
    return logit > cutoff || (logit == cutoff && id <= cutoff_id);
  }
  // Whether a block with this largest logit may hold a kept id.
  bool may_keep(float block_max) const {
    return block_max >= cutoff && block_max > -std::numeric_limits<float>::infinity();
  }
  float scale() const { return static_cast<float>(1 / std::exp(static_cast<double>(log_norm))); }
  // How the logits of ids from `first` on become weights.
  Weighting weighting(int first) const { return {max, temperature, cutoff, cutoff_id - first}; }
  // Unnormalised weights of ids [first, first + n), from their logits.
  void weights(const float* logits, int first, int n, float* out) const {
    block_ops.weights(logits, n, weighting(first), out);
  }
  float prob(float logit, int id) const;
  float logprob(float logit) const { return (logit - max) / temperature - log_norm; }
};

struct RowSummary {
  bool finite = false; // false: NaN, +inf or no finite logit, and nothing else is set
  Distribution dist{};
  std::vector<float> block_max; // the largest logit of every DRAW_BLOCK
  std::vector<double> block_mass; // weights summed per DRAW_BLOCK; empty: see block_masses

  bool may_keep(int block) const { return dist.may_keep(block_max[block]); }
};

// One pass over the row. With filters the blocks that may hold the last kept ids are read again.
RowSummary summarise(const Row& row, const RowSampling& sampling);

// Of n pairs of rows, in order, with threads woken once for all. done(i, ...) is called once for a pair,
// by any thread; where it returns true, later pairs are needless, though some may be read. Pairs are alike
// in their sizes.
void summarise_pairs(
    int n,
    const std::function<std::pair<Row, Row>(int)>& rows,
    const RowSampling& sampling,
    const RowSampling& other_sampling,
    const std::function<bool(int, RowSummary, RowSummary)>& done);

// Weights summed per DRAW_BLOCK, where they are not known. `block_max` of the summary, if known, tells
// which blocks need not be read.
std::vector<double> block_masses(
    const Row& row, const Distribution& dist, const std::vector<float>& block_max = {});

// The first index whose cumulative mass exceeds u * total, the last of positive mass if rounding
// leaves none, -1 if there is no mass at all. An index of mass 0 is never returned.
template <typename T>
int pick(const T* mass, int n, float u) {
  double total = 0;
  for (int i = 0; i < n; ++i) {
    total += mass[i];
  }
  double threshold = u * total;
  double cumulative = 0;
  int last = -1;
  for (int i = 0; i < n; ++i) {
    if (mass[i] > 0) {
      cumulative += mass[i];
      last = i;
      if (cumulative > threshold) {
        break;
      }
    }
  }
  return last;
}

// Two-level inverse CDF: u[0] chooses the block, u[1] the id inside it. `fill(first, n, out)`
// writes the weights of ids [first, first + n). Returns -1 if there is no mass.
template <typename Fill>
int draw(const std::vector<double>& block_mass, int size, const float* u, Fill&& fill) {
  int block = pick(block_mass.data(), static_cast<int>(block_mass.size()), u[0]);
  if (block < 0) {
    return -1;
  }
  int first = block * DRAW_BLOCK;
  int n = std::min<int>(DRAW_BLOCK, size - first);
  float w[DRAW_BLOCK];
  fill(first, n, w);
  return first + pick(w, n, u[1]);
}

int draw(const Row& row, const RowSummary& summary, const float* u);

// The kept id of the largest (logit - max) / temperature + G(key, position, id) with the Gumbel noise
// of noisy_argmax; the lowest id on ties. A greedy row ignores the noise.
int coupled_choice(
    const Row& row, const RowSummary& summary, std::pair<uint32_t, uint32_t> key, uint32_t position);

// Log-probability of a token of this row: under the filtered distribution, or log-softmax of the
// logits as given, mask ignored.
float token_logprob(
    const Row& row, const RowSummary& summary, const RowSampling& sampling, int token, Logprobs kind);

// Entropy in nats. Reads the row again.
float entropy(const Row& row, const Distribution& dist);

// Calls fn(block) for every block, on several threads where there are many.
void for_each_block(int num_blocks, const std::function<void(int)>& fn);

} // namespace exactspec
