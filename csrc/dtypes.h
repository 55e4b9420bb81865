// The dtypes that logits may have, in one place.
#pragma once

#include <string>

#include "errors.h"

namespace exactspec {

inline void check_logits_dtype(const char* op, const std::string& name, const mx::array& a) {
  check_dtype(op, name, a, {mx::float32, mx::float16, mx::bfloat16});
}

// Token ids are read as int32: a uint32 id above 2**31 is as far out of range as a negative one.
inline void check_ids_dtype(const char* op, const std::string& name, const mx::array& a) {
  check_dtype(op, name, a, {mx::int32, mx::uint32});
}

} // namespace exactspec
