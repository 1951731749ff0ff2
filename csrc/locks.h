// Byte-range locks on .ack files: leases and liveness (docs/format.md, 3).
//
// POSIX locks belong to the process: the kernel never shows a process its own, and any close of the file drops them all. So there is
// one AckFile per file and process, with one descriptor that lives as long as anybody uses it, and it counts what this process holds.
#ifndef HSXFER_LOCKS_H
#define HSXFER_LOCKS_H

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "memory_file.h"

namespace hsx {

class AckFile {
 public:
  // Shared by everybody in this process who opens the same file.
  static std::shared_ptr<AckFile> open(const std::string& path);
  // A file that was just made, so nobody here can have it.
  static std::shared_ptr<AckFile> adopt(UniqueFd fd, const std::string& path);
  // `look` at the file from outside: it is opened and closed here, unless this process has it open anyway.
  static void probe(const std::string& path, const std::function<void(AckFile&)>& look);

  int fd() const { return fd_.get(); }

  void lock_producer();
  void unlock_producer();
  bool producer_alive();

  void attach();
  void detach();
  bool readers_attached();

  void lease(uint32_t slot);
  void release(uint32_t slot);
  bool leased(uint32_t slot);  // by any process; true if the kernel does not say

  ~AckFile() = default;

 private:
  struct Registry;
  friend struct Registry;
  friend void forget_locks();

  AckFile(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  static Registry& registry();
  static std::shared_ptr<AckFile> share(Registry& registry, AckFile* file);
  void set_lock(short type, int64_t byte);
  bool held_elsewhere(int64_t byte);

  UniqueFd fd_;
  std::string path_;
  std::vector<UniqueFd> parked_;  // further descriptors of this file: closing one would drop our locks
  uint32_t num_users_ = 0;        // guarded by the registry's mutex

  std::mutex mutex_;
  std::unordered_map<uint32_t, uint32_t> leases_;  // slot -> leases held by this process
  uint32_t num_attached_ = 0;
  bool producer_ = false;
};

// In a forked child: the parent's locks are not ours, and its mutexes may be held for ever.
void forget_locks();

}  // namespace hsx

#endif
