#include "sampling_inputs.h"

#include <algorithm>
#include <limits>

#include "errors.h"
#include "mlx/ops.h"

namespace exactspec {

namespace {

mx::array parameter(
    const char* op,
    const std::string& name,
    const Parameter& value,
    mx::Dtype dtype,
    const mx::Shape& batch_shape,
    mx::Stream stream) {
  if (auto number = std::get_if<double>(&value)) {
    if (dtype == mx::int32) {
      constexpr double limit = std::numeric_limits<int32_t>::max();
      return mx::array(static_cast<int32_t>(std::clamp(*number, -limit, limit)));
    }
    return mx::array(static_cast<float>(*number));
  }
  const auto& a = std::get<mx::array>(value);
  if (dtype == mx::int32) {
    check_dtype(op, name, a, {mx::int32, mx::uint32});
  } else {
    check_dtype(op, name, a, {mx::float32, mx::float16, mx::bfloat16, mx::int32});
  }
  if (a.ndim() != 0) {
    check_shape(op, name, a, batch_shape);
  }
  return dtype == mx::float32 ? mx::astype(a, dtype, stream) : a;
}

} // namespace

void append_parameters(
    std::vector<mx::array>& inputs,
    const char* op,
    const std::string& name,
    const Sampling& sampling,
    const mx::Shape& batch_shape,
    mx::Stream stream) {
  auto append = [&](const char* field, const Parameter& value, mx::Dtype dtype) {
    inputs.push_back(parameter(op, name + "." + field, value, dtype, batch_shape, stream));
  };
  append("temperature", sampling.temperature, mx::float32);
  append("top_k", sampling.top_k, mx::int32);
  append("top_p", sampling.top_p, mx::float32);
  append("min_p", sampling.min_p, mx::float32);
}

bool may_filter(const Sampling& sampling) {
  auto on = [](const Parameter& value, double low, double high) {
    auto number = std::get_if<double>(&value);
    return !number || (*number > low && *number < high);
  };
  constexpr double inf = std::numeric_limits<double>::infinity();
  return on(sampling.top_k, 0, inf) || on(sampling.top_p, -inf, 1) || on(sampling.min_p, 0, inf);
}

} // namespace exactspec
