#include "driver.h"

#include "error.h"

namespace hsx {

std::unique_ptr<Driver> make_driver(const std::string& name, uint32_t device) {
  if (name == "cuda") return make_cuda_driver(device);
  if (name != "host" && name != "host-faulty")
    fail(HSX_E_INVALID, "no driver is called '%s'; there are host and cuda", name.c_str());
  if (device != 0) fail(HSX_E_INVALID, "driver host has device 0 only, not %u", device);
  return make_host_driver(name == "host-faulty");
}

}  // namespace hsx
