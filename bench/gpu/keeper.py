"""Runs a command and ends with it; ends it, and all that it started, when whoever asked for it is gone, killed even.

    python bench/gpu/keeper.py COMMAND...

Standard input is a pipe of which the asking process holds the other end: end of file means that it is gone. The keeper leads
the process group that the command runs in. Run as a file, without the package: it starts in a few milliseconds.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading


def _watch() -> None:
    """Wait for the end of standard input, then kill the whole group, this process included."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main(command: list[str]) -> int:
    """The command's exit status. A command that a signal ended takes the keeper with it, by the same signal."""
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error}\n")
        return 127
    threading.Thread(target=_watch, daemon=True).start()
    status = process.wait()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command's own core, if any, is the one to look at
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
