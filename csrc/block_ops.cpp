#include "block_ops.h"

#include <cstdlib>
#include <cstring>

namespace exactspec {

namespace portable {
extern const BlockOps ops;
}
#if defined(__x86_64__)
namespace avx2 {
extern const BlockOps ops;
}
namespace avx512 {
extern const BlockOps ops;
}
#endif

namespace {

const BlockOps& choose() {
#if defined(__x86_64__)
  const char* wanted = std::getenv("EXACTSPEC_ISA");
  bool any = wanted == nullptr || *wanted == '\0';
  __builtin_cpu_init();
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl");
  if (has_avx512 && (any || std::strcmp(wanted, "avx512") == 0)) {
    return avx512::ops;
  }
  if (has_avx2 && (any || std::strcmp(wanted, "portable") != 0)) {
    return avx2::ops;
  }
#endif
  return portable::ops;
}

} // namespace

const BlockOps& block_ops = choose();

} // namespace exactspec
