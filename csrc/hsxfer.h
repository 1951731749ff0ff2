// hsxfer's C ABI. Formats: docs/format.md. Loaded with ctypes (hsxfer/_native.py), so only plain types cross it.
//
// Every call that can fail returns an hsx_code; hsx_last_error() then gives the sentence, per thread. Handles come from *_create or
// *_open and go to *_close once; no other call may use them afterwards. In a forked child they give HSX_E_FORKED; it may open its own.
// "wait_" calls may block up to timeout_us (0: look once); "submit_" calls queue and return; the rest take microseconds.
#ifndef HSXFER_H
#define HSXFER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

#define HSX_ABI_VERSION 1
#define HSX_NO_DIGEST UINT64_MAX

typedef enum hsx_code {
  HSX_OK = 0,
  HSX_E_INVALID = 1,  // an argument, or a file that is not ours
  HSX_E_FULL = 2,     // no room in the arena, or on the file system
  HSX_E_TIMEOUT = 3,
  HSX_E_LOST = 4,         // retired, another generation, or never there; lease.fate says which
  HSX_E_FAILED = 5,       // the sample failed; the lease is held and its tail says why
  HSX_E_INTEGRITY = 6,    // digests differ
  HSX_E_UNAVAILABLE = 7,  // no such driver, or it does not work here
  HSX_E_SYSTEM = 8,       // a system call failed
  HSX_E_BUSY = 9,         // the key is in use by a live sample
  HSX_E_FORKED = 10,      // this process is a fork of the one that opened it
} hsx_code;

uint32_t hsx_abi_version(void);
const char* hsx_last_error(void);  // of this thread's last failed call; valid until its next

// ---- producer -------------------------------------------------------------------------------------------------------------------
typedef struct hsx_arena hsx_arena;

typedef struct hsx_arena_options {
  const char* path;         // PATH.arena and PATH.ack are made, mode 0600
  const char* driver;       // "host", "cuda"
  uint64_t capacity_bytes;  // payload
  uint64_t region_bytes;    // 0: capacity + capacity / 32 + 1 MiB
  uint64_t unread_ttl_us;
  uint32_t num_slots;  // 0: one per 64 KiB of capacity, 1,024 to 65,536
  uint32_t device;     // ordinal, for drivers that have several
} hsx_arena_options;

typedef struct hsx_slot {
  uint64_t generation;
  uint32_t index;
  uint32_t reserved;
} hsx_slot;

typedef struct hsx_sample_spec {  // what begin needs; all memory is the caller's and copied
  const char* key;
  const void* head;
  uint64_t data_bytes;     // digest tables, tensors, padding
  uint64_t payload_bytes;  // of them, what counts against the capacity
  uint32_t key_bytes;
  uint32_t head_bytes;
  uint32_t tail_capacity_bytes;
  uint32_t consumers;
  uint64_t marks_offset;  // of the watermarks in the data
  uint64_t num_marks;     // u64 each; they start at 0
} hsx_sample_spec;

typedef struct hsx_copy {  // num_rows rows of row_bytes each
  const void* src;  // host, or device for drivers that have one; must live and hold still until the submission is done
  uint64_t src_stride_bytes;
  uint64_t dst_offset;  // in the slot's data
  uint64_t dst_stride_bytes;
  uint64_t row_bytes;
  uint64_t num_rows;
  uint64_t digest_offset;        // of the first row's digest in the slot's data, or HSX_NO_DIGEST
  uint64_t digest_stride_bytes;  // from row to row; 8 for one plane
  hsx_slot slot;
  uint64_t mark_offset;    // of the tensor's first watermark in the slot's data
  uint64_t rows_per_mark;  // 0: none
  uint64_t first_row;      // of the tensor, what is copied first
} hsx_copy;

typedef struct hsx_stats {
  uint64_t capacity_bytes, payload_bytes, region_bytes, extent_bytes;  // payload and extents in use now
  uint64_t num_slots, num_live;  // live: neither free nor retired, or retired with a lease on it
  uint64_t num_begun, num_ready, num_failed, num_consumed, num_expired, num_recycled;
  uint64_t num_submissions, num_copies, num_rows, copied_bytes;
  uint64_t num_unread;        // ready, with acknowledgements outstanding
  uint64_t readers_attached;  // 0 or 1: whether any consumer process is
} hsx_stats;

