// What the processor may touch. The kernel is asked, which says EFAULT where the process would get SIGSEGV.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"

namespace remap::testing {

inline bool transfers_one_byte(long call, int end, void* at) { return ::syscall(call, end, at, 1) == 1; }

inline bool readable(const void* at) {
  int ends[2];
  CHECK(::pipe(ends) == 0);
  const bool good = transfers_one_byte(SYS_write, ends[1], const_cast<void*>(at));
  ::close(ends[0]);
  ::close(ends[1]);
  return good;
}

inline bool writable(void* at) {
  int ends[2];
  char byte = 'w';
  CHECK(::pipe(ends) == 0 && transfers_one_byte(SYS_write, ends[1], &byte));
  const bool good = transfers_one_byte(SYS_read, ends[0], at);
  ::close(ends[0]);
  ::close(ends[1]);
  return good;
}

}  // namespace remap::testing
