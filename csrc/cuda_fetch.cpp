#include "cuda_fetch.h"

#include <sys/prctl.h>

#include <algorithm>
#include <map>

#include "error.h"
#include "futex.h"
#include "rows.h"

namespace hsx {
namespace {

constexpr uint64_t kPieceBytes = 8 << 20;    // without watermarks; with them their rows are the pieces
constexpr uint64_t kVerifyBytes = 32 << 20;  // a launch each, beside the copies of the next
constexpr size_t kNumVerdicts = 64;
constexpr uint64_t kNoBadRow = UINT64_MAX;

uint64_t num_bytes(const hsx_fetch_op& op, uint64_t rows) { return rows * op.row_bytes; }

// What the word says when all its rows are there.
uint64_t rows_of_mark(const hsx_fetch_op& op, uint64_t word) {
  return std::min(op.rows_per_mark, op.tensor_rows - word * op.rows_per_mark);
}

template <class T>
T* at_row(T* base, uint64_t row, uint64_t row_bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + row * row_bytes);
}

}  // namespace

CudaFetcher& CudaFetcher::get(uint32_t ordinal) {
  static std::mutex mutex;
  static auto* fetchers = new std::map<uint32_t, CudaFetcher*>;
  CudaDevice::get(ordinal);  // says what is wrong, also in a fork
  std::lock_guard<std::mutex> guard(mutex);
  CudaFetcher*& fetcher = (*fetchers)[ordinal];
  if (fetcher == nullptr) fetcher = new CudaFetcher(ordinal);
  return *fetcher;
}

CudaFetcher::CudaFetcher(uint32_t ordinal) : device_(CudaDevice::get(ordinal)) {
  CudaDevice::Current current(device_);
  device_.need(current.result, "cuCtxPushCurrent");
  stream_ = device_.make_stream(false);
  kernel_stream_ = device_.make_stream(true);
  CUdeviceptr on_device;
  void* on_host;
  device_.need(device_.api.mem_alloc(&on_device, 8 * kNumVerdicts), "cuMemAlloc");
  device_.need(device_.api.host_alloc(&on_host, 8 * kNumVerdicts, kHostRegisterPortable), "cuMemHostAlloc");
  for (size_t i = 0; i < kNumVerdicts; ++i)
    verdicts_.push_back({on_device + 8 * i, static_cast<uint64_t*>(on_host) + i});
}

CudaFetcher::Verdict CudaFetcher::take_verdict() {
  std::lock_guard<std::mutex> guard(mutex_);
  if (verdicts_.empty()) fail(HSX_E_UNAVAILABLE, "fetch: %zu samples are under way at once", kNumVerdicts);
  Verdict verdict = verdicts_.back();
  verdicts_.pop_back();
  return verdict;
}

void CudaFetcher::give_verdict(Verdict verdict) {
  std::lock_guard<std::mutex> guard(mutex_);
  verdicts_.push_back(verdict);
}

Fetch::Fetch(CudaFetcher& fetcher, std::shared_ptr<Reader> reader, const hsx_lease& lease,
             std::vector<hsx_fetch_op> ops)
    : fetcher_(fetcher),
      device_(fetcher.device_),
      api_(device_.api),
      reader_(std::move(reader)),
      lease_(lease),
      ops_(std::move(ops)),
      verdict_(fetcher.take_verdict()) {
  CudaDevice::Current current(device_);
  CUresult result = current.result;
  if (result == kCudaSuccess) result = api_.event_create(&copied_, kEventDisableTiming);
  if (result == kCudaSuccess) result = api_.event_create(&done_, kEventDisableTiming);
  if (result == kCudaSuccess) result = api_.memset_async(verdict_.device, UINT32_MAX, 2, fetcher_.kernel_stream_);
  if (result != kCudaSuccess) {
    fetcher_.give_verdict(verdict_);
    for (CUevent event : {copied_, done_})
      if (event != nullptr) api_.event_destroy(event);
    device_.need(result, "cuEventCreate");
  }
  for (size_t i = 0; i < ops_.size(); ++i) add_pieces(i);
  complete_ = lease.state != kOpen && lease.state != kSealed;
  early_ = !complete_;
}

