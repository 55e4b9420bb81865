#pragma once

#include <functional>

namespace exactspec {

// Calls fn(0) ... fn(n - 1), each once, on this thread and idle workers, and returns when all are
// done. Threads claim items one by one, so a busy core delays nobody. Runs inline when called from
// inside another parallel_for or while another caller has the workers. If fn throws, items that nobody has
// begun are left out, and the first exception is thrown here when no thread is inside fn any more.
void parallel_for(int n, const std::function<void(int)>& fn);

} // namespace exactspec
