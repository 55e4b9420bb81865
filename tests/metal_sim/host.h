// Runs what a primitive's eval_gpu encodes, on a CPU stream.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "mlx/stream.h"
#include "runtime.h"

namespace metal_sim {

// Calls `encode` (an eval_gpu), and has the stream run what it recorded once the inputs are there.
void evaluate(
    const std::string& name,
    mlx::core::Stream stream,
    const std::vector<mlx::core::array>& inputs,
    std::vector<mlx::core::array>& outputs,
    const std::function<void()>& encode);

// Turns a library's name and Metal source into the path of a shared object.
void set_compiler(std::function<std::string(const std::string&, const std::string&)>);

void set_options(const Options&);
Options options();

// Calls that have run since the last time.
std::vector<Call> take_calls();

} // namespace metal_sim
