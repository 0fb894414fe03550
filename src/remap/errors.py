# SPDX-License-Identifier: Apache-2.0
"""The errors that this library raises. Numbers are fields, never only text (design: "a failed call changes nothing").

Each message says what was asked and what was expected, what was left unchanged, and what to do next. Fields are set by
keyword and readable as attributes, so callers decide without parsing text. The C++ core raises the same classes
(python/errors.cpp maps them by name).
"""

from __future__ import annotations

__all__ = [
    "ArenaBroken",
    "DriverError",
    "Error",
    "ForkedProcess",
    "InvalidArgument",
    "InvalidState",
    "LimitExceeded",
    "OutOfBlocks",
    "OutOfMemory",
    "StalePlan",
]


class Error(Exception):
    """Base of all errors of this library. Keyword arguments become attributes (`error.fields` holds them all)."""

    def __init__(self, message: str = "", **fields: object) -> None:
        super().__init__(message)
        self.fields = dict(fields)

    def __getattr__(self, name: str) -> object:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__} has no field {name!r}; it has {sorted(fields)}")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), str(self), self.fields))


def _rebuild(kind: type[Error], message: str, fields: dict[str, object]) -> Error:
    return kind(message, **fields)


class InvalidArgument(Error, ValueError):
    """An argument is outside what the call accepts. Nothing changed."""


class InvalidState(Error, RuntimeError):
    """The call is not allowed in the present state (closed session, pass in flight, layer pinned). Nothing changed."""


class OutOfMemory(Error, MemoryError):
    """Not enough pages or host memory. Nothing changed; retry after giving something up."""


class OutOfBlocks(Error):
    """Fewer usable KV blocks than asked for. Nothing changed. Fields: requested, free, usable; for a change that gives
    pages back also preempt: tenant -> the blocks to free first."""


class LimitExceeded(Error):
    """The call would pass a hard limit (pages, mappings, host bytes, copies in flight). Nothing changed.

    limited_by, with requested, in_use and limit, where it is a limit of the process or the machine: "RLIMIT_AS" (addresses),
    "RLIMIT_DATA", "RLIMIT_MEMLOCK", "RLIMIT_NOFILE", "RLIMIT_FSIZE", "address space", "vm.max_map_count" or
    "vm.overcommit_memory"; for page-locked memory also "host_budget" or "REMAP_HOST_BUDGET" (a limit that was set), "cgroup" or
    "machine" (what these can spare).
    """


class StalePlan(Error):
    """The plan was made for another epoch. No driver call was made. Fields: plan_epoch, arena_epoch; of an instance of a cluster
    plan_epoch, epoch, aborted (the last epoch that was)."""


class DriverError(Error):
    """The backend refused a call. Fields: call, code. The change that it was part of was undone."""


class ArenaBroken(Error):
    """Undoing a failed plan failed as well. Only `close()` is allowed. Fields: quarantined_pages."""


class ForkedProcess(Error):
    """A child made by fork touched the arena. Start workers with the `spawn` method instead."""
