// The copy engine of a GPU: copies on a stream of our own, behind an event on the caller's, in the device's primary context (torch's).
#include <algorithm>
#include <deque>
#include <mutex>
#include <utility>

#include "cuda_api.h"
#include "driver.h"
#include "error.h"
#include "futex.h"
#include "rows.h"

namespace hsx {
namespace {

class CudaDriver : public Driver {
 public:
  explicit CudaDriver(uint32_t ordinal) : api_(cuda_api()) {
    if (!api_.unavailable.empty()) fail(HSX_E_UNAVAILABLE, "driver cuda: %s", api_.unavailable.c_str());
    int num_devices = 0;
    api_.device_get_count(&num_devices);
    if (ordinal >= static_cast<uint32_t>(num_devices))
      fail(HSX_E_UNAVAILABLE, "driver cuda: there is no device %u, CUDA sees %d", ordinal, num_devices);
    need(api_.device_get(&device_, static_cast<int>(ordinal)), "cuDeviceGet");
    need(api_.ctx_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
    Current current(*this);
    CUresult result = api_.stream_create(&stream_, kStreamNonBlocking);
    if (result == kCudaSuccess) result = api_.event_create(&caller_event_, kEventDisableTiming);
    if (result == kCudaSuccess) return;
    release();
    need(result, "cuStreamCreate or cuEventCreate");
  }

  ~CudaDriver() override {
    Current current(*this);
    api_.stream_synchronize(stream_);
    for (Submitted& left : submitted_) spare_events_.push_back(left.done);
    for (CUevent event : spare_events_)
      if (event != nullptr) api_.event_destroy(event);
    if (registered_ != nullptr) api_.host_unregister(registered_);
    release();
  }

  void register_memory(void* base, uint64_t bytes) override {
    Current current(*this);
    // Not pinned (a memlock limit, say), the copies go through the driver's bounce buffer: slower, not wrong.
    if (api_.host_register(base, bytes, kHostRegisterPortable) == kCudaSuccess) registered_ = base;
  }

  uint64_t submit(std::vector<CopyOp> ops, void* stream) override {
    Current current(*this);
    Submitted submitted;
    CUresult result = current.result;
    const char* call = "cuCtxPushCurrent";
    auto then = [&](const char* name, auto&& step) {
      if (result != kCudaSuccess) return;
      call = name;
      result = step();
    };
    then("cuEventRecord", [&] { return api_.event_record(caller_event_, static_cast<CUstream>(stream)); });
    then("cuStreamWaitEvent", [&] { return api_.stream_wait_event(stream_, caller_event_, 0); });
    for (const CopyOp& op : ops) then("cuMemcpyAsync", [&] { return queue(op); });
    if (result != kCudaSuccess) submitted.error = sentence(call, result);
    // Also behind a failed copy: those before it may be under way, and their memory is in use until then.
    submitted.done = spare_event();
    if (submitted.done != nullptr) {
      result = api_.event_record(submitted.done, stream_);
      if (result != kCudaSuccess && submitted.error.empty()) submitted.error = sentence("cuEventRecord", result);
    } else if (submitted.error.empty()) {
      submitted.error = "no event to wait for: cuEventCreate failed";
    }
    for (const CopyOp& op : ops)
      if (op.digests != nullptr) submitted.digested.push_back(op);
    std::lock_guard<std::mutex> guard(mutex_);
    submitted_.push_back(std::move(submitted));
    return ++num_submitted_;
  }

  bool wait(uint64_t, uint64_t timeout_us, std::string* error) override {
    Current current(*this);
    Submitted* submitted;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      submitted = &submitted_.front();  // deque: stays where it is while others are queued behind it
    }
    CUresult result = current.result;
    if (result == kCudaSuccess)
      result = submitted->done == nullptr ? api_.stream_synchronize(stream_) : poll(submitted->done, timeout_us);
    if (result == kCudaNotReady) return false;
    *error = submitted->error;
    if (result != kCudaSuccess && error->empty()) *error = sentence("cuEventQuery", result);
    // From where the bytes landed; a kernel that digests them on the device comes with csrc/kernels.
    if (error->empty())
      for (CopyOp& op : submitted->digested) {
        op.src = op.dst;
        op.src_stride_bytes = op.dst_stride_bytes;
        op.dst = nullptr;
        copy_rows(op);
      }
    std::lock_guard<std::mutex> guard(mutex_);
    if (submitted->done != nullptr) spare_events_.push_back(submitted->done);
    submitted_.pop_front();
    return true;
  }

