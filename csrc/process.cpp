#include "process.h"

#include <atomic>

#include "locks.h"

namespace hsx {
namespace {

std::atomic<uint32_t> epoch{0};

void in_forked_child() {
  epoch.fetch_add(1, std::memory_order_relaxed);
  forget_locks();
}

// The library is linked with nodelete, so the handler cannot outlive it.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, in_forked_child);

}  // namespace

uint32_t process_epoch() { return epoch.load(std::memory_order_relaxed); }

}  // namespace hsx
