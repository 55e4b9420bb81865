#define EXACTSPEC_ISA avx512
#include "block_ops_impl.h"
