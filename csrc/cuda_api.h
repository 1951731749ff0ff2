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

constexpr CUresult kCudaSuccess = 0, kCudaNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2, kHostRegisterPortable = 1;
constexpr unsigned kMemoryHost = 1, kMemoryUnified = 4;

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

// X(member, exported symbol, arguments). The _v2 names are what CUDA's headers map the plain ones to.
#define HSX_CUDA_FUNCTIONS(X)                                                    \
  X(init, "cuInit", (unsigned))                                                  \
  X(get_error_string, "cuGetErrorString", (CUresult, const char**))              \
  X(device_get_count, "cuDeviceGetCount", (int*))                                \
  X(device_get, "cuDeviceGet", (CUdevice*, int))                                 \
  X(ctx_retain, "cuDevicePrimaryCtxRetain", (CUcontext*, CUdevice))              \
  X(ctx_release, "cuDevicePrimaryCtxRelease_v2", (CUdevice))                     \
  X(ctx_push, "cuCtxPushCurrent_v2", (CUcontext))                                \
  X(ctx_pop, "cuCtxPopCurrent_v2", (CUcontext*))                                 \
  X(stream_create, "cuStreamCreate", (CUstream*, unsigned))                      \
  X(stream_destroy, "cuStreamDestroy_v2", (CUstream))                            \
  X(stream_wait_event, "cuStreamWaitEvent", (CUstream, CUevent, unsigned))       \
  X(stream_synchronize, "cuStreamSynchronize", (CUstream))                       \
  X(event_create, "cuEventCreate", (CUevent*, unsigned))                         \
  X(event_destroy, "cuEventDestroy_v2", (CUevent))                               \
  X(event_record, "cuEventRecord", (CUevent, CUstream))                          \
  X(event_query, "cuEventQuery", (CUevent))                                      \
  X(memcpy_async, "cuMemcpyAsync", (CUdeviceptr, CUdeviceptr, size_t, CUstream)) \
  X(memcpy_2d_async, "cuMemcpy2DAsync_v2", (const CudaMemcpy2D*, CUstream))      \
  X(host_register, "cuMemHostRegister_v2", (void*, size_t, unsigned))            \
  X(host_unregister, "cuMemHostUnregister", (void*))

struct CudaApi {
#define X(member, symbol, arguments) CUresult(*member) arguments;
  HSX_CUDA_FUNCTIONS(X)
#undef X
  std::string unavailable;  // why there is no CUDA here; empty if there is

  std::string describe(CUresult result) const;
};

// Loaded and initialised by the first call; never unloaded.
const CudaApi& cuda_api();

}  // namespace hsx

#endif
