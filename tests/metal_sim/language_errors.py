"""Source that Metal rejects, one error each, for the tests of lint.py."""

PRELUDE = """#include <metal_stdlib>
using namespace metal;
struct Sum {
  float value;
  void add(float x) thread { value += x; }
  float twice() const { return 2 * value; }
};
inline void store(threadgroup float* to, float x) { to[0] = x; }
inline float fetch(const device float* from) { return from[0]; }
"""

KERNEL = """
kernel void sound(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  Sum sum;
  sum.value = 0;
  sum.add(1.0f);
  out[i] = sum.twice() + fetch(out);
}
"""

ERRORS = {
    "pointers of different spaces":
        "inline void f(device float* a, threadgroup float* b) { a = b; }",
    "argument of another space": "inline void f(device float* a) { store(a, 1.0f); }",
    "cast between spaces":
        "inline float f(threadgroup float* a) { return ((device float*)a)[0]; }",
    "pointer without a space": "inline float f(float* a) { return a[0]; }",
    "reference without a space": "inline float f(float& a) { return a; }",
    "member without a space": "struct S { float* a; };",
    "thread reference to device memory":
        "inline float f(thread float& a) { return a; }\n"
        "inline float g(device float* a) { return f(a[0]); }",
    "thread method of a device object": "inline void f(device Sum* a) { a->add(1.0f); }",
    "plain method of a device object": "inline float f(device Sum* a) { return a->twice(); }",
    "write through constant": "inline void f(constant float* a) { a[0] = 1; }",
    "write through const": "inline void f(const device float* a) { a[0] = 1; }",
    "recursion": "inline int f(int n) { return n > 0 ? f(n - 1) : 0; }",
    "mutual recursion":
        "inline int g(int n);\ninline int f(int n) { return g(n); }\n"
        "inline int g(int n) { return n > 0 ? f(n - 1) : 0; }",
    "recursive method": "struct S { int f(int n) const { return n > 0 ? f(n - 1) : 0; } };",
    "function pointer": "typedef int (*F)(int);\ninline int f(F g) { return g(1); }",
    "double": "inline double f(double x) { return x * 2; }",
    "double constant": "inline float f(float x) { return x * 2.5; }",
    "exception": "inline int f() { try { return 1; } catch (...) { return 0; } }",
    "virtual function": "struct S { virtual int f() { return 1; } };",
    "new": "inline thread int* f() { return new int; }",
    "goto": "inline int f() { goto end; end: return 1; }",
    "lambda": "inline int f(int x) { auto g = [=]() { return x; }; return g(); }",
    "static data": "static int counter;\ninline int f() { return counter++; }",
    "static variable": "inline int f() { static int counter = 0; return counter++; }",
    "threadgroup variable outside a kernel":
        "inline float f(float x) { threadgroup float s[4]; s[0] = x; return s[0]; }",
    "array of variable length": "inline int f(int n) { int a[n]; a[0] = 1; return a[0]; }",
    "float to bfloat": "inline bfloat f(float x) { bfloat y = x; return y; }",
    "half to bfloat": "inline bfloat f(half x) { return x; }",
    "bfloat to half": "inline half f(bfloat x) { return x; }",
    "integer to bfloat": "inline bfloat f(int x) { return x; }",
    "std namespace": "inline float f(float x) { return std::sqrt(x); }",
    "C library": "inline float f(float x) { return expf(x); }",
    "64-bit reduction": "inline ulong f(ulong x) { return simd_sum(x); }",
    "bool reduction": "inline bool f(bool x) { return simd_sum(x); }",
    "bfloat shuffle": "inline bfloat f(bfloat x) { return simd_shuffle_xor(x, 1); }",
    "vector of too few components": "inline float4 f(float x) { return float4(x, x, x); }",
    "compared vectors": "inline int f(int4 a, int4 b) { return (a < b).x; }",
    "atomic without a function":
        "inline uint f(device atomic_uint* a) { return a->fetch_add(1u); }",
    "atomic read as a value": "inline uint f(device atomic_uint* a) { return *a; }",
    "sequentially consistent atomic":
        "inline uint f(device atomic_uint* a) {\n"
        "  return atomic_load_explicit(a, memory_order_seq_cst);\n}",
    "assembly": 'inline void f() { asm("nop"); }',
    "text that is not ASCII": "// caf\u00e9",
}  # fmt: skip
