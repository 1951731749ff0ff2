// The submission queue of an arena: copies and seals, numbered, done in order.
#ifndef HSXFER_PACKER_H
#define HSXFER_PACKER_H

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "arena.h"
#include "completion.h"
#include "driver.h"

namespace hsx {

class Packer {
 public:
  static constexpr int kHost = -1;  // in place of a device

  explicit Packer(const hsx_arena_options& options);
  ~Packer();

  Arena& arena() { return arena_; }
  // From now on copies can come from that device, too. Returns why the region could not be pinned, or "".
  std::string attach(const std::string& driver, uint32_t device);
  // From host memory, or from that of an attached device.
  uint64_t submit_copies(const hsx_copy* copies, size_t num_copies, int device, void* stream);
  uint64_t submit_seal(hsx_slot slot, const void* tail, uint32_t tail_bytes, bool failed);
  uint64_t wait_done(uint64_t after, uint64_t timeout_us) { return completion_.wait_done(after, timeout_us); }
  void close();

 private:
  std::map<int, std::unique_ptr<Driver>> drivers_;  // first: where the host's does not work, no file is made
  Arena arena_;
  Completion completion_;
  std::mutex mutex_;  // events and submission numbers in the same order
  bool closed_ = false;
};

}  // namespace hsx

#endif
