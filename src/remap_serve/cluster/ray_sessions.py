# SPDX-License-Identifier: Apache-2.0
"""The folders that Ray leaves behind for each server that starts one of its own: logs, for who looks for a cause. The last ones
stay, older ones are removed.

A folder is this library's if it has a mark, a file that the server has locked while it lives. So a folder of another program, of
another user, or of a living server is left alone; and so is one whose Ray processes still answer.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import IO

__all__ = ["KEPT", "KEPT_LOGS", "mark", "remove_old", "trim"]

MARK = "of-remap"
KEPT = 4
"""Folders of servers that have ended."""
KEPT_LOGS = 96
"""Files of workers that have ended: three of each."""


def mark(session: Path) -> IO[bytes]:
    """This session is of this process, until the file that this returns is closed. Raises OSError if the folder cannot be written
    to."""
    file = open(session / MARK, "wb")  # noqa: SIM115  # it is open for as long as the caller lives
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def remove_old(root: Path, kept: int = KEPT) -> list[Path]:
    """Remove this user's marked folders in `root` whose servers have ended, but for the `kept` newest. Returns those. A folder
    that cannot be removed is left as far as it cannot."""
    found = []
    for session in root.glob("session_*"):
        with suppress(OSError):
            here = (session / MARK).lstat()
            if not session.is_symlink() and session.lstat().st_uid == here.st_uid == os.geteuid():
                found.append((here.st_mtime, session))
    over = [session for _, session in sorted(found, reverse=True) if _over(session)]
    for session in over[kept:]:
        shutil.rmtree(session, ignore_errors=True)
    return over[kept:]


def trim(logs: Path, kept: int = KEPT_LOGS) -> None:
    """Remove the logs of workers that have ended, but for the `kept` newest: one that dies whenever it is started leaves three
    every two seconds."""
    found = []
    for path in [*logs.glob("worker-*"), *logs.glob("python-core-worker-*")]:
        pid = re.search(r"[-_](\d+)\.\w+$", path.name)  # Ray's names end with the process
        with suppress(OSError):
            if pid is not None and not Path(f"/proc/{pid[1]}").exists():
                found.append((path.stat().st_mtime, path))
    for _, path in sorted(found, reverse=True)[kept:]:
        with suppress(OSError):
            path.unlink()


def _over(session: Path) -> bool:
    with suppress(OSError), open(session / MARK, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return not any(map(_answers, (session / "sockets").glob("*")))
    return False


def _answers(path: Path) -> bool:
    with suppress(OSError), socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(1.0)
        asked.connect(str(path))
        return True
    return False
