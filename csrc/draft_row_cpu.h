// One row of a draft on the CPU, whatever its kind.
#pragma once

#include <optional>
#include <vector>

#include "row_cpu.h"

namespace exactspec {

// A column of a dense draft, or an entry of a sparse one, by the id it stands for.
struct Entry {
  int id;
  int column;
  bool operator<(const Entry& other) const {
    return id != other.id ? id < other.id : column < other.column;
  }
};

struct DraftViews {
  // To be called once, before any row is read.
  void sort_columns();

  // Whether the row has a place for the token at all, whatever its probability there.
  bool can_produce(int b, int row, int token, int vocab_size) const;

  DraftKind kind;
  bool has_vocab, has_stats;
  View rows, probs, vocab, stats;
  std::vector<Entry> columns; // with a vocabulary: in order of their ids
};

// A draft distribution. Its probabilities are those of ids of the target's vocabulary.
class DraftRow {
 public:
  // `token` is where a one-hot draft has its mass; other kinds ignore it.
  DraftRow(const DraftViews& views, const RowSampling& sampling, int b, int row, int token);
  // A dense row without stats that was read before.
  DraftRow(const DraftViews& views, const Row& row, RowSummary summary);

  bool finite() const { return finite_; }

  float prob(int token) const;

  // Probabilities of ids [first, first + n) into out.
  void load(int first, int n, float* out) const;

  // Of ids [first, first + n): max(scale * target - taken * draft, 0), the target unnormalised. Returns
  // the sum; `out` may be null.
  double residual(
      const Row& target_row,
      const Distribution& target,
      float scale,
      float taken,
      int first,
      int n,
      float* out) const;

  // Of everything the draft can produce but the given ids: exactly 0 where nothing else is likely.
  double mass_without(const std::vector<int>& ids);

  // The probability of the likeliest column or entry; repeated ids stay apart.
  float largest() const;

  // In nats, over everything the draft can produce, repeated ids merged.
  float entropy() const;

 private:
  const std::vector<Entry>& entries() const {
    return views_.kind == DraftKind::Dense ? views_.columns : sparse_;
  }
  float entry_prob(const Entry& entry) const;
  void take(RowSummary summary);
  void read_dense(const RowSampling& sampling, int b, int row);
  void read_sparse(int b, int row);

  const DraftViews& views_;
  int token_ = PLACEHOLDER_TOKEN;
  bool finite_ = true;
  std::optional<Row> row_; // dense
  Distribution dist_{};
  std::vector<double> block_mass_; // of dist_'s weights; empty until needed
  std::vector<Entry> sparse_; // sparse: ids in order, with their place in probs_
  std::vector<float> probs_;
};

} // namespace exactspec
