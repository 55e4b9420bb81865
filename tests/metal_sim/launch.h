// Runs one kernel from Python through the host interface, as the host code of an operation would.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "mlx/array.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"

namespace metal_sim {

namespace mx = mlx::core;

struct LaunchArguments {
  std::string library;
  std::string source;
  std::string kernel;
  std::vector<int> input_indices;
  std::vector<int> output_indices;
  std::vector<std::pair<int, std::string>> bytes;
  std::vector<std::tuple<int, std::string, double>> constants; // index, type, value
  std::vector<std::pair<int, int>> threadgroup_memory; // index, bytes
  std::tuple<int, int, int> threadgroups;
  std::tuple<int, int, int> threads; // of a threadgroup
};

std::vector<mx::array> launch(
    LaunchArguments arguments,
    const std::vector<mx::array>& inputs,
    const std::vector<mx::Shape>& output_shapes,
    const std::vector<mx::Dtype>& output_dtypes);

} // namespace metal_sim
