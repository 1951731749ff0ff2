#include "packer.h"

#include "error.h"

namespace hsx {

namespace {

std::map<int, std::unique_ptr<Driver>> first_driver(int key, const hsx_arena_options& options) {
  std::map<int, std::unique_ptr<Driver>> drivers;
  drivers[key] = make_driver(options.driver, options.device);
  return drivers;
}

}  // namespace

Packer::Packer(const hsx_arena_options& options)
    : drivers_(first_driver(kHost, options)), arena_(options), completion_(arena_) {
  drivers_[kHost]->register_memory(arena_.region(), arena_.region_bytes());
}

std::string Packer::attach(const std::string& name, uint32_t device) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (closed_) fail(HSX_E_INVALID, "attach: the arena is closed");
  std::unique_ptr<Driver>& driver = drivers_[static_cast<int>(device)];
  if (driver != nullptr) return "";
  driver = make_driver(name, device);
  driver->on_rows_coming = [this] { arena_.announce_rows(); };
  driver->on_queued = [this] { completion_.wake(); };
  return driver->register_memory(arena_.region(), arena_.region_bytes());
}

Packer::~Packer() {
  completion_.stop();
  drivers_.clear();
}

uint64_t Packer::submit_copies(const hsx_copy* copies, size_t num_copies, int device, void* stream) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (closed_) fail(HSX_E_INVALID, "submit_copies: the arena is closed");
  auto driver = drivers_.find(device);
  if (driver == drivers_.end() || driver->second == nullptr)
    fail(HSX_E_INVALID, "submit_copies: device %d is not attached to this arena", device);
  CopyPlan plan = arena_.plan_copies(copies, num_copies);
  Submission submission;
  submission.driver = driver->second.get();
  submission.event = submission.driver->submit(std::move(plan.ops), stream);
  submission.slots = std::move(plan.slots);
  submission.num_copies = num_copies;
  submission.num_rows = plan.num_rows;
  submission.num_bytes = plan.num_bytes;
  return completion_.push(std::move(submission));
}

uint64_t Packer::submit_seal(hsx_slot slot, const void* tail, uint32_t tail_bytes, bool failed) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (closed_) fail(HSX_E_INVALID, "submit_seal: the arena is closed");
  arena_.start_seal(slot, tail, tail_bytes, failed);
  Submission submission;
  submission.slots.push_back(slot);
  submission.failed = failed;
  return completion_.push(std::move(submission));
}

void Packer::close() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (closed_) return;
    closed_ = true;
    for (hsx_slot slot : arena_.stop_taking()) {
      Submission submission;
      submission.slots.push_back(slot);
      completion_.push(std::move(submission));
    }
  }
  completion_.stop();
  drivers_.clear();  // they may have pinned what the arena unmaps
  arena_.close();
}

}  // namespace hsx
