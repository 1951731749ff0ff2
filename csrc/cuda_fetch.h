// From an arena into the memory of a GPU: copies that start while the sample still arrives, digests checked where the bytes land.
#ifndef HSXFER_CUDA_FETCH_H
#define HSXFER_CUDA_FETCH_H

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_device.h"
#include "hsxfer.h"
#include "reader.h"

namespace hsx {

// A device's streams for what comes in; one object a device, for as long as the process lives.
class CudaFetcher {
 public:
  static CudaFetcher& get(uint32_t ordinal);

  CUstream stream() const { return stream_; }

 private:
  friend class Fetch;
  struct Verdict {  // the first row that differs, on the device and where the host sees it
    CUdeviceptr device;
    uint64_t* host;
  };

  explicit CudaFetcher(uint32_t ordinal);
  Verdict take_verdict();
  void give_verdict(Verdict verdict);

  CudaDevice& device_;
  CUstream stream_ = nullptr, kernel_stream_ = nullptr;
  std::mutex mutex_;
  std::vector<Verdict> verdicts_;
};

class Fetch {
 public:
  Fetch(CudaFetcher& fetcher, std::shared_ptr<Reader> reader, const hsx_lease& lease, std::vector<hsx_fetch_op> ops);
  ~Fetch();
  Fetch(const Fetch&) = delete;

  // HSX_OK, HSX_E_TIMEOUT, HSX_E_FAILED or HSX_E_INTEGRITY; throws what CUDA has to say.
  hsx_code wait(uint64_t timeout_us, uint64_t* bad_op, uint64_t* bad_row);
  const std::string& warning() const { return warning_; }

 private:
  struct Piece {
    size_t op;
    uint64_t row, num_rows;
  };

  void add_pieces(size_t op);
  bool landed(const Piece& piece) const;
  bool queue_landed();
  void queue(const Piece& piece);
  void queue_verify();
  bool look_at_state();
  bool again_if_rewritten();
  void finish();

  CudaFetcher& fetcher_;
  CudaDevice& device_;
  const CudaApi& api_;
  std::shared_ptr<Reader> reader_;
  const hsx_lease lease_;
  const std::vector<hsx_fetch_op> ops_;
  CudaFetcher::Verdict verdict_;
  CUevent copied_ = nullptr, done_ = nullptr;
  std::deque<Piece> pending_;
  Piece unverified_ = {0, 0, 0};
  bool complete_ = false;  // the sample is ready: watermarks do not matter any more
  bool early_ = false, failed_ = false;
  bool finished_ = false;     // everything is queued
  bool landed_ = false;       // and done
  size_t bad_op_ = SIZE_MAX;  // found on the host
  uint64_t bad_row_ = 0;
  std::string warning_;
};

}  // namespace hsx

#endif
