// SPDX-License-Identifier: Apache-2.0
// Threads of this library's own.
#pragma once

#include <functional>
#include <thread>

namespace remap {

// A named thread (15 characters at most) that takes no signals: those are for the process's own threads. Throws LimitExceeded
// (fields: thread, errno) if the system gives none; nothing has changed then, the caller's signal mask included.
std::thread start_thread(const char* name, std::function<void()> body);

}  // namespace remap
