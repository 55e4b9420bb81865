// MLX's own reductions, unmodified; only the instantiations are ours.
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/atomic.h"
#include "mlx/backend/metal/kernels/reduction/ops.h"
#include "mlx/backend/metal/kernels/reduction/reduce_all.h"
#include "mlx/backend/metal/kernels/reduction/reduce_row.h"

#define instantiate_reduce(name, type, op)                                   \
  instantiate_kernel("all_" #name, all_reduce, type, type, op<type>, int64_t) \
  instantiate_kernel("row_" #name, row_reduce_simple, type, type, op<type>)

instantiate_reduce(sum_float32, float, Sum)
instantiate_reduce(max_float32, float, Max)
instantiate_reduce(sum_int32, int, Sum)
