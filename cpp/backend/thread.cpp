#include "backend/thread.h"

#include <pthread.h>
#include <signal.h>

#include <string>
#include <system_error>
#include <utility>

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

}  // namespace

std::thread start_thread(const char* name, std::function<void()> body) {
  std::thread thread;
  try {
    const SignalsBlocked blocked;
    thread = std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::limit_exceeded,
                std::string("The thread ") + name + " could not be started (" + error.what() +
                    "). Nothing changed. Raise ulimit -u or the cgroup's pids.max, or use fewer threads.",
                {{"thread", std::string(name)}, {"errno", std::int64_t{error.code().value()}}});
  }
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace remap
