// MLX's own cumulative sum, unmodified; only the instantiations are ours.
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/scan.h"

#define instantiate_scan(name, type, inclusive, reverse)                                          \
  instantiate_kernel(                                                                             \
      "contig_" #name, contiguous_scan, type, type, CumSum<type>, 4, inclusive, reverse)          \
  instantiate_kernel("strided_" #name, strided_scan, type, type, CumSum<type>, 4, inclusive, reverse)

instantiate_scan(inclusive_float32, float, true, false)
instantiate_scan(exclusive_float32, float, false, false)
instantiate_scan(reverse_inclusive_float32, float, true, true)
instantiate_scan(inclusive_int32, int, true, false)
