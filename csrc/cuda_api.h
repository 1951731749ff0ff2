// The part of libcuda that we call, declared by hand: neither CUDA's headers nor its library are needed to build, or to load, ours.
#ifndef HSXFER_CUDA_API_H
#define HSXFER_CUDA_API_H

#include <cstddef>
#include <cstdint>
#include <string>

namespace hsx {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;

constexpr CUresult kCudaSuccess = 0, kCudaNotInitialized = 3, kCudaNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2, kHostRegisterPortable = 1,
                   kHostRegisterReadOnly = 8;
constexpr unsigned kMemoryHost = 1, kMemoryDevice = 2, kMemoryUnified = 4;
constexpr int kCaptureModeRelaxed = 2, kPointerMemoryType = 2;
constexpr unsigned kIpcLazyPeerAccess = 1;

struct CudaMemcpy2D {  // CUDA_MEMCPY2D
  size_t srcXInBytes, srcY;
  unsigned srcMemoryType;
  const void* srcHost;
  CUdeviceptr srcDevice;
  void* srcArray;
  size_t srcPitch;
  size_t dstXInBytes, dstY;
  unsigned dstMemoryType;
  void* dstHost;
  CUdeviceptr dstDevice;
  void* dstArray;
  size_t dstPitch;
  size_t WidthInBytes, Height;
};
static_assert(sizeof(CudaMemcpy2D) == 128, "the driver's ABI");

struct CudaMemcpyAttributes {  // CUmemcpyAttributes
  int srcAccessOrder;          // 1: in the order of the stream
  int srcLocation[2], dstLocation[2];
  unsigned flags;  // 1: prefer the copy engine, beside what computes
};
static_assert(sizeof(CudaMemcpyAttributes) == 24, "the driver's ABI");

struct CudaIpcHandle {  // CUipcMemHandle
  unsigned char bytes[64];
};

// X(member, exported symbol, arguments). The _v2 names are what CUDA's headers map the plain ones to.
#define HSX_CUDA_FUNCTIONS(X)                                                     \
  X(init, "cuInit", (unsigned))                                                   \
  X(get_error_string, "cuGetErrorString", (CUresult, const char**))               \
  X(device_get_count, "cuDeviceGetCount", (int*))                                 \
  X(device_get, "cuDeviceGet", (CUdevice*, int))                                  \
  X(ctx_retain, "cuDevicePrimaryCtxRetain", (CUcontext*, CUdevice))               \
  X(ctx_push, "cuCtxPushCurrent_v2", (CUcontext))                                 \
  X(ctx_pop, "cuCtxPopCurrent_v2", (CUcontext*))                                  \
  X(ctx_priorities, "cuCtxGetStreamPriorityRange", (int*, int*))                  \
  X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int*))                    \
  X(stream_create, "cuStreamCreateWithPriority", (CUstream*, unsigned, int))      \
  X(stream_destroy, "cuStreamDestroy_v2", (CUstream))                             \
  X(stream_is_capturing, "cuStreamIsCapturing", (CUstream, int*))                 \
  X(stream_wait_event, "cuStreamWaitEvent", (CUstream, CUevent, unsigned))        \
  X(stream_synchronize, "cuStreamSynchronize", (CUstream))                        \
  X(event_create, "cuEventCreate", (CUevent*, unsigned))                          \
  X(event_destroy, "cuEventDestroy_v2", (CUevent))                                \
  X(event_record, "cuEventRecord", (CUevent, CUstream))                           \
  X(event_query, "cuEventQuery", (CUevent))                                       \
  X(memcpy_async, "cuMemcpyAsync", (CUdeviceptr, CUdeviceptr, size_t, CUstream))  \
  X(memcpy_2d_async, "cuMemcpy2DAsync_v2", (const CudaMemcpy2D*, CUstream))       \
  X(memset_async, "cuMemsetD32Async", (CUdeviceptr, unsigned, size_t, CUstream))  \
  X(mem_alloc, "cuMemAlloc_v2", (CUdeviceptr*, size_t))                           \
  X(mem_free, "cuMemFree_v2", (CUdeviceptr))                                      \
  X(pointer_attribute, "cuPointerGetAttribute", (void*, int, CUdeviceptr))        \
  X(host_alloc, "cuMemHostAlloc", (void**, size_t, unsigned))                     \
  X(host_free, "cuMemFreeHost", (void*))                                          \
  X(host_register, "cuMemHostRegister_v2", (void*, size_t, unsigned))             \
  X(host_unregister, "cuMemHostUnregister", (void*))                              \
  X(ipc_get, "cuIpcGetMemHandle", (CudaIpcHandle*, CUdeviceptr))                  \
  X(ipc_open, "cuIpcOpenMemHandle_v2", (CUdeviceptr*, CudaIpcHandle, unsigned))   \
  X(ipc_close, "cuIpcCloseMemHandle", (CUdeviceptr))                              \
  X(module_load, "cuModuleLoadData", (CUmodule*, const void*))                    \
  X(module_function, "cuModuleGetFunction", (CUfunction*, CUmodule, const char*)) \
  X(launch, "cuLaunchKernel",                                                     \
    (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**, void**))

// Null where the driver lacks them.
#define HSX_CUDA_OPTIONAL_FUNCTIONS(X)                           \
  X(memcpy_batch_async, "cuMemcpyBatchAsync", /* from 12.8 on */ \
    (CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CudaMemcpyAttributes*, size_t*, size_t, size_t*, CUstream))

struct CudaApi {
#define X(member, symbol, arguments) CUresult(*member) arguments;
  HSX_CUDA_FUNCTIONS(X)
  HSX_CUDA_OPTIONAL_FUNCTIONS(X)
#undef X
  std::string unavailable;  // why there is no CUDA here; empty if there is
  int num_devices = 0;
  uint32_t epoch = 0;  // of the process that loaded it: a fork has no CUDA

  std::string describe(CUresult result) const;
};

// Loaded and initialised by the first call; never unloaded.
const CudaApi& cuda_api();

}  // namespace hsx

#endif
