#include "driver.h"

#include <algorithm>

#include "error.h"

namespace hsx {

std::unique_ptr<Driver> make_driver(const std::string& name, uint32_t device) {
  if (name == "cuda" || name == "cuda-unpinned") return make_cuda_driver(device, name == "cuda");
  if (name != "host" && name != "host-faulty")
    fail(HSX_E_INVALID, "no driver is called '%s'; there are host and cuda", name.c_str());
  if (device != 0) fail(HSX_E_INVALID, "driver host has device 0 only, not %u", device);
  return make_host_driver(name == "host-faulty");
}

void add_to_marks(const CopyOp& op, uint64_t row, uint64_t num_rows) {
  if (op.marks == nullptr) return;
  for (uint64_t at = op.first_row + row, end = at + num_rows; at < end;) {
    uint64_t word = at / op.rows_per_mark, rows = std::min(end, (word + 1) * op.rows_per_mark) - at;
    __atomic_add_fetch(&op.marks[word], rows, __ATOMIC_RELEASE);
    at += rows;
  }
}

}  // namespace hsx
