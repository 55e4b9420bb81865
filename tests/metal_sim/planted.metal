// One planted fault per kernel; `sound` has none. faults.py says what each is to be found as.
#include <metal_stdlib>
using namespace metal;

struct Params {
  uint n;
  float scale;
  int64_t stride;
};

constant bool flag [[function_constant(0)]];

// 64 threads reverse a row of 64 in threadgroup memory, and use most of what a shader can use.
[[kernel]] void sound(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    constant Params& params [[buffer(2)]],
    uint i [[thread_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float row[64];
  threadgroup atomic_uint count;
  if (i == 0) {
    atomic_store_explicit(&count, 0u, memory_order_relaxed);
  }
  row[i] = i < params.n ? in[i] * params.scale : 0.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&count, 1u, memory_order_relaxed);
  float sum = simd_sum(row[63 - i]);
  sum += simd_shuffle_xor(sum, 1) + simd_broadcast(sum, 3);
  out[i] = flag ? row[63 - i] : sum;
}

[[kernel]] void no_barrier(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  threadgroup float row[64];
  row[i] = in[i];
  out[i] = row[63 - i];
}

[[kernel]] void barrier_of_the_wrong_memory(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  threadgroup float row[64];
  row[i] = in[i];
  threadgroup_barrier(mem_flags::mem_device);
  out[i] = row[63 - i];
}

[[kernel]] void simdgroup_barrier_across_simdgroups(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  threadgroup float row[64];
  row[i] = in[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = row[63 - i];
}

[[kernel]] void no_barrier_within_a_simdgroup(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float row[64];
  row[i] = in[i];
  out[i] = row[i - lane + 31 - lane];
}

// The next round overwrites what slower threads still read.
[[kernel]] void write_after_read(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  threadgroup float row[64];
  float sum = 0;
  for (int round = 0; round < 3; ++round) {
    row[i] = in[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum += row[63 - i];
  }
  out[i] = sum;
}

[[kernel]] void device_race_within_a_threadgroup(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  out[i] = in[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = out[63 - i];
}

[[kernel]] void device_race_across_threadgroups(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  out[i] = in[i];
}

[[kernel]] void plain_access_to_an_atomic(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  threadgroup atomic_uint count[2];
  if (i == 0) {
    *(threadgroup uint*)&count[0] = 0;
  }
  atomic_fetch_add_explicit(&count[0], 1u, memory_order_relaxed);
  out[i] = in[i];
}

[[kernel]] void atomic_load_without_barrier(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  threadgroup atomic_uint count;
  if (i == 0) {
    atomic_store_explicit(&count, 0u, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&count, 1u, memory_order_relaxed);
  out[i] = in[i] + atomic_load_explicit(&count, memory_order_relaxed);
}

[[kernel]] void divergent_barrier(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  if (i < 32) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  out[i] = in[i];
}

[[kernel]] void different_barriers(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  if (i < 32) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = in[i];
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = -in[i];
  }
}

[[kernel]] void divergent_simd_sum(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  float sum = 0;
  if (i % 2 == 0) {
    sum = simd_sum(in[i]);
  }
  out[i] = sum;
}

[[kernel]] void simd_sum_after_return(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  out[i] = in[i];
  if (i > 40) {
    return;
  }
  out[i] = simd_sum(in[i]);
}

[[kernel]] void shuffle_from_an_inactive_lane(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  out[i] = simd_shuffle(in[i], ushort(i % 32 + 1));
}

[[kernel]] void broadcast_from_different_lanes(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  out[i] = simd_broadcast(in[i], lane / 16);
}

[[kernel]] void read_past_the_end(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  out[i] = in[i + 1];
}

[[kernel]] void write_past_the_end(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  out[i + 1] = in[i];
}

[[kernel]] void read_in_front(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  out[i] = in[int(i) - 1];
}

[[kernel]] void read_far_away(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  out[i] = in[int64_t(i) << 40];
}

[[kernel]] void threadgroup_past_the_end(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  threadgroup float row[63];
  threadgroup float next[64];
  row[i] = in[i];
  next[i] = in[i];
  out[i] = row[i] + next[i];
}

// Runs on a view whose rows lie apart.
[[kernel]] void read_between_rows(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  out[i] = in[i] + in[i + 1];
}

[[kernel]] void write_to_an_input(
    device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  out[i] = in[i];
  in[i] = 0;
}

[[kernel]] void misaligned_vector(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  float4 v = *(const device float4*)(in + i % 32);
  out[i] = v.x + v.y + v.z + v.w;
}

[[kernel]] void unwritten_threadgroup_memory(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  threadgroup float row[64];
  if (i % 2 == 0) {
    row[i] = in[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = row[i];
}

[[kernel]] void unwritten_device_memory(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  out[i] += in[i];
}

[[kernel]] void unwritten_variable(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  float sum;
  for (uint j = 0; j < i; ++j) {
    sum += in[j];
  }
  out[i] = sum;
}

[[kernel]] void unwritten_output(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  if (i != 7) {
    out[i] = in[i];
  }
}

[[kernel]] void too_much_threadgroup_memory(
    const device float* in [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  threadgroup float big[8192];
  threadgroup float more[64];
  big[i] = in[i];
  more[i] = in[i];
  out[i] = big[i] + more[i];
}
