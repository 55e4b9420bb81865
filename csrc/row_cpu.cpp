#include "row_cpu.h"

#include <atomic>
#include <bit>
#include <mutex>
#include <numeric>
#include <optional>

#include "threads.h"

namespace exactspec {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
// A block takes a third of a microsecond or more, waking a thread several, and in a virtual machine 50.
constexpr int kBlocksPerTask = 8;
constexpr int kFewBlocks = 96; // not worth another thread
constexpr int kPiece = 256; // ids of a block whose maximum a search for many of the largest needs

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

// Whether an id of this logit has a weight: below 2**-126 it counts as 0.
bool has_weight(float logit, float max, float temperature) {
  float w = 1;
  if ((logit - max) / temperature < -80) {
    block_ops.weights(&logit, 1, {max, temperature, -kInf, 0}, &w);
  }
  return w > 0;
}

float measured_temperature(const RowSampling& sampling) {
  bool untempered = sampling.greedy() ||
      (sampling.has_filters() && measures_untempered(sampling.order));
  return untempered ? 1.0f : sampling.temperature;
}

bool uses_top_k(const RowSampling& sampling, const Row& row) {
  return sampling.top_k > 0 && sampling.top_k < row.size;
}

// The smallest logit that min_p keeps: exp((l - max) / T) >= min_p, solved for l and rounded up to the
// next float32.
float min_p_logit(const RowSampling& sampling, float max, float temperature) {
  if (!(sampling.min_p > 0)) {
    return -kInf;
  }
  double exact = max + temperature * std::log(static_cast<double>(sampling.min_p));
  auto logit = static_cast<float>(exact);
  logit = logit < exact ? std::nextafter(logit, kInf) : logit;
  return std::min(logit, max);
}

// Maximum and mass of every block of a row, whose parts may be read by several threads.
class BlockSums {
 public:
  BlockSums(const Row& row, const RowSampling& sampling)
      : max(row.num_blocks()),
        mass(row.num_blocks()),
        row_(row),
        temperature_(measured_temperature(sampling)) {
    int num_pieces = (row.size + kPiece - 1) / kPiece;
    // Where k ids are to be found in fewer blocks, in each of many pieces there is hardly more than one.
    if (uses_top_k(sampling, row) && sampling.top_k > row.num_blocks() &&
        sampling.top_k <= num_pieces / 2) {
      piece_max_.resize(num_pieces);
    }
    // Masses are relative to a logit of the row, so no block has to be read for its maximum first.
    for (int block = 0; block < row.num_blocks() && reference_ == -kInf; ++block) {
      float buffer[DRAW_BLOCK];
      bool bad = false;
      int n = row.block_size(block);
      reference_ = block_ops.max(row.block(block * DRAW_BLOCK, n, buffer), n, &bad);
    }
  }

  void read(int block) {
    int n = row_.block_size(block);
    float buffer[DRAW_BLOCK];
    const float* x = row_.block(block * DRAW_BLOCK, n, buffer);
    auto sum = [&](float reference) {
      mass[block] =
          block_ops.max_weight_sum(x, n, {reference, temperature_, -kInf, n}, &max[block]);
    };
    sum(reference_);
    if (is_far(block)) {
      sum(max[block]);
    }
    for (int i = 0; i < n && !piece_max_.empty(); i += kPiece) {
      bool bad = false; // the sum tells
      piece_max_[(block * DRAW_BLOCK + i) / kPiece] =
          block_ops.max(x + i, std::min(kPiece, n - i), &bad);
    }
  }

  // After all blocks were read: false for NaN, +inf or no finite logit. Masses become relative to the
  // row's maximum.
  bool finish() {
    row_max = *std::max_element(max.begin(), max.end());
    auto is_nan = [](double x) { return std::isnan(x); };
    if (!std::isfinite(row_max) || std::any_of(mass.begin(), mass.end(), is_nan)) {
      return false;
    }
    double common = factor(reference_);
    total = 0;
    for (size_t i = 0; i < mass.size(); ++i) {
      // Where even the largest weight counts as 0 there is none to draw.
      bool any = max[i] > -kInf && has_weight(max[i], row_max, temperature_);
      mass[i] *= !any ? 0 : is_far(i) ? factor(max[i]) : common;
      total += mass[i];
    }
    return true;
  }

  // What the search for a few ids reads: maxima of spans of ids.
  const std::vector<float>& span_max() const { return piece_max_.empty() ? max : piece_max_; }
  int span() const { return piece_max_.empty() ? DRAW_BLOCK : kPiece; }

  std::vector<float> max;
  std::vector<double> mass;
  float row_max = -kInf;
  double total = 0;

 private:
  // Whether weights relative to the reference would be too large for float32.
  bool is_far(size_t block) const { return (max[block] - reference_) / temperature_ > 40; }
  double factor(float reference) const {
    return std::exp(static_cast<double>((reference - row_max) / temperature_));
  }

