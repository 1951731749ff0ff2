#include "rows.h"

#include <cstring>

namespace hsx {
namespace {

// Above this the destination leaves the caches before anybody reads it.
constexpr uint64_t kStreamBytes = 4 << 20;

template <class T>
T* at(T* base, uint64_t stride, uint64_t row) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + stride * row);
}

uint64_t term(uint64_t word, uint64_t key) {
  uint64_t x = word ^ key;
  return (x & 0xFFFFFFFF) * (x >> 32) + x;
}

void copy_only(const CopyOp& op, const RowKernels& kernels) {
  uint64_t bytes = op.row_bytes * op.num_rows;
  if (op.dst == nullptr || bytes == 0) return;
  if (op.row_bytes == op.src_stride_bytes && op.row_bytes == op.dst_stride_bytes) {
    if (bytes >= kStreamBytes && kernels.stream != nullptr)
      kernels.stream(static_cast<uint8_t*>(op.dst), static_cast<const uint8_t*>(op.src), bytes);
    else
      std::memcpy(op.dst, op.src, bytes);
    return;
  }
  for (uint64_t row = 0; row < op.num_rows; ++row)
    std::memcpy(at(op.dst, op.dst_stride_bytes, row), at(op.src, op.src_stride_bytes, row), op.row_bytes);
}

template <class F>  // f(row, digest), false to stop
void each_digest(const CopyOp& op, const RowKernels& kernels, F&& f) {
  bool stream = op.row_bytes * op.num_rows >= kStreamBytes;
  for (uint64_t row = 0; row < op.num_rows; ++row) {
    auto* dst = op.dst == nullptr ? nullptr : static_cast<uint8_t*>(at(op.dst, op.dst_stride_bytes, row));
    auto* src = static_cast<const uint8_t*>(at(op.src, op.src_stride_bytes, row));
    if (!f(row, kernels.digest(dst, src, op.row_bytes, stream))) return;
  }
#if defined(__x86_64__)
  __builtin_ia32_sfence();  // streamed stores are not ordered by the release store that publishes them
#endif
}

}  // namespace

uint64_t row_generic(uint8_t* dst, const uint8_t* src, uint64_t bytes, bool) {
  uint64_t sum = bytes * kDigestBytes, key = kDigestStep, word;
  uint64_t i = 0;
  for (; i + 8 <= bytes; i += 8, key += kDigestStep) {
    std::memcpy(&word, src + i, 8);
    if (dst != nullptr) std::memcpy(dst + i, &word, 8);
    sum += term(word, key);
  }
  if (i < bytes) {
    word = 0;
    std::memcpy(&word, src + i, bytes - i);
    if (dst != nullptr) std::memcpy(dst + i, &word, bytes - i);
    sum += term(word, key);
  }
  return sum;
}

const RowKernels* find_kernels(const char* name) {
  static const RowKernels all[] = {
#if defined(__x86_64__)
      {"avx512", row_avx512, stream_avx2},
      {"avx2", row_avx2, stream_avx2},
#endif
      {"generic", row_generic, nullptr}};
  for (const RowKernels& kernels : all) {
    if (std::strcmp(kernels.name, name) != 0) continue;
#if defined(__x86_64__)
    if (kernels.digest == row_avx512 && !(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")))
      return nullptr;
    if (kernels.digest == row_avx2 && !__builtin_cpu_supports("avx2")) return nullptr;
#endif
    return &kernels;
  }
  return nullptr;
}

const RowKernels& best_kernels() {
  static const RowKernels& best = []() -> const RowKernels& {
    for (const char* name : {"avx512", "avx2"})
      if (const RowKernels* kernels = find_kernels(name)) return *kernels;
    return *find_kernels("generic");
  }();
  return best;
}

void copy_rows(const CopyOp& op, const RowKernels& kernels) {
  if (op.digests == nullptr) return copy_only(op, kernels);
  each_digest(op, kernels, [&](uint64_t row, uint64_t digest) {
    *at(op.digests, op.digest_stride_bytes, row) = digest;
    return true;
  });
}

uint64_t verify_rows(const CopyOp& op) {
  uint64_t bad = op.num_rows;
  each_digest(op, best_kernels(), [&](uint64_t row, uint64_t digest) {
    if (*at(op.digests, op.digest_stride_bytes, row) == digest) return true;
    bad = row;
    return false;
  });
  return bad;
}

}  // namespace hsx
