#include "row_cpu.h"

#include <bit>
#include <stdexcept>

#include "threads.h"

namespace exactspec {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
// Handing a block to another thread costs about as much as summing a few of them.
constexpr int kBlocksPerTask = 8;

// Unsigned keys in the order "logit descending, then id ascending" are themselves descending.
uint64_t sort_key(float logit, int id) {
  auto bits = std::bit_cast<uint32_t>(logit + 0.0f); // -0 becomes +0
  bits = bits & 0x80000000 ? ~bits : bits | 0x80000000;
  return static_cast<uint64_t>(bits) << 32 | ~static_cast<uint32_t>(id);
}

float key_logit(uint64_t key) {
  auto bits = static_cast<uint32_t>(key >> 32);
  return std::bit_cast<float>(bits & 0x80000000 ? bits & 0x7fffffff : ~bits);
}

int key_id(uint64_t key) {
  return static_cast<int>(~static_cast<uint32_t>(key));
}

struct Cutoff {
  float logit;
  int id;
};

struct BlockSums {
  std::vector<float> max;
  std::vector<double> mass; // relative to the block's own maximum
  bool finite = true;
};

// Maximum and mass of every block over the ids that `cutoff` keeps, in one pass.
BlockSums sum_blocks(const Row& row, float temperature, Cutoff cutoff, const BlockSums* known) {
  int num_blocks = row.num_blocks();
  BlockSums sums{std::vector<float>(num_blocks, -kInf), std::vector<double>(num_blocks, 0.0)};
  std::vector<char> bad(num_blocks, 0);
  for_each_block(row, [&](int block) {
    if (known && known->max[block] < cutoff.logit) {
      return;
    }
    int first = block * DRAW_BLOCK;
    int n = row.block_size(block);
    float buffer[DRAW_BLOCK];
    bool odd = false;
    const float* x = row.block(first, n, buffer);
    float max = block_ops.max(x, n, &odd);
    bad[block] = odd;
    if (odd || max == -kInf) {
      return;
    }
    sums.max[block] = max;
    sums.mass[block] =
        block_ops.weight_sum(x, n, {max, temperature, cutoff.logit, cutoff.id - first});
  });
  sums.finite = std::find(bad.begin(), bad.end(), 1) == bad.end();
  return sums;
}

// Rescales every block's mass to the row's maximum and returns the total.
double rescale(BlockSums& sums, float max, float temperature) {
  double total = 0;
  for (size_t i = 0; i < sums.mass.size(); ++i) {
    if (sums.mass[i] > 0) {
      // Where even the largest weight counts as 0 there is none to draw.
      float largest;
      block_ops.weights(&sums.max[i], 1, {max, temperature, -kInf, 0}, &largest);
      double factor = std::exp(static_cast<double>((sums.max[i] - max) / temperature));
      sums.mass[i] *= largest > 0 ? factor : 0;
      total += sums.mass[i];
    }
  }
  return total;
}

int first_of_value(const Row& row, const BlockSums& sums, float value) {
  auto block = static_cast<int>(
      std::find(sums.max.begin(), sums.max.end(), value) - sums.max.begin());
  int n = row.block_size(block);
  float x[DRAW_BLOCK];
  row.load(block * DRAW_BLOCK, n, x);
  return block * DRAW_BLOCK + static_cast<int>(std::find(x, x + n, value) - x);
}

// Ids in sorted order, sorted only as far as they are asked for.
class SortedPrefix {
 public:
  // Every id whose logit is at least `floor` (and not -inf).
  SortedPrefix(const Row& row, const BlockSums& sums, float floor) {
    float x[DRAW_BLOCK];
    for (int block = 0; block < row.num_blocks(); ++block) {
      if (sums.max[block] < floor) {
        continue;
      }
      int first = block * DRAW_BLOCK;
      int n = row.block_size(block);
      row.load(first, n, x);
      for (int j = 0; j < n; ++j) {
        if (x[j] >= floor && x[j] > -kInf) {
          keys_.push_back(sort_key(x[j], first + j));
        }
      }
    }
  }

  size_t size() const { return keys_.size(); }

  uint64_t operator[](size_t i) {
    if (i >= sorted_) {
      auto begin = keys_.begin() + sorted_;
      sorted_ = std::min(std::max(4 * sorted_, size_t{64}), keys_.size());
      sorted_ = std::max(sorted_, i + 1);
      auto end = keys_.begin() + sorted_;
      if (end != keys_.end()) {
        std::nth_element(begin, end, keys_.end(), std::greater<>());
      }
      std::sort(begin, end, std::greater<>());
    }
    return keys_[i];
  }

