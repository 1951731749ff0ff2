#include "cuda_pin.h"

#include <algorithm>
#include <ctime>

#include "cuda_device.h"
#include "process.h"

namespace hsx {

PinnedRegion::PinnedRegion(CudaDevice& device, uint8_t* base, uint64_t bytes)
    : device_(device), base_(base), bytes_(bytes), pieces_((bytes + kPieceBytes - 1) / kPieceBytes, kUntouched) {}

void PinnedRegion::pin_the_rest() {
  for (uint64_t piece = 0; piece < pieces_.size(); ++piece) {
    timespec pause = {0, 1000000};  // between two, so that need() gets its turn: a mutex is not fair
    nanosleep(&pause, nullptr);
    std::lock_guard<std::mutex> guard(mutex_);
    if (stopping_ || !pin(piece)) return;
  }
}

PinnedRegion::~PinnedRegion() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
  CudaDevice::Current current(device_);
  for (uint64_t piece = 0; piece < pieces_.size(); ++piece)
    if (pieces_[piece] == kPinned) device_.api.host_unregister(base_ + piece * kPieceBytes);
}

bool PinnedRegion::pin(uint64_t piece) {
  State& state = pieces_[piece];
  if (state != kUntouched) return state == kPinned;
  CudaDevice::Current current(device_);
  uint64_t start = piece * kPieceBytes;
  // Read-only: consumers may not write there, and without the flag registering their mapping fails.
  CUresult result = device_.api.host_register(base_ + start, std::min(kPieceBytes, bytes_ - start),
                                              kHostRegisterPortable | kHostRegisterReadOnly);
  state = result == kCudaSuccess ? kPinned : kFailed;
  if (state == kFailed && failure_.empty()) failure_ = device_.sentence(result, "cuMemHostRegister");
  return state == kPinned;
}

bool PinnedRegion::need(const void* at, uint64_t bytes) {
  if (bytes == 0) return true;
  auto offset = static_cast<uint64_t>(static_cast<const uint8_t*>(at) - base_);
  std::lock_guard<std::mutex> guard(mutex_);
  bool pinned = true;
  for (uint64_t piece = offset / kPieceBytes; piece <= (offset + bytes - 1) / kPieceBytes; ++piece)
    pinned = pin(piece) && pinned;
  if (!thread_.joinable()) thread_ = start_thread("hsx-pin", [this] { pin_the_rest(); });
  return pinned;
}

uint64_t PinnedRegion::within_piece(const void* at, uint64_t bytes) const {
  auto offset = static_cast<uint64_t>(static_cast<const uint8_t*>(at) - base_);
  return std::min(bytes, kPieceBytes - offset % kPieceBytes);
}

std::string PinnedRegion::failure() {
  std::lock_guard<std::mutex> guard(mutex_);
  return failure_;
}

}  // namespace hsx
