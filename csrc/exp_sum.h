#pragma once

#include <cstdint>

namespace exactspec {

// Of the vector loops that this machine runs.
const char* instruction_set();

// Seconds for the weights of n cached logits and their sum on all threads: the least of `repeats`.
double exp_sum_seconds(int64_t n, int repeats);

} // namespace exactspec
