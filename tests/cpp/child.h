// Tests that fork.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>

#include "check.h"

namespace remap::testing {

// Runs `body` in a forked child, which ends with 0 if it comes to its end. Gives waitpid()'s status.
template <typename Body>
int in_child(Body&& body) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    ::signal(SIGSEGV, SIG_DFL);  // a sanitizer's handler would turn the signal into an exit status
    ::signal(SIGBUS, SIG_DFL);
    ::alarm(20);  // a hang ends as SIGALRM
    int status = 1;
    try {
      body();
      status = 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "in the child: %s\n", error.what());
    }
    ::_exit(status);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  return status;
}

inline bool ended_well(int status) { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }

}  // namespace remap::testing
