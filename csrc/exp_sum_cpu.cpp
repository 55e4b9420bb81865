#include "exp_sum.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "block_ops.h"
#include "law.h"
#include "threads.h"

namespace exactspec {

const char* instruction_set() {
  return block_ops.name;
}

double exp_sum_seconds(int64_t n, int repeats) {
  constexpr int64_t kTask = 16 * DRAW_BLOCK; // as much as is worth handing to another thread
  if (n < 1 || n / kTask >= std::numeric_limits<int>::max()) {
    throw std::invalid_argument("exp_sum_seconds: n: expected 1 to 2**45, got " + std::to_string(n));
  }
  if (repeats < 1) {
    throw std::invalid_argument(
        "exp_sum_seconds: repeats: expected at least 1, got " + std::to_string(repeats));
  }
  std::vector<float> logits(DRAW_BLOCK);
  for (int i = 0; i < DRAW_BLOCK; ++i) {
    logits[i] = 4 * std::sin(1.7f * static_cast<float>(i));
  }
  const Weighting by{4, 0.6f, -std::numeric_limits<float>::infinity(), DRAW_BLOCK};
  auto num_tasks = static_cast<int>((n + kTask - 1) / kTask);
  std::vector<double> sums(num_tasks);
  double least = std::numeric_limits<double>::infinity();
  for (int repeat = 0; repeat < repeats; ++repeat) {
    auto start = std::chrono::steady_clock::now();
    parallel_for(num_tasks, [&](int task) {
      double sum = 0;
      int64_t left = std::min(kTask, n - task * kTask);
      for (; left > 0; left -= DRAW_BLOCK) {
        auto size = static_cast<int>(std::min<int64_t>(left, DRAW_BLOCK));
        sum += block_ops.weight_sum(logits.data(), size, by);
      }
      sums[task] = sum;
    });
    std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    least = std::min(least, seconds.count());
  }
  return least;
}

} // namespace exactspec
