// A GPU as everything here uses it: its primary context (torch's), and the kernels of csrc/kernels loaded into that.
#ifndef HSXFER_CUDA_DEVICE_H
#define HSXFER_CUDA_DEVICE_H

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_api.h"
#include "driver.h"
#include "kernels/jobs.h"

namespace hsx {

class CudaDevice {
 public:
  // One object a device, never destroyed: torch's context outlives every use of ours, and static destructors are too late for CUDA.
  // HSX_E_UNAVAILABLE with the reason.
  static CudaDevice& get(uint32_t ordinal);

  // The primary context on this thread, and what was there before afterwards. While another thread captures a graph in the default mode,
  // calls such as ours would invalidate the capture; in the relaxed mode they do not concern it.
  class Current {
   public:
    explicit Current(const CudaDevice& device);
    ~Current();
    CUresult result;

   private:
    const CudaApi& api_;
    int mode_ = kCaptureModeRelaxed;
  };

  // HSX_E_UNAVAILABLE, naming the call, unless it succeeded.
  void need(CUresult result, const char* call) const;
  std::string sentence(CUresult result, const char* call) const;

  CUstream make_stream(bool for_kernels) const;  // for kernels: behind everything else that computes

  bool has_kernels() const { return kernels_missing_.empty(); }
  const std::string& kernels_missing() const { return kernels_missing_; }
  // HSX_E_INVALID for a kernel that is none, HSX_E_UNAVAILABLE without kernels.
  CUresult launch(const std::string& kernel, unsigned num_blocks, CUstream stream, const void* parameter) const;
  // Digests the rows of `ops` from their sources, with `copy` in the pass that copies them to `dst`. With `first_bad` (device memory)
  // compares instead, rows counted from `row_base` on.
  CUresult launch_rows(const std::vector<CopyOp>& ops, bool copy, CUstream stream, CUdeviceptr first_bad = 0,
                       uint64_t row_base = 0) const;

  const CudaApi& api;
  const uint32_t ordinal;

 private:
  explicit CudaDevice(uint32_t ordinal);
  void load_kernels();

  CUcontext context_ = nullptr;
  std::string kernels_missing_;
  std::map<std::string, CUfunction> functions_;
};

// What a build without nvcc lacks, or "".
const char* kernels_not_built();

void submit_encode(CudaDevice& device, CUstream stream, const std::string& kernel, const EncodeLaunch& launch);
void submit_screen(CudaDevice& device, CUstream stream, const std::string& kind, const ScreenLaunch& launch);

}  // namespace hsx

#endif
