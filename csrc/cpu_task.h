// How an operation evaluates on the CPU: as a task of its stream.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"

namespace exactspec {

namespace mx = mlx::core;

inline void allocate(std::vector<mx::array>& outputs) {
  for (auto& out : outputs) {
    out.set_data(mx::allocator::malloc(out.nbytes()));
  }
}

// Work on a call's outputs.
template <typename Fn>
class Task {
 public:
  Task(Fn fn, std::vector<mx::array>& outputs) : fn_(std::move(fn)) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      buffers_.at(i) = {outputs[i].data<char>(), outputs[i].nbytes()};
    }
  }

  // What fn throws (there is no memory) MLX raises in whoever waits for the stream, but from then on the
  // outputs count as computed. So they are filled with what no success leaves: ids of -1, every status bit
  // and NaN.
  void run() {
    try {
      fn_();
    } catch (...) {
      for (auto [data, size] : buffers_) {
        if (size > 0) {
          std::memset(data, 0xff, size);
        }
      }
      throw;
    }
  }

 private:
  Fn fn_;
  std::array<std::pair<char*, size_t>, 8> buffers_{};
};

template <typename Fn>
void dispatch(mx::Stream stream, std::vector<mx::array>& outputs, Fn fn) {
  auto& encoder = mx::cpu::get_command_encoder(stream);
  auto task = std::make_unique<Task<Fn>>(std::move(fn), outputs);
  // MLX counts a task before it has it: if std::function had to allocate for more than a pointer and failed,
  // the count would stay too high, and after a few times everyone waits for ever.
  encoder.dispatch([pointer = task.release()] { std::unique_ptr<Task<Fn>>(pointer)->run(); });
}

} // namespace exactspec