int hsx_arena_create(const hsx_arena_options* options, hsx_arena** out);
// Finishes what is queued, fails what is open, marks the arena closed and unlinks it unless unread samples are in it. In the last case
// the memory that they do not use is given back to the system.
int hsx_arena_close(hsx_arena* arena);

// HSX_E_FULL leaves nothing behind. Reclaims what was acknowledged before it says so.
int hsx_arena_begin(hsx_arena* arena, const hsx_sample_spec* spec, hsx_slot* out);
int hsx_arena_wait_space(hsx_arena* arena, uint64_t timeout_us);  // until something was released; HSX_E_TIMEOUT
int hsx_arena_data(hsx_arena* arena, hsx_slot slot, void** data, uint64_t* data_bytes);

// All copies are one submission: one event, in order behind `stream` (the caller's; NULL for the host). Submissions complete in order.
int hsx_submit_copies(hsx_arena* arena, const hsx_copy* copies, size_t num_copies, void* stream, uint64_t* submission);
// Lets copies come from the memory of a GPU; `driver` is "cuda". *warning: "", or why the arena could not be pinned (copies are slower then);
// valid until this thread's next failed call.
int hsx_arena_attach(hsx_arena* arena, const char* driver, uint32_t device, const char** warning);
int hsx_submit_device_copies(hsx_arena* arena, uint32_t device, const hsx_copy* copies, size_t num_copies, void* stream,
                             uint64_t* submission);
// Behind everything submitted before: writes the tail, then state `ready` (failed == 0) or `failed`; the latter gives the payload back.
int hsx_submit_seal(hsx_arena* arena, hsx_slot slot, const void* tail, uint32_t tail_bytes, int failed,
                    uint64_t* submission);
// Until more than `after` submissions are done; *done is how many are. HSX_E_TIMEOUT otherwise.
int hsx_wait_done(hsx_arena* arena, uint64_t after, uint64_t timeout_us, uint64_t* done);
int hsx_arena_stats(hsx_arena* arena, hsx_stats* out);  // reclaims first

// ---- consumer -------------------------------------------------------------------------------------------------------------------
typedef struct hsx_reader hsx_reader;

typedef struct hsx_lease {
  const void* head;
  const void* tail;
  const void* data;  // read-only memory
  uint64_t data_bytes;
  uint64_t generation;
  uint64_t sequence;
  uint32_t slot;
  uint32_t head_bytes;
  uint32_t tail_bytes;
  uint32_t fate;  // with HSX_E_LOST: docs/format.md 2.1, 0: never seen
  uint32_t consumers;
  uint32_t state;  // docs/format.md 2.1, when it was leased
} hsx_lease;

#define HSX_LEASE_ACK 1    // uses one of the sample's acknowledgements
#define HSX_LEASE_EARLY 2  // also of a sample whose data still arrives

typedef struct hsx_probe_info {
  uint64_t capacity_bytes, file_bytes, created_us, unread_ttl_us;
  uint64_t num_ready, num_open, num_failed, num_unread, payload_bytes;
  uint32_t alive, closed, readers_attached, reserved;  // alive: the producer holds its lock
} hsx_probe_info;

int hsx_reader_open(const char* path,
                    hsx_reader** out);     // PATH.arena, PATH.ack; HSX_E_INVALID for a file that is not ours
int hsx_reader_close(hsx_reader* reader);  // HSX_E_BUSY while leases are held
// Waits for the sample to become ready or failed, and leases it. HSX_E_TIMEOUT: not there yet. HSX_E_FAILED: leased, not acknowledged.
int hsx_lease_wait(hsx_reader* reader, const char* key, uint32_t key_bytes, int flags, uint64_t timeout_us,
                   hsx_lease* out);
