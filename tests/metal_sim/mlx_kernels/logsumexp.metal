// MLX's own logsumexp, unmodified; only the instantiations are ours.
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/logsumexp.h"

#define instantiate_logsumexp(name, type)                          \
  instantiate_kernel("block_logsumexp_" #name, logsumexp, type)    \
  instantiate_kernel("looped_logsumexp_" #name, logsumexp_looped, type)

instantiate_logsumexp(float32, float)
instantiate_logsumexp(float16, half)
instantiate_logsumexp(bfloat16, bfloat16_t)