 private:
  struct Submitted {
    CUevent done = nullptr;
    std::vector<CopyOp> digested;
    std::string error;
  };

  // The primary context on this thread, and what was there before afterwards.
  struct Current {
    explicit Current(CudaDriver& driver) : driver(driver), result(driver.api_.ctx_push(driver.context_)) {}
    ~Current() {
      CUcontext popped;
      if (result == kCudaSuccess) driver.api_.ctx_pop(&popped);
    }
    CudaDriver& driver;
    CUresult result;
  };

  void need(CUresult result, const char* call) {
    if (result != kCudaSuccess) fail(HSX_E_UNAVAILABLE, "driver cuda: %s", sentence(call, result).c_str());
  }

  std::string sentence(const char* call, CUresult result) {
    return std::string(call) + " failed: " + api_.describe(result);
  }

  CUresult queue(const CopyOp& op) {
    if (op.row_bytes == 0) return kCudaSuccess;
    auto src = reinterpret_cast<CUdeviceptr>(op.src), dst = reinterpret_cast<CUdeviceptr>(op.dst);
    if (op.src_stride_bytes == op.row_bytes && op.dst_stride_bytes == op.row_bytes)
      return api_.memcpy_async(dst, src, op.row_bytes * op.num_rows, stream_);
    constexpr uint64_t kMaxPitch = INT32_MAX;
    uint64_t narrow = std::min(op.src_stride_bytes, op.dst_stride_bytes);
    uint64_t wide = std::max(op.src_stride_bytes, op.dst_stride_bytes);
    if (narrow >= op.row_bytes && wide <= kMaxPitch) {
      CudaMemcpy2D copy = {};
      copy.srcMemoryType = kMemoryUnified;
      copy.srcDevice = src;
      copy.srcPitch = op.src_stride_bytes;
      copy.dstMemoryType = kMemoryHost;
      copy.dstHost = op.dst;
      copy.dstPitch = op.dst_stride_bytes;
      copy.WidthInBytes = op.row_bytes;
      copy.Height = op.num_rows;
      return api_.memcpy_2d_async(&copy, stream_);
    }
    for (uint64_t row = 0; row < op.num_rows; ++row)  // one row broadcast, or strides that no pitch can be
      if (CUresult result = api_.memcpy_async(dst + row * op.dst_stride_bytes, src + row * op.src_stride_bytes,
                                              op.row_bytes, stream_))
        return result;
    return kCudaSuccess;
  }

  CUevent spare_event() {
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

  // cuEventSynchronize has no timeout; a query takes about a microsecond.
  CUresult poll(CUevent event, uint64_t timeout_us) {
    uint64_t start = now_us(), deadline = deadline_us(timeout_us);
    for (;;) {
      CUresult result = api_.event_query(event);
      uint64_t now = now_us();
      if (result != kCudaNotReady || now >= deadline) return result;
      timespec pause = {0, now - start < 2000 ? 10000 : 50000};
      nanosleep(&pause, nullptr);
    }
  }

  void release() {
    if (caller_event_ != nullptr) api_.event_destroy(caller_event_);
    if (stream_ != nullptr) api_.stream_destroy(stream_);
    api_.ctx_release(device_);
  }

  const CudaApi& api_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  CUevent caller_event_ = nullptr;  // recorded again for each submission; what waits for it has taken note by then
  void* registered_ = nullptr;
  std::mutex mutex_;
  std::deque<Submitted> submitted_;
  std::vector<CUevent> spare_events_;
  uint64_t num_submitted_ = 0;
};

}  // namespace

std::unique_ptr<Driver> make_cuda_driver(uint32_t device) { return std::make_unique<CudaDriver>(device); }

}  // namespace hsx