// What HSX_LEASE_ACK does, for a lease taken without it. HSX_E_LOST if others have used the acknowledgements up since.
int hsx_lease_ack(hsx_reader* reader, uint32_t slot, uint64_t generation);
int hsx_lease_release(hsx_reader* reader, uint32_t slot, uint64_t generation);
int hsx_reader_alive(hsx_reader* reader, int* alive, int* closed);

// Looks at an arena without attaching to it: for reclaiming left-overs, and for `hsxfer inspect`.
int hsx_probe(const char* path, hsx_probe_info* out);

// ---- consumer with a GPU --------------------------------------------------------------------------------------------------------
typedef struct hsx_fetch hsx_fetch;  // one sample's way to a GPU

typedef struct hsx_fetch_op {  // num_rows rows, one behind the other at both ends
  const void* src;             // in the lease's data; with `device_src` an address of the GPU
  void* dst;                   // of the GPU
  uint64_t row_bytes;
  uint64_t num_rows;
  const uint64_t* digests;  // in the lease's data, 8 bytes apart; NULL: not checked
  const uint64_t* marks;    // the tensor's watermarks in the lease's data; NULL: wait for the whole sample
  uint64_t rows_per_mark;
  uint64_t first_row;    // of the tensor, what is copied first
  uint64_t tensor_rows;  // all of them
  uint64_t device_src;
} hsx_fetch_op;

// The stream on which copies come to that GPU: memory that is allocated on it can be a destination at once.
int hsx_fetch_stream(uint32_t device, void** stream);
// Of a sample leased on `reader`. Copies start as soon as watermarks allow.
int hsx_fetch_begin(uint32_t device, hsx_reader* reader, const hsx_lease* lease, const hsx_fetch_op* ops,
                    size_t num_ops, hsx_fetch** out);
// Until all of it has landed and its digests are right. HSX_E_TIMEOUT: call again. HSX_E_FAILED: the producer gave the sample up.
// HSX_E_INTEGRITY: row *bad_row of op *bad_op differs. *warning: "", or why the arena could not be pinned.
int hsx_fetch_wait(hsx_fetch* fetch, uint64_t timeout_us, uint64_t* bad_op, uint64_t* bad_row, const char** warning);
// Once. Waits for the copies under way; then the destinations may go, and the lease.
int hsx_fetch_end(hsx_fetch* fetch);

// ---- kernels --------------------------------------------------------------------------------------------------------------------
const char* hsx_kernels_missing(void);  // "", or why this build has none
// `kernel`: "bf16_to_fp8", "fp8_to_bf16", "fp32_to_bf16", ... (csrc/kernels/encode.cuh). Queued on `stream`; row_bytes are of the encoded side.
int hsx_submit_encode(uint32_t device, void* stream, const char* kernel, const void* src, uint64_t src_stride_bytes,
                      void* dst, uint64_t dst_stride_bytes, uint32_t width, uint32_t row_bytes, uint32_t num_rows);
// A byte a row into `flags` (device memory): 1 holds NaN or infinity, 2 is all zero. `kind`: "bf16", "fp16", "fp32".
int hsx_submit_screen(uint32_t device, void* stream, const char* kind, const void* src, uint64_t src_stride_bytes,
                      void* flags, uint32_t width, uint32_t num_rows);

// ---- rows -----------------------------------------------------------------------------------------------------------------------
// dst may be NULL (digest only), digests may be NULL (copy only): the routine the host driver copies with.
int hsx_copy_rows(void* dst, uint64_t dst_stride_bytes, const void* src, uint64_t src_stride_bytes, uint64_t row_bytes,
                  uint64_t num_rows, uint64_t* digests, uint64_t digest_stride_bytes);
// The same, holding each row's digest to `expected`; *bad is the first row that differs. HSX_E_INTEGRITY.
int hsx_verify_rows(void* dst, uint64_t dst_stride_bytes, const void* src, uint64_t src_stride_bytes,
                    uint64_t row_bytes, uint64_t num_rows, const uint64_t* expected, uint64_t digest_stride_bytes,
                    uint64_t* bad);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
