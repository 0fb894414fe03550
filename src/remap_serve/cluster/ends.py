# SPDX-License-Identifier: Apache-2.0
"""How an instance's process ended, as far as this machine knows: its signal or exit code, its log, and what that says last.

A process's parent is told how it ended; of instances that is Ray, which does not pass it on. Since Linux 6.15 whoever has a
descriptor of the process can ask.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from contextlib import suppress
from pathlib import Path
from select import POLLIN, poll

__all__ = ["ProcessEnd", "last_words", "log_here"]

GET_INFO, INFO, EXIT = 0xC040FF0B, struct.Struct("=2Q11Ii"), 1 << 3
"""PIDFD_GET_INFO, its `struct pidfd_info`, of which the mask is first and the exit status last, and the mask's bit of that."""
TAIL = 8192
CRASHED = "Fatal Python error"
RAYS = (":job_id:", ":actor_name:", ":task_name:")
"""Lines that Ray writes, for its own readers."""
MOST = 300
"""Characters that are quoted."""


class ProcessEnd:
    """Of the process with this number, whose log is this file. A number may be another process's by the time of its end, or on
    another machine: so the process is taken by a descriptor, and only if it has this log."""

    def __init__(self, pid: int, log: str) -> None:
        self.pid, self.log = pid, log
        self._process: int | None = None
        with suppress(OSError):
            found = os.pidfd_open(pid)
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/2") == log:
                    self._process = found
            if self._process is None:
                os.close(found)

    @property
    def here(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        return self._process is not None

    def kill(self) -> None:
        """Kill it, if it is here and still runs."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def over(self) -> bool:
        """Whether it is known to have ended."""
        if self._process is None:
            return False
        asked = poll()
        asked.register(self._process, POLLIN)
        return bool(asked.poll(0))

    def status(self) -> tuple[str | None, int | None]:
        """The signal's name that ended it, or its exit code; None for what is not known."""
        if self._process is None:
            return None, None
        asked = bytearray(INFO.pack(EXIT, *[0] * 13))
        try:
            fcntl.ioctl(self._process, GET_INFO, asked)
        except OSError:  # an older kernel
            return None, None
        mask, *_, status = INFO.unpack(asked)
        if not mask & EXIT:
            return None, None
        if not os.WIFSIGNALED(status):
            return None, os.waitstatus_to_exitcode(status)
        number = os.WTERMSIG(status)
        return (signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"), None

    def close(self) -> None:
        """Forget the process."""
        if self._process is not None:
            os.close(self._process)
        self._process = None


def log_here() -> str:
    """The file that this process's errors go to; "" if that is none."""
    with suppress(OSError):
        found = os.readlink("/proc/self/fd/2")
        if Path(found).is_file():
            return found
    return ""


def last_words(log: str) -> str:
    """How Python says that it crashed, if that is at the end of this file; else its last line. "" if it says nothing."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip() and not line.startswith(RAYS)]
    return next((line for line in said if line.startswith(CRASHED)), said[-1] if said else "")[:MOST]
