// Digests of rows (docs/format.md, 5), alone or in the pass that copies them. Bound by memory: seven instructions per eight bytes.
#ifndef HSXFER_KERNELS_ROWS_CUH
#define HSXFER_KERNELS_ROWS_CUH

#include "jobs.h"

namespace hsx {

constexpr uint64_t kStep = 0x9E3779B97F4A7C15, kPerByte = 0xD6E8FEB86659FD93;

__device__ inline uint64_t term(uint64_t word, uint64_t key) {
  uint64_t x = word ^ key;
  return uint64_t{static_cast<uint32_t>(x)} * static_cast<uint32_t>(x >> 32) + x;
}

// The word at `p`, of which `n` bytes are the row's, at the widest access that `align` allows.
__device__ inline uint64_t load_word(const uint8_t* p, uint32_t n, uint32_t align) {
  if (n >= 8 && align >= 8) return *reinterpret_cast<const uint64_t*>(p);
  uint64_t word = 0;
  if (n >= 8 && align >= 4) {
    auto* q = reinterpret_cast<const uint32_t*>(p);
    return q[0] | uint64_t{q[1]} << 32;
  }
  if (n >= 8 && align >= 2) {
    auto* q = reinterpret_cast<const uint16_t*>(p);
    for (int i = 0; i < 4; ++i) word |= uint64_t{q[i]} << 16 * i;
    return word;
  }
  for (uint32_t i = 0; i < min(n, 8u); ++i) word |= uint64_t{p[i]} << 8 * i;
  return word;
}

__device__ inline void store_word(uint8_t* p, uint64_t word, uint32_t n, uint32_t align) {
  if (n >= 8 && align >= 8) {
    *reinterpret_cast<uint64_t*>(p) = word;
  } else if (n >= 8 && align >= 4) {
    auto* q = reinterpret_cast<uint32_t*>(p);
    q[0] = static_cast<uint32_t>(word);
    q[1] = static_cast<uint32_t>(word >> 32);
  } else {
    for (uint32_t i = 0; i < min(n, 8u); ++i) p[i] = static_cast<uint8_t>(word >> 8 * i);
  }
}

__device__ inline uint32_t alignment(uint64_t bits) { return static_cast<uint32_t>(bits & -bits) & 31; }

// This thread's share of a row's sum, every `kThreads`-th 16 bytes; `dst` may be null.
template <int kThreads>
__device__ uint64_t row_terms(uint8_t* dst, const uint8_t* src, uint64_t bytes, uint32_t lane, bool wide,
                              uint32_t src_align, uint32_t dst_align) {
  uint64_t sum = 0;
  uint64_t num_wide = wide ? bytes / 16 : 0;
  uint64_t key = (2 * uint64_t{lane} + 1) * kStep;
  auto take = [&](uint64_t i, uint4 v) {
    if (dst != nullptr) reinterpret_cast<uint4*>(dst)[i] = v;
    sum += term(v.x | uint64_t{v.y} << 32, key) + term(v.z | uint64_t{v.w} << 32, key + kStep);
    key += 2 * kThreads * kStep;
  };
  uint64_t i = lane;
  auto* from = reinterpret_cast<const uint4*>(src);
  for (; i + 3 * kThreads < num_wide; i += 4 * kThreads) {  // four loads under way at a time
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = from[i + j * kThreads];
#pragma unroll
    for (int j = 0; j < 4; ++j) take(i + j * kThreads, v[j]);
  }
  for (; i < num_wide; i += kThreads) take(i, from[i]);
  for (uint64_t at = num_wide * 16 + 8 * lane; at < bytes; at += 8 * kThreads) {
    uint32_t n = static_cast<uint32_t>(min(bytes - at, uint64_t{8}));
    uint64_t word = load_word(src + at, n, src_align);
    if (dst != nullptr) store_word(dst + at, word, n, dst_align);
    sum += term(word, (at / 8 + 1) * kStep);
  }
  return sum;
}

template <int kThreads>
__device__ void rows(const RowLaunch& launch) {
  constexpr int kRowsPerBlock = 256 / kThreads;
  uint32_t row = blockIdx.x * kRowsPerBlock + threadIdx.x / kThreads, lane = threadIdx.x % kThreads;
  bool mine = row < launch.num_rows;
  uint32_t low = 0, high = launch.num_jobs - 1;
  while (low < high) {
    uint32_t middle = (low + high) / 2;
    if (row < launch.jobs[middle].end_row)
      high = middle;
    else
      low = middle + 1;
  }
  const RowJob& job = launch.jobs[low];
  uint64_t local = row - (low == 0 ? 0 : launch.jobs[low - 1].end_row);
  uint64_t sum = 0;
  if (mine) {
    uint64_t src = job.src + local * job.src_stride_bytes;
    uint64_t dst = job.dst == 0 ? 0 : job.dst + local * job.dst_stride_bytes;
    bool wide = ((src | dst) & 15) == 0;
    sum = row_terms<kThreads>(reinterpret_cast<uint8_t*>(dst), reinterpret_cast<const uint8_t*>(src), job.row_bytes,
                              lane, wide, alignment(src | 16), alignment(dst | 16));
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
  if (kThreads > 32) {
    __shared__ uint64_t warps[kThreads / 32];
    if (lane % 32 == 0) warps[lane / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < kThreads / 32; ++i) sum += warps[i];
  }
  if (!mine || lane != 0 || job.digests == 0) return;
  sum += job.row_bytes * kPerByte;
  auto* digest = reinterpret_cast<uint64_t*>(job.digests + local * job.digest_stride_bytes);
  if (launch.first_bad == 0)
    *digest = sum;
  else if (*digest != sum)
    atomicMin(reinterpret_cast<unsigned long long*>(launch.first_bad), launch.row_base + row);
}

}  // namespace hsx

// A warp a row where there are enough rows to fill the GPU, else a block a row.
extern "C" __global__ void __launch_bounds__(256) hsx_rows_by_warp(__grid_constant__ const hsx::RowLaunch launch) {
  hsx::rows<32>(launch);
}
extern "C" __global__ void __launch_bounds__(256) hsx_rows_by_block(__grid_constant__ const hsx::RowLaunch launch) {
  hsx::rows<256>(launch);
}

#endif
