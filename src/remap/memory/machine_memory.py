# SPDX-License-Identifier: Apache-2.0
"""The most memory that this process could ever have: the hard limit of a session on the CPU, and of any session's host memory.

The kernel gives the host backend its pages when they are touched, so a capacity that the machine cannot hold ends in
the kernel's out-of-memory killer, not in an error. `require_memory` refuses it before anything is made, the table of
its pages included.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from remap.errors import OutOfMemory
from remap.sizes import show_size

__all__ = ["MemoryBound", "memory_bound", "require_memory"]

_NO_LIMIT = 1 << 62  # cgroup v1 writes "no limit" as the largest multiple of an OS page that fits a signed number


@dataclass(frozen=True)
class MemoryBound:
    """Bytes of memory and swap together. limited_by: "machine" or "cgroup"."""

    nbytes: int
    limited_by: str


def memory_bound(root: str = "/") -> MemoryBound:
    """The least of the machine's memory and the limits of all memory cgroups above this process. root: of the files,
    for tests.

    Swap counts, since pages of shared memory can be swapped out.
    """
    top = Path(root)
    meminfo = dict(_fields(_read(top / "proc/meminfo")))
    swap = meminfo.get("SwapTotal", 0)
    total = meminfo.get("MemTotal", 0) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = MemoryBound(total + swap, "machine")
    for allowed in _cgroups(top, swap):
        if allowed < found.nbytes:
            found = MemoryBound(allowed, "cgroup")
    return found


def require_memory(nbytes: int, root: str = "/", what: str = "a capacity") -> None:
    """Raises OutOfMemory (fields requested, limit, limited_by) for more bytes than `memory_bound`. what: asks for them."""
    bound = memory_bound(root)
    if nbytes <= bound.nbytes:
        return
    whose = "this machine has" if bound.limited_by == "machine" else "the process's control group allows"
    other = "" if bound.limited_by == "machine" else ", or raise the group's limit"
    raise OutOfMemory(
        f"{what} of {show_size(nbytes)} ({nbytes} bytes) was asked for, but {whose} {show_size(bound.nbytes)} "
        f"({bound.nbytes} bytes) of memory and swap in all; nothing was created; ask for less, so that there is room for "
        f"everything else on the machine{other}",
        requested=nbytes,
        limit=bound.nbytes,
        limited_by=bound.limited_by,
    )


def _cgroups(top: Path, swap: int) -> Iterator[int]:
    """The limits of this process's memory cgroups, from its own up to the mount. Groups without a limit are left out.

    In a container only the host may see the path: then the limit is at the mount itself.
    """
    for line in _read(top / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        v2 = not controllers
        if not v2 and "memory" not in controllers.split(","):
            continue
        mount = top / ("sys/fs/cgroup" if v2 else "sys/fs/cgroup/memory")
        inner = PurePosixPath(path.lstrip("/"))
        for each in (inner, *inner.parents):
            allowed = _limit_v2(mount / each, swap) if v2 else _limit_v1(mount / each, swap)
            if allowed is not None:
                yield allowed


def _limit_v2(group: Path, swap: int) -> int | None:
    memory = _number(group / "memory.max")
    if memory is None:
        return None
    swapped = _number(group / "memory.swap.max")
    return memory + (swap if swapped is None else min(swap, swapped))


def _limit_v1(group: Path, swap: int) -> int | None:
    memory = _number(group / "memory.limit_in_bytes")
    if memory is None:
        return None
    both = _number(group / "memory.memsw.limit_in_bytes")
    return memory + swap if both is None else min(memory + swap, both)


def _number(path: Path) -> int | None:
    """The file's number; None if there is no such file, or if it says that there is no limit."""
    text = _read(path).strip()
    value = int(text) if text.isdigit() else _NO_LIMIT
    return value if value < _NO_LIMIT else None


def _fields(meminfo: str) -> Iterator[tuple[str, int]]:
    for line in meminfo.splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            yield key, int(words[0]) * (1024 if words[1:] == ["kB"] else 1)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
