// How a batch of copies becomes work for the GPU: what the copy engine does, what a kernel does, and in which order.
#include <algorithm>

#include "cuda_driver.h"

namespace hsx {
namespace {

// A copy costs the engine about 4 us however small it is; a kernel takes any number of small ones at once, but the SMs' time.
constexpr uint64_t kSmallBytes = 64 << 10;
constexpr size_t kManySmall = 8;
constexpr size_t kManyCopies = 8;          // worth one call for all
constexpr uint64_t kPieceBytes = 8 << 20;  // between two events: what a reader can start on

// Whether two ops write the same rows: then the order counts, which kernels do not keep.
bool overlap(const std::vector<CopyOp>& ops) {
  std::vector<std::pair<uintptr_t, uintptr_t>> spans;
  for (const CopyOp& op : ops) {
    if (op.num_rows == 0 || op.row_bytes == 0) continue;
    auto start = reinterpret_cast<uintptr_t>(op.dst);
    spans.emplace_back(start, start + (op.num_rows - 1) * op.dst_stride_bytes + op.row_bytes);
  }
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); ++i)
    if (spans[i].first < spans[i - 1].second) return true;
  return false;
}

}  // namespace

void CudaDriver::queue(Batch& batch) {
  auto step = [&](CUresult result) {
    if (result != kCudaSuccess && batch.error.empty()) batch.error = device_.sentence(result, call_);
    return batch.error.empty();
  };
  if (batch.error.empty()) {
    std::vector<CopyOp>& ops = batch.ops;
    call_ = "cuStreamWaitEvent";
    bool digests = std::any_of(ops.begin(), ops.end(), [](const CopyOp& op) { return op.digests != nullptr; });
    bool kernels = mapped_ && device_.has_kernels(), overlapping = kernels && overlap(ops);
    batch.digest_on_host = digests && !kernels;
    std::vector<CopyOp> small, large;
    std::vector<bool> is_small(ops.size(), false);
    for (size_t i = 0; i < ops.size(); ++i) {
      is_small[i] = kernels && !overlapping && ops[i].row_bytes * ops[i].num_rows <= kSmallBytes;
      (is_small[i] ? small : large).push_back(ops[i]);
    }
    if (small.size() < kManySmall) {
      large = ops;
      small.clear();
      is_small.assign(ops.size(), false);
    }
    step(api_.stream_wait_event(stream_, batch.ready, 0)) &&
        (batch.digest_on_host || !digests || step(api_.stream_wait_event(kernel_stream_, batch.ready, 0))) &&
        (batch.digest_on_host || !digests || step(queue_digests(large, overlapping))) &&
        (small.empty() || step(queue_small(small))) && step(queue_copies(batch, is_small));
  }
  if (batch.ready != nullptr) give_event(batch.ready);
  // Also behind a failed step: what was queued before it may be under way, and its memory is in use until then.
  std::vector<Landed> nothing;
  step(close_piece(batch, &nothing));
}

// On a stream of their own, so that they run beside the first copies.
CUresult CudaDriver::queue_digests(const std::vector<CopyOp>& ops, bool overlapping) {
  std::vector<CopyOp> digested;
  for (const CopyOp& op : ops)
    if (op.digests != nullptr && op.num_rows > 0) digested.push_back(op);
  if (digested.empty()) return kCudaSuccess;
  // Small rows sent before may have digests in the same places.
  call_ = "cuStreamWaitEvent";
  if (CUresult result = api_.stream_wait_event(kernel_stream_, small_done_, 0)) return result;
  call_ = "cuLaunchKernel";
  if (overlapping) {
    for (const CopyOp& op : digested)
      if (CUresult result = device_.launch_rows({op}, false, kernel_stream_)) return result;
  } else if (CUresult result = device_.launch_rows(digested, false, kernel_stream_)) {
    return result;
  }
  call_ = "cuEventRecord";
  return api_.event_record(digests_done_, kernel_stream_);
}

CUresult CudaDriver::queue_small(const std::vector<CopyOp>& ops) {
  call_ = "cuStreamWaitEvent";
  if (CUresult result = api_.stream_wait_event(stream_, digests_done_, 0)) return result;
  call_ = "cuLaunchKernel";
  if (CUresult result = device_.launch_rows(ops, true, stream_)) return result;
  call_ = "cuEventRecord";
  return api_.event_record(small_done_, stream_);
}

