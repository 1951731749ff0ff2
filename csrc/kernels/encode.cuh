// Narrower elements for the way: fp8 e4m3 with one float scale a row, or bf16; and back. hsxfer/encoding.py states the same in torch.
#ifndef HSXFER_KERNELS_ENCODE_CUH
#define HSXFER_KERNELS_ENCODE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "jobs.h"

namespace hsx {

constexpr float kFp8Max = 448.0f, kSmallestMax = 1e-30f;
constexpr int kEncodeThreads = 256, kVector = 8;  // elements a thread takes at a time: 16 bytes of the 16-bit types

__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(float x) { return x; }
__device__ inline void from_float(float x, __nv_bfloat16* out) { *out = __float2bfloat16_rn(x); }
__device__ inline void from_float(float x, __half* out) { *out = __float2half_rn(x); }
__device__ inline void from_float(float x, float* out) { *out = x; }

template <class T>
struct alignas(sizeof(T) * kVector > 16 ? 16 : sizeof(T) * kVector) Vector {
  T at[kVector];
};

// f(first element, Vector&, how many are the row's) over this thread's share of a row.
template <class T, class F>
__device__ void each_vector(const T* row, uint32_t width, F&& f) {
  bool aligned = reinterpret_cast<uintptr_t>(row) % 16 == 0;
  for (uint32_t i = threadIdx.x * kVector; i < width; i += kEncodeThreads * kVector) {
    uint32_t n = min(width - i, uint32_t{kVector});
    Vector<T> v;
    if (n == kVector && aligned) {
      v = *reinterpret_cast<const Vector<T>*>(row + i);
    } else {
      for (int j = 0; j < kVector; ++j)
        if (j < n) v.at[j] = row[i + j];
    }
    f(i, v, n);
  }
}

template <class T>
__device__ void store_vector(T* row, uint32_t i, const Vector<T>& v, uint32_t n) {
  if (n == kVector && reinterpret_cast<uintptr_t>(row + i) % alignof(Vector<T>) == 0) {
    *reinterpret_cast<Vector<T>*>(row + i) = v;
    return;
  }
  for (int j = 0; j < kVector; ++j)
    if (j < n) row[i + j] = v.at[j];
}

__device__ inline float block_max(float value) {
  __shared__ float warps[kEncodeThreads / 32];
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, step));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  for (float other : warps) value = fmaxf(value, other);
  return value;
}

template <class T>
__device__ void to_fp8(const EncodeLaunch& launch) {
  auto* src = reinterpret_cast<const T*>(launch.src + blockIdx.x * launch.src_stride_bytes);
  auto* dst = reinterpret_cast<uint8_t*>(launch.dst + blockIdx.x * launch.dst_stride_bytes);
  float largest = 0;
  each_vector(src, launch.width, [&](uint32_t, const Vector<T>& v, uint32_t n) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      float x = j < n ? fabsf(to_float(v.at[j])) : 0.0f;
      if (x <= 3.4028234e38f) largest = fmaxf(largest, x);  // neither infinity nor NaN
    }
  });
  largest = fmaxf(block_max(largest), kSmallestMax);
  float inverse = __fdiv_rn(kFp8Max, largest);
  // The second reading comes out of the caches: a block's rows are a tenth of its multiprocessor's.
  each_vector(src, launch.width, [&](uint32_t i, const Vector<T>& v, uint32_t n) {
    Vector<uint8_t> out;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      float x = j < n ? to_float(v.at[j]) : 0.0f;
      // Infinity becomes NaN: saturated it would pass for a number.
      out.at[j] = fabsf(x) <= 3.4028234e38f ? __nv_cvt_float_to_fp8(__fmul_rn(x, inverse), __NV_SATFINITE, __NV_E4M3)
                                            : uint8_t{0x7F};
    }
    store_vector(dst, i, out, n);
  });
  for (uint32_t i = launch.width + threadIdx.x; i + 4 < launch.row_bytes; i += kEncodeThreads) dst[i] = 0;
  if (threadIdx.x == 0) *reinterpret_cast<float*>(dst + launch.row_bytes - 4) = __fdiv_rn(largest, kFp8Max);
}

