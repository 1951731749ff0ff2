// What a launch is told; read by the host's compiler and by nvcc.
#ifndef HSXFER_KERNELS_JOBS_H
#define HSXFER_KERNELS_JOBS_H

#include <cstdint>

namespace hsx {

struct RowJob {  // addresses are the device's; dst and digests may be in registered host memory
  uint64_t src;
  uint64_t dst;  // 0: nothing is copied
  uint64_t digests;
  uint64_t src_stride_bytes;
  uint64_t dst_stride_bytes;
  uint64_t digest_stride_bytes;
  uint64_t row_bytes;
  uint32_t end_row;  // of the launch: the jobs' rows are counted through
  uint32_t reserved;
};
static_assert(sizeof(RowJob) == 64, "kernel parameter");

constexpr uint32_t kMaxRowJobs = 60;  // kernel parameters may have 4 KiB on every driver

struct RowLaunch {
  RowJob jobs[kMaxRowJobs];
  uint64_t first_bad;  // 0: digests are written; else they are compared, and the smallest row that differs is left here
  uint64_t row_base;   // what to call the launch's first row there
  uint32_t num_jobs;
  uint32_t num_rows;
};
static_assert(sizeof(RowLaunch) <= 4096, "kernel parameter");

enum ElementKind : uint32_t { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

// A row of `width` elements <-> its encoding. FP8: `width` bytes of e4m3, zeros, and the float scale in the row's last 4 bytes.
struct EncodeLaunch {
  uint64_t src;
  uint64_t dst;
  uint64_t src_stride_bytes;
  uint64_t dst_stride_bytes;
  uint32_t width;
  uint32_t row_bytes;  // of the encoded side
  uint32_t num_rows;
  uint32_t reserved;
};

struct ScreenLaunch {
  uint64_t src;
  uint64_t flags;  // a byte a row: 1 holds NaN or infinity, 2 is all zero
  uint64_t src_stride_bytes;
  uint32_t width;
  uint32_t num_rows;
};

}  // namespace hsx

#endif
