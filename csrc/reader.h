// The consuming side of an arena: finds samples by key and holds leases on them. Believes nothing that shared memory says.
#ifndef HSXFER_READER_H
#define HSXFER_READER_H

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "arena_file.h"
#include "cuda_pin.h"
#include "hsxfer.h"

namespace hsx {

class Reader {
 public:
  explicit Reader(const std::string& path);
  ~Reader();
  Reader(const Reader&) = delete;

  // HSX_OK or HSX_E_FAILED, leased; otherwise throws. `flags`: HSX_LEASE_*.
  hsx_code lease_wait(const char* key, uint32_t key_bytes, int flags, uint64_t timeout_us, hsx_lease* out);
  void acknowledge(uint32_t slot, uint64_t generation);
  void release(uint32_t slot, uint64_t generation);
  void alive(int* alive, int* closed);
  void stop();                               // no more leases; HSX_E_BUSY while some are held
  uint32_t state(uint32_t slot) const;       // of a leased slot: acquired, so that what it says about the data holds
  PinnedRegion& pinned(CudaDevice& device);  // the region, for copies to GPUs; made by the first call

 private:
  struct Wanted {
    const char* key;
    uint32_t key_bytes;
    uint64_t hash;
    bool ack;
    bool early;
  };
  enum class Found { kNothing, kPending, kGone, kLeased };

  Found look(const Wanted& wanted, hsx_lease* out, bool* failed);
  Found look_at(uint32_t slot, const Wanted& wanted, hsx_lease* out, bool* failed);
  Found look_leased(uint32_t slot, const Wanted& wanted, hsx_lease* out, bool* failed);
  bool acknowledge(uint32_t slot, bool ack, uint64_t generation, uint32_t consumers);
  void keep(uint32_t slot, uint64_t generation);

  std::string path_;
  ReaderFiles files_;
  std::mutex mutex_;
  struct Held {
    uint64_t generation;
    uint32_t count;
  };
  std::unordered_map<uint32_t, Held> held_;  // leases handed out, by slot
  bool stopped_ = false;
  std::unique_ptr<PinnedRegion> pinned_;  // goes before the mapping does
};

hsx_probe_info probe_arena(const std::string& path);

}  // namespace hsx

#endif