 private:
  std::vector<uint64_t> keys_;
  size_t sorted_ = 0;
};

// The last id that top_k and top_p keep. `total` is the full mass at `temperature`.
Cutoff rank_cutoff(
    const Row& row,
    const RowSampling& sampling,
    const BlockSums& sums,
    float max,
    float temperature,
    double total) {
  bool use_top_p = sampling.top_p > 0 && sampling.top_p < 1;
  bool sequential = sampling.order == Order::Sequential;
  size_t limit = sampling.top_k > 0 ? sampling.top_k : row.size;

  float floor = -kInf;
  if (limit <= sums.max.size()) {
    // k blocks have a maximum at or above this one, so k ids do.
    auto maxima = sums.max;
    std::nth_element(maxima.begin(), maxima.begin() + (limit - 1), maxima.end(), std::greater<>());
    floor = maxima[limit - 1];
  }
  if (use_top_p && !(sequential && sampling.top_k > 0)) {
    // Ids this light cannot add up to the mass that the nucleus leaves out (half, for rounding).
    double tail = 0.5 * (1 - static_cast<double>(sampling.top_p)) * total / row.size;
    floor = std::max(floor, static_cast<float>(max + temperature * std::log(tail)));
  }

  SortedPrefix ids(row, sums, floor);
  limit = std::min(limit, ids.size());
  size_t kept = limit;
  if (use_top_p) {
    auto weight = [&](size_t i) {
      return std::exp(static_cast<double>((key_logit(ids[i]) - max) / temperature));
    };
    if (sequential && sampling.top_k > 0) {
      total = 0;
      for (size_t i = 0; i < limit; ++i) {
        total += weight(i);
      }
    }
    double before = 0;
    for (kept = 0; kept < limit && before < sampling.top_p * total; ++kept) {
      before += weight(kept);
    }
  }
  uint64_t last = ids[std::max(kept, size_t{1}) - 1];
  return {key_logit(last), key_id(last)};
}

// The cutoff of all filters together: each keeps a prefix, so the shortest one wins.
Cutoff filter_cutoff(
    const Row& row,
    const RowSampling& sampling,
    const BlockSums& sums,
    float max,
    float temperature,
    double total) {
  Cutoff cutoff{-kInf, row.size - 1};
  bool use_top_k = sampling.top_k > 0 && sampling.top_k < row.size;
  bool use_top_p = sampling.top_p > 0 && sampling.top_p < 1;
  if (use_top_k || use_top_p) {
    cutoff = rank_cutoff(row, sampling, sums, max, temperature, total);
  }
  if (sampling.min_p > 0) {
    // exp((l - max) / T) >= min_p, solved for l and rounded up to the next float32.
    double exact = max + temperature * std::log(static_cast<double>(sampling.min_p));
    auto logit = static_cast<float>(exact);
    logit = logit < exact ? std::nextafter(logit, kInf) : logit;
    logit = std::min(logit, max);
    if (logit > cutoff.logit) {
      cutoff = {logit, row.size - 1};
    }
  }
  return cutoff;
}

} // namespace

void for_each_block(const Row& row, const std::function<void(int)>& fn) {
  int num_blocks = row.num_blocks();
  parallel_for((num_blocks + kBlocksPerTask - 1) / kBlocksPerTask, [&](int task) {
    int end = std::min(num_blocks, (task + 1) * kBlocksPerTask);
    for (int block = task * kBlocksPerTask; block < end; ++block) {
      fn(block);
    }
  });
}

void Row::load(int first, int n, float* out) const {
  auto itemsize = static_cast<int64_t>(mx::size_of(dtype));
  const char* from = data + first * stride * itemsize;
  if (stride == 1 && dtype == mx::float32) {
    std::copy_n(reinterpret_cast<const float*>(from), n, out);
  } else if (dtype == mx::float32) {
    for (int j = 0; j < n; ++j) {
      out[j] = reinterpret_cast<const float*>(from)[j * stride];
    }
  } else {
    auto bits = reinterpret_cast<const uint16_t*>(from);
    uint16_t packed[DRAW_BLOCK];
    if (stride != 1) {
      for (int j = 0; j < n; ++j) {
        packed[j] = bits[j * stride];
      }
      bits = packed;
    }
    auto widen = dtype == mx::float16 ? block_ops.widen_float16 : block_ops.widen_bfloat16;
    widen(bits, n, out);
  }
  if (mask) {
    for (int j = 0; j < n; ++j) {
      int id = first + j;
      if (!(static_cast<uint32_t>(mask[id / 32 * mask_stride]) >> (id % 32) & 1)) {
        out[j] = -kInf;
      }
    }
  }
}

float Row::logit(int id) const {
  float value;
  load(id, 1, &value);
  return value;
}

RowSampling::RowSampling(const SamplingViews& views, Order order_, int b)
    : temperature(*views.temperature.at<float>(b)),
      top_k(*views.top_k.at<int32_t>(b)),
      top_p(*views.top_p.at<float>(b)),
      min_p(*views.min_p.at<float>(b)),
      order(order_) {
  if (min_p > 1) {
    top_k = 1; // no weight is that large, and one token always stays
  }
}

