#include "cuda_api.h"

#include <dlfcn.h>

#include "process.h"

namespace hsx {
namespace {

CudaApi load() {
  CudaApi api = {};
  api.epoch = process_epoch();
  // Local: our symbols must not shadow the ones torch resolved.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    api.unavailable = "CUDA's driver library does not load (" + std::string(dlerror()) + ")";
    return api;
  }
#define X(member, symbol, arguments) api.member = reinterpret_cast<CUresult(*) arguments>(dlsym(library, symbol));
  HSX_CUDA_OPTIONAL_FUNCTIONS(X)
#undef X
#define X(member, symbol, arguments)                                            \
  api.member = reinterpret_cast<CUresult(*) arguments>(dlsym(library, symbol)); \
  if (api.member == nullptr && api.unavailable.empty())                         \
    api.unavailable =                                                           \
        "CUDA's driver is too old: it has "                                     \
        "no " symbol;
  HSX_CUDA_FUNCTIONS(X)
#undef X
  if (!api.unavailable.empty()) return api;
  CUresult result = api.init(0);
  if (result == kCudaSuccess) result = api.device_get_count(&api.num_devices);
  if (result == kCudaNotInitialized)
    api.unavailable = "CUDA was initialised before this process was forked: start processes with spawn";
  else if (result != kCudaSuccess)
    api.unavailable = "CUDA does not start (" + api.describe(result) + ")";
  else if (api.num_devices == 0)
    api.unavailable = "CUDA sees no device";
  return api;
}

}  // namespace

std::string CudaApi::describe(CUresult result) const {
  const char* text = nullptr;
  if (get_error_string(result, &text) == kCudaSuccess && text != nullptr) return text;
  return "CUDA error " + std::to_string(result);
}

const CudaApi& cuda_api() {
  static const CudaApi* api = new CudaApi(load());  // never destroyed: threads may outlive static destructors
  return *api;
}

}  // namespace hsx
