// Where a sequence's uniforms come from: given, or generated from its key.
#pragma once

#include <optional>
#include <utility>

#include "errors.h"
#include "random.h"
#include "view.h"

namespace exactspec {

// The noise input after checks: `uniforms` [batch..., count] or `keys` [batch..., 2].
inline mx::array noise_input(
    const char* op,
    const std::optional<mx::array>& uniforms,
    const std::optional<mx::array>& keys,
    Rule rule,
    mx::Shape batch_shape,
    int count) {
  if (uniforms && rule == Rule::Coupled) {
    bad_argument(op, "uniforms", "None with rule='coupled'", "an array");
  }
  if (uniforms.has_value() == keys.has_value()) {
    bad_argument(op, "uniforms, keys", "exactly one of them", keys ? "both" : "neither");
  }
  if (uniforms) {
    check_dtype(op, "uniforms", *uniforms, {mx::float32});
    batch_shape.push_back(count);
    check_shape(op, "uniforms", *uniforms, batch_shape);
    return *uniforms;
  }
  check_dtype(op, "keys", *keys, {mx::uint32});
  batch_shape.push_back(2);
  check_shape(op, "keys", *keys, batch_shape);
  if (count > NOISE_WORDS) {
    bad_argument(
        op,
        "keys",
        "at most " + std::to_string(MAX_KEYED_DRAFTS) + " draft slots with keys",
        std::to_string(count - 2));
  }
  return *keys;
}

// `positions` [batch...] i32 belong to the rule whose noise is a function of them.
inline void check_positions(
    const char* op,
    const std::optional<mx::array>& positions,
    Rule rule,
    const mx::Shape& batch_shape) {
  if (positions.has_value() != (rule == Rule::Coupled)) {
    bad_argument(
        op,
        "positions",
        rule == Rule::Coupled ? "an array with rule='coupled'" : "None without rule='coupled'",
        positions ? describe(positions->shape()) : "None");
  }
  if (positions) {
    check_dtype(op, "positions", *positions, {mx::int32});
    check_shape(op, "positions", *positions, batch_shape);
  }
}

class NoiseView {
 public:
  // `num_coins` coins come before the draw's pair in explicit uniforms.
  NoiseView(const mx::array& input, bool keyed, int num_coins)
      : view_(input, 1), keyed_(keyed), num_coins_(num_coins) {}

  std::pair<uint32_t, uint32_t> key(int b) const {
    return {*view_.at<uint32_t>(b, 0), *view_.at<uint32_t>(b, 1)};
  }

  // Whether all given uniforms are in [0, 1), used or not: NaN is not.
  bool valid(int b) const {
    for (int i = 0; i < num_coins_ + 2 && !keyed_; ++i) {
      float u = *view_.at<float>(b, i);
      if (!(u >= 0 && u < 1)) {
        return false;
      }
    }
    return true;
  }

  float coin(int b, int i) const {
    return keyed_ ? word(b, i) : *view_.at<float>(b, i);
  }

  // The pair that draws a token, whatever the length of the sequence's draft.
  void pair(int b, float* u) const {
    for (int i = 0; i < 2; ++i) {
      u[i] = keyed_ ? word(b, MAX_KEYED_DRAFTS + i) : *view_.at<float>(b, num_coins_ + i);
    }
  }

 private:
  float word(int b, int i) const {
    auto [key0, key1] = key(b);
    return keyed_uniform(key0, key1, i);
  }

  View view_;
  bool keyed_;
  int num_coins_;
};

} // namespace exactspec
