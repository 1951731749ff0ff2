#include "cuda_driver.h"

#include <sys/prctl.h>

#include <chrono>

#include "error.h"
#include "futex.h"
#include "process.h"
#include "rows.h"

namespace hsx {
namespace {

constexpr CUresult kAlreadyRegistered = 712;

}  // namespace

CudaDriver::CudaDriver(uint32_t ordinal, bool pinned)
    : device_(CudaDevice::get(ordinal)), api_(device_.api), pinned_(pinned) {
  CudaDevice::Current current(device_);
  device_.need(current.result, "cuCtxPushCurrent");
  try {
    stream_ = device_.make_stream(false);
    kernel_stream_ = device_.make_stream(true);
    device_.need(api_.event_create(&digests_done_, kEventDisableTiming), "cuEventCreate");
    device_.need(api_.event_create(&small_done_, kEventDisableTiming), "cuEventCreate");
  } catch (...) {
    release();
    throw;
  }
  thread_ = start_thread("hsx-cuda", [this] { run(); });
}

CudaDriver::~CudaDriver() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stopping_ = true;
  }
  submitted_.notify_one();
  thread_.join();
  CudaDevice::Current current(device_);
  api_.stream_synchronize(kernel_stream_);
  api_.stream_synchronize(stream_);
  if (registered_ != nullptr) api_.host_unregister(registered_);
  for (Batch& batch : batches_)
    for (Piece& piece : batch.pieces) spare_events_.push_back(piece.done);
  for (CUevent event : spare_events_) api_.event_destroy(event);
  release();
}

void CudaDriver::release() {
  for (CUevent event : {digests_done_, small_done_})
    if (event != nullptr) api_.event_destroy(event);
  for (CUstream stream : {stream_, kernel_stream_})
    if (stream != nullptr) api_.stream_destroy(stream);
}

std::string CudaDriver::register_memory(void* base, uint64_t bytes) {
  if (!pinned_) return "pinning is off (driver cuda-unpinned)";
  CudaDevice::Current current(device_);
  // Portable: for every device of this process that sends through this region.
  CUresult result = api_.host_register(base, bytes, kHostRegisterPortable);
  if (result == kCudaSuccess) registered_ = base;
  mapped_ = result == kCudaSuccess || result == kAlreadyRegistered;
  return mapped_ ? "" : device_.sentence(result, "cuMemHostRegister");
}

uint64_t CudaDriver::submit(std::vector<CopyOp> ops, void* stream) {
  CudaDevice::Current current(device_);
  Batch batch;
  batch.ops = std::move(ops);
  CUresult result = current.result;
  auto caller = static_cast<CUstream>(stream);
  if (result == kCudaSuccess) {
    // An event recorded here would become a part of the graph, and ours would wait for the graph's replays.
    int capturing = 0;
    if (api_.stream_is_capturing(caller, &capturing) != kCudaSuccess || capturing != 0)
      fail(HSX_E_INVALID, "submit_copies: the stream captures a graph; send after its replay, with snapshot");
    batch.ready = take_event();
    if (batch.ready == nullptr)
      batch.error = "cuEventCreate failed";
    else if ((result = api_.event_record(batch.ready, caller)) != kCudaSuccess)
      batch.error = device_.sentence(result, "cuEventRecord");
  } else {
    batch.error = device_.sentence(result, "cuCtxPushCurrent");
  }
  uint64_t number;
  bool wake;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    batches_.push_back(std::move(batch));
    number = ++num_submitted_;
    wake = asleep_;
    asleep_ = false;
  }
  if (wake) submitted_.notify_one();
  return number;
}

bool CudaDriver::wait(uint64_t event, uint64_t timeout_us, std::string* error) {
  static thread_local const int slack = prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);  // sleeps of 10 us take 60 without it
  (void)slack;
  uint64_t deadline = deadline_us(timeout_us);
  Batch* batch;
  {
    std::unique_lock<std::mutex> guard(mutex_);
    if (!queued_.wait_for(guard, std::chrono::microseconds(timeout_us), [&] { return num_queued_ >= event; }))
      return false;
    batch = &batches_.front();
  }
  CudaDevice::Current current(device_);
  while (!batch->pieces.empty()) {
    Piece& piece = batch->pieces.front();
    CUresult result = poll(piece.done, deadline);
    if (result == kCudaNotReady) return false;
    if (result != kCudaSuccess && batch->error.empty()) batch->error = device_.sentence(result, "cuEventQuery");
    if (batch->error.empty())
      for (const Landed& landed : piece.landed) add_to_marks(batch->ops[landed.op], landed.row, landed.num_rows);
    give_event(piece.done);
    batch->pieces.pop_front();
  }
  *error = batch->error;
  if (error->empty() && batch->digest_on_host)  // from where the bytes landed
    for (CopyOp op : batch->ops) {
      op.src = op.dst;
      op.src_stride_bytes = op.dst_stride_bytes;
      op.dst = nullptr;
      copy_rows(op);
    }
  std::lock_guard<std::mutex> guard(mutex_);
  batches_.pop_front();
  return true;
}

// cuEventSynchronize has no timeout; a query takes about a microsecond.
CUresult CudaDriver::poll(CUevent event, uint64_t deadline) {
  uint64_t start = now_us();
  for (;;) {
    CUresult result = api_.event_query(event);
    uint64_t now = now_us();
    if (result != kCudaNotReady || now >= deadline) return result;
    timespec pause = {0, now - start < 2000 ? 10000 : 50000};
    nanosleep(&pause, nullptr);
  }
}

void CudaDriver::run() {
  prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);  // sleeps of 20 us take 70 without it
  std::unique_lock<std::mutex> guard(mutex_);
  for (;;) {
    if (!await_work(guard)) return;
    Batch* batch = &batches_[batches_.size() - (num_submitted_ - num_queued_)];
    guard.unlock();
    {
      CudaDevice::Current current(device_);
      queue(*batch);
    }
    guard.lock();
    ++num_queued_;
    queued_.notify_one();
    guard.unlock();
    on_queued();
    guard.lock();
  }
}

// False at the end. For a while after each batch it looks by itself, so that an engine that sends at every step need not wake it.
bool CudaDriver::await_work(std::unique_lock<std::mutex>& guard) {
  constexpr uint64_t kLookUs = 20000;
  timespec pause = {0, 20000};
  auto ready = [&] { return stopping_ || num_queued_ < num_submitted_; };
  for (uint64_t end = now_us() + kLookUs; !ready() && now_us() < end;) {
    guard.unlock();
    nanosleep(&pause, nullptr);
    guard.lock();
  }
  asleep_ = !ready();
  submitted_.wait(guard, ready);
  asleep_ = false;
  return num_queued_ < num_submitted_;
}

CUevent CudaDriver::take_event() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!spare_events_.empty()) {
      CUevent event = spare_events_.back();
      spare_events_.pop_back();
      return event;
    }
  }
  CUevent event = nullptr;
  return api_.event_create(&event, kEventDisableTiming) == kCudaSuccess ? event : nullptr;
}

void CudaDriver::give_event(CUevent event) {
  std::lock_guard<std::mutex> guard(mutex_);
  spare_events_.push_back(event);
}

std::unique_ptr<Driver> make_cuda_driver(uint32_t device, bool pinned) {
  return std::make_unique<CudaDriver>(device, pinned);
}

}  // namespace hsx
