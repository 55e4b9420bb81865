#include "draft_row_cpu.h"

namespace exactspec {

void DraftViews::sort_columns() {
  if (!has_vocab) {
    return;
  }
  columns.resize(vocab.core_shape.back());
  for (size_t i = 0; i < columns.size(); ++i) {
    columns[i] = {*vocab.at<int32_t>(0, static_cast<int>(i)), static_cast<int>(i)};
  }
  if (!std::is_sorted(columns.begin(), columns.end())) {
    std::sort(columns.begin(), columns.end());
  }
}

bool DraftViews::can_produce(int b, int row, int token, int vocab_size) const {
  if (token < 0) {
    return false;
  }
  if (kind == DraftKind::Dense && has_vocab) {
    auto found = std::lower_bound(columns.begin(), columns.end(), Entry{token, 0});
    return found != columns.end() && found->id == token;
  }
  if (kind == DraftKind::Dense) {
    return token < rows.core_shape.back();
  }
  if (kind == DraftKind::Sparse && token >= vocab_size) {
    for (int i = 0; i < rows.core_shape.back(); ++i) {
      if (*rows.at<int32_t>(b, row, i) == token) {
        return true;
      }
    }
  }
  return token < vocab_size;
}

DraftRow::DraftRow(
    const DraftViews& views, const RowSampling& sampling, int b, int row, int token)
    : views_(views), token_(token) {
  if (views_.kind == DraftKind::Dense) {
    row_ = make_row(views_.rows, b, row);
    read_dense(sampling, b, row);
  } else if (views_.kind == DraftKind::Sparse) {
    read_sparse(b, row);
  }
}

DraftRow::DraftRow(const DraftViews& views, const Row& row, RowSummary summary)
    : views_(views), row_(row) {
  take(std::move(summary));
}

void DraftRow::take(RowSummary summary) {
  finite_ = summary.finite;
  dist_ = summary.dist;
  block_mass_ = std::move(summary.block_mass);
}

float DraftRow::prob(int token) const {
  if (views_.kind == DraftKind::OneHot) {
    return token == token_ ? 1.0f : 0.0f;
  }
  if (views_.kind == DraftKind::Dense && !views_.has_vocab) {
    return dist_.prob(row_->logit(token), token);
  }
  float sum = 0;
  auto from = std::lower_bound(entries().begin(), entries().end(), Entry{token, 0});
  for (; from != entries().end() && from->id == token; ++from) {
    sum += entry_prob(*from);
  }
  return sum;
}

void DraftRow::load(int first, int n, float* out) const {
  if (views_.kind == DraftKind::Dense && !views_.has_vocab) {
    int inside = std::clamp(row_->size - first, 0, n);
    float x[DRAW_BLOCK];
    row_->load(first, inside, x);
    dist_.weights(x, first, inside, out);
    block_ops.scale(out, dist_.scale(), inside);
    std::fill(out + inside, out + n, 0.0f);
    return;
  }
  std::fill(out, out + n, 0.0f);
  if (views_.kind == DraftKind::OneHot) {
    if (token_ >= first && token_ < first + n) {
      out[token_ - first] = 1;
    }
    return;
  }
  auto from = std::lower_bound(entries().begin(), entries().end(), Entry{first, 0});
  for (; from != entries().end() && from->id < first + n; ++from) {
    out[from->id - first] += entry_prob(*from);
  }
}

double DraftRow::residual(
    const Row& target_row,
    const Distribution& target,
    float scale,
    float taken,
    int first,
    int n,
    float* out) const {
  float target_buffer[DRAW_BLOCK], draft_buffer[DRAW_BLOCK];
  const float* x = target_row.block(first, n, target_buffer);
  bool by_column = views_.kind == DraftKind::Dense && !views_.has_vocab;
  if (by_column && first + n <= row_->size) {
    return block_ops.residual_of_logits(
        x,
        target.weighting(first),
        scale,
        row_->block(first, n, draft_buffer),
        dist_.weighting(first),
        taken * dist_.scale(),
        n,
        out);
  }
  load(first, n, draft_buffer);
  if (taken != 1) {
    block_ops.scale(draft_buffer, taken, n);
  }
  return block_ops.residual(x, n, target.weighting(first), scale, draft_buffer, out);
}

double DraftRow::mass_without(const std::vector<int>& ids) {
  auto has = [&](int id) { return std::find(ids.begin(), ids.end(), id) != ids.end(); };
  double sum = 0;
  if (views_.kind != DraftKind::Dense) {
    for (const Entry& entry : sparse_) {
      sum += has(entry.id) ? 0 : probs_[entry.column];
    }
    return sum;
  }
  std::vector<int> columns = ids;
  if (views_.has_vocab) {
    columns.clear();
    for (int id : ids) {
      auto from = std::lower_bound(entries().begin(), entries().end(), Entry{id, 0});
      for (; from != entries().end() && from->id == id; ++from) {
        columns.push_back(from->column);
      }
    }
  }
  if (block_mass_.empty()) {
    block_mass_ = block_masses(*row_, dist_);
  }
  for (int block = 0; block < row_->num_blocks(); ++block) {
    int first = block * DRAW_BLOCK;
    int n = row_->block_size(block);
    auto inside = [&](int column) { return column >= first && column < first + n; };
    if (std::none_of(columns.begin(), columns.end(), inside)) {
      sum += block_mass_[block];
      continue;
    }
    float x[DRAW_BLOCK], w[DRAW_BLOCK];
    row_->load(first, n, x);
    dist_.weights(x, first, n, w);
    for (int column : columns) {
      if (inside(column)) {
        w[column - first] = 0;
      }
    }
    sum += block_ops.sum(w, n);
  }
  return sum * dist_.scale();
}

float DraftRow::largest() const {
  if (views_.kind == DraftKind::Dense) {
    return dist_.scale();
  }
  float largest = views_.kind == DraftKind::OneHot;
  for (const Entry& entry : sparse_) {
    largest = std::max(largest, probs_[entry.column]);
  }
  return std::min(largest, 1.0f); // the mass may be up to MAX_SPARSE_MASS
}

float DraftRow::entropy() const {
  if (views_.kind == DraftKind::OneHot) {
    return 0;
  }
  if (views_.kind == DraftKind::Dense && !views_.has_vocab) {
    return exactspec::entropy(*row_, dist_);
  }
  double sum = 0;
  for (size_t i = 0; i < entries().size();) {
    double prob = 0;
    size_t next = i;
    for (; next < entries().size() && entries()[next].id == entries()[i].id; ++next) {
      prob += entry_prob(entries()[next]);
    }
    sum -= prob > 0 ? prob * std::log(prob) : 0;
    i = next;
  }
  return static_cast<float>(sum);
}

float DraftRow::entry_prob(const Entry& entry) const {
  return views_.kind == DraftKind::Dense ? dist_.prob(row_->logit(entry.column), entry.column)
                                         : probs_[entry.column];
}

void DraftRow::read_dense(const RowSampling& sampling, int b, int row) {
  if (!views_.has_stats) {
    take(summarise(*row_, sampling));
    return;
  }
  float stat[NUM_ROW_STATS];
  for (int i = 0; i < NUM_ROW_STATS; ++i) {
    stat[i] = *views_.stats.at<float>(b, row, i);
    finite_ = finite_ && !std::isnan(stat[i]);
  }
  if (finite_) {
    bool greedy = sampling.greedy();
    dist_ = {
        stat[STAT_MAX],
        greedy ? 1.0f : sampling.temperature,
        stat[STAT_LOG_NORM],
        stat[STAT_CUTOFF],
        static_cast<int>(std::clamp(stat[STAT_CUTOFF_ID], 0.0f, MAX_CUTOFF_ID)),
        greedy};
  }
}

void DraftRow::read_sparse(int b, int row) {
  auto support = static_cast<int>(views_.rows.core_shape.back());
  probs_.resize(support);
  double mass = 0;
  for (int i = 0; i < support; ++i) {
    int id = *views_.rows.at<int32_t>(b, row, i);
    if (id < 0) {
      continue; // padding
    }
    float prob = *views_.probs.at<float>(b, row, i);
    finite_ = finite_ && prob >= 0 && std::isfinite(prob);
    probs_[i] = prob;
    mass += prob;
    sparse_.push_back({id, i});
  }
  finite_ = finite_ && mass <= MAX_SPARSE_MASS;
  std::sort(sparse_.begin(), sparse_.end());
}

} // namespace exactspec
