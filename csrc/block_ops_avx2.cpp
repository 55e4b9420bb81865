#define EXACTSPEC_ISA avx2
#include "block_ops_impl.h"
