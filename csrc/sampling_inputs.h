// Sampling parameters as inputs of a primitive: four arrays, each one value or one per sequence.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "law.h"
#include "mlx/array.h"
#include "mlx/utils.h"
#include "view.h"

namespace exactspec {

using Parameter = std::variant<double, mx::array>;

struct Sampling {
  Parameter temperature = 1.0;
  Parameter top_k = 0.0;
  Parameter top_p = 1.0;
  Parameter min_p = 0.0;
  Order order = Order::TemperatureFirst;
};

// temperature, top_k, top_p, min_p
constexpr int kNumParameters = 4;

// Appends the four parameters as float32 / int32 arrays. `name` is the argument's, for errors.
void append_parameters(
    std::vector<mx::array>& inputs,
    const char* op,
    const std::string& name,
    const Sampling& sampling,
    const mx::Shape& batch_shape,
    mx::Stream stream);

// Whether a filter is on, or may be: the values of arrays are not known yet.
bool may_filter(const Sampling& sampling);

struct SamplingViews {
  // `first` is the index of the temperature among the inputs.
  SamplingViews(const std::vector<mx::array>& inputs, int first)
      : temperature(inputs[first], 0),
        top_k(inputs[first + 1], 0),
        top_p(inputs[first + 2], 0),
        min_p(inputs[first + 3], 0) {}
  View temperature, top_k, top_p, min_p;
};

} // namespace exactspec
