// A child made by fork shares the arena's memory with its parent and has none of its threads: it must not touch either.
#pragma once

namespace remap {

// Grows by one in every forked child. An object remembers the value it was made under; another value means "forked".
unsigned fork_generation() noexcept;

// Throws ForkedProcess if this process was forked since `made_under` was read.
void refuse_fork(unsigned made_under);

}  // namespace remap
