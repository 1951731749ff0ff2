#include "cuda_device.h"

#include <algorithm>

#include "error.h"
#include "process.h"

// What setup.py embeds; of no bytes where there is no nvcc.
extern "C" const unsigned char hsx_fatbin[];
extern "C" const uint64_t hsx_fatbin_bytes;

namespace hsx {
namespace {

constexpr const char* kKernels[] = {"hsx_rows_by_warp", "hsx_rows_by_block", "hsx_bf16_to_fp8",  "hsx_fp16_to_fp8",
                                    "hsx_fp32_to_fp8",  "hsx_fp8_to_bf16",   "hsx_fp8_to_fp16",  "hsx_fp8_to_fp32",
                                    "hsx_fp16_to_bf16", "hsx_fp32_to_bf16",  "hsx_bf16_to_fp16", "hsx_bf16_to_fp32",
                                    "hsx_screen_bf16",  "hsx_screen_fp16",   "hsx_screen_fp32"};

}  // namespace

const char* kernels_not_built() {
  return hsx_fatbin_bytes == 0 ? "this build has no CUDA kernels: it was made without nvcc" : "";
}

CudaDevice& CudaDevice::get(uint32_t ordinal) {
  static std::mutex mutex;
  static auto* devices = new std::map<uint32_t, CudaDevice*>;
  const CudaApi& api = cuda_api();
  if (!api.unavailable.empty()) fail(HSX_E_UNAVAILABLE, "driver cuda: %s", api.unavailable.c_str());
  if (api.epoch != process_epoch())
    fail(HSX_E_UNAVAILABLE,
         "driver cuda: CUDA was initialised before this process was forked: start processes with spawn");
  if (ordinal >= static_cast<uint32_t>(api.num_devices))
    fail(HSX_E_UNAVAILABLE, "driver cuda: there is no device %u, CUDA sees %d", ordinal, api.num_devices);
  std::lock_guard<std::mutex> guard(mutex);
  CudaDevice*& device = (*devices)[ordinal];
  if (device == nullptr) device = new CudaDevice(ordinal);
  return *device;
}

CudaDevice::CudaDevice(uint32_t ordinal) : api(cuda_api()), ordinal(ordinal) {
  CUdevice device;
  need(api.device_get(&device, static_cast<int>(ordinal)), "cuDeviceGet");
  need(api.ctx_retain(&context_, device), "cuDevicePrimaryCtxRetain");
  load_kernels();
}

void CudaDevice::load_kernels() {
  kernels_missing_ = kernels_not_built();
  if (!kernels_missing_.empty()) return;
  Current current(*this);
  need(current.result, "cuCtxPushCurrent");
  CUmodule module;
  CUresult result = api.module_load(&module, hsx_fatbin);
  if (result != kCudaSuccess) {
    kernels_missing_ = "the CUDA kernels do not load (" + api.describe(result) + ")";
    return;
  }
  for (const char* name : kKernels) need(api.module_function(&functions_[name], module, name), name);
}

CudaDevice::Current::Current(const CudaDevice& device)
    : result(device.api.ctx_push(device.context_)), api_(device.api) {
  if (result == kCudaSuccess) api_.capture_mode(&mode_);
}

CudaDevice::Current::~Current() {
  if (result != kCudaSuccess) return;
  api_.capture_mode(&mode_);
  CUcontext popped;
  api_.ctx_pop(&popped);
}

void CudaDevice::need(CUresult result, const char* call) const {
  if (result != kCudaSuccess) fail(HSX_E_UNAVAILABLE, "driver cuda: %s", sentence(result, call).c_str());
}

std::string CudaDevice::sentence(CUresult result, const char* call) const {
  return std::string(call) + " failed on device " + std::to_string(ordinal) + ": " + api.describe(result);
}

CUstream CudaDevice::make_stream(bool for_kernels) const {
  int least = 0, greatest = 0;
  need(api.ctx_priorities(&least, &greatest), "cuCtxGetStreamPriorityRange");
  CUstream stream;
  need(api.stream_create(&stream, kStreamNonBlocking, for_kernels ? least : greatest), "cuStreamCreateWithPriority");
  return stream;
}

CUresult CudaDevice::launch(const std::string& kernel, unsigned num_blocks, CUstream stream,
                            const void* parameter) const {
  if (!has_kernels()) fail(HSX_E_UNAVAILABLE, "driver cuda: %s", kernels_missing_.c_str());
  auto function = functions_.find(kernel);
  if (function == functions_.end()) fail(HSX_E_INVALID, "no kernel is called '%s'", kernel.c_str());
  void* parameters[] = {const_cast<void*>(parameter)};
  return api.launch(function->second, num_blocks, 1, 1, 256, 1, 1, 0, stream, parameters, nullptr);
}

void submit_encode(CudaDevice& device, CUstream stream, const std::string& kernel, const EncodeLaunch& launch) {
  CudaDevice::Current current(device);
  if (launch.num_rows > 0)
    device.need(device.launch("hsx_" + kernel, launch.num_rows, stream, &launch), "cuLaunchKernel");
}

void submit_screen(CudaDevice& device, CUstream stream, const std::string& kind, const ScreenLaunch& launch) {
  CudaDevice::Current current(device);
  if (launch.num_rows > 0)
    device.need(device.launch("hsx_screen_" + kind, launch.num_rows, stream, &launch), "cuLaunchKernel");
}

CUresult CudaDevice::launch_rows(const std::vector<CopyOp>& ops, bool copy, CUstream stream, CUdeviceptr first_bad,
                                 uint64_t row_base) const {
  RowLaunch launch = {};
  launch.first_bad = first_bad;
  launch.row_base = row_base;
  uint64_t widest = 0;
  auto flush = [&]() -> CUresult {
    if (launch.num_rows == 0) return kCudaSuccess;
    // A warp a row needs thousands of rows to fill the GPU; with fewer, long ones, a block a row does.
    constexpr uint32_t kManyRows = 4096;
    bool by_block = launch.num_rows < kManyRows && widest >= 4096;
    uint32_t rows_per_block = by_block ? 1 : 8, num_blocks = (launch.num_rows + rows_per_block - 1) / rows_per_block;
    CUresult result = this->launch(by_block ? "hsx_rows_by_block" : "hsx_rows_by_warp", num_blocks, stream, &launch);
    launch.row_base += launch.num_rows;
    launch.num_jobs = launch.num_rows = 0;
    widest = 0;
    return result;
  };
  for (const CopyOp& op : ops) {
    constexpr uint64_t kMaxRows = 1 << 30;
    for (uint64_t row = 0; row < op.num_rows;) {
      uint64_t rows = std::min(op.num_rows - row, kMaxRows - launch.num_rows);
      if (rows == 0 || launch.num_jobs == kMaxRowJobs) {
        if (CUresult result = flush()) return result;
        continue;
      }
      auto at = [&](const void* base, uint64_t stride) { return reinterpret_cast<uint64_t>(base) + row * stride; };
      launch.num_rows += static_cast<uint32_t>(rows);
      launch.jobs[launch.num_jobs++] = {at(op.src, op.src_stride_bytes),
                                        copy ? at(op.dst, op.dst_stride_bytes) : 0,
                                        op.digests == nullptr ? 0 : at(op.digests, op.digest_stride_bytes),
                                        op.src_stride_bytes,
                                        op.dst_stride_bytes,
                                        op.digest_stride_bytes,
                                        op.row_bytes,
                                        launch.num_rows,
                                        0};
      widest = std::max(widest, op.row_bytes);
      row += rows;
    }
  }
  return flush();
}

}  // namespace hsx
