// MLX's own softmax, unmodified; only the instantiations are ours.
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/softmax.h"

#define instantiate_softmax(name, type)                                 \
  instantiate_kernel("block_softmax_" #name, softmax_single_row, type)  \
  instantiate_kernel("looped_softmax_" #name, softmax_looped, type)
#define instantiate_softmax_precise(name, type)                                        \
  instantiate_kernel("block_softmax_precise_" #name, softmax_single_row, type, float)  \
  instantiate_kernel("looped_softmax_precise_" #name, softmax_looped, type, float)

instantiate_softmax(float32, float)
instantiate_softmax_precise(float16, half)
instantiate_softmax_precise(bfloat16, bfloat16_t)
