// Preloaded into Python: the n-th `new` of one library fails, or every one from the n-th on. Not those of
// the main thread, on which MLX gives back no count of its tasks when an evaluation throws.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#include <sys/syscall.h>
#include <unistd.h>

namespace {

std::atomic<uintptr_t> library_begin{0}, library_end{0};
std::atomic<long> calls_left{0};
std::atomic<bool> for_good{false};

void* allocate(size_t size, size_t alignment, void* caller) {
  auto from = reinterpret_cast<uintptr_t>(caller);
  if (from >= library_begin && from < library_end && syscall(SYS_gettid) != getpid()) {
    long left = --calls_left;
    if (left == 0 || (left < 0 && for_good)) {
      return nullptr;
    }
  }
  size = size ? size : 1;
  return alignment ? std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment)
                   : std::malloc(size);
}

void* or_throw(void* memory) {
  return memory ? memory : throw std::bad_alloc();
}

} // namespace

extern "C" {
// Counts what code in [begin, end) allocates from now on.
void fail_at(long n, bool on, uintptr_t begin, uintptr_t end) {
  calls_left = n;
  for_good = on;
  library_begin = begin;
  library_end = end;
}
// Whether one failed since then. No more will.
bool has_failed() {
  library_end = 0;
  return calls_left <= 0;
}
}

void* operator new(size_t size) {
  return or_throw(allocate(size, 0, __builtin_return_address(0)));
}
void* operator new[](size_t size) {
  return or_throw(allocate(size, 0, __builtin_return_address(0)));
}
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return allocate(size, 0, __builtin_return_address(0));
}
void* operator new(size_t size, std::align_val_t alignment) {
  return or_throw(allocate(size, static_cast<size_t>(alignment), __builtin_return_address(0)));
}
