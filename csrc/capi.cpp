// hsxfer.h -> core. Exceptions become codes here and nowhere else.
#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "cuda_fetch.h"
#include "error.h"
#include "packer.h"
#include "process.h"
#include "reader.h"
#include "rows.h"

namespace {

thread_local char last_error[512] = "";

void set_error(const char* sentence) { std::snprintf(last_error, sizeof last_error, "%s", sentence); }

template <class F>
int guard(F&& body) noexcept {
  try {
    return body();
  } catch (const hsx::Error& error) {
    set_error(error.what());
    return error.code();
  } catch (const std::bad_alloc&) {
    set_error("out of memory");
  } catch (const std::exception& error) {
    set_error(error.what());
  }
  return HSX_E_SYSTEM;
}

// What a handle points to. Its few bytes are never freed, so a late call gets an error and not somebody else's memory.
template <class T>
struct Handle {
  explicit Handle(std::shared_ptr<T> object) : object_(std::move(object)) {
    next = all.load(std::memory_order_relaxed);
    while (!all.compare_exchange_weak(next, this)) {
    }
  }

  static std::shared_ptr<T> get(Handle* handle, bool take = false) {
    if (handle == nullptr) hsx::fail(HSX_E_INVALID, "a handle is null");
    if (handle->epoch != hsx::process_epoch())
      hsx::fail(HSX_E_FORKED, "this process is a fork of the one that opened the handle: open one here");
    std::lock_guard<std::mutex> lock(handle->mutex);
    if (handle->object_ == nullptr) hsx::fail(HSX_E_INVALID, "a handle is closed already");
    return take ? std::move(handle->object_) : handle->object_;
  }

 private:
  std::mutex mutex;
  std::shared_ptr<T> object_;
  const uint32_t epoch = hsx::process_epoch();
  Handle* next;  // keeps them all reachable
  static inline std::atomic<Handle*> all{nullptr};
};

template <class T>
void need(const T* pointer, const char* what) {
  if (pointer == nullptr) hsx::fail(HSX_E_INVALID, "%s is null", what);
}

}  // namespace

struct hsx_arena : Handle<hsx::Packer> {
  using Handle::Handle;
};
struct hsx_reader : Handle<hsx::Reader> {
  using Handle::Handle;
};
struct hsx_fetch {
  hsx::Fetch fetch;
};

uint32_t hsx_abi_version(void) { return HSX_ABI_VERSION; }

const char* hsx_last_error(void) { return last_error; }

int hsx_arena_create(const hsx_arena_options* options, hsx_arena** out) {
  return guard([&] {
    need(options, "options");
    need(options->path, "options.path");
    need(options->driver, "options.driver");
    need(out, "out");
    *out = new hsx_arena(std::make_shared<hsx::Packer>(*options));
    return HSX_OK;
  });
}

int hsx_arena_close(hsx_arena* arena) {
  return guard([&] {
    hsx_arena::get(arena, true)->close();
    return HSX_OK;
  });
}

int hsx_arena_begin(hsx_arena* arena, const hsx_sample_spec* spec, hsx_slot* out) {
  return guard([&] {
    need(spec, "spec");
    need(out, "out");
    *out = hsx_arena::get(arena)->arena().begin(*spec);
    return HSX_OK;
  });
}

int hsx_arena_wait_space(hsx_arena* arena, uint64_t timeout_us) {
  return guard([&] {
    hsx_arena::get(arena)->arena().wait_space(timeout_us);
    return HSX_OK;
  });
}

int hsx_arena_data(hsx_arena* arena, hsx_slot slot, void** data, uint64_t* data_bytes) {
  return guard([&] {
    need(data, "data");
    need(data_bytes, "data_bytes");
    *data = hsx_arena::get(arena)->arena().data(slot, data_bytes);
    return HSX_OK;
  });
}

int hsx_submit_copies(hsx_arena* arena, const hsx_copy* copies, size_t num_copies, void* stream, uint64_t* submission) {
  return guard([&] {
    if (num_copies > 0) need(copies, "copies");
    need(submission, "submission");
    *submission = hsx_arena::get(arena)->submit_copies(copies, num_copies, hsx::Packer::kHost, stream);
    return HSX_OK;
  });
}

int hsx_arena_attach(hsx_arena* arena, const char* driver, uint32_t device, const char** warning) {
  return guard([&] {
    need(driver, "driver");
    need(warning, "warning");
    set_error(hsx_arena::get(arena)->attach(driver, device).c_str());
    *warning = last_error;
    return HSX_OK;
  });
}

int hsx_submit_device_copies(hsx_arena* arena, uint32_t device, const hsx_copy* copies, size_t num_copies, void* stream,
                             uint64_t* submission) {
  return guard([&] {
    if (num_copies > 0) need(copies, "copies");
    need(submission, "submission");
    *submission = hsx_arena::get(arena)->submit_copies(copies, num_copies, static_cast<int>(device), stream);
    return HSX_OK;
  });
}

int hsx_submit_seal(hsx_arena* arena, hsx_slot slot, const void* tail, uint32_t tail_bytes, int failed,
                    uint64_t* submission) {
  return guard([&] {
    need(submission, "submission");
    *submission = hsx_arena::get(arena)->submit_seal(slot, tail, tail_bytes, failed != 0);
    return HSX_OK;
  });
}

