// Waiting on a word of shared memory. FUTEX_WAIT needs no write access, so consumers wait on their read-only mapping.
#ifndef HSXFER_FUTEX_H
#define HSXFER_FUTEX_H

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <ctime>

namespace hsx {

inline uint64_t now_us() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1000000 + static_cast<uint64_t>(time.tv_nsec) / 1000;
}

// A moment on now_us's clock, or never.
inline uint64_t deadline_us(uint64_t timeout_us) {
  uint64_t deadline;
  return __builtin_add_overflow(now_us(), timeout_us, &deadline) ? UINT64_MAX : deadline;
}

// Until the word is not `expected`, a wake, a signal or the deadline, whichever comes first.
inline void futex_wait(const uint32_t* word, uint32_t expected, uint64_t deadline) {
  uint64_t now = now_us();
  if (deadline <= now) return;
  uint64_t left = std::min<uint64_t>(deadline - now, 1000000000);
  timespec timeout = {static_cast<time_t>(left / 1000000), static_cast<long>(left % 1000000) * 1000};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

inline void futex_wake_all(const uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

}  // namespace hsx

#endif