bool RowSampling::valid() const {
  return temperature >= 0 && temperature < kInf && !std::isnan(top_p) && !std::isnan(min_p);
}

float Distribution::prob(float logit, int id) const {
  float w;
  weights(&logit, id, 1, &w);
  return w * scale();
}

RowSummary summarise(const Row& row, const RowSampling& sampling) {
  RowSummary result;
  bool greedy = sampling.greedy();
  bool filtered = !greedy && sampling.has_filters();
  bool untempered = greedy || (filtered && sampling.order == Order::TemperatureLast);
  float measured = untempered ? 1.0f : sampling.temperature;
  Cutoff all{-kInf, row.size - 1};
  BlockSums sums = sum_blocks(row, measured, all, nullptr);
  float max = *std::max_element(sums.max.begin(), sums.max.end());
  if (!sums.finite || max == -kInf) {
    return result;
  }
  result.finite = true;

  if (greedy) {
    int id = first_of_value(row, sums, max);
    result.dist = {max, 1.0f, 0.0f, max, id, true};
    result.block_mass.assign(row.num_blocks(), 0.0);
    result.block_mass[id / DRAW_BLOCK] = 1;
    return result;
  }

  float temperature = sampling.temperature;
  double total = rescale(sums, max, measured);
  Cutoff cutoff = all;
  if (filtered) {
    cutoff = filter_cutoff(row, sampling, sums, max, measured, total);
    sums = sum_blocks(row, temperature, cutoff, &sums);
    total = rescale(sums, max, temperature);
  }
  auto log_norm = static_cast<float>(std::log(total));
  result.dist = {max, temperature, log_norm, cutoff.logit, cutoff.id, false};
  result.block_mass = std::move(sums.mass);
  return result;
}

int draw(const Row& row, const RowSummary& summary, const float* u) {
  return draw(summary.block_mass, row.size, u, [&](int first, int n, float* w) {
    float x[DRAW_BLOCK];
    row.load(first, n, x);
    summary.dist.weights(x, first, n, w);
  });
}

int coupled_choice(
    const Row& row, const RowSummary& summary, std::pair<uint32_t, uint32_t> key, uint32_t position) {
  const Distribution& dist = summary.dist;
  if (dist.greedy) {
    return dist.cutoff_id;
  }
  struct Best {
    float score = -kInf;
    int id = -1;
  };
  std::vector<Best> best(row.num_blocks());
  for_each_block(row, [&](int block) {
    if (summary.block_mass[block] == 0) {
      return;
    }
    int first = block * DRAW_BLOCK;
    int n = row.block_size(block);
    float buffer[DRAW_BLOCK], g[DRAW_BLOCK];
    const float* x = row.block(first, n, buffer);
    block_ops.gumbel(key.first, key.second, position, first, n, g);
    for (int j = 0; j < n; ++j) {
      float score = (x[j] - dist.max) / dist.temperature + g[j];
      if (dist.keeps(x[j], first + j) && score > best[block].score) {
        best[block] = {score, first + j};
      }
    }
  });
  return std::max_element(
             best.begin(), best.end(), [](auto& a, auto& b) { return a.score < b.score; })
      ->id;
}

float token_logprob(
    const Row& row, const RowSummary& summary, const RowSampling& sampling, int token, Logprobs kind) {
  bool as_given = sampling.temperature == 1 && !sampling.has_filters() && !row.mask;
  if (kind == Logprobs::Filtered || as_given) {
    return summary.dist.logprob(row.logit(token));
  }
  Row given = row;
  given.mask = nullptr;
  RowSummary softmax = summarise(given, RowSampling());
  return softmax.finite ? softmax.dist.logprob(given.logit(token))
                        : std::numeric_limits<float>::quiet_NaN();
}

float entropy(const Row& row, const RowSummary& summary) {
  const Distribution& dist = summary.dist;
  std::vector<double> partial(row.num_blocks(), 0.0);
  for_each_block(row, [&](int block) {
    int first = block * DRAW_BLOCK;
    int n = row.block_size(block);
    float x[DRAW_BLOCK], w[DRAW_BLOCK];
    row.load(first, n, x);
    dist.weights(x, first, n, w);
    for (int j = 0; j < n; ++j) {
      // -log of a weight is (max - l) / T; a weight of 0 adds nothing, also where that is inf.
      partial[block] += w[j] > 0 ? w[j] * ((dist.max - x[j]) / dist.temperature) : 0.0f;
    }
  });
  double sum = 0;
  for (double value : partial) {
    sum += value;
  }
  return static_cast<float>(dist.log_norm + sum * dist.scale());
}

} // namespace exactspec