Fetch::~Fetch() {
  CudaDevice::Current current(device_);
  if (!landed_) {  // otherwise all of ours is done, and what others queue on these streams is not to be waited for
    api_.stream_synchronize(fetcher_.stream_);
    api_.stream_synchronize(fetcher_.kernel_stream_);
  }
  api_.event_destroy(copied_);
  api_.event_destroy(done_);
  fetcher_.give_verdict(verdict_);
}

void Fetch::add_pieces(size_t number) {
  const hsx_fetch_op& op = ops_[number];
  uint64_t most = std::max<uint64_t>(1, kPieceBytes / std::max<uint64_t>(1, op.row_bytes));
  for (uint64_t row = 0; row < op.num_rows;) {
    uint64_t rows = std::min(most, op.num_rows - row);
    if (op.marks != nullptr)
      rows = std::min(op.num_rows - row, op.rows_per_mark - (op.first_row + row) % op.rows_per_mark);
    pending_.push_back({number, row, rows});
    row += rows;
  }
}

bool Fetch::landed(const Piece& piece) const {
  if (complete_) return true;
  const hsx_fetch_op& op = ops_[piece.op];
  if (op.marks == nullptr) return false;
  uint64_t word = (op.first_row + piece.row) / op.rows_per_mark;
  return __atomic_load_n(&op.marks[word], __ATOMIC_ACQUIRE) >= rows_of_mark(op, word);
}

bool Fetch::queue_landed() {
  bool any = false;
  for (size_t i = 0; i < pending_.size();) {
    if (!landed(pending_[i])) {
      ++i;
      continue;
    }
    queue(pending_[i]);
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
    any = true;
  }
  return any;
}

void Fetch::queue(const Piece& piece) {
  const hsx_fetch_op& op = ops_[piece.op];
  const void* src = at_row(op.src, piece.row, op.row_bytes);
  void* dst = at_row(op.dst, piece.row, op.row_bytes);
  uint64_t bytes = num_bytes(op, piece.num_rows);
  const uint64_t* digests = op.digests == nullptr ? nullptr : op.digests + piece.row;
  bool reachable = device_.has_kernels();
  if (!op.device_src) {
    PinnedRegion& pinned = reader_->pinned(device_);
    bool here = pinned.need(src, bytes) && (digests == nullptr || pinned.need(digests, 8 * piece.num_rows));
    if (!here) warning_ = pinned.failure();
    reachable = reachable && here;
    for (uint64_t done = 0; done < bytes;) {
      auto from = static_cast<const uint8_t*>(src) + done;
      uint64_t step = pinned.within_piece(from, bytes - done);
      device_.need(api_.memcpy_async(reinterpret_cast<CUdeviceptr>(dst) + done, reinterpret_cast<CUdeviceptr>(from),
                                     step, fetcher_.stream_),
                   "cuMemcpyAsync");
      done += step;
    }
  } else if (bytes > 0) {
    if (digests != nullptr) reachable = reachable && reader_->pinned(device_).need(digests, 8 * piece.num_rows);
    device_.need(api_.memcpy_async(reinterpret_cast<CUdeviceptr>(dst), reinterpret_cast<CUdeviceptr>(src), bytes,
                                   fetcher_.stream_),
                 "cuMemcpyAsync");
  }
  if (digests == nullptr) return;
  if (!reachable && !op.device_src) {  // before the bytes leave the host, in place of where they land
    uint64_t bad =
        verify_rows({nullptr, src, 0, op.row_bytes, op.row_bytes, piece.num_rows, const_cast<uint64_t*>(digests), 8});
    if (bad < piece.num_rows && bad_op_ == SIZE_MAX) {
      bad_op_ = piece.op;
      bad_row_ = piece.row + bad;
    }
    return;
  }
  if (!reachable) fail(HSX_E_UNAVAILABLE, "fetch: digests cannot be checked: %s", device_.kernels_missing().c_str());
  if (unverified_.op != piece.op || unverified_.row + unverified_.num_rows != piece.row) queue_verify();
  if (unverified_.num_rows == 0) unverified_ = {piece.op, piece.row, 0};
  unverified_.num_rows += piece.num_rows;
  if (num_bytes(op, unverified_.num_rows) >= kVerifyBytes) queue_verify();
}