int hsx_wait_done(hsx_arena* arena, uint64_t after, uint64_t timeout_us, uint64_t* done) {
  return guard([&] {
    need(done, "done");
    *done = hsx_arena::get(arena)->wait_done(after, timeout_us);
    return HSX_OK;
  });
}

int hsx_arena_stats(hsx_arena* arena, hsx_stats* out) {
  return guard([&] {
    need(out, "out");
    hsx_arena::get(arena)->arena().stats(out);
    return HSX_OK;
  });
}

int hsx_reader_open(const char* path, hsx_reader** out) {
  return guard([&] {
    need(path, "path");
    need(out, "out");
    *out = new hsx_reader(std::make_shared<hsx::Reader>(path));
    return HSX_OK;
  });
}

int hsx_reader_close(hsx_reader* reader) {
  return guard([&] {
    hsx_reader::get(reader)->stop();
    hsx_reader::get(reader, true);
    return HSX_OK;
  });
}

int hsx_lease_wait(hsx_reader* reader, const char* key, uint32_t key_bytes, int flags, uint64_t timeout_us,
                   hsx_lease* out) {
  return guard([&] {
    need(out, "out");
    hsx_code code = hsx_reader::get(reader)->lease_wait(key, key_bytes, flags, timeout_us, out);
    if (code == HSX_E_FAILED) set_error("lease: the sample failed; its tail says why");
    return static_cast<int>(code);
  });
}

int hsx_lease_release(hsx_reader* reader, uint32_t slot, uint64_t generation) {
  return guard([&] {
    hsx_reader::get(reader)->release(slot, generation);
    return HSX_OK;
  });
}

int hsx_reader_alive(hsx_reader* reader, int* alive, int* closed) {
  return guard([&] {
    need(alive, "alive");
    need(closed, "closed");
    hsx_reader::get(reader)->alive(alive, closed);
    return HSX_OK;
  });
}

int hsx_probe(const char* path, hsx_probe_info* out) {
  return guard([&] {
    need(path, "path");
    need(out, "out");
    *out = hsx::probe_arena(path);
    return HSX_OK;
  });
}

int hsx_fetch_stream(uint32_t device, void** stream) {
  return guard([&] {
    need(stream, "stream");
    *stream = hsx::CudaFetcher::get(device).stream();
    return HSX_OK;
  });
}

int hsx_fetch_begin(uint32_t device, hsx_reader* reader, const hsx_lease* lease, const hsx_fetch_op* ops,
                    size_t num_ops, hsx_fetch** out) {
  return guard([&] {
    need(lease, "lease");
    if (num_ops > 0) need(ops, "ops");
    need(out, "out");
    *out = new hsx_fetch{{hsx::CudaFetcher::get(device), hsx_reader::get(reader), *lease, {ops, ops + num_ops}}};
    return HSX_OK;
  });
}

int hsx_fetch_wait(hsx_fetch* fetch, uint64_t timeout_us, uint64_t* bad_op, uint64_t* bad_row, const char** warning) {
  return guard([&] {
    need(fetch, "fetch");
    need(bad_op, "bad_op");
    need(bad_row, "bad_row");
    need(warning, "warning");
    hsx_code code = fetch->fetch.wait(timeout_us, bad_op, bad_row);
    set_error(code == HSX_OK ? fetch->fetch.warning().c_str() : "fetch: see the code");
    *warning = last_error;
    return static_cast<int>(code);
  });
}

int hsx_fetch_end(hsx_fetch* fetch) {
  return guard([&] {
    need(fetch, "fetch");
    delete fetch;
    return HSX_OK;
  });
}

int hsx_copy_rows(void* dst, uint64_t dst_stride_bytes, const void* src, uint64_t src_stride_bytes, uint64_t row_bytes,
                  uint64_t num_rows, uint64_t* digests, uint64_t digest_stride_bytes) {
  return guard([&] {
    if (row_bytes > 0 && num_rows > 0) need(src, "src");
    hsx::copy_rows({dst, src, dst_stride_bytes, src_stride_bytes, row_bytes, num_rows, digests, digest_stride_bytes});
    return HSX_OK;
  });
}

int hsx_verify_rows(void* dst, uint64_t dst_stride_bytes, const void* src, uint64_t src_stride_bytes,
                    uint64_t row_bytes, uint64_t num_rows, const uint64_t* expected, uint64_t digest_stride_bytes,
                    uint64_t* bad) {
  return guard([&] {
    if (row_bytes > 0 && num_rows > 0) need(src, "src");
    if (num_rows > 0) need(expected, "expected");
    need(bad, "bad");
    *bad = hsx::verify_rows({dst, src, dst_stride_bytes, src_stride_bytes, row_bytes, num_rows,
                             const_cast<uint64_t*>(expected), digest_stride_bytes});
    if (*bad < num_rows)
      hsx::fail(HSX_E_INTEGRITY, "verify_rows: row %llu of %llu does not have its digest", hsx::ull(*bad),
                hsx::ull(num_rows));
    return HSX_OK;
  });
}
