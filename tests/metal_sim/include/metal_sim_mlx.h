// What MLX's kernels use of Metal's headers beyond the specification. Only their translation sees
// this file: a shader of this project that used one of these names would not compile.
#pragma once

#define __METAL_MAYBE_FAST_MATH__ 1
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 0

// What the overloads for bfloat call with floats.
#define X(name, expression)                   \
  METAL_FUNC float __metal_##name(float x, int) { \
    return expression;                        \
  }
X(acos, __builtin_acosf(x))
X(acosh, __builtin_acoshf(x))
X(asin, __builtin_asinf(x))
X(asinh, __builtin_asinhf(x))
X(atan, __builtin_atanf(x))
X(atanh, __builtin_atanhf(x))
X(ceil, __builtin_ceilf(x))
X(cos, __builtin_cosf(x))
X(cosh, __builtin_coshf(x))
X(cospi, __builtin_cosf(x * M_PI_F))
X(exp, __builtin_expf(x))
X(exp10, __builtin_powf(10.0f, x))
X(exp2, __builtin_exp2f(x))
X(fabs, __builtin_fabsf(x))
X(floor, __builtin_floorf(x))
X(fract, x - __builtin_floorf(x))
X(log, __builtin_logf(x))
X(log10, __builtin_log10f(x))
X(log2, __builtin_log2f(x))
X(rint, __builtin_rintf(x))
X(round, __builtin_roundf(x))
X(rsqrt, 1.0f / __builtin_sqrtf(x))
X(sin, __builtin_sinf(x))
X(sinh, __builtin_sinhf(x))
X(sinpi, __builtin_sinf(x * M_PI_F))
X(sqrt, __builtin_sqrtf(x))
X(tan, __builtin_tanf(x))
X(tanh, __builtin_tanhf(x))
X(tanpi, __builtin_tanf(x * M_PI_F))
X(trunc, __builtin_truncf(x))
#undef X
#define X(name, expression)                                \
  METAL_FUNC float __metal_##name(float x, float y, int) { \
    return expression;                                     \
  }
X(atan2, __builtin_atan2f(x, y))
X(divide, x / y)
X(fmax, __builtin_fmaxf(x, y))
X(fmin, __builtin_fminf(x, y))
X(fmod, __builtin_fmodf(x, y))
X(pow, __builtin_powf(x, y))
X(powr, __builtin_powf(x, y))
#undef X
METAL_FUNC float __metal_fma(float x, float y, float z) {
  return __builtin_fmaf(x, y, z);
}
METAL_FUNC float __metal_frexp(float x, thread int* exponent) {
  return __builtin_frexpf(x, exponent);
}
METAL_FUNC float __metal_ldexp(float x, int k, int) {
  return __builtin_ldexpf(x, k);
}
METAL_FUNC float __metal_nextafter(float x, float y) {
  return __builtin_nextafterf(x, y);
}
METAL_FUNC float __metal_fmax3(float x, float y, float z, int) {
  return metal::fmax(x, metal::fmax(y, z));
}
METAL_FUNC float __metal_fmin3(float x, float y, float z, int) {
  return metal::fmin(x, metal::fmin(y, z));
}
METAL_FUNC float __metal_fmedian3(float x, float y, float z, int) {
  return metal::fmax(metal::fmin(x, y), metal::fmin(metal::fmax(x, y), z));
}

#define X(name)                                    \
  template <typename T>                            \
  METAL_FUNC T __metal_##name(T value) {           \
    return metal::name(value);                     \
  }
X(simd_max)
X(simd_min)
X(simd_product)
X(simd_sum)
X(simd_prefix_exclusive_product)
X(simd_prefix_exclusive_sum)
X(simd_prefix_inclusive_product)
X(simd_prefix_inclusive_sum)
#undef X
METAL_FUNC float __metal_simd_xor(float value) {
  return value; // named for bfloat, never used
}
#define X(name)                                        \
  template <typename T>                                \
  METAL_FUNC T __metal_##name(T value, ushort lane) {  \
    return metal::name(value, lane);                   \
  }
X(simd_broadcast)
X(simd_shuffle)
X(simd_shuffle_down)
X(simd_shuffle_rotate_down)
X(simd_shuffle_rotate_up)
X(simd_shuffle_up)
X(simd_shuffle_xor)
#undef X
METAL_FUNC ushort __metal_get_simdgroup_size(ushort) {
  return 32;
}
template <typename T>
METAL_FUNC T __metal_simd_shuffle_and_fill_up(T value, T fill, ushort delta, ushort) {
  return metal::simd_shuffle_and_fill_up(value, fill, delta);
}
template <typename T>
METAL_FUNC T __metal_simd_shuffle_and_fill_down(T value, T, ushort delta, ushort) {
  return metal::simd_shuffle_down(value, delta);
}

namespace metal {
#define X(T)                           \
  METAL_FUNC bool isnan(T x) {         \
    return x != x;                     \
  }                                    \
  METAL_FUNC bool isinf(T x) {         \
    return __builtin_isinf(float(x));  \
  }                                    \
  METAL_FUNC bool isfinite(T x) {      \
    return __builtin_isfinite(float(x)); \
  }
X(bfloat)
#undef X
#define X(name, expression)       \
  METAL_FUNC float name(float x) { \
    return expression;            \
  }
X(sin, __builtin_sinf(x))
X(cos, __builtin_cosf(x))
X(sinh, __builtin_sinhf(x))
X(cosh, __builtin_coshf(x))
#undef X
METAL_FUNC float atan2(float y, float x) {
  return __builtin_atan2f(y, x);
}
template <typename From, typename To>
constexpr constant bool is_convertible_v = __is_convertible(From, To);
template <typename... B>
struct _disjunction : bool_constant<(B::value || ...)> {};
struct os_log {
  constexpr os_log(constant const char*, constant const char*) constant {}
  template <typename... A>
  void log_debug(constant const char*, A...) const constant {}
};
template <typename T, size_t n>
struct array {
  T value[n];
  thread T& operator[](size_t i) thread {
    return value[i];
  }
};

// Atomic floats, as the bits of an integer.
METAL_FUNC float atomic_load_explicit(volatile device const atomic<float>* object, memory_order) {
  return as_type<float>(metal_sim::atomic(object, metal_sim::Load, 0u));
}
METAL_FUNC void
atomic_store_explicit(volatile device atomic<float>* object, float v, memory_order) {
  metal_sim::atomic(object, metal_sim::Store, as_type<uint>(v));
}
METAL_FUNC bool atomic_compare_exchange_weak_explicit(
    volatile device atomic<float>* object, thread float* expected, float v, memory_order, memory_order) {
  uint wanted = as_type<uint>(*expected);
  uint old = metal_sim::atomic(object, metal_sim::CompareSwap, as_type<uint>(v), wanted);
  *expected = as_type<float>(old);
  return old == wanted;
}
} // namespace metal

// A union of MLX reads four bools as one word.
struct metal_sim_bool4 {
  bool v[4];
  bool& operator[](int i) {
    return v[i];
  }
};
#define bool4 metal_sim_bool4