  const Row& row_;
  float temperature_;
  float reference_ = -kInf;
  std::vector<float> piece_max_; // empty: those of the blocks are enough
};

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
  void add(float logit, int id) { keys_.push_back(sort_key(logit, id)); }

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

struct Prefix {
  Cutoff last; // id
  double mass;
};

// Finds where a prefix of the sorted ids ends. Ids are sorted in bins of equal width in the logit, and
// only those of one bin are compared with one another.
class RankSearch {
 public:
  // Ids below `floor` are in no prefix. `few`: not many others are, so that one bin is enough.
  RankSearch(const Row& row, const BlockSums& sums, float temperature, float floor, bool few)
      : row_(row),
        sums_(sums),
        temperature_(temperature),
        floor_(std::max(floor, std::numeric_limits<float>::lowest())) {
    if (!few) {
      // Without a useful floor, a multiple of the distance to the logit of average weight covers most
      // of a row; the last bin has the rest.
      double spread = 4 * temperature * std::log(row.size / sums.total);
      double range = std::min(static_cast<double>(sums.row_max) - floor_, spread);
      bins_.resize(kBins);
      per_logit_ = static_cast<float>(kBins / std::clamp(range, 1e-30, 1e30));
      fill();
    }
  }

  // Mass of the first `limit` ids.
  double mass(size_t limit) const {
    double sum = 0;
    size_t count = 0;
    for (const Bin& bin : bins_) {
      sum += bin.mass;
      count += bin.count;
    }
    return count > 0 && count <= limit ? sum : shortest(limit, kInf).mass;
  }

  // The shortest prefix that holds `limit` ids or at least this mass.
  Prefix shortest(size_t limit, double wanted) const {
    int chosen = 0;
    double before = 0;
    if (!bins_.empty()) {
      double sum = 0;
      size_t count = 0;
      for (int i = 0; i < kBins && count < limit && sum < wanted; ++i) {
        if (bins_[i].count > 0) {
          chosen = i;
          before = sum;
          sum += bins_[i].mass;
          limit -= std::exchange(count, bins_[i].count);
        }
      }
    }
    SortedPrefix ids = collect(chosen);
    limit = std::min(limit, ids.size());
    size_t kept = 0;
    for (; kept < limit && before < wanted; ++kept) {
      before += std::exp(static_cast<double>((key_logit(ids[kept]) - sums_.row_max) / temperature_));
    }
    uint64_t last = ids[std::max(kept, size_t{1}) - 1];
    return {{key_logit(last), key_id(last)}, before};
  }

 private:
  static constexpr int kBins = 512;
  static constexpr int kParts = 8; // of a row, for threads; not more, as each has bins of its own

  struct Bin {
    double mass = 0;
    size_t count = 0;
  };

  int bin(float logit) const {
    return static_cast<int>(std::min((sums_.row_max - logit) * per_logit_, kBins - 1.0f));
  }

  void fill() {
    int num_blocks = row_.num_blocks();
    int per_part = std::max(8, (num_blocks + kParts - 1) / kParts);
    int num_parts = (num_blocks + per_part - 1) / per_part;
    std::vector<Bin> bins(num_parts * kBins);
    parallel_for(num_parts, [&](int part) {
      int end = std::min(num_blocks, (part + 1) * per_part);
      for (int block = part * per_part; block < end; ++block) {
        if (sums_.max[block] >= floor_) {
          count(block, &bins[part * kBins]);
        }
      }
    });
    for (size_t i = 0; i < bins.size(); ++i) {
      bins_[i % kBins].mass += bins[i].mass;
      bins_[i % kBins].count += bins[i].count;
    }
  }

  void count(int block, Bin* bins) const {
    int n = row_.block_size(block);
    float buffer[DRAW_BLOCK], w[DRAW_BLOCK];
    int index[DRAW_BLOCK];
    const float* x = row_.block(block * DRAW_BLOCK, n, buffer);
    block_ops.weights(x, n, {sums_.row_max, temperature_, floor_, n}, w);
    int found = block_ops.find(x, n, floor_, sums_.row_max, index);
    for (int i = 0; i < found; ++i) {
      Bin& to = bins[bin(x[index[i]])];
      to.mass += w[index[i]];
      to.count += 1;
    }
  }

