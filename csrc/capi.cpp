// hsxfer.h -> core.
#include "capi.h"

#include "rows.h"

using hsx::guard, hsx::last_error, hsx::need, hsx::set_error;

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

int hsx_lease_ack(hsx_reader* reader, uint32_t slot, uint64_t generation) {
  return guard([&] {
    hsx_reader::get(reader)->acknowledge(slot, generation);
    return HSX_OK;
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
