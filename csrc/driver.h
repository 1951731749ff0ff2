// What moves bytes into an arena. Two of them: the copy engine of a GPU, and a thread of this process.
#ifndef HSXFER_DRIVER_H
#define HSXFER_DRIVER_H

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace hsx {

struct CopyOp {  // num_rows rows of row_bytes; digests may be null
  void* dst;
  const void* src;
  uint64_t dst_stride_bytes;
  uint64_t src_stride_bytes;
  uint64_t row_bytes;
  uint64_t num_rows;
  uint64_t* digests;
  uint64_t digest_stride_bytes;
  // Watermarks (docs/format.md, 2.2): word i counts the rows from i * rows_per_mark on that have landed. Null: none.
  uint64_t* marks = nullptr;
  uint64_t rows_per_mark = 0;
  uint64_t first_row = 0;  // what to call the first row there
};

// Rows [row, row + num_rows) of `op` have landed.
void add_to_marks(const CopyOp& op, uint64_t row, uint64_t num_rows);

// One per arena. submit() is called by one thread at a time, wait() by another one, in the order of the events.
class Driver {
 public:
  virtual ~Driver() = default;  // waits for what is queued

  // Pins the region, where that means something. A device that cannot is slower, not wrong: returns why, or "".
  virtual std::string register_memory(void* base, uint64_t bytes) = 0;

  // Queues the copies behind what the caller's stream holds now and behind earlier submissions; returns their event. Does not wait. Fails
  // only for a stream that cannot be waited for; what goes wrong on the device is wait()'s to tell.
  virtual uint64_t submit(std::vector<CopyOp> ops, void* stream) = 0;

  // Called when rows of a submission with watermarks are on their way: who waits for the sample sleeps, and has things to prepare.
  std::function<void()> on_rows_coming = [] {};

  // Whether it calls on_queued, in a thread of its own, once a submission can be waited for; else it can at once.
  virtual bool wakes_completion() const { return false; }
  std::function<void()> on_queued = [] {};

  // True once the event is done; `error` then says why its bytes did not arrive, or stays empty.
  virtual bool wait(uint64_t event, uint64_t timeout_us, std::string* error) = 0;
};

// HSX_E_UNAVAILABLE with the reason if it does not work here, HSX_E_INVALID for a name that is none.
std::unique_ptr<Driver> make_driver(const std::string& name, uint32_t device);

std::unique_ptr<Driver> make_host_driver(bool faulty);
// `pinned`: false leaves the region pageable, for tests.
std::unique_ptr<Driver> make_cuda_driver(uint32_t device, bool pinned);

}  // namespace hsx

#endif