  SortedPrefix collect(int chosen) const {
    float from = floor_, to = sums_.row_max;
    if (!bins_.empty()) {
      // A little more than the bin, which decides itself.
      float width = 1 / per_logit_;
      from = chosen == kBins - 1 ? floor_ : std::max(floor_, to - width * (chosen + 1.01f));
      to -= width * (chosen - 0.01f);
      float slack = 1e-6f * (std::abs(from) + std::abs(to));
      from = chosen == kBins - 1 ? floor_ : std::max(floor_, from - slack);
      to += slack;
    }
    SortedPrefix ids;
    for (size_t i = 0; i < sums_.span_max().size(); ++i) {
      if (sums_.span_max()[i] < from) {
        continue;
      }
      int first = static_cast<int>(i) * sums_.span();
      int n = std::min(sums_.span(), row_.size - first);
      float buffer[DRAW_BLOCK];
      int index[DRAW_BLOCK];
      const float* x = row_.block(first, n, buffer);
      int found = block_ops.find(x, n, from, to, index);
      for (int j = 0; j < found; ++j) {
        float logit = x[index[j]];
        if (bins_.empty() || bin(logit) == chosen) {
          ids.add(logit, first + index[j]);
        }
      }
    }
    return ids;
  }

  const Row& row_;
  const BlockSums& sums_;
  float temperature_;
  float floor_;
  float per_logit_ = 0; // bins
  std::vector<Bin> bins_; // none: one bin
};

// The ids that top_k and top_p keep, at the temperature they are measured at; with Order::MinPFirst of
// those at or above `min_p_floor`.
Prefix rank_prefix(
    const Row& row,
    const RowSampling& sampling,
    const BlockSums& sums,
    float temperature,
    float min_p_floor) {
  bool use_top_k = uses_top_k(sampling, row);
  bool use_top_p = sampling.top_p > 0 && sampling.top_p < 1;
  bool min_p_first = sampling.order == Order::MinPFirst && sampling.min_p > 0;
  bool renormalised = use_top_p && (use_top_k || min_p_first) && filters_in_turn(sampling.order);
  size_t limit = use_top_k ? sampling.top_k : row.size;
  double total = sums.total;

  float floor = -kInf;
  bool few = limit <= sums.span_max().size();
  if (few) {
    // k spans have a maximum at or above this one, so k ids do.
    auto maxima = sums.span_max();
    std::nth_element(maxima.begin(), maxima.begin() + (limit - 1), maxima.end(), std::greater<>());
    floor = maxima[limit - 1];
  }
  if (min_p_first) {
    floor = std::max(floor, min_p_floor);
  }
  if (use_top_p && !renormalised) {
    // Ids this light cannot add up to the mass that the nucleus leaves out (half, for rounding).
    double tail = 0.5 * (1 - static_cast<double>(sampling.top_p)) * total / row.size;
    floor = std::max(floor, static_cast<float>(sums.row_max + temperature * std::log(tail)));
  }
  RankSearch search(row, sums, temperature, floor, few);
  if (renormalised) {
    total = search.mass(limit);
  }
  return search.shortest(limit, use_top_p ? sampling.top_p * total : kInf);
}

// The ids that all filters keep: each keeps a prefix, so the shortest one wins. A negative mass is not
// known.
Prefix filtered_prefix(
    const Row& row, const RowSampling& sampling, const BlockSums& sums, float temperature) {
  Prefix prefix{{-kInf, row.size - 1}, sums.total};
  bool use_top_k = uses_top_k(sampling, row);
  bool use_top_p = sampling.top_p > 0 && sampling.top_p < 1;
  float floor = min_p_logit(sampling, sums.row_max, temperature);
  if (use_top_k || use_top_p) {
    prefix = rank_prefix(row, sampling, sums, temperature, floor);
  }
  return floor > prefix.last.logit ? Prefix{{floor, row.size - 1}, -1} : prefix;
}

RowSummary summary_of(const Row& row, const RowSampling& sampling, BlockSums& sums) {
  RowSummary result;
  if (!sums.finish()) {
    return result;
  }
  result.finite = true;
  float max = sums.row_max;
  if (sampling.greedy()) {
    int id = first_of_value(row, sums, max);
    result.dist = {max, 1.0f, 0.0f, max, id, true};
    result.block_mass.assign(row.num_blocks(), 0.0);
    result.block_mass[id / DRAW_BLOCK] = 1;
    result.block_max = std::move(sums.max);
    return result;
  }
  float temperature = sampling.temperature;
  result.dist = {max, temperature, 0.0f, -kInf, row.size - 1, false};
  double total = sums.total;
  if (sampling.has_filters()) {
    float measured = measured_temperature(sampling);
    Prefix prefix = filtered_prefix(row, sampling, sums, measured);
    result.dist.cutoff = prefix.last.logit;
    result.dist.cutoff_id = prefix.last.id;
    result.block_max = std::move(sums.max);
    total = prefix.mass;
    if (measured != temperature || total < 0) {
      result.block_mass = block_masses(row, result.dist, result.block_max);
      total = std::accumulate(result.block_mass.begin(), result.block_mass.end(), 0.0);
    }
  } else {
    result.block_max = std::move(sums.max);
    result.block_mass = std::move(sums.mass);
  }
  result.dist.log_norm = static_cast<float>(std::log(total));
  return result;
}

} // namespace

