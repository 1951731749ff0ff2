// hsxfer.h -> core: what needs a GPU.
#include "capi.h"
#include "cuda_fetch.h"

using hsx::guard, hsx::last_error, hsx::need, hsx::set_error;

struct hsx_fetch {
  hsx::Fetch fetch;
};

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

const char* hsx_kernels_missing(void) { return hsx::kernels_not_built(); }

int hsx_submit_encode(uint32_t device, void* stream, const char* kernel, const void* src, uint64_t src_stride_bytes,
                      void* dst, uint64_t dst_stride_bytes, uint32_t width, uint32_t row_bytes, uint32_t num_rows) {
  return guard([&] {
    need(kernel, "kernel");
    hsx::submit_encode(hsx::CudaDevice::get(device), static_cast<hsx::CUstream>(stream), kernel,
                       {reinterpret_cast<uint64_t>(src), reinterpret_cast<uint64_t>(dst), src_stride_bytes,
                        dst_stride_bytes, width, row_bytes, num_rows, 0});
    return HSX_OK;
  });
}

int hsx_submit_screen(uint32_t device, void* stream, const char* kind, const void* src, uint64_t src_stride_bytes,
                      void* flags, uint32_t width, uint32_t num_rows) {
  return guard([&] {
    need(kind, "kind");
    hsx::submit_screen(
        hsx::CudaDevice::get(device), static_cast<hsx::CUstream>(stream), kind,
        {reinterpret_cast<uint64_t>(src), reinterpret_cast<uint64_t>(flags), src_stride_bytes, width, num_rows});
    return HSX_OK;
  });
}