template <class T>
__device__ void from_fp8(const EncodeLaunch& launch) {
  auto* src = reinterpret_cast<const uint8_t*>(launch.src + blockIdx.x * launch.src_stride_bytes);
  auto* dst = reinterpret_cast<T*>(launch.dst + blockIdx.x * launch.dst_stride_bytes);
  float scale = *reinterpret_cast<const float*>(src + launch.row_bytes - 4);
  each_vector(src, launch.width, [&](uint32_t i, const Vector<uint8_t>& v, uint32_t n) {
    Vector<T> out;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      __half_raw half = __nv_cvt_fp8_to_halfraw(v.at[j], __NV_E4M3);
      from_float(__fmul_rn(__half2float(__half(half)), scale), &out.at[j]);
    }
    store_vector(dst, i, out, n);
  });
}

template <class From, class To>
__device__ void cast(const EncodeLaunch& launch) {
  auto* src = reinterpret_cast<const From*>(launch.src + blockIdx.x * launch.src_stride_bytes);
  auto* dst = reinterpret_cast<To*>(launch.dst + blockIdx.x * launch.dst_stride_bytes);
  each_vector(src, launch.width, [&](uint32_t i, const Vector<From>& v, uint32_t n) {
    Vector<To> out;
#pragma unroll
    for (int j = 0; j < kVector; ++j) from_float(j < n ? to_float(v.at[j]) : 0.0f, &out.at[j]);
    store_vector(dst, i, out, n);
  });
}

template <class T>
__device__ void screen(const ScreenLaunch& launch) {
  auto* src = reinterpret_cast<const T*>(launch.src + blockIdx.x * launch.src_stride_bytes);
  bool infinite = false, nonzero = false;
  each_vector(src, launch.width, [&](uint32_t, const Vector<T>& v, uint32_t n) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      float x = j < n ? to_float(v.at[j]) : 0.0f;
      infinite |= !(fabsf(x) <= 3.4028234e38f);
      nonzero |= x != 0.0f;
    }
  });
  infinite = __syncthreads_or(infinite);
  nonzero = __syncthreads_or(nonzero);
  if (threadIdx.x == 0) reinterpret_cast<uint8_t*>(launch.flags)[blockIdx.x] = infinite | (nonzero ? 0 : 2);
}

}  // namespace hsx

#define HSX_ENCODE_KERNEL(name, body)                                                                        \
  extern "C" __global__ void __launch_bounds__(256) name(__grid_constant__ const hsx::EncodeLaunch launch) { \
    hsx::body(launch);                                                                                       \
  }
HSX_ENCODE_KERNEL(hsx_bf16_to_fp8, to_fp8<__nv_bfloat16>)
HSX_ENCODE_KERNEL(hsx_fp16_to_fp8, to_fp8<__half>)
HSX_ENCODE_KERNEL(hsx_fp32_to_fp8, to_fp8<float>)
HSX_ENCODE_KERNEL(hsx_fp8_to_bf16, from_fp8<__nv_bfloat16>)
HSX_ENCODE_KERNEL(hsx_fp8_to_fp16, from_fp8<__half>)
HSX_ENCODE_KERNEL(hsx_fp8_to_fp32, from_fp8<float>)
#define HSX_COMMA ,
HSX_ENCODE_KERNEL(hsx_fp16_to_bf16, cast<__half HSX_COMMA __nv_bfloat16>)
HSX_ENCODE_KERNEL(hsx_fp32_to_bf16, cast<float HSX_COMMA __nv_bfloat16>)
HSX_ENCODE_KERNEL(hsx_bf16_to_fp16, cast<__nv_bfloat16 HSX_COMMA __half>)
HSX_ENCODE_KERNEL(hsx_bf16_to_fp32, cast<__nv_bfloat16 HSX_COMMA float>)

#define HSX_SCREEN_KERNEL(name, type)                                                                        \
  extern "C" __global__ void __launch_bounds__(256) name(__grid_constant__ const hsx::ScreenLaunch launch) { \
    hsx::screen<type>(launch);                                                                               \
  }
HSX_SCREEN_KERNEL(hsx_screen_bf16, __nv_bfloat16)
HSX_SCREEN_KERNEL(hsx_screen_fp16, __half)
HSX_SCREEN_KERNEL(hsx_screen_fp32, float)

#endif
