#include "locks.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <atomic>
#include <map>
#include <utility>

#include "error.h"
#include "layout.h"
#include "process.h"

namespace hsx {

namespace {

using FileId = std::pair<dev_t, ino_t>;

FileId id_of(const struct stat& status) { return {status.st_dev, status.st_ino}; }

UniqueFd open_for_locks(const std::string& path) { return open_regular(path, O_RDWR); }

}  // namespace

struct AckFile::Registry {
  std::mutex mutex;
  std::map<FileId, AckFile*> files;

  AckFile* find(const std::string& path) {
    struct stat status;
    if (::stat(path.c_str(), &status) != 0) return nullptr;
    auto found = files.find(id_of(status));
    return found == files.end() ? nullptr : found->second;
  }

  // The registered file, or `fd` as a new one. The path may have been replaced between look and open.
  AckFile* enter(UniqueFd fd, const std::string& path) {
    struct stat status;
    if (fstat(fd.get(), &status) != 0) fail_errno("fstat", path.c_str());
    AckFile*& file = files[id_of(status)];
    if (file != nullptr)
      file->parked_.push_back(std::move(fd));
    else
      file = new AckFile(std::move(fd), path);
    return file;
  }

  void leave(AckFile* file) {
    std::lock_guard<std::mutex> guard(mutex);  // held over the close: an open in between would lose its locks to it
    if (--file->num_users_ > 0) return;
    for (auto entry = files.begin(); entry != files.end(); ++entry)
      if (entry->second == file) {
        files.erase(entry);
        break;
      }
    delete file;
  }
};

namespace {
std::atomic<void*> current_registry{nullptr};
}

// Never destroyed: threads of a host application may outlive static destructors.
AckFile::Registry& AckFile::registry() {
  void* found = current_registry.load(std::memory_order_acquire);
  if (found == nullptr) {
    auto* made = new Registry;
    if (current_registry.compare_exchange_strong(found, made)) return *made;
    delete made;
  }
  return *static_cast<Registry*>(found);
}

void forget_locks() { current_registry.store(nullptr, std::memory_order_release); }

std::shared_ptr<AckFile> AckFile::share(Registry& registry, AckFile* file) {
  ++file->num_users_;
  return std::shared_ptr<AckFile>(file, [&registry, epoch = process_epoch()](AckFile* used) {
    if (epoch == process_epoch()) registry.leave(used);
  });
}

std::shared_ptr<AckFile> AckFile::open(const std::string& path) {
  Registry& files = registry();
  std::lock_guard<std::mutex> guard(files.mutex);
  AckFile* file = files.find(path);
  if (file == nullptr) file = files.enter(open_for_locks(path), path);
  return share(files, file);
}

std::shared_ptr<AckFile> AckFile::adopt(UniqueFd fd, const std::string& path) {
  Registry& files = registry();
  std::lock_guard<std::mutex> guard(files.mutex);
  return share(files, files.enter(std::move(fd), path));
}

void AckFile::probe(const std::string& path, const std::function<void(AckFile&)>& look) {
  Registry& files = registry();
  std::lock_guard<std::mutex> guard(
      files.mutex);  // nobody here can start to lock the file between our open and our close
  AckFile* file = files.find(path);
  std::unique_ptr<AckFile> outside;
  if (file == nullptr) {
    UniqueFd fd = open_for_locks(path);
    struct stat status;
    if (fstat(fd.get(), &status) != 0) fail_errno("fstat", path.c_str());
    auto found = files.files.find(id_of(status));
    if (found != files.files.end()) {
      file = found->second;
      file->parked_.push_back(std::move(fd));
    } else {
      outside.reset(new AckFile(std::move(fd), path));
      file = outside.get();
    }
  }
  look(*file);
}

void AckFile::lock_producer() {
  std::lock_guard<std::mutex> guard(mutex_);
  set_lock(F_WRLCK, kProducerLockByte);
  producer_ = true;
}

void AckFile::unlock_producer() {
  std::lock_guard<std::mutex> guard(mutex_);
  producer_ = false;
  set_lock(F_UNLCK, kProducerLockByte);
}

bool AckFile::producer_alive() {
  std::lock_guard<std::mutex> guard(mutex_);
  return producer_ || held_elsewhere(kProducerLockByte);
}

void AckFile::attach() {
  std::lock_guard<std::mutex> guard(mutex_);
  if (num_attached_ == 0) set_lock(F_RDLCK, kAttachLockByte);
  ++num_attached_;
}

void AckFile::detach() {
  std::lock_guard<std::mutex> guard(mutex_);
  if (--num_attached_ == 0) set_lock(F_UNLCK, kAttachLockByte);
}

bool AckFile::readers_attached() {
  std::lock_guard<std::mutex> guard(mutex_);
  return num_attached_ > 0 || held_elsewhere(kAttachLockByte);
}

void AckFile::lease(uint32_t slot) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    uint32_t& count = leases_[slot];
    if (count == 0) {
      try {
        set_lock(F_RDLCK, slot);
      } catch (...) {
        leases_.erase(slot);
        throw;
      }
    }
    ++count;
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);  // the lock before whatever the caller looks at now
}

void AckFile::release(uint32_t slot) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto lease = leases_.find(slot);
  if (lease == leases_.end() || --lease->second > 0) return;
  leases_.erase(lease);
  set_lock(F_UNLCK, slot);
}

bool AckFile::leased(uint32_t slot) {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // the caller's change of state before the look at the locks
  std::lock_guard<std::mutex> guard(mutex_);
  return leases_.count(slot) > 0 || held_elsewhere(slot);
}

void AckFile::set_lock(short type, int64_t byte) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  while (fcntl(fd_.get(), F_SETLK, &lock) != 0)
    if (errno != EINTR)
      fail(HSX_E_SYSTEM, "fcntl(F_SETLK) of byte %lld of %s failed: %s", static_cast<long long>(byte), path_.c_str(),
           std::strerror(errno));
}

bool AckFile::held_elsewhere(int64_t byte) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;  // in conflict with any lock
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return fcntl(fd_.get(), F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace hsx
