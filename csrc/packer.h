// The submission queue of an arena: copies and seals, numbered, done in order.
#ifndef HSXFER_PACKER_H
#define HSXFER_PACKER_H

#include <memory>
#include <mutex>

#include "arena.h"
#include "completion.h"
#include "driver.h"

namespace hsx {

class Packer {
 public:
  explicit Packer(const hsx_arena_options& options);
  ~Packer();

  Arena& arena() { return arena_; }
  uint64_t submit_copies(const hsx_copy* copies, size_t num_copies, void* stream);
  uint64_t submit_seal(hsx_slot slot, const void* tail, uint32_t tail_bytes, bool failed);
  uint64_t wait_done(uint64_t after, uint64_t timeout_us) { return completion_.wait_done(after, timeout_us); }
  void close();

 private:
  std::unique_ptr<Driver> driver_;  // first: where it does not work, no file is made
  Arena arena_;
  Completion completion_;
  std::mutex mutex_;  // events and submission numbers in the same order
  bool closed_ = false;
};

}  // namespace hsx

#endif
