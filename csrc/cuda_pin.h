// A consumer's mapping of an arena, pinned for GPUs piece by piece: 8 GiB at once would stall the first get for half a second.
#ifndef HSXFER_CUDA_PIN_H
#define HSXFER_CUDA_PIN_H

#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace hsx {

class CudaDevice;

class PinnedRegion {
 public:
  PinnedRegion(CudaDevice& device, uint8_t* base, uint64_t bytes);
  ~PinnedRegion();

  // Whether [at, at + bytes) is pinned, which this sees to; after the first time a thread pins the rest, in the background. A copy must not cross a multiple of kPieceBytes from the base.
  bool need(const void* at, uint64_t bytes);
  // How many of `bytes` from `at` on lie in one piece.
  uint64_t within_piece(const void* at, uint64_t bytes) const;
  std::string failure();  // why a piece could not be pinned, or ""

  static constexpr uint64_t kPieceBytes = 64 << 20;

 private:
  enum State : uint8_t { kUntouched, kPinned, kFailed };

  bool pin(uint64_t piece);
  void pin_the_rest();

  CudaDevice& device_;
  uint8_t* const base_;
  const uint64_t bytes_;
  std::mutex mutex_;
  std::vector<State> pieces_;
  std::string failure_;
  bool stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace hsx

#endif
