// SPDX-License-Identifier: Apache-2.0
#include "backend/thread.h"

#include <pthread.h>
#include <signal.h>

#include <string>
#include <system_error>
#include <utility>

#include "backend/os_limits.h"
#include "remap/error.h"

namespace remap {
namespace {

// The new thread inherits the mask of who starts it; setting it there would be too late.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// A thread's share of the process's addresses: the C library says only that it could not be started.
os::Asked stack_of_a_thread() noexcept {
  pthread_attr_t attributes;
  std::size_t bytes = 0;
  if (pthread_attr_init(&attributes) == 0) {
    pthread_attr_getstacksize(&attributes, &bytes);
    pthread_attr_destroy(&attributes);
  }
  return {bytes, bytes, 2};
}

}  // namespace

std::thread start_thread(const char* name, std::function<void()> body) {
  std::thread thread;
  try {
    const SignalsBlocked blocked;
    thread = std::thread(std::move(body));
  } catch (const std::system_error& error) {
    const std::string what = std::string("The thread ") + name + " could not be started";
    const int code = error.code().value();
    if (auto met = os::limit_met(what, code, stack_of_a_thread(), {{"thread", std::string(name)}}, os::read_limits())) throw *met;
    throw Error(ErrorKind::limit_exceeded,
                what + " (" + error.what() +
                    "). Nothing changed. Raise ulimit -u or the cgroup's pids.max, or use fewer threads.",
                {{"thread", std::string(name)}, {"errno", std::int64_t{code}}});
  }
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace remap