void Fetch::queue_verify() {
  if (unverified_.num_rows == 0) return;
  const Piece piece = unverified_;
  unverified_.num_rows = 0;
  const hsx_fetch_op& op = ops_[piece.op];
  uint64_t row_base = piece.row;
  for (size_t i = 0; i < piece.op; ++i) row_base += ops_[i].num_rows;
  device_.need(api_.event_record(copied_, fetcher_.stream_), "cuEventRecord");
  device_.need(api_.stream_wait_event(fetcher_.kernel_stream_, copied_, 0), "cuStreamWaitEvent");
  CopyOp rows = {nullptr,        at_row(op.dst, piece.row, op.row_bytes),       0, op.row_bytes, op.row_bytes,
                 piece.num_rows, const_cast<uint64_t*>(op.digests) + piece.row, 8};
  device_.need(device_.launch_rows({rows}, false, fetcher_.kernel_stream_, verdict_.device, row_base),
               "cuLaunchKernel");
}

// False if the sample failed.
bool Fetch::look_at_state() {
  if (complete_) return true;
  uint32_t state = reader_->state(lease_.slot);
  complete_ = state == kReady;
  // Retired with our lease on it: another reader used it up, and what lies there stays; or it failed and made room.
  failed_ = state == kFailed || state == kFree || state == kRetired;
  return !failed_;
}

// Rows that were written twice are counted twice, and may have been copied in between.
bool Fetch::again_if_rewritten() {
  if (!early_) return false;
  early_ = false;
  bool again = false;
  for (size_t i = 0; i < ops_.size(); ++i) {
    const hsx_fetch_op& op = ops_[i];
    if (op.marks == nullptr || op.num_rows == 0) continue;
    uint64_t first = op.first_row / op.rows_per_mark, last = (op.first_row + op.num_rows - 1) / op.rows_per_mark;
    bool rewritten = false;
    for (uint64_t word = first; word <= last; ++word)
      rewritten |= __atomic_load_n(&op.marks[word], __ATOMIC_ACQUIRE) != rows_of_mark(op, word);
    if (rewritten) add_pieces(i);
    again |= rewritten;
  }
  if (again)
    device_.need(api_.memset_async(verdict_.device, UINT32_MAX, 2, fetcher_.kernel_stream_), "cuMemsetD32Async");
  return again;
}

void Fetch::finish() {
  queue_verify();
  device_.need(api_.event_record(copied_, fetcher_.stream_), "cuEventRecord");
  device_.need(api_.stream_wait_event(fetcher_.kernel_stream_, copied_, 0), "cuStreamWaitEvent");
  device_.need(
      api_.memcpy_async(reinterpret_cast<CUdeviceptr>(verdict_.host), verdict_.device, 8, fetcher_.kernel_stream_),
      "cuMemcpyAsync");
  device_.need(api_.event_record(done_, fetcher_.kernel_stream_), "cuEventRecord");
  finished_ = true;
}

hsx_code Fetch::wait(uint64_t timeout_us, uint64_t* bad_op, uint64_t* bad_row) {
  static thread_local const int slack = prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
  (void)slack;
  CudaDevice::Current current(device_);
  device_.need(current.result, "cuCtxPushCurrent");
  uint64_t deadline = deadline_us(timeout_us);
  timespec pause = {0, 20000};
  while (!finished_) {
    if (!look_at_state()) return HSX_E_FAILED;
    bool any = queue_landed();
    if (pending_.empty() && complete_ && !again_if_rewritten()) {
      finish();
    } else if (!any) {
      if (now_us() >= deadline) return HSX_E_TIMEOUT;
      nanosleep(&pause, nullptr);
    }
  }
  for (;;) {
    CUresult result = api_.event_query(done_);
    if (result == kCudaSuccess) break;
    if (result != kCudaNotReady) device_.need(result, "cuEventQuery");
    if (now_us() >= deadline) return HSX_E_TIMEOUT;
    nanosleep(&pause, nullptr);
  }
  landed_ = true;
  uint64_t bad = *verdict_.host;
  if (bad == kNoBadRow && bad_op_ == SIZE_MAX) return HSX_OK;
  *bad_op = bad_op_ == SIZE_MAX ? 0 : bad_op_;
  *bad_row = bad_op_ == SIZE_MAX ? bad : bad_row_;
  if (bad_op_ == SIZE_MAX)
    for (; *bad_row >= ops_[*bad_op].num_rows; ++*bad_op) *bad_row -= ops_[*bad_op].num_rows;
  return HSX_E_INTEGRITY;
}

}  // namespace hsx
