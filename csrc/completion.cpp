#include "completion.h"

#include <algorithm>
#include <chrono>

#include "error.h"
#include "futex.h"
#include "process.h"

namespace hsx {

namespace {
constexpr uint64_t kSweepUs = 100000;
}

Completion::Completion(Arena& arena) : arena_(arena), thread_(start_thread("hsx-done", [this] { run(); })) {}

Completion::~Completion() { stop(); }

uint64_t Completion::push(Submission submission) {
  bool later = submission.driver != nullptr && submission.driver->wakes_completion();
  uint64_t number;
  bool wake;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    later = later || !queue_.empty();  // behind one that the thread was told of, or will be
    queue_.push_back(std::move(submission));
    number = ++num_submitted_;
    wake = idle_ && !later;
    if (wake) idle_ = false;
  }
  // In a virtual machine a wake of a thread that slept for long takes the caller 50 us: the engine is spared those that can be.
  if (wake) queued_.notify_one();
  return number;
}

void Completion::wake() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!idle_) return;
    idle_ = false;
  }
  queued_.notify_one();
}

uint64_t Completion::wait_done(uint64_t after, uint64_t timeout_us) {
  uint64_t deadline = deadline_us(timeout_us);
  std::unique_lock<std::mutex> guard(mutex_);
  while (num_done_ <= after && !stopped_) {
    uint64_t now = now_us();
    if (now >= deadline)
      fail(HSX_E_TIMEOUT, "wait_done: %llu of %llu submissions are done, more than %llu were asked for", ull(num_done_),
           ull(num_submitted_), ull(after));
    done_.wait_for(guard, std::chrono::microseconds(std::min<uint64_t>(deadline - now, 1000000)));
  }
  if (num_done_ <= after) fail(HSX_E_INVALID, "wait_done: the arena was closed after %llu submissions", ull(num_done_));
  return num_done_;
}

void Completion::stop() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stopping_ = true;
  }
  queued_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Completion::run() {
  std::unique_lock<std::mutex> guard(mutex_);
  for (;;) {
    auto ready = [&] { return stopping_ || !queue_.empty(); };
    guard.unlock();
    bool live = arena_.has_live_slots();
    guard.lock();
    idle_ = queue_.empty();
    if (live)
      queued_.wait_for(guard, std::chrono::microseconds(kSweepUs), ready);
    else
      queued_.wait(guard, ready);  // nothing to reclaim: an idle arena costs nothing
    idle_ = false;
    if (queue_.empty() && stopping_) break;
    bool some = !queue_.empty();
    Submission submission;
    if (some) {
      submission = std::move(queue_.front());
      queue_.pop_front();
    }
    guard.unlock();
    try {
      if (some) finish(submission);
      sweep_if_due();
    } catch (...) {
      // Out of memory: a sample may stay unpublished, and its reader times out. The engine whose process this is goes on.
    }
    guard.lock();
    num_done_ += some;
    if (some) done_.notify_all();
  }
  stopped_ = true;
  done_.notify_all();
}

void Completion::finish(const Submission& submission) {
  if (submission.driver == nullptr) return arena_.finish_seal(submission.slots.front(), submission.failed);
  std::string error;
  while (!submission.driver->wait(submission.event, kSweepUs, &error)) sweep_if_due();
  arena_.finish_copies(submission.slots, submission.num_copies, submission.num_rows, submission.num_bytes, error);
}

void Completion::sweep_if_due() {
  uint64_t now = now_us();
  if (now < next_sweep_us_) return;
  next_sweep_us_ = now + kSweepUs;
  arena_.sweep();
}

}  // namespace hsx
