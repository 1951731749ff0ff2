// The copy engine of a GPU: copies on a stream of our own, behind an event on the caller's, in the device's primary context (torch's).
#ifndef HSXFER_CUDA_DRIVER_H
#define HSXFER_CUDA_DRIVER_H

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda_device.h"
#include "driver.h"

namespace hsx {

// submit() records an event on the caller's stream and wakes a thread of ours, which queues the copies: for one tensor that takes it 40 us,
// for 805 MB in pieces 150 us, which are not the engine's.
class CudaDriver : public Driver {
 public:
  CudaDriver(uint32_t ordinal, bool pinned);
  ~CudaDriver() override;

  std::string register_memory(void* base, uint64_t bytes) override;
  uint64_t submit(std::vector<CopyOp> ops, void* stream) override;
  bool wakes_completion() const override { return true; }
  bool wait(uint64_t event, uint64_t timeout_us, std::string* error) override;

 private:
  struct Landed {  // rows of an op, once the event is done
    size_t op;
    uint64_t row, num_rows;
  };
  struct Piece {
    CUevent done;
    std::vector<Landed> landed;
  };
  struct Batch {
    CUevent ready = nullptr;  // on the caller's stream
    std::vector<CopyOp> ops;
    std::deque<Piece> pieces;
    std::string error;
    bool digest_on_host = false;
  };

  void run();
  bool await_work(std::unique_lock<std::mutex>& guard);
  void queue(Batch& batch);
  CUresult queue_digests(const std::vector<CopyOp>& ops, bool overlapping);
  CUresult queue_small(const std::vector<CopyOp>& ops);
  CUresult queue_copies(Batch& batch, const std::vector<bool>& done);
  CUresult queue_rows(const CopyOp& op, uint64_t row, uint64_t num_rows);
  CUresult flush_many();
  CUresult close_piece(Batch& batch, std::vector<Landed>* landed);
  CUresult poll(CUevent event, uint64_t deadline);
  CUevent take_event();
  void give_event(CUevent event);
  void release();

  CudaDevice& device_;
  const CudaApi& api_;
  const bool pinned_;
  CUstream stream_ = nullptr, kernel_stream_ = nullptr;
  CUevent digests_done_ = nullptr, small_done_ = nullptr;  // between our two streams
  void* registered_ = nullptr;
  bool mapped_ = false;    // kernels reach the region
  const char* call_ = "";  // what the thread does
  struct Many {            // contiguous copies that go to the driver in one call
    std::vector<CUdeviceptr> dst, src;
    std::vector<size_t> bytes;
  } many_;

  std::mutex mutex_;
  std::condition_variable submitted_, queued_;
  std::deque<Batch> batches_;  // stay where they are while others are added behind them
  uint64_t num_submitted_ = 0, num_queued_ = 0;
  std::vector<CUevent> spare_events_;
  bool stopping_ = false;
  bool asleep_ = false;  // the thread waits for `submitted_`
  std::thread thread_;   // last: it uses all of the above
};

}  // namespace hsx

#endif
