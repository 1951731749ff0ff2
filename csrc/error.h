// The one exception of the core. It becomes a code and a sentence in capi.cpp, nowhere else.
#ifndef HSXFER_ERROR_H
#define HSXFER_ERROR_H

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <exception>

#include "hsxfer.h"

namespace hsx {

using ull = unsigned long long;  // what %llu wants

class Error : public std::exception {
 public:
  Error(hsx_code code, const char* format, va_list values) : code_(code) {
    std::vsnprintf(message_, sizeof message_, format, values);
  }
  hsx_code code() const { return code_; }
  const char* what() const noexcept override { return message_; }

 private:
  hsx_code code_;
  char message_[480];
};

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(hsx_code code, const char* format, ...) {
  va_list values;
  va_start(values, format);
  Error error(code, format, values);
  va_end(values);
  throw error;
}

// For a system call that just failed.
[[noreturn]] inline void fail_errno(const char* call, const char* value) {
  fail(HSX_E_SYSTEM, "%s of %s failed: %s", call, value, std::strerror(errno));
}

}  // namespace hsx

#endif
