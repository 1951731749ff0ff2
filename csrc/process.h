// What belongs to the process as a whole: forks of it, and the threads that we start in it.
#ifndef HSXFER_PROCESS_H
#define HSXFER_PROCESS_H

#include <pthread.h>
#include <signal.h>

#include <cstdint>
#include <thread>
#include <utility>

namespace hsx {

// Another number in every forked child: what was opened under one number must not be touched under another.
uint32_t process_epoch();

// In this thread, and in those that it starts, while this lives.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// Our threads take no signals: those are the application's, and Python wants them on its main thread.
template <class F>
std::thread start_thread(const char* name, F&& body) {
  SignalsBlocked blocked;
  std::thread thread(std::forward<F>(body));
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace hsx

#endif
