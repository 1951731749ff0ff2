// The thread that sees copies end: in order of submission it waits for their events, publishes slots and wakes who waits for them.
#ifndef HSXFER_COMPLETION_H
#define HSXFER_COMPLETION_H

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "arena.h"
#include "driver.h"

namespace hsx {

struct Submission {
  Driver* driver = nullptr;  // null for a seal
  uint64_t event = 0;        // of the driver
  std::vector<hsx_slot> slots;
  uint64_t num_copies = 0, num_rows = 0, num_bytes = 0;
  bool failed = false;  // of a seal
};

class Completion {
 public:
  explicit Completion(Arena& arena);
  ~Completion();  // finishes what is queued

  uint64_t push(Submission submission);  // its number, from 1
  void wake();                           // something pushed before can be waited for
  uint64_t wait_done(uint64_t after, uint64_t timeout_us);
  void stop();  // finishes what is queued; who waits for more is told

 private:
  void run();
  void finish(const Submission& submission);
  void sweep_if_due();

  Arena& arena_;
  std::mutex mutex_;
  std::condition_variable queued_, done_;
  std::deque<Submission> queue_;
  uint64_t num_submitted_ = 0, num_done_ = 0;
  uint64_t next_sweep_us_ = 0;
  bool stopping_ = false, stopped_ = false;
  bool idle_ = false;   // the thread waits for `queued_`
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace hsx

#endif
