#include "memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>

#include "error.h"
#include "process.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace hsx {

Mapping::Mapping(int fd, uint64_t bytes, bool writable, const std::string& path) : bytes_(bytes) {
  void* base = mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) fail_errno("mmap", path.c_str());
  base_ = static_cast<uint8_t*>(base);
}

Mapping::~Mapping() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

NewFile::NewFile(std::string path) : path_(std::move(path)) {
  size_t slash = path_.rfind('/');
  std::string directory = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  fd_ = UniqueFd(::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  raw_fd_ = fd_.get();
  if (raw_fd_ >= 0) return;
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOSYS) fail_errno("open", directory.c_str());
  temporary_ = path_ + ".tmp";
  fd_ = UniqueFd(::open(temporary_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600));
  raw_fd_ = fd_.get();
  if (raw_fd_ < 0) {
    std::string name;
    name.swap(temporary_);  // not ours to remove
    fail_errno("open", name.c_str());
  }
}

NewFile::~NewFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void NewFile::reserve(uint64_t bytes) {
  struct statvfs space;
  // A file system without blocks (tmpfs of size 0) has no limit to compare with.
  if (fstatvfs(raw_fd_, &space) == 0 && space.f_blocks > 0 && space.f_bavail < bytes / space.f_frsize)
    fail(HSX_E_FULL, "%s needs %llu bytes, its file system has %llu free", path_.c_str(), ull(bytes),
         ull(space.f_bavail) * space.f_frsize);
  // An interrupted fallocate on tmpfs gives back what it had: under a profiler's timer it would never end. In steps, so that
  // signals are not kept waiting for long.
  constexpr uint64_t kStepBytes = 64 << 20;
  for (uint64_t at = 0; at < bytes;) {
    uint64_t step = std::min(kStepBytes, bytes - at);
    SignalsBlocked blocked;
    if (::fallocate(raw_fd_, 0, static_cast<off_t>(at), static_cast<off_t>(step)) == 0) {
      at += step;
    } else if (errno == ENOSPC || errno == EFBIG || errno == EDQUOT || errno == ENOMEM) {
      fail(HSX_E_FULL, "fallocate of %s failed at %llu of %llu bytes: %s", path_.c_str(), ull(at), ull(bytes),
           std::strerror(errno));
    } else if (errno != EINTR) {
      fail_errno("fallocate", path_.c_str());
    }
  }
}

void NewFile::publish() {
  std::string source = temporary_.empty() ? "/proc/self/fd/" + std::to_string(raw_fd_) : temporary_;
  if (linkat(AT_FDCWD, source.c_str(), AT_FDCWD, path_.c_str(), AT_SYMLINK_FOLLOW) != 0) {
    if (errno == EEXIST) fail(HSX_E_INVALID, "%s is already there", path_.c_str());
    fail_errno("linkat", path_.c_str());
  }
}

UniqueFd open_regular(const std::string& path, int flags) {
  UniqueFd fd(::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));  // a FIFO must not hold us up
  if (fd.get() < 0) {
    if (errno == ELOOP || errno == EISDIR || errno == ENXIO)
      fail(HSX_E_INVALID, "%s is not a file of ours", path.c_str());
    fail_errno("open", path.c_str());
  }
  struct stat status;
  if (fstat(fd.get(), &status) != 0) fail_errno("fstat", path.c_str());
  if (!S_ISREG(status.st_mode)) fail(HSX_E_INVALID, "%s is not a regular file", path.c_str());
  return fd;
}

uint64_t file_bytes(int fd, const std::string& path) {
  struct stat status;
  if (fstat(fd, &status) != 0) fail_errno("fstat", path.c_str());
  return static_cast<uint64_t>(status.st_size);
}

void unlink_if_same(int fd, const std::string& path) noexcept {
  struct stat ours, there;
  if (fstat(fd, &ours) == 0 && lstat(path.c_str(), &there) == 0 && ours.st_dev == there.st_dev &&
      ours.st_ino == there.st_ino)
    ::unlink(path.c_str());
}

void punch_hole(int fd, uint64_t offset, uint64_t bytes) noexcept {
  ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes));
}

void populate(const Mapping& mapping) noexcept { madvise(mapping.base(), mapping.bytes(), MADV_POPULATE_WRITE); }

}  // namespace hsx
