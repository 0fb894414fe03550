# SPDX-License-Identifier: Apache-2.0
"""Master copies for simulated sessions: buffers with a size and an address, and nothing in them.

`Session.attach_bytes` takes one buffer a layer and keeps it as the master copy, which is only ever copied from. On simulated
memory without bytes a copy reads nothing, so all layers of all models can share one range of untouched address space.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from remap.errors import InvalidArgument

__all__ = ["masters"]


def masters(layer_bytes: Sequence[int]) -> list[memoryview]:
    """One read-only buffer of each of these sizes, in bytes. All begin at the same address and cost no memory until a caller
    reads them; they read as zero, and the address space is given back with the last of them.

    Raises InvalidArgument (field layer_bytes) for a size below 1, or if there are none.
    """
    sizes = list(layer_bytes)
    if not sizes or min(sizes) < 1:
        raise InvalidArgument(
            f"layer_bytes must be sizes of at least 1 byte, at least one of them, got {sizes[:8]!r}; nothing was created",
            layer_bytes=sizes,
        )
    # Private and never writable: the kernel does not even promise memory for it, however large the layers are.
    whole = memoryview(mmap.mmap(-1, max(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ))
    return [whole[:size] for size in sizes]
