// Files of shared memory: made whole or not at all, mapped, given back.
#ifndef HSXFER_MEMORY_FILE_H
#define HSXFER_MEMORY_FILE_H

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <utility>

namespace hsx {

class UniqueFd {
 public:
  explicit UniqueFd(int fd = -1) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// A shared mapping of a file's first `bytes`.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, uint64_t bytes, bool writable, const std::string& path);
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping();
  uint8_t* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }

 private:
  uint8_t* base_ = nullptr;
  uint64_t bytes_ = 0;
};

// A file that has no name until publish(): a producer killed before that leaves nothing behind.
class NewFile {
 public:
  explicit NewFile(std::string path);
  NewFile(const NewFile&) = delete;
  ~NewFile();
  // All of it reserved now, so that no later touch of the mapping is a SIGBUS. HSX_E_FULL with the figures.
  void reserve(uint64_t bytes);
  void publish();  // HSX_E_INVALID if the name is taken
  // The descriptor changes hands (a second one of an .ack file must never be closed); publish() still works while it is open.
  UniqueFd take_fd() { return std::move(fd_); }
  int fd() const { return raw_fd_; }

 private:
  std::string path_;
  std::string temporary_;  // empty where the file system has files without a name
  UniqueFd fd_;
  int raw_fd_ = -1;
};

// A regular file, not a link; HSX_E_INVALID for anything else.
UniqueFd open_regular(const std::string& path, int flags);
uint64_t file_bytes(int fd, const std::string& path);
// Removes the name only while it still is this file's.
void unlink_if_same(int fd, const std::string& path) noexcept;
void punch_hole(int fd, uint64_t offset, uint64_t bytes) noexcept;
// Maps the pages now instead of one fault each later: 805 MB are 200,000 faults, half as long as the copy itself.
void populate(const Mapping& mapping) noexcept;

}  // namespace hsx

#endif