// Everything but `done`; an event behind each piece that somebody may wait for.
CUresult CudaDriver::queue_copies(Batch& batch, const std::vector<bool>& done) {
  std::vector<Landed> landed;
  uint64_t bytes = 0;
  for (size_t i = 0; i < batch.ops.size(); ++i) {
    const CopyOp& op = batch.ops[i];
    if (op.num_rows == 0) continue;
    for (uint64_t row = 0; row < op.num_rows;) {
      uint64_t rows = op.num_rows - row;
      if (op.marks != nullptr && !done[i])  // to the next watermark's first row
        rows = std::min(rows, op.rows_per_mark - (op.first_row + row) % op.rows_per_mark);
      if (!done[i])
        if (CUresult result = queue_rows(op, row, rows)) return result;
      if (op.marks != nullptr) {
        landed.push_back({i, row, rows});
        bytes += rows * op.row_bytes;
        if (bytes >= kPieceBytes / 2) {
          if (CUresult result = close_piece(batch, &landed)) return result;
          bytes = 0;
        }
      }
      row += rows;
    }
  }
  if (CUresult result = flush_many()) return result;
  return landed.empty() ? kCudaSuccess : close_piece(batch, &landed);
}

CUresult CudaDriver::close_piece(Batch& batch, std::vector<Landed>* landed) {
  if (CUresult result = flush_many()) return result;
  call_ = "cuStreamWaitEvent";
  if (CUresult result = api_.stream_wait_event(stream_, digests_done_, 0)) return result;
  call_ = "cuEventRecord";
  Piece piece = {take_event(), std::move(*landed)};
  landed->clear();
  if (piece.done == nullptr) return api_.stream_synchronize(stream_);
  CUresult result = api_.event_record(piece.done, stream_);
  if (batch.pieces.empty() && !piece.landed.empty()) on_rows_coming();
  batch.pieces.push_back(std::move(piece));
  return result;
}

CUresult CudaDriver::queue_rows(const CopyOp& op, uint64_t row, uint64_t num_rows) {
  if (op.row_bytes == 0) return kCudaSuccess;
  auto src = reinterpret_cast<CUdeviceptr>(op.src) + row * op.src_stride_bytes;
  auto dst = reinterpret_cast<CUdeviceptr>(op.dst) + row * op.dst_stride_bytes;
  if ((op.src_stride_bytes == op.row_bytes && op.dst_stride_bytes == op.row_bytes) || num_rows == 1) {
    many_.dst.push_back(dst);
    many_.src.push_back(src);
    many_.bytes.push_back(op.row_bytes * num_rows);
    return kCudaSuccess;
  }
  if (CUresult result = flush_many()) return result;
  constexpr uint64_t kMaxPitch = INT32_MAX;
  uint64_t narrow = std::min(op.src_stride_bytes, op.dst_stride_bytes);
  uint64_t wide = std::max(op.src_stride_bytes, op.dst_stride_bytes);
  if (narrow >= op.row_bytes && wide <= kMaxPitch) {
    CudaMemcpy2D copy = {};
    copy.srcMemoryType = kMemoryUnified;
    copy.srcDevice = src;
    copy.srcPitch = op.src_stride_bytes;
    copy.dstMemoryType = kMemoryUnified;
    copy.dstDevice = dst;
    copy.dstPitch = op.dst_stride_bytes;
    copy.WidthInBytes = op.row_bytes;
    copy.Height = num_rows;
    if (!mapped_) {
      copy.dstMemoryType = kMemoryHost;
      copy.dstHost = reinterpret_cast<void*>(dst);
    }
    call_ = "cuMemcpy2DAsync";
    return api_.memcpy_2d_async(&copy, stream_);
  }
  call_ = "cuMemcpyAsync";
  for (uint64_t i = 0; i < num_rows; ++i)  // one row broadcast, or strides that no pitch can be
    if (CUresult result =
            api_.memcpy_async(dst + i * op.dst_stride_bytes, src + i * op.src_stride_bytes, op.row_bytes, stream_))
      return result;
  return kCudaSuccess;
}

CUresult CudaDriver::flush_many() {
  CUresult result = kCudaSuccess;
  size_t count = many_.dst.size();
  if (count >= kManyCopies && mapped_ && api_.memcpy_batch_async != nullptr) {
    call_ = "cuMemcpyBatchAsync";
    CudaMemcpyAttributes attributes = {1, {0, 0}, {0, 0}, 1};
    size_t first = 0, failed = 0;
    result = api_.memcpy_batch_async(many_.dst.data(), many_.src.data(), many_.bytes.data(), count, &attributes, &first,
                                     1, &failed, stream_);
  } else {
    call_ = "cuMemcpyAsync";
    for (size_t i = 0; i < count && result == kCudaSuccess; ++i)
      result = api_.memcpy_async(many_.dst[i], many_.src[i], many_.bytes[i], stream_);
  }
  many_.dst.clear();
  many_.src.clear();
  many_.bytes.clear();
  return result;
}

}  // namespace hsx
