// What the two halves of the C ABI share: exceptions become codes here and nowhere else.
#ifndef HSXFER_CAPI_H
#define HSXFER_CAPI_H

#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "error.h"
#include "packer.h"
#include "process.h"
#include "reader.h"

namespace hsx {

inline thread_local char last_error[512] = "";

inline void set_error(const char* sentence) { std::snprintf(last_error, sizeof last_error, "%s", sentence); }

template <class F>
int guard(F&& body) noexcept {
  try {
    return body();
  } catch (const Error& error) {
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
    if (handle == nullptr) fail(HSX_E_INVALID, "a handle is null");
    if (handle->epoch != process_epoch())
      fail(HSX_E_FORKED, "this process is a fork of the one that opened the handle: open one here");
    std::lock_guard<std::mutex> lock(handle->mutex);
    if (handle->object_ == nullptr) fail(HSX_E_INVALID, "a handle is closed already");
    return take ? std::move(handle->object_) : handle->object_;
  }

 private:
  std::mutex mutex;
  std::shared_ptr<T> object_;
  const uint32_t epoch = process_epoch();
  Handle* next;  // keeps them all reachable
  static inline std::atomic<Handle*> all{nullptr};
};

template <class T>
void need(const T* pointer, const char* what) {
  if (pointer == nullptr) fail(HSX_E_INVALID, "%s is null", what);
}

}  // namespace hsx

struct hsx_arena : hsx::Handle<hsx::Packer> {
  using Handle::Handle;
};
struct hsx_reader : hsx::Handle<hsx::Reader> {
  using Handle::Handle;
};

#endif
