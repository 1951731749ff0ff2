// Copy and digest rows in one pass (docs/format.md, 5).
#ifndef HSXFER_ROWS_H
#define HSXFER_ROWS_H

#include <cstdint>

#include "driver.h"

namespace hsx {

constexpr uint64_t kDigestStep = 0x9E3779B97F4A7C15;   // K[i] = (i + 1) * this
constexpr uint64_t kDigestBytes = 0xD6E8FEB86659FD93;  // times the row's bytes

// One row: the digest, and its bytes to `dst` unless that is null. `stream`: past the caches, where it can be.
using RowKernel = uint64_t (*)(uint8_t* dst, const uint8_t* src, uint64_t bytes, bool stream);

// Without a digest, past the caches.
using CopyKernel = void (*)(uint8_t* dst, const uint8_t* src, uint64_t bytes);

struct RowKernels {
  const char* name;
  RowKernel digest;
  CopyKernel stream;  // null: memcpy does as well
};
const RowKernels& best_kernels();                  // for this CPU
const RowKernels* find_kernels(const char* name);  // null if this CPU lacks them

uint64_t row_generic(uint8_t* dst, const uint8_t* src, uint64_t bytes, bool stream);
#if defined(__x86_64__)
uint64_t row_avx2(uint8_t* dst, const uint8_t* src, uint64_t bytes, bool stream);
uint64_t row_avx512(uint8_t* dst, const uint8_t* src, uint64_t bytes, bool stream);
void stream_avx2(uint8_t* dst, const uint8_t* src, uint64_t bytes);
#endif

void copy_rows(const CopyOp& op, const RowKernels& kernels = best_kernels());

// Row of the first digest that is not the expected one, or num_rows. `op.digests` are the expected ones and are not written.
uint64_t verify_rows(const CopyOp& op);

}  // namespace hsx

#endif
