// The CPU as a device: a stream is a thread that copies in order, an event is a count of what it has done.
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "driver.h"
#include "futex.h"
#include "process.h"
#include "rows.h"

namespace hsx {
namespace {

class HostDriver : public Driver {
 public:
  explicit HostDriver(bool faulty) : faulty_(faulty), thread_(start_thread("hsx-copy", [this] { run(); })) {}

  ~HostDriver() override {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      stopping_ = true;
    }
    queued_.notify_one();
    thread_.join();
  }

  std::string register_memory(void*, uint64_t) override { return ""; }

  uint64_t submit(std::vector<CopyOp> ops, void*) override {
    uint64_t event;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      queue_.push_back(std::move(ops));
      event = ++num_submitted_;
    }
    queued_.notify_one();
    return event;
  }

  bool wait(uint64_t event, uint64_t timeout_us, std::string* error) override {
    std::unique_lock<std::mutex> guard(mutex_);
    if (!done_.wait_for(guard, std::chrono::microseconds(timeout_us), [&] { return num_done_ >= event; })) return false;
    if (faulty_ && event % 2 == 0) *error = "the device reported an error (driver host-faulty)";
    return true;
  }

 private:
  void run() {
    std::unique_lock<std::mutex> guard(mutex_);
    for (;;) {
      queued_.wait(guard, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      std::vector<CopyOp> ops = std::move(queue_.front());
      queue_.pop_front();
      guard.unlock();
      if (!faulty_ || num_done_ % 2 == 0)
        for (const CopyOp& op : ops) {
          copy_rows(op);
          add_to_marks(op, 0, op.num_rows);
        }
      guard.lock();
      ++num_done_;
      done_.notify_one();
    }
  }

  const bool faulty_;  // for tests: every second submission fails
  std::mutex mutex_;
  std::condition_variable queued_, done_;
  std::deque<std::vector<CopyOp>> queue_;
  uint64_t num_submitted_ = 0, num_done_ = 0;
  bool stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace

std::unique_ptr<Driver> make_host_driver(bool faulty) { return std::make_unique<HostDriver>(faulty); }

}  // namespace hsx
