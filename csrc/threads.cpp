#include "threads.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace exactspec {

namespace {

thread_local bool inside_parallel_for = false;

// The cores this process may run on when it is first needed, or EXACTSPEC_THREADS, for tests.
int count_threads() {
  const char* wanted = std::getenv("EXACTSPEC_THREADS");
  int count = wanted == nullptr ? 0 : std::atoi(wanted);
  return count > 0 ? count : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

class Workers {
 public:
  explicit Workers(int count) {
    try {
      for (; count_ < count; ++count_) {
        std::thread([this] { work(); }).detach();
      }
    } catch (const std::exception&) {
      // Too few threads or too little memory: the calling thread does what the missing ones would have.
    }
  }

  void run(int n, const std::function<void(int)>& fn) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (!owner) {
      for (int i = 0; i < n; ++i) {
        fn(i);
      }
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      fn_ = &fn;
      size_ = n;
      next_ = 0;
      ++generation_;
    }
    for (int i = 0; i < std::min(n - 1, count_); ++i) {
      wake_.notify_one();
    }
    claim(fn, n);
    // Workers that are still inside the job hold a reference to fn.
    std::unique_lock<std::mutex> lock(mutex_);
    fn_ = nullptr;
    idle_.wait(lock, [this] { return active_ == 0; });
    if (error_) {
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
  }

 private:
  void claim(const std::function<void(int)>& fn, int n) {
    inside_parallel_for = true;
    try {
      for (int i = next_++; i < n; i = next_++) {
        fn(i);
      }
    } catch (...) {
      next_ = n; // nobody begins another item
      std::lock_guard<std::mutex> lock(mutex_);
      error_ = error_ ? error_ : std::current_exception();
    }
    inside_parallel_for = false;
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (unsigned seen = 0;;) {
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (fn_ == nullptr) {
        continue;
      }
      const auto& fn = *fn_;
      int n = size_;
      ++active_;
      lock.unlock();
      claim(fn, n);
      lock.lock();
      if (--active_ == 0) {
        idle_.notify_one();
      }
    }
  }

  int count_ = 0;
  std::mutex owner_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  const std::function<void(int)>* fn_ = nullptr;
  std::exception_ptr error_; // the first of the job
  int size_ = 0;
  int active_ = 0;
  unsigned generation_ = 0;
  std::atomic<int> next_{0};
};

} // namespace

void parallel_for(int n, const std::function<void(int)>& fn) {
  static const int num_threads = count_threads();
  if (n <= 1 || num_threads == 1 || inside_parallel_for) {
    for (int i = 0; i < n; ++i) {
      fn(i);
    }
    return;
  }
  // Never destroyed: workers outlive static destructors at exit.
  static auto* workers = new Workers(num_threads - 1);
  workers->run(n, fn);
}

} // namespace exactspec
