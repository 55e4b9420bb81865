#define EXACTSPEC_ISA portable
#include "block_ops_impl.h"
