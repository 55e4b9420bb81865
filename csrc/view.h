#pragma once

#include <cstddef>
#include <cstdint>

#include "mlx/array.h"

namespace exactspec {

namespace mx = mlx::core;

// A view of an array of shape [batch..., core...], read in place whatever its strides. The batch
// axes are addressed by one index; an array without them is shared by every sequence.
struct View {
  View(const mx::array& a, int core_rank)
      : data(a.data<char>()), dtype(a.dtype()), itemsize(static_cast<int64_t>(a.itemsize())) {
    int batch_rank = static_cast<int>(a.ndim()) - core_rank;
    auto split_shape = a.shape().begin() + batch_rank;
    auto split_strides = a.strides().begin() + batch_rank;
    shape = mx::Shape(a.shape().begin(), split_shape);
    core_shape = mx::Shape(split_shape, a.shape().end());
    strides = mx::Strides(a.strides().begin(), split_strides);
    core_strides = mx::Strides(split_strides, a.strides().end());
  }

  // The address of element (i, j, ...) of sequence b; missing trailing indices are 0.
  template <typename T, typename... Index>
  const T* at(int b, Index... index) const {
    int64_t offset = 0;
    for (int axis = static_cast<int>(shape.size()) - 1; axis >= 0; --axis) {
      offset += b % shape[axis] * strides[axis];
      b /= shape[axis];
    }
    int axis = 0;
    ((offset += index * core_strides[axis++]), ...);
    return reinterpret_cast<const T*>(data + offset * itemsize);
  }

  const char* data;
  mx::Dtype dtype;
  int64_t itemsize;
  mx::Shape shape, core_shape;
  mx::Strides strides, core_strides;
};

} // namespace exactspec