void for_each_block(int num_blocks, const std::function<void(int)>& fn) {
  if (num_blocks <= kFewBlocks) {
    for (int block = 0; block < num_blocks; ++block) {
      fn(block);
    }
    return;
  }
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
      order(order_) {}

bool RowSampling::valid() const {
  // All comparisons are false for NaN.
  return temperature >= 0 && temperature < kInf && top_p >= 0 && top_p <= 1 && min_p >= 0 &&
      min_p <= 1;
}

float Distribution::prob(float logit, int id) const {
  float w;
  weights(&logit, id, 1, &w);
  return w * scale();
}

RowSummary summarise(const Row& row, const RowSampling& sampling) {
  BlockSums sums(row, sampling);
  for_each_block(row.num_blocks(), [&](int block) { sums.read(block); });
  return summary_of(row, sampling, sums);
}

void summarise_pairs(
    int n,
    const std::function<std::pair<Row, Row>(int)>& rows,
    const RowSampling& sampling,
    const RowSampling& other_sampling,
    const std::function<bool(int, RowSummary, RowSummary)>& done) {
  struct Pair {
    std::once_flag begun;
    std::optional<std::pair<Row, Row>> rows;
    std::optional<BlockSums> sums, other_sums;
    std::atomic<int> blocks_left{0};
  };
  if (n == 0) {
    return;
  }
  std::vector<Pair> pairs(n);
  auto [first, other] = rows(0);
  int num_blocks = first.num_blocks();
  int blocks_of_pair = num_blocks + other.num_blocks();
  std::atomic<int> last{n - 1};
  for_each_block(n * blocks_of_pair, [&](int block) {
    int i = block / blocks_of_pair;
    block %= blocks_of_pair;
    if (i > last) {
      return;
    }
    Pair& pair = pairs[i];
    std::call_once(pair.begun, [&] {
      pair.rows = rows(i);
      pair.sums.emplace(pair.rows->first, sampling);
      pair.other_sums.emplace(pair.rows->second, other_sampling);
      pair.blocks_left = blocks_of_pair;
    });
    block < num_blocks ? pair.sums->read(block) : pair.other_sums->read(block - num_blocks);
    if (--pair.blocks_left == 0 &&
        done(
            i,
            summary_of(pair.rows->first, sampling, *pair.sums),
            summary_of(pair.rows->second, other_sampling, *pair.other_sums))) {
      for (int before = last; i < before && !last.compare_exchange_weak(before, i);) {
      }
    }
  });
}

std::vector<double> block_masses(
    const Row& row, const Distribution& dist, const std::vector<float>& block_max) {
  std::vector<double> mass(row.num_blocks(), 0.0);
  for_each_block(row.num_blocks(), [&](int block) {
    if (block_max.empty() || dist.may_keep(block_max[block])) {
      int first = block * DRAW_BLOCK;
      int n = row.block_size(block);
      float buffer[DRAW_BLOCK];
      const float* x = row.block(first, n, buffer);
      mass[block] = block_ops.weight_sum(x, n, dist.weighting(first));
    }
  });
  return mass;
}

int draw(const Row& row, const RowSummary& summary, const float* u) {
  auto fill = [&](int first, int n, float* w) {
    float buffer[DRAW_BLOCK];
    summary.dist.weights(row.block(first, n, buffer), first, n, w);
  };
  if (!summary.block_mass.empty()) {
    return draw(summary.block_mass, row.size, u, fill);
  }
  return draw(block_masses(row, summary.dist, summary.block_max), row.size, u, fill);
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
  std::atomic<float> reached{-kInf}; // by any block; what cannot reach it, too, is passed over
  for_each_block(row.num_blocks(), [&](int block) {
    if (!summary.may_keep(block)) {
      return;
    }
    int first = block * DRAW_BLOCK;
    int n = row.block_size(block);
    float buffer[DRAW_BLOCK];
    const float* x = row.block(first, n, buffer);
    // A little less, so that every thread finds equal scores.
    float others = reached.load(std::memory_order_relaxed);
    float score = std::nextafter(others, -kInf);
    int argmax = block_ops.noisy_argmax(
        x,
        n,
        dist.weighting(first),
        summary.block_max[block],
        key.first,
        key.second,
        position,
        first,
        &score);
    if (argmax >= 0) {
      best[block] = {score, first + argmax};
      while (others < score && !reached.compare_exchange_weak(others, score)) {
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

float entropy(const Row& row, const Distribution& dist) {
  std::vector<double> partial(row.num_blocks(), 0.0);
  for_each_block(row.num_blocks(), [&](int block) {
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
