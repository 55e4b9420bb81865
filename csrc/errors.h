// Checks of an operation's arguments: "[op] argument: expected ..., got ...".
#pragma once

#include <algorithm>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace exactspec {

namespace mx = mlx::core;

// What is printed for a shape: [2, 5, 32000].
inline std::string describe(const mx::Shape& shape) {
  std::ostringstream out;
  out << "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    out << (i ? ", " : "") << shape[i];
  }
  out << "]";
  return out.str();
}

// A batch's shape with the axes of one sequence behind it.
inline mx::Shape with(mx::Shape batch_shape, std::initializer_list<int> core) {
  batch_shape.insert(batch_shape.end(), core.begin(), core.end());
  return batch_shape;
}

[[noreturn]] inline void bad_argument(
    const char* op, const std::string& name, const std::string& expected, const std::string& got) {
  std::ostringstream out;
  out << "[" << op << "] " << name << ": expected " << expected << ", got " << got;
  throw std::invalid_argument(out.str());
}

inline void check_dtype(
    const char* op,
    const std::string& name,
    const mx::array& a,
    std::initializer_list<mx::Dtype> allowed) {
  if (std::find(allowed.begin(), allowed.end(), a.dtype()) != allowed.end()) {
    return;
  }
  std::ostringstream expected, got;
  const char* separator = "dtype ";
  for (auto dtype : allowed) {
    expected << separator << dtype;
    separator = " or ";
  }
  got << a.dtype();
  bad_argument(op, name, expected.str(), got.str());
}

inline void check_shape(
    const char* op, const std::string& name, const mx::array& a, const mx::Shape& shape) {
  if (a.shape() != shape) {
    bad_argument(op, name, "shape " + describe(shape), describe(a.shape()));
  }
}

// The stream to run on.
inline mx::Stream resolve_stream(const char* op, mx::StreamOrDevice s) {
#ifdef EXACTSPEC_METAL
  return mx::to_stream(s);
#else
  try {
    auto stream = mx::to_stream(s);
    if (stream.device == mx::Device::cpu) {
      return stream;
    }
  } catch (const std::invalid_argument&) {
    // MLX was built without the device that was named.
  }
  bad_argument(op, "stream", "a CPU stream or device (this build has no GPU backend)", "a GPU one");
#endif
}

} // namespace exactspec
