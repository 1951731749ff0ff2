#include "packer.h"

#include "error.h"

namespace hsx {

Packer::Packer(const hsx_arena_options& options)
    : driver_(make_driver(options.driver, options.device)), arena_(options), completion_(arena_, *driver_) {
  driver_->register_memory(arena_.region(), arena_.region_bytes());
}

Packer::~Packer() {
  completion_.stop();
  driver_.reset();
}

uint64_t Packer::submit_copies(const hsx_copy* copies, size_t num_copies, void* stream) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (closed_) fail(HSX_E_INVALID, "submit_copies: the arena is closed");
  CopyPlan plan = arena_.plan_copies(copies, num_copies);
  Submission submission;
  submission.event = driver_->submit(std::move(plan.ops), stream);
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
  driver_.reset();  // it may have pinned what the arena unmaps
  arena_.close();
}

}  // namespace hsx
